"""The strategy never changes the answer: Keras on two replicas gives the losses and weights of one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh

from .scenarios import SCENARIOS

WEIGHTS = 1e-6
"""Scenarios ask for float64, but Keras' own products and divisions on this backend round to float32."""


def run_all(hand: Any, folder: Path) -> dict[str, Any]:
    return {name: scenario(folder) for name, scenario in SCENARIOS.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one device and two replicas give, of all scenarios; the replicas are started once."""
    folder = tmp_path_factory.mktemp("keras")
    two = mh.launch(functools.partial(run_all, folder=folder), "mirrored", on="cpu*2", progress=False, timeout=30)
    return run_all(None, folder), two


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_replicas_equal_one(name: str, both: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    one = both[0][name]
    for two in (result[name] for result in both[1]):
        assert two.keys() == one.keys()
        assert two["history"].keys() == one["history"].keys()
        for key, values in one["history"].items():
            np.testing.assert_allclose(two["history"][key], values, rtol=1e-6, atol=1e-9, err_msg=key)
        for key in one.keys() - {"history", "weights", "values"}:
            np.testing.assert_allclose(two[key], one[key], rtol=1e-5, atol=2e-6, err_msg=key)
        for mine, theirs in zip(one["weights"], two["weights"], strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=0, atol=WEIGHTS)
        assert two.get("values") == pytest.approx(one.get("values"))
