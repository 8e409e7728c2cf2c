"""The networks that are served in benchmarks; peers import this file too, so it needs torch alone."""

from __future__ import annotations

import os

import torch
from torch import nn

ROW = 784
CHOICE = "SERVED_WORK"
"""The variable that tells a peer which of the networks it serves."""


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
MAX_ROWS = {"mlp": 64, "cnn": 16}
"""Of a batch, for everybody: one of the larger network takes ten to twenty milliseconds."""


def chosen() -> nn.Module:
    """The network that this process serves."""
    torch.set_num_threads(1)
    return WORKS[os.environ[CHOICE]]()


def max_rows() -> int:
    """Of a batch of it."""
    return MAX_ROWS[os.environ[CHOICE]]
