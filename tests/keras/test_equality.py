"""Keras on two replicas gives the losses and weights of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .scenarios import SCENARIOS

ACTS = SCENARIOS
WEIGHTS = 1e-12
"""Scenarios compute in float64."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_replicas_train_like_one(name: str, every: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    one = SCENARIOS[name](tmp_path)
    for two in every[name]:
        assert two.keys() == one.keys()
        assert two["history"].keys() == one["history"].keys()
        for key, values in one["history"].items():
            np.testing.assert_allclose(two["history"][key], values, rtol=1e-6, atol=1e-9, err_msg=key)
        for key in one.keys() - {"history", "weights", "values"}:
            np.testing.assert_allclose(two[key], one[key], rtol=1e-5, atol=2e-6, err_msg=key)
        for mine, theirs in zip(one["weights"], two["weights"], strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=0, atol=WEIGHTS)
        assert two.get("values") == pytest.approx(one.get("values"))
