"""The networks that are served in benchmarks; peers import this file too, so it needs torch alone."""

from __future__ import annotations

import torch
from torch import nn

ROW = 784


def mlp() -> nn.Module:
    """A small network: what is measured is the server."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ROW, 256), nn.ReLU(), nn.Linear(256, 10)).eval()


def cnn() -> nn.Module:
    """A network that takes milliseconds a row: what is measured is how well the devices are used."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 49, 10),
    ).eval()


WORKS = {"mlp": mlp, "cnn": cnn}
