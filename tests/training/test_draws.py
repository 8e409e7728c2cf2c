"""Which random draws belong to single samples, and the notice if only their size tells."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.distributed import NullWorld, World
from manyhands.training import Job, train

from .test_equality import keep

PLACES, WIDTH, BATCH = 4, 3, 8


class Net(nn.Module):
    """Draws by `noise` whatever shape the rows have."""

    def __init__(self, noise: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(16, WIDTH))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        x = self.noise(self, x) if self.training else x
        return self.last(self.norm(x.mean(1)))


def layer_drop(net: Net, x: Tensor) -> Tensor:
    """Leaves layers out at random, so that the numbers of the draws behind them move."""
    for _ in range(3):
        if float(torch.rand(1)) < 0.5:
            x = x + F.dropout(net.table[: x.shape[1]], 0.5)
        x = F.dropout(x.transpose(0, 1), 0.2).transpose(0, 1)
    return x


NOISES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "a table of places": lambda net, x: x + F.dropout(net.table[: x.shape[1]], 0.5),
    "depth of the whole batch": lambda net, x: x * (torch.rand(1) > 0.5) + x,
    "depth of each sample": lambda net, x: x * (torch.rand(len(x), 1, 1) > 0.5) + x,
    "time first": lambda net, x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1),
    "recurrent": lambda net, x: net.recurrent(x.transpose(0, 1))[0].transpose(0, 1),
    "layers left out": layer_drop,
}


def task(noise: Callable[[Net, Tensor], Tensor], **changes: Any) -> mh.Task:
    x = torch.randn(21, PLACES, WIDTH, generator=torch.Generator().manual_seed(0))
    made = mh.Task(
        model=lambda: Net(noise),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=(x, x.sum((1, 2)).unsqueeze(1)),
        batch_size=BATCH,
    )
    return made.replace(**changes)


def losses_of(world: World, folder: Path, noises: list[str]) -> dict[str, dict[str, list[float]]]:
    results: dict[str, dict[str, list[float]]] = {}
    spec = mh.Mirrored(deterministic=True).with_devices(world.size)
    for name in noises:
        world.channel.taps[:] = [partial(keep, into=results.setdefault(name, {}))]
        train(world, Job(task=task(NOISES[name]), spec=spec, folder=folder / f"{name}-{world.size}", epochs=2))
        world.barrier()
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_random_draws_are_assigned_to_samples_independently_of_the_split(
    size: int, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """A replica gets as many rows as there are places, or one; the last batches leave some without any."""
    work = partial(losses_of, folder=tmp_path, noises=list(NOISES))
    alone = work(NullWorld())
    for name, losses in run_ranks(work, size)[0].items():
        assert losses["loss"] == pytest.approx(alone[name]["loss"], rel=1e-4), name


def notices_of(made: mh.Task, folder: Path) -> list[str]:
    world, heard = NullWorld(), []
    world.channel.taps[:] = [lambda entry: heard.append(entry["text"]) if entry["kind"] == "notice" else None]
    train(world, Job(task=made, spec=mh.Single(deterministic=True), folder=folder))
    return [text for text in heard if "inferred from their size" in text]


def test_draw_classified_by_shape_alone_logs_a_notice(tmp_path: Path) -> None:
    def step(hand: mh.Hand, batch: Any) -> None:
        hand.minimize(lambda part: F.mse_loss(hand.model(part[0]), part[1]))

    noise = NOISES["a table of places"]
    assert notices_of(task(noise), tmp_path / "seen") == []
    (told,) = notices_of(task(noise, loss=None, step=step), tmp_path / "own step")
    assert "of shape (4, 3) are taken for those of the whole batch" in told
    pairs = task(lambda net, x: x + torch.rand(len(x), len(x)).mean())
    (told,) = notices_of(pairs, tmp_path / "pairs")
    assert "of shape (8, 8) are taken for those of samples in dim 0" in told


def test_draw_inspection_does_not_change_buffers(tmp_path: Path) -> None:
    """The first step finds buffers as they were built: one update of the norm's, from the first batch alone."""
    run = mh.fit(
        task(NOISES["recurrent"]),
        on="cpu",
        steps=1,
        folder=tmp_path,
        options=[mh.options.Equality(deterministic=True), mh.options.Display(progress=False)],
    )
    assert dict(run.model().named_buffers())["norm.num_batches_tracked"] == 1


@pytest.mark.parametrize("name", ["a table of places", "depth of each sample"])
def test_check_reports_per_batch_and_per_sample_draws_as_equal(name: str) -> None:
    assert mh.check(task(NOISES[name]), on="cpu*2").equal
