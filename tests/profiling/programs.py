"""Programs with one known performance problem each, and one without."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import manyhands as mh
from manyhands.distributed import current_world


def classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def mlp(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def pairs(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 64), torch.randint(10, (count,))


def healthy(batch_size: int = 512) -> mh.Task:
    return mh.Task(model=mlp, loss=classes, optimizer=sgd, data=pairs(2 * batch_size), batch_size=batch_size)


class Slow(Dataset[tuple[Tensor, int]]):
    """Samples that take their time, as those of a far disk do."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(2e-3)
        return torch.zeros(64), index % 10


def starved() -> mh.Task:
    return mh.Task(model=mlp, loss=classes, optimizer=sgd, data=Slow(), batch_size=8, workers=0)


def tiny() -> mh.Task:
    return mh.Task(model=mlp, loss=classes, optimizer=sgd, data=pairs(256), batch_size=1)


class SlowOnOneRank(nn.Module):
    """A network that takes longer on the last rank, as on a device that others use too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(64)

    def forward(self, inputs: Tensor) -> Tensor:
        world = current_world()
        if world is not None and world.rank == world.size - 1:
            time.sleep(0.02)
        return self.inner(inputs)  # type: ignore[no-any-return]


def lame() -> mh.Task:
    return mh.Task(model=SlowOnOneRank, loss=classes, optimizer=sgd, data=pairs(256), batch_size=32)


class Words(nn.Module):
    """A few words of a large table, all of whose gradient travels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100_000, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words).mean(1))  # type: ignore[no-any-return]


def hot() -> mh.Task:
    data = torch.randint(100_000, (256, 8)), torch.randint(10, (256,))
    return mh.Task(model=Words, loss=classes, optimizer=sgd, data=data, batch_size=32)


class Crowd(nn.Module):
    """A network that asks for more threads than there are cores."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(16)
        self.inner = mlp(1024)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)  # type: ignore[no-any-return]


class Uneven(Dataset[tuple[Tensor, int]]):
    """Samples of which one line takes nearly all of the time."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample = torch.zeros(64)
        decoded(sample)
        return sample, index % 10


def decoded(sample: Tensor) -> None:
    end = time.perf_counter() + 2e-3
    while time.perf_counter() < end:
        sample.add_(1.0)  # the slow line


def slow_collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    time.sleep(0.02)  # the slow collate
    return torch.stack([sample for sample, _ in samples]), torch.tensor([label for _, label in samples])


def uneven(workers: int) -> mh.Task:
    return mh.Task(model=mlp, loss=classes, optimizer=sgd, data=Uneven(), batch_size=8, workers=workers)


class Even(Uneven):
    """Samples that take no time."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(64), index % 10


def collated(workers: int) -> mh.Task:
    return mh.Task(
        model=mlp, loss=classes, optimizer=sgd, data=Even(), batch_size=8, workers=workers, collate=slow_collate
    )
