"""A pipeline gives the result of one device wherever its stages begin, not only where they are balanced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.distributed import NullWorld, World
from manyhands.graph import Works
from manyhands.storage import CheckpointStore
from manyhands.strategies import placement
from manyhands.training import CHECKPOINTS, Job, train

from .odd_networks import LENGTH, WIDTH, X, Y, Z, sgd

MOST_BOUNDARIES = 12


class Autoencoder(nn.Module):
    """Returns results of its first layers too, which are larger than the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 32), nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        middle, log_scale = self.encode(x).chunk(2, dim=-1)
        return self.decode(middle * log_scale.exp()), middle, log_scale


class Attention(nn.Module):
    """Attention whose result is permuted and then viewed, which its order in memory allows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.head((x + attended).mean(1))


class Turned(nn.Module):
    """Results whose order in memory is not that of their dimensions, and a view that relies on it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 8), nn.Linear(8 * LENGTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.first(x).transpose(1, 2).contiguous().transpose(1, 2).tanh()
        return self.head(turned.transpose(1, 2).view(len(x), -1))


class LargestSeen(nn.Module):
    """Divides by the largest number seen so far, a buffer that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 5)
        self.register_buffer("largest", torch.tensor(100.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return self.head(torch.tanh(x / self.largest))


def rebuilt(model: nn.Module, batch: Any) -> Tensor:
    out, middle, log_scale = model(batch[0])
    return (out - batch[0]).square().mean() + (middle.square() + log_scale.exp() - log_scale).mean()


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(model: Any, loss: Any, data: Any) -> mh.Task:
    return mh.Task(model=model, loss=loss, optimizer=sgd, data=data, batch_size=6, seed=3)


TASKS = {
    "autoencoder": task(Autoencoder, rebuilt, (X, Y)),
    "attention": task(Attention, classify, (Z, Y)),
    "largest seen": task(LargestSeen, classify, (X, Y)),
    "turned": task(Turned, classify, (Z, Y)),
}


@contextmanager
def starting_at(boundary: int, counts: list[int]) -> Iterator[None]:
    """The second stage begins with this unit of the network; `counts` gets the number of its units."""

    def seconds(works: Works, *_: Any) -> list[float]:
        counts.append(len(works.units))
        return [float(index in (boundary - 1, boundary)) for index in range(len(works.units))]

    with mock.patch.object(placement, "measured", seconds):
        yield


def train_at_boundaries(world: World, name: str, folder: Path) -> list[dict[str, Tensor]]:
    """Train a task once for every boundary of its stages, or for a dozen of them; return the weights of each."""
    results: list[dict[str, Tensor]] = []
    spec = mh.Pipeline(2, microbatches=2, precision="fp64")
    counts, boundary = [2], 1
    while boundary < counts[0]:
        counts = []
        with starting_at(boundary, counts):
            where = folder / str(boundary)
            train(world, Job(task=TASKS[name], spec=spec, folder=where, epochs=1, verify=False))
        counts = world.gather_objects(counts)[0][:1]
        results.append(CheckpointStore(where / CHECKPOINTS).load().model)
        boundary += max(1, counts[0] // MOST_BOUNDARIES)
    return results


@pytest.mark.parametrize("name", list(TASKS))
def test_every_stage_boundary_matches_single_device_weights(name: str, run_ranks: Any, tmp_path: Path) -> None:
    train(NullWorld(), Job(task=TASKS[name], spec=mh.Single(precision="fp64"), folder=tmp_path / "one", epochs=1))
    expected = CheckpointStore(tmp_path / "one" / CHECKPOINTS).load().model
    results = run_ranks(partial(train_at_boundaries, name=name, folder=tmp_path), 2)[0]
    assert len(results) >= 4
    for weights in results:
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-9, msg=key)
