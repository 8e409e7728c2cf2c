"""Small tasks for tests of tuning."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import manyhands as mh

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long()


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(lr: float = 1e-2, width: int = 8, seed: int = 0) -> mh.Task:
    """A network that learns the sign of a sum."""
    return mh.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)),
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=lr),
        data=(INPUTS[:64], LABELS[:64]),
        valid=(INPUTS[64:], LABELS[64:]),
        metrics={"accuracy": lambda outputs, batch: (outputs.argmax(1) == batch[1]).float().mean()},
        batch_size=16,
        seed=seed,
    )
