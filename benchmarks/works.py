"""Works: the networks and synthetic data that every contender trains. Needs torch alone, so that peers read it too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Subset, TensorDataset

NUM_ROWS = 2048
"""Rows that exist; a run of many steps reads them again and again, so that it is one long epoch."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A network, its data and its optimizer."""

    name: str
    build: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer]
    shape: tuple[int, ...]
    batch_size: int
    """Of one process."""

    def model(self) -> nn.Module:
        """The network, with the same first values everywhere."""
        torch.manual_seed(1)
        return self.build()

    def arrays(self) -> Batch:
        """All rows: inputs and classes."""
        return _arrays(self.shape)

    def dataset(self, num_samples: int) -> Subset[Batch]:
        """So many samples, over and over the same rows."""
        return Subset(TensorDataset(*self.arrays()), (torch.arange(num_samples) % NUM_ROWS).tolist())


def loss(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Cross-entropy, the mean over the batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def _mlp() -> nn.Module:
    return _dense(784, 256, 256, 10)


def _wide() -> nn.Module:
    return _dense(784, 1024, 1024, 256, 10)


def _dense(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.01, momentum=0.9)


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4)


@cache
def _arrays(shape: tuple[int, ...]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_ROWS, *shape, generator=generator)
    return inputs, torch.randint(10, (NUM_ROWS,), generator=generator)


CNN = Work(name="cnn", build=_cnn, make_optimizer=_sgd, shape=(3, 32, 32), batch_size=96)
"""Bound by compute: few parameters, about 140 ms a step on one core."""
MLP = Work(name="mlp", build=_mlp, make_optimizer=_sgd, shape=(784,), batch_size=64)
"""Bound by overhead: about 1.3 ms a step."""
WIDE = Work(name="wide", build=_wide, make_optimizer=_adamw, shape=(784,), batch_size=64)
"""Two million parameters and AdamW: checkpoints of 25 MB."""
WORKS = {work.name: work for work in (CNN, MLP, WIDE)}
