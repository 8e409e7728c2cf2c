"""Offloading of state, gradients and activations to host memory: the same results with less GPU memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import StrategyError
from manyhands.strategies import offload

from ..grouped_options import fit_options
from .problems import problem
from .test_fit import StopAt

SPECS = {
    "one device": (mh.Single, "cpu"),
    "replicas": (mh.Mirrored, "cpu*2"),
    "shards": (mh.Sharded, "cpu*2"),
    "shards of state": (partial(mh.Sharded, sharding="optimizer"), "cpu*2"),
}


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device, which is in this process, an update goes round several times."""
    monkeypatch.setattr(offload, "AT_ONCE", 400)


def fit(task: mh.Task, spec: mh.StrategySpec, folder: Path, **settings: Any) -> mh.Run:
    return mh.fit(task, spec, **fit_options(epochs=2, progress=False, timeout=60, folder=folder, **settings))


def assert_equal(run: mh.Run, other: mh.Run) -> None:
    for key, values in run.history.items():
        np.testing.assert_allclose(list(other.history[key].values()), list(values.values()), rtol=1e-9)
    for key, value in run.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=0, atol=1e-9, msg=key)


@pytest.mark.parametrize("kind", SPECS)
def test_offload_to_host_does_not_change_results(kind: str, tmp_path: Path) -> None:
    make, on = SPECS[kind]
    task = problem("gpt", "adamw")
    plain = fit(task, mh.Single(precision="fp64"), tmp_path, on="cpu")
    spec = make(precision="fp64", accumulate=2, offload="optimizer+activations")
    assert_equal(plain, fit(task, spec, tmp_path, on=on))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_offload_with_two_optimizers_and_skipped_steps_keeps_results(clip: float | None, tmp_path: Path) -> None:
    task = problem("gan", "adamw").replace(clip=clip, not_finite="skip")
    assert_equal(*(fit(task, mh.Single(precision="fp64", offload=o), tmp_path, on="cpu") for o in ("", "optimizer")))
    poisoned = problem("mlp", "adamw").replace(clip=clip, not_finite="skip", shuffle=False)
    poisoned.data[0][20] = float("nan")
    runs = [fit(poisoned, mh.Single(precision="fp64", offload=o), tmp_path, on="cpu") for o in ("", "optimizer")]
    assert_equal(*runs)
    assert len(runs[0].losses) == 6


def test_offloaded_run_resumes_with_equal_results(tmp_path: Path) -> None:
    task, spec = problem("mlp", "adamw"), mh.Single(precision="fp64", offload="optimizer")
    whole = fit(task, mh.Single(precision="fp64"), tmp_path, on="cpu")
    fit(task, spec, tmp_path, on="cpu", name="parts", callbacks=[StopAt(2)])
    assert_equal(whole, fit(task, spec, tmp_path, on="cpu", name="parts", resume=True))


def test_invalid_offload_settings_are_rejected() -> None:
    with pytest.raises(StrategyError, match="offload must be one of optimizer, activations, but got 'disk'"):
        mh.Single(offload="disk")
    with pytest.raises(StrategyError, match="neither captured nor compiled, but got offload=optimizer with capture"):
        mh.Single(offload="optimizer", capture="graph")
    with pytest.raises(StrategyError, match="whole networks and exact gradients, but got servers=1 with offload"):
        mh.StrategySpec(servers=1, offload="optimizer")


@pytest.mark.gpu
def test_offload_reduces_peak_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "AT_ONCE", 32 << 20)
    width, depth = 2048, 12
    size = 4 * depth * width * width
    task = mh.Task(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        data=torch.randn(64, width, generator=torch.Generator().manual_seed(0)),
        batch_size=16,
    )
    peaks, losses = {}, {}
    for what in ("", "optimizer", "optimizer+activations"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run = fit(task, mh.Single(capture="off" if not what else "auto", offload=what), tmp_path, on="cuda:0")
        peaks[what], losses[what] = torch.cuda.max_memory_allocated() - before, list(run.losses)
    np.testing.assert_allclose(losses["optimizer"], losses[""], rtol=1e-5)
    np.testing.assert_allclose(losses["optimizer+activations"], losses[""], rtol=1e-5)
    assert peaks[""] > 4 * size
    assert peaks["optimizer"] < 2.2 * size
