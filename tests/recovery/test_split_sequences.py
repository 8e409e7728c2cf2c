"""Runs with split sequences resume after a killed rank, and on any other layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import manyhands as mh

from ..grouped_options import fit_options
from ..strategies.context_networks import NETWORKS
from .test_local import Fault, assert_same, fit, kill, recoveries


def test_run_with_a_killed_rank_of_a_context_equals_undisturbed_run(engine: Any, tmp_path: Path) -> None:
    task, strategy = NETWORKS["rotary"](), mh.ContextParallel(2, precision="fp64")
    calm = fit(task, tmp_path / "calm", strategy=strategy)
    run = fit(task, tmp_path / "hit", Fault(tmp_path, 1, 3, kill), strategy=strategy)
    assert_same(run, calm)
    (found,) = recoveries(run)
    assert "memory" in found["source"]


def test_checkpoint_of_a_context_resumes_on_other_layouts(engine: Any, tmp_path: Path) -> None:
    task = NETWORKS["documents"]()

    def run(folder: str, strategy: mh.StrategySpec, **options: Any) -> mh.Run:
        settings = {"on": f"cpu*{strategy.num_devices}", "folder": tmp_path / folder, "name": "run", "progress": False}
        return mh.fit(task, strategy, **fit_options(**settings, **options))

    whole = run("whole", mh.Single(precision="fp64"), epochs=3)
    run("split", mh.ContextParallel(2, precision="fp64"), epochs=1)
    run("split", mh.Sharded(2, precision="fp64"), epochs=2, resume=True)
    last = run("split", mh.ContextParallel(3, precision="fp64"), epochs=3, resume=True)
    torch.testing.assert_close(last.losses[-1], whole.losses[-1], rtol=1e-9, atol=1e-9)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(last.state_dict()[name], tensor, rtol=0, atol=1e-9)
