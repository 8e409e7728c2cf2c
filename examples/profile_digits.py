"""Profile a network whose input is too slow, and the same network with fast input.

    python profile_digits.py
    manyhands profile profile_digits.py workers=0 --html runs/profile.html

Shows `mh.profile`: tables of phases, modules, operations and memory, advice, and a web page.

Expect the advice "starved input", because most of a step waits for data. The last line shows that the wait is almost
gone without the delay. The page is runs/profile.html.
"""

import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import manyhands as mh


class Pictures(torch.utils.data.Dataset):
    """Random images; reading one takes `seconds`, as from a slow disk."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 512

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 28, 28, generator=generator), index % 10


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def task(seconds: float = 0.001, workers: int = 0) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 10)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        data=Pictures(seconds),
        workers=workers,
        batch_size=16,
    )


if __name__ == "__main__":
    slow = mh.profile(task, "single", on="cpu", steps=10)
    slow.show()
    Path("runs").mkdir(exist_ok=True)
    slow.save("runs/profile.html")
    fast = mh.profile(task, "single", on="cpu", steps=10, params={"seconds": 0.0})
    print(f"waiting for data: {slow.share('input'):.0%} of a step, without the delay {fast.share('input'):.0%}")
