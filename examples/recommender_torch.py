"""Train a recommender on ratings, in plain PyTorch on one device.

`recommender_manyhands.py` is the same program on any number of devices. Expect the training loss to fall from about 3
to about 1 within five epochs.
"""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", 5))
USERS, ITEMS = 2_000, 1_000


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, ids):
        return (self.users(ids[:, 0]) * self.items(ids[:, 1])).sum(1)


def ratings():
    """20,000 ratings that come from hidden tastes."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(0, rows, (20_000,), generator=draw) for rows in (USERS, ITEMS)], 1)
    tastes = [torch.randn(rows, 3, generator=draw) for rows in (USERS, ITEMS)]
    return ids, (tastes[0][ids[:, 0]] * tastes[1][ids[:, 1]]).sum(1)


def main():
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
    loader = DataLoader(TensorDataset(*ratings()), batch_size=250, shuffle=True)
    for epoch in range(EPOCHS):
        for ids, wanted in loader:
            loss = (model(ids) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
