"""Search a learning rate and a width, then train five networks as an ensemble.

Shows `mh.tune` with early stopping, `mh.ensemble` and its calibration. Needs the extra `tune`. `tune_digits_optuna.py`
is the same search with Optuna and a hand-written loop.

    python tune_digits_manyhands.py

Expect a best validation loss of about 0.36, and an ensemble whose calibration error is below that of its members.
"""

import functools
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import manyhands as mh

TRIALS = int(os.environ.get("TRIALS", 15))
EPOCHS = int(os.environ.get("EPOCHS", 9))


def digits():
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def net(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def task(lr: float = 1e-3, width: int = 64, seed: int = 0) -> mh.Task:
    train_set, valid_set = digits()
    return mh.Task(
        model=lambda: net(width),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        data=train_set,
        valid=valid_set,
        batch_size=64,
        seed=seed,
    )


if __name__ == "__main__":
    space = {"lr": mh.tuning.loguniform(1e-4, 1e-1), "width": mh.tuning.choice(32, 64)}
    study = mh.tune(
        task,
        space,
        trials=TRIALS,
        epochs=EPOCHS,
        options=[mh.options.Algorithm(stop="median"), mh.options.Selection(keep=5)],
    )
    print(f"best valid_loss {study.best.value:.4f} with {study.best.params}")

    ensemble = mh.ensemble(functools.partial(task, lr=1e-1), members=5, epochs=20)
    together, alone = ensemble.calibration()
    print(f"five networks: calibration error {together.error:.4f}, accuracy {together.accuracy:.4f}")
    print(f"one of them:   calibration error {sum(one.error for one in alone) / 5:.4f} in the mean")
