"""Train two towers, each of which reads one half of an image, in plain PyTorch on one device.

`two_towers_manyhands.py` is the same program with each tower on its own device. Expect a training loss of about 0.1
after ten epochs.
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", 10))


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


def main():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*halves()), batch_size=64, shuffle=True)
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        losses = []
        for batch in loader:
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
