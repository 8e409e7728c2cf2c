"""What the hosts of the fault tests train: small, slow enough to be hit, and hurried on by a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh

ROWS, BATCH = 60, 16


def paced(model: nn.Module, batch: Any) -> Any:
    hurry = os.environ.get("HURRY")
    if hurry and not Path(hurry).exists():
        time.sleep(0.1)
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def task() -> mh.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)),
        loss=paced,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=(inputs, inputs.sum(1, keepdim=True)),
        batch_size=BATCH,
    )
