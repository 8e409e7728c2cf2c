"""Policies on a GPU: two ranks share one, the exchange runs by itself between two recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh

from .test_training import LOSSY, QUIET, notices, spirals

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", LOSSY)
def test_a_recorded_step_exchanges_by_the_policy(policy: str, tmp_path: Path) -> None:
    def fit(capture: str) -> Any:
        spec = mh.Mirrored(2, sync=policy, capture=capture)
        return mh.fit(spirals(), spec, on="cuda:0*2", epochs=6, folder=tmp_path, name=capture, **QUIET)

    plain, recorded = fit("off"), fit("graph")
    assert "two CUDA graphs around the exchange" in notices(recorded)
    assert f"sync={policy}: the mean gradient was" in notices(recorded)
    np.testing.assert_allclose(recorded.losses, plain.losses, rtol=2e-2)


@pytest.mark.parametrize("policy", ["localsteps(4)", "diloco(5,momentum=0.5)"])
def test_steps_between_agreements_are_recorded_whole(policy: str, tmp_path: Path) -> None:
    def fit(capture: str) -> Any:
        spec = mh.Mirrored(2, sync=policy, capture=capture)
        return mh.fit(spirals(), spec, on="cuda:0*2", epochs=12, folder=tmp_path, name=capture, **QUIET)

    plain, recorded = fit("off"), fit("graph")
    assert "recorded as one CUDA graph" in notices(recorded)
    np.testing.assert_allclose(recorded.losses, plain.losses, rtol=2e-2)
