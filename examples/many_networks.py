"""Train thirty-two networks as one vectorized program, and stop the worse half of them halfway.

Shows `groups`, which says which tasks can be stacked, and `Population`, whose members have different learning rates and
seeds. `population.model(n)` returns a member as a plain network.

    python many_networks.py

Expect "32 tasks go together", and an accuracy of about 0.92 for the best member.
"""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import manyhands as mh
from manyhands.vectorized import Population, groups

EPOCHS = int(os.environ.get("EPOCHS", 6))
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (outputs.argmax(1) == batch[1]).float().mean()


def task(lr: float = 1e-2, seed: int = 0) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        data=(images[:1500], labels[:1500]),
        valid=(images[1500:], labels[1500:]),
        batch_size=100,
        metrics={"accuracy": accuracy},
        seed=seed,
    )


if __name__ == "__main__":
    rates = [10 ** (-4 + 0.1 * number) for number in range(32)]
    tasks = [task(lr, seed) for seed, lr in enumerate(rates)]
    for group in groups(tasks):
        print(f"{len(group.tasks)} tasks go together" if group.stacks else group.reason)

    population = Population(tasks, epochs=EPOCHS)
    population.train(until=population.total // 2)
    found = [metrics["valid_loss"] for metrics in population.evaluate()]
    for member in sorted(range(len(tasks)), key=lambda member: found[member])[len(tasks) // 2 :]:
        population.stop(member)
    population.train()

    left = [number for number, member in enumerate(population.members) if member.status == "done"]
    best = min(left, key=lambda number: population.members[number].metrics["valid_loss"])
    measured = population.members[best].metrics
    print(f"best of {len(tasks)}: lr {rates[best]:.1e}, accuracy {measured['valid_accuracy']:.3f}")
    model = population.model(best)  # a plain network again
    print("answers", model.eval()(images[:3]).argmax(1).tolist())
