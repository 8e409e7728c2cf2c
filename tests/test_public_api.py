"""The public functions: few parameters, and options that are declared once."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import manyhands as mh
from manyhands.cli.serve import SERVER, SHARED, Backends
from manyhands.core import SettingsError, options_of

MAX_PARAMETERS = 10
UNGROUPED = {"fit", "tune", "ensemble", "ParameterServer", "Pipeline"}
"""Functions whose options are not grouped into classes yet; the set must only shrink."""
FUNCTIONS = sorted(name for name in mh.__all__ if inspect.isfunction(getattr(mh, name)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_have_at_most_ten_parameters(name: str) -> None:
    is_small = len(inspect.signature(getattr(mh, name)).parameters) <= MAX_PARAMETERS
    assert is_small is (name not in UNGROUPED)


def test_options_of_serving_have_unique_names_and_helps() -> None:
    fields = [field for kind in (*SHARED, *SERVER, Backends) for field in options_of(kind)]
    names = [field.name for field in fields]
    assert len(names) == len(set(names))
    assert all(field.metadata["help"].endswith(".") for field in fields)


@pytest.mark.parametrize("wrong", [{"listen": {"http": 0}}, {"batching": 5}, {"rollout": "latest:2"}, {"log": 5}])
def test_options_of_another_class_are_refused_with_the_right_one(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"Pass mh\.serving\.\w+\(\.\.\.\)"):
        mh.serve("models", on="cpu", **wrong)
