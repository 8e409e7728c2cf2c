"""The public functions: few parameters, and options that are declared once."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import manyhands as mh
from manyhands.cli.ensemble import GROUPS as ENSEMBLE
from manyhands.cli.fit import GROUPS as FIT
from manyhands.cli.serve import SERVER, SHARED, Backends
from manyhands.cli.tune import GROUPS as TUNE
from manyhands.core import SettingsError, options_of

MAX_PARAMETERS = 10
UNGROUPED = {"ParameterServer", "Pipeline"}
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


@pytest.mark.parametrize("kinds", [FIT, TUNE, ENSEMBLE], ids=["fit", "tune", "ensemble"])
def test_commands_declare_every_option_once_with_a_help(kinds: tuple[type, ...]) -> None:
    fields = [field for kind in kinds for field in options_of(kind)]
    names = [field.name for field in fields]
    assert len(names) == len(set(names))
    assert all(field.metadata["help"].endswith(".") for field in fields)


def test_argument_that_moved_into_a_class_is_refused_with_that_class() -> None:
    call: Any = mh.fit
    with pytest.raises(TypeError, match=r"pass options=mh\.options\.Checkpoints\(save_every=10\)"):
        call(None, save_every=10)
    call = mh.tune
    with pytest.raises(TypeError, match=r"pass options=mh\.options\.Algorithm\(search='random'\)"):
        call(None, {}, search="random")
    with pytest.raises(TypeError, match=r"mh\.tune has no argument 'epoch'; known are task, space, trials"):
        call(None, {}, epoch=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (mh.options.Budget(seconds=3), r"objects of Checkpoints, Logging.* but got Budget\(.*Pass for example"),
        ({"keep": 3}, r"Pass options=mh\.options\.Checkpoints\(keep=3\)"),
        (mh.options.Checkpoints, r"Pass an object: mh\.options\.Checkpoints\(\.\.\.\)"),
        ([mh.options.Checkpoints(keep=1), mh.options.Checkpoints(keep=2)], "Checkpoints twice"),
    ],
)
def test_options_that_fit_does_not_have_are_refused(options: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        mh.fit(mh.Task, options=options)  # type: ignore[arg-type]
