"""On a GPU: layout-free random numbers as on the CPU and in captured steps, recomputation, memory limits."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import manyhands as mh
from manyhands.core import LayoutFree, OutOfMemory, SettingsError

from ..grouped_options import fit_options
from .test_deterministic import gpt
from .test_memory import WIDTH, loss, task

pytestmark = pytest.mark.gpu


def fit(made: mh.Task, strategy: Any, on: str, folder: Path, **settings: Any) -> mh.Run:
    return mh.fit(made, strategy, **fit_options(on=on, folder=folder, progress=False, timeout=60, epochs=2, **settings))


def test_gpu_draws_the_same_random_numbers_as_cpu() -> None:
    drawn = []
    for device in (torch.device("cpu"), torch.device("cuda:0")):
        draws = LayoutFree(device)
        draws.load(3, 5, np.arange(6))
        with draws.drawing():
            x = torch.ones(6, 9, device=device)
            drawn.append([F.dropout(x).cpu(), torch.rand_like(x).cpu(), torch.randint(99, (6,), device=device).cpu()])
    for cpu, gpu in zip(*drawn, strict=True):
        assert torch.equal(cpu, gpu)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_replicas_on_one_gpu_give_the_same_losses_as_one(precision: str, tmp_path: Path) -> None:
    alone = fit(gpt(), mh.Single(precision=precision), "cuda:0", tmp_path, deterministic=True)
    halves = fit(gpt(), mh.Mirrored(2, precision=precision), "cuda:0*2", tmp_path, deterministic=True)
    np.testing.assert_allclose(halves.losses, alone.losses, rtol=1e-5 if precision == "fp32" else 2e-2)


def test_captured_step_draws_new_random_numbers_in_every_replay() -> None:
    device = torch.device("cuda:0")
    draws = LayoutFree(device)
    x = torch.ones(8, 64, device=device)

    def eager(step: int) -> torch.Tensor:
        draws.load(0, step, np.arange(8) + 8 * step)
        with draws.drawing():
            return F.dropout(x, 0.5) + torch.rand(8, 64, device=device)

    expected = [eager(step).clone() for step in range(4)]
    draws.load(0, 0, np.arange(8))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), draws.drawing():
        captured = F.dropout(x, 0.5) + torch.rand(8, 64, device=device)
    for step in range(4):
        draws.load(0, step, np.arange(8) + 8 * step)
        graph.replay()
        assert torch.equal(captured, expected[step])


@pytest.mark.parametrize("way", ["blocks", "selective"])
def test_recompute_keeps_losses_and_reduces_peak_gpu_memory(way: str, tmp_path: Path) -> None:
    runs, peaks = [], []
    for recompute in ("", way):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before, made = torch.cuda.memory_allocated(), task(32768)
        runs.append(fit(made, mh.Single(recompute=recompute, capture="off"), "cuda:0", tmp_path))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    np.testing.assert_allclose(runs[1].losses, runs[0].losses, rtol=1e-5)
    assert peaks[1] < 0.8 * peaks[0]


def test_gpu_memory_limit_is_enforced_and_out_of_memory_explained(tmp_path: Path) -> None:
    gc.collect()
    before, held = torch.cuda.get_per_process_memory_fraction(0), torch.cuda.memory_allocated()
    with pytest.raises(OutOfMemory, match=r"did not fit into the memory of cuda:0 on rank 0(.|\n)*accumulate=\d+"):
        fit(task(65536), mh.Single(), "cuda:0", tmp_path, memory="1GiB")
    assert torch.cuda.get_per_process_memory_fraction(0) == before
    gc.collect()
    assert torch.cuda.memory_allocated() < held + 2**28
    x = torch.randn(65536, WIDTH, device="cuda:0")
    assert loss(torch.nn.Linear(WIDTH, 1).cuda(), (x,)).item() >= 0
    with pytest.raises(SettingsError, match="Pass a smaller amount, or omit it"):
        fit(task(8), mh.Single(), "cuda:0", tmp_path, memory="900GiB")
