"""Train a GAN that draws points on a ring of eight spots, on all devices of this machine.

Shows a custom step with two optimizers (`step(hand, batch)` and `hand.minimize(loss, "critic")`), and noise that is the
same on any number of devices, because the dataset draws it. `gan_torch.py` is the same program in plain PyTorch.

    python gan_manyhands.py

Expect "8 of 8 spots reached" after twelve epochs, with about half of the points on a spot.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import manyhands as mh

EPOCHS = int(os.environ.get("EPOCHS", 12))
NOISE = 8


def spots(number=8):
    """Points on a circle of radius 1, evenly spread."""
    angles = torch.arange(number) * 2 * torch.pi / number
    return torch.stack([angles.cos(), angles.sin()], dim=1)


class Ring(Dataset):
    """Points around the spots, each with the noise that the generator starts from.

    What a sample draws depends on the seed, the epoch and its index, not on the device that reads it.
    """

    def __init__(self, size):
        random = torch.Generator().manual_seed(0)
        which = torch.randint(8, (size,), generator=random)
        self.points = spots()[which] + 0.05 * torch.randn(size, 2, generator=random)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], torch.randn(NOISE)


def network(inputs, outputs, width):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.SiLU(),
        nn.Linear(width, width), nn.SiLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


class GAN(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.generator = network(NOISE, 2, width)
        self.critic = network(2, 1, width)


def critic_loss(model, batch):
    points, noise = batch
    real, fake = model.critic(points), model.critic(model.generator(noise).detach())
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(model, batch):
    _, noise = batch
    return F.softplus(-model.critic(model.generator(noise))).mean()


@torch.no_grad()
def report(model):
    """How many of the eight spots the generator reaches, and how close its points lie to one."""
    device = next(model.parameters()).device
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1)).to(device)
    distances, nearest = torch.cdist(model.generator(noise), spots().to(device)).min(dim=1)
    reached = nearest[distances < 0.2].bincount(minlength=8) >= 20
    close = (distances < 0.2).float().mean()
    print(f"{int(reached.sum())} of 8 spots reached, {close:.0%} of the points lie on one")


def step(hand, batch):
    hand.minimize(lambda part: critic_loss(hand.model, part), "critic")
    hand.minimize(lambda part: generator_loss(hand.model, part), "generator")


def task(lr: float = 1e-3, width: int = 64, size: int = 25600, batch_size: int = 256) -> mh.Task:
    return mh.Task(
        model=lambda: GAN(width),
        step=step,
        optimizer=lambda model: {
            "generator": torch.optim.Adam(model.generator.parameters(), lr=lr, betas=(0.5, 0.9)),
            "critic": torch.optim.Adam(model.critic.parameters(), lr=lr, betas=(0.5, 0.9)),
        },
        data=Ring(size),
        batch_size=batch_size,  # of all devices together
    )


if __name__ == "__main__":
    report(mh.fit(task, mh.Mirrored(), epochs=EPOCHS).model())
