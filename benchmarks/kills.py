"""The task that is trained while ranks are killed, and the clock that records the time of each step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

WIDTH, ROWS, BATCH = 512, 4096, 64


def net() -> nn.Module:
    """Small enough for two cores, large enough that its state is no trifle: 1.3 million parameters."""
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10)
    )


def task() -> mh.Task:
    """What is trained."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, 10, (ROWS,), generator=generator)
    return mh.Task(
        model=net,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        data=data,
        batch_size=BATCH,
    )


class Clock(mh.Callback):
    """Writes when each step was taken; stops the run when a file exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, hand: mh.Hand) -> None:
        with (self.folder / f"steps-{os.getpid()}").open("a") as file:
            file.write(f"{hand.num_steps} {time.time():.4f}\n")
        if hand.num_steps % 10 == 0 and (self.folder / "enough").exists():
            hand.stop()
