"""Train a GAN that draws points on a ring of eight spots, in plain PyTorch on one device.

`gan_manyhands.py` is the same program on any number of devices. Expect "8 of 8 spots reached" after twelve epochs, with
about half of the points on a spot.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = int(os.environ.get("EPOCHS", 12))
NOISE = 8


def spots(number=8):
    """Points on a circle of radius 1, evenly spread."""
    angles = torch.arange(number) * 2 * torch.pi / number
    return torch.stack([angles.cos(), angles.sin()], dim=1)


class Ring(Dataset):
    """Points around the spots, each with the noise that the generator starts from."""

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


def train(lr=1e-3, width=64, size=25600, batch_size=256):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    loader = DataLoader(Ring(size), batch_size, shuffle=True)
    model = GAN(width).to(device)
    optimizers = {
        "generator": torch.optim.Adam(model.generator.parameters(), lr=lr, betas=(0.5, 0.9)),
        "critic": torch.optim.Adam(model.critic.parameters(), lr=lr, betas=(0.5, 0.9)),
    }

    for epoch in range(EPOCHS):
        for batch in loader:
            batch = [tensor.to(device) for tensor in batch]

            critic = critic_loss(model, batch)
            optimizers["critic"].zero_grad()
            critic.backward()
            optimizers["critic"].step()

            generator = generator_loss(model, batch)
            optimizers["generator"].zero_grad()
            generator.backward()
            optimizers["generator"].step()
        print(f"epoch {epoch + 1}  critic {critic:.4f}  generator {generator:.4f}")
    return model


if __name__ == "__main__":
    report(train())
