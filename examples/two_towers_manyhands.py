"""Train two towers, each of which reads one half of an image, each on its own device and both at the same time.

Shows `mh.Placed`, which maps parts of a network to devices, and `mh.partition`, which shows the partition before
training. `two_towers_torch.py` is the same program in plain PyTorch.

    python two_towers_manyhands.py

It uses two GPUs if there are two, else two processes on the CPU. Expect a list of what each device holds and what is
sent, then one line per epoch. Its loss is that of the epoch's last batch, which is small, so it varies while it falls.
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import manyhands as mh

EPOCHS = int(os.environ.get("EPOCHS", 10))
WHERE = {"upper.*": 0, "lower.*": 1}  # parts of the network, and the devices of `on` that they run on


def tower():
    return nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 10))


class Towers(nn.Module):
    """The sum of the logits of both halves."""

    def __init__(self):
        super().__init__()
        self.upper, self.lower = tower(), tower()

    def forward(self, upper, lower):
        return self.upper(upper) + self.lower(lower)


def halves():
    """1,797 images of 64 pixels: the upper halves, the lower halves and the digits."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    return images[:, :32].contiguous(), images[:, 32:].contiguous(), labels


def loss(model, batch):
    upper, lower, labels = batch
    return F.cross_entropy(model(upper, lower), labels)


def task(lr: float = 1e-3) -> mh.Task:
    return mh.Task(
        model=Towers,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        data=halves(),
        batch_size=64,
    )


def main():
    on = "cuda:0,1" if torch.cuda.device_count() > 1 else "cpu*2"
    mh.partition(task, mh.Placed(WHERE), on=on).show()  # .show("partition.svg") draws it
    mh.fit(task, mh.Placed(WHERE), on=on, epochs=EPOCHS)


if __name__ == "__main__":
    main()
