"""Serve a network while it is trained further; the new version takes over, and a rollback returns to the old one.

Shows `run.export`, `mh.serve`, `mh.serving.Client`, and how a client loads a version and rolls it back. No request is
lost while versions change.

    python serve_digits.py

Expect three accuracies: version 1 at about 0.8, version 2 at about 0.9, and version 1 again.
"""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import manyhands as mh

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)


def loss(model, batch):
    inputs, wanted = batch
    return F.cross_entropy(model(inputs), wanted)


def task(lr: float = 1e-2) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        data=(images[:1500], labels[:1500]),
        batch_size=100,
    )


def accuracy(client: mh.serving.Client) -> float:
    scores = client("digits", images[1500:])
    return float(np.mean(scores.argmax(1) == labels[1500:].numpy()))


if __name__ == "__main__":
    run = mh.fit(task, epochs=1, name="digits", on="cpu")
    run.export("models/digits")
    with mh.serve("models", listen=mh.serving.Listen(http=0, grpc=0, manage=0)) as server:
        client = mh.serving.Client(server.url, manage=server.manage_url)
        print(f"version 1: {accuracy(client):.3f}")
        run = mh.fit(task, epochs=5, name="digits", resume=True, on="cpu")
        run.export("models/digits")
        client.load("digits")  # now; by itself the server looks once a second
        print(f"version 2: {accuracy(client):.3f}")
        client.rollback("digits")
        print(f"version 1: {accuracy(client):.3f}")
