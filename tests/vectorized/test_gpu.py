"""Vectorized ensembles on a CUDA device: captured, compiled, in bf16, changing members, out of memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.vectorized import Population

from .test_equality import alone
from .works import KINDS, adamw, task

pytestmark = pytest.mark.gpu

EPOCHS = 5
"""Enough passes for recordings to be made and used."""


def members(kind: str, count: int = 3) -> list[mh.Task]:
    return [task(kind, adamw(1e-2 * (1 + seed)), seed=seed, clip=1.0 + seed) for seed in range(count)]


def curve(run: mh.Run) -> torch.Tensor:
    return torch.tensor(run.losses, dtype=torch.float64)


@pytest.mark.parametrize("capture", ["off", "graph", "compile"])
@pytest.mark.parametrize("kind", KINDS)
def test_members_on_a_gpu_train_like_separate_runs_on_the_cpu(kind: str, capture: str, tmp_path: Path) -> None:
    tasks, notices = members(kind), list[str]()
    spec = mh.Single(precision="fp64", capture=capture)
    with Population(tasks, spec, device="cuda:0", epochs=EPOCHS, notice=notices.append) as population:
        curves = population.step(population.total)
        measured = population.evaluate()
    assert not notices
    for number, one in enumerate(tasks):
        run = alone(one, tmp_path / str(number), epochs=EPOCHS)
        torch.testing.assert_close(curves[:, number], curve(run), rtol=1e-8, atol=0)
        assert measured[number]["valid_loss"] == pytest.approx(run.metrics["valid_loss"], rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_members_can_be_added_and_stopped_between_captured_graphs(kind: str, tmp_path: Path) -> None:
    tasks, later = members(kind, 8), task(kind, adamw(5e-3), seed=11)
    with Population(tasks, mh.Single(precision="fp64"), device="cuda:0", epochs=EPOCHS) as population:
        population.step(10)
        population.stop(2)
        population.step(7)
        population.replace(2, later)
        for number in (4, 5, 6):
            population.stop(number)
        population.train()
        assert [m.status for m in population.members] == ["done"] * 4 + ["stopped"] * 3 + ["done"]
        for number, one in ((0, tasks[0]), (2, later), (7, tasks[7])):
            run = alone(one, tmp_path / str(number), epochs=EPOCHS)
            assert population.members[number].loss == pytest.approx(run.losses[-1], rel=1e-8)


@pytest.mark.parametrize("capture", ["graph", "compile"])
def test_bf16_losses_are_close_to_fp32(capture: str) -> None:
    tasks = members("transformer")
    wide = Population(tasks, mh.Single(), device="cuda:0", epochs=2)
    with Population(tasks, mh.Single(precision="bf16", capture=capture), device="cuda:0", epochs=2) as narrow:
        torch.testing.assert_close(narrow.step(12), wide.step(12), rtol=0.05, atol=0.02)


def test_members_that_exceed_memory_are_computed_in_chunks() -> None:
    notices: list[str] = []
    width = 2048

    def one(seed: int) -> mh.Task:
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        return mh.Task(
            model=lambda: torch.nn.Sequential(torch.nn.Linear(4, width), *layers, torch.nn.Linear(width, 1)),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
            data=torch.ones(16_384, 4),
            batch_size=8192,
            seed=seed,
        )

    tasks = [one(seed) for seed in range(12)]
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    # Activations of all members take about 10 GB, weights about 1.2; captured graphs of other tests may hold some more.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 6e9) / total)
    try:
        with Population(tasks, device="cuda:0", steps=8, notice=notices.append) as population:
            curves = population.step(8)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert curves.isfinite().all()
    assert "members do not fit into memory together" in notices[0]
