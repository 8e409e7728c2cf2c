"""Profile a network whose input is too slow, and the same network with fast input.

    python profile_digits.py
    manyhands profile profile_digits.py workers=0 --html runs/profile.html

Shows `mh.profile`: tables of phases, modules, operations and memory, advice, and a web page.

Expect the advice "starved input" with the share of a step that waits for data, and a smaller share without the delay.
The page is runs/profile.html.
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
        time.sleep(self.seconds)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 28, 28, generator=generator), index % 10


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def task(seconds: float = 0.001, workers: int = 0) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        data=Pictures(seconds),
        workers=workers,
        batch_size=16,
    )


if __name__ == "__main__":
    sick = mh.profile(task, "single", on="cpu", steps=10)
    sick.show()
    Path("runs").mkdir(exist_ok=True)
    sick.save("runs/profile.html")
    cured = mh.profile(task, "single", on="cpu", steps=10, params={"seconds": 0.0})
    print(f"waiting for data: {sick.share('input'):.0%} of a step, cured {cured.share('input'):.0%}")
