"""What `benchmarks.tune` tunes: small networks on made-up digits, as plain PyTorch and as a Task."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_ROWS, NUM_VALID, NUM_INPUTS, NUM_CLASSES = 1024, 256, 64, 10
BATCH = 64
NARROW, SMALL, LARGE = 8, 32, 768
LOW, HIGH = 1e-4, 1e-1


def data(num_rows: int = NUM_ROWS, num_valid: int = NUM_VALID, noise: float = 2.5) -> tuple[Tensor, Tensor]:
    """Classes around random centres, which a small network learns but not at once."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(NUM_CLASSES, (num_rows + num_valid,), generator=random)
    centres = torch.randn(NUM_CLASSES, NUM_INPUTS, generator=random)
    return centres[labels] + noise * torch.randn(len(labels), NUM_INPUTS, generator=random), labels


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), _last(width))


def _last(width: int) -> nn.Module:
    return nn.Linear(width, NUM_CLASSES)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain_trial(lr: float, width: int, epochs: int) -> float:
    """The hand-written loop: the loop, and the loss on the validation rows at the end of every epoch."""
    inputs, labels = data()
    torch.manual_seed(0)
    model = network(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    measured = math.inf
    for _ in range(epochs):
        order = torch.randperm(NUM_ROWS)
        for start in range(0, NUM_ROWS, BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            loss(model, (inputs[rows], labels[rows])).backward()
            optimizer.step()
        with torch.no_grad():
            measured = float(loss(model, (inputs[NUM_ROWS:], labels[NUM_ROWS:])))
    return measured


def rates(num: int) -> list[float]:
    """Learning rates spread over the space."""
    return [LOW * (HIGH / LOW) ** (number / max(1, num - 1)) for number in range(num)]


def plain_loop(num: int, width: int, epochs: int) -> float:
    """Seconds of so many trials one after another."""
    began = time.perf_counter()
    for rate in rates(num):
        plain_trial(rate, width, epochs)
    return time.perf_counter() - began


def half(barrier: Any, report: Callable[[float], None], num: int, width: int, epochs: int) -> None:
    """One of two independent processes: waits for the other one, and says how long its trials took."""
    torch.set_num_threads(1)
    plain_trial(LOW, width, 1)
    barrier.wait()
    report(plain_loop(num, width, epochs))
