"""Search a learning rate and a width, with Optuna and a hand-written training loop.

`tune_digits_manyhands.py` is the same search with `mh.tune`. Expect a best validation loss of about 0.36.
"""

import os

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

TRIALS = int(os.environ.get("TRIALS", 15))
EPOCHS = int(os.environ.get("EPOCHS", 9))


def digits():
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def net(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def objective(trial):
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    width = trial.suggest_categorical("width", [32, 64])
    (images, labels), (held, wanted) = digits()
    torch.manual_seed(0)
    model = net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            valid_loss = F.cross_entropy(model(held), wanted).item()
        trial.report(valid_loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return valid_loss


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner())
    study.optimize(objective, TRIALS)
    print(f"best valid_loss {study.best_value:.4f} with {study.best_params}")
