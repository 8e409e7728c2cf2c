"""The task that is trained under faults: a small network with slow steps, which become fast once a file exists.

The model also has one parameter per sample, whose gradient is the number of visits in a batch. Its learning rate is
the batch size, so that after training it holds the number of visits of each sample.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import manyhands as mh

ROWS, BATCH = 640, 16
PACE = 0.1
"""Minimum seconds of a batch, until the file named by the environment variable HURRY exists."""
VISITS = "visits"


class Samples(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Inputs, targets and the sample's number; read by worker processes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True), torch.tensor(index)


class Counting(nn.Module):
    """A network that also counts visits."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(16)] if norm else []
        self.net = nn.Sequential(nn.Linear(8, 16, bias=not norm), *middle, nn.Tanh(), nn.Linear(16, 1))
        self.visits = nn.Parameter(torch.zeros(ROWS))

    def forward(self, inputs: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(inputs), self.visits[numbers]


def paced(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch after a delay, unless the file in HURRY exists."""
    hurry = os.environ.get("HURRY")
    if hurry and not Path(hurry).exists():
        time.sleep(PACE)
    outputs, visits = model(batch[0], batch[2])
    # Descending this adds one to the counter of every sample of the batch.
    return nn.functional.mse_loss(outputs, batch[1]) - visits.mean()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum for the network, and without it for the counters of visits."""
    counters = [one for name, one in model.named_parameters() if name.endswith(VISITS)]
    others = [one for name, one in model.named_parameters() if not name.endswith(VISITS)]
    groups: Sequence[dict[str, Any]] = [
        {"params": others, "momentum": 0.9},
        {"params": counters, "lr": float(BATCH)},
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.01)


def task(norm: bool = True, workers: int = 1) -> mh.Task:
    """Return what is trained."""
    return mh.Task(
        model=lambda: Counting(norm=norm),
        loss=paced,
        optimizer=optimizer,
        data=Samples(),
        batch_size=BATCH,
        workers=workers,
    )


def wrong_samples(weights: dict[str, Tensor], num_steps: int) -> int:
    """Return the number of samples whose visits differ from those of `num_steps` undisturbed steps of whole batches."""
    visits = weights[VISITS]
    whole, rest = divmod(num_steps * BATCH, ROWS)
    at_most = whole + (rest > 0)
    wrong = (visits - visits.round()).abs() > 1e-6
    wrong |= (visits.round() < whole) | (visits.round() > at_most)
    missing = abs(int(visits.round().sum()) - num_steps * BATCH)
    return max(int(wrong.sum()), missing)
