"""Train a recommender on ratings, on one device, on many, or with parameter servers.

    python recommender_manyhands.py
    manyhands fit recommender_manyhands.py --strategy ps,servers=2,workers=2 --on 'cpu*2'

Shows `mh.strategies.Embedding`. With parameter servers no worker holds these tables: only rows that a batch uses are
sent.
`recommender_torch.py` is the same program in plain PyTorch.

Expect the training loss to fall from about 3 to about 1 within five epochs.
"""

import os

import torch
from torch import nn

import manyhands as mh

EPOCHS = int(os.environ.get("EPOCHS", 5))
USERS, ITEMS = 2_000, 1_000


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = mh.strategies.Embedding(USERS, 8, std=0.3), mh.strategies.Embedding(ITEMS, 8, std=0.3)

    def forward(self, ids):
        return (self.users(ids[:, 0]) * self.items(ids[:, 1])).sum(1)


def ratings():
    """20,000 ratings that come from hidden tastes."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(0, rows, (20_000,), generator=draw) for rows in (USERS, ITEMS)], 1)
    tastes = [torch.randn(rows, 3, generator=draw) for rows in (USERS, ITEMS)]
    return ids, (tastes[0][ids[:, 0]] * tastes[1][ids[:, 1]]).sum(1)


def loss(model, batch):
    ids, wanted = batch
    return (model(ids) - wanted).square().mean()


def task(lr: float = 0.2) -> mh.Task:
    return mh.Task(
        model=Recommender,
        loss=loss,
        optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=lr),
        data=ratings(),
        batch_size=250,
    )


if __name__ == "__main__":
    run = mh.fit(task, epochs=EPOCHS)
    print(run)
