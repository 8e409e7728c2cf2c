"""Policies on a GPU: two ranks share it, and the exchange runs between two captured graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh

from ..grouped_options import fit_options
from .test_training import LOSSY, QUIET, notices, spirals

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", LOSSY)
def test_captured_step_applies_the_sync_policy(policy: str, tmp_path: Path) -> None:
    def fit(capture: str) -> Any:
        spec = mh.Mirrored(2, sync=policy, capture=capture)
        return mh.fit(spirals(), spec, **fit_options(on="cuda:0*2", epochs=6, folder=tmp_path, name=capture, **QUIET))

    plain, captured = fit("off"), fit("graph")
    assert "two CUDA graphs around the exchange" in notices(captured)
    assert f"sync={policy}: the mean gradient differed" in notices(captured)
    np.testing.assert_allclose(captured.losses, plain.losses, rtol=2e-2)


@pytest.mark.parametrize("policy", ["localsteps(4)", "diloco(5,momentum=0.5)"])
def test_local_steps_are_captured_as_one_cuda_graph(policy: str, tmp_path: Path) -> None:
    def fit(capture: str) -> Any:
        spec = mh.Mirrored(2, sync=policy, capture=capture)
        return mh.fit(spirals(), spec, **fit_options(on="cuda:0*2", epochs=12, folder=tmp_path, name=capture, **QUIET))

    plain, captured = fit("off"), fit("graph")
    assert "captured as one CUDA graph" in notices(captured)
    np.testing.assert_allclose(captured.losses, plain.losses, rtol=2e-2)
