"""Run a custom training loop with checkpoints and early stopping, on any number of devices.

    python own_loop_manyhands.py
    manyhands launch own_loop_manyhands.py --on 'cpu*2'

Shows `mh.hand()`: its share of the data, `backward` and `step`, a sum over replicas, `save` and `restore`. Run it again
with a larger EPOCHS and it resumes where it stopped, also on another number of devices. `own_loop_torch.py` is the same
program in plain PyTorch.

Expect a best accuracy of about 0.89 after 15 epochs, the same on any number of devices, up to rounding.
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import manyhands as mh

EPOCHS = int(os.environ.get("EPOCHS", 15))
CHECKPOINTS = "runs/own_loop_manyhands"


def digits():
    """1,797 images of 64 pixels; the last 297 are held out."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def main():
    hand = mh.hand()  # one of many under `manyhands launch`, else the only one
    torch.manual_seed(0)
    train_set, (images, labels) = digits()
    mine = slice(hand.rank, None, hand.size)  # this replica's share of the held-out images
    images, labels, num_labels = images[mine].to(hand.device), labels[mine].to(hand.device), len(labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 10))
    model, _ = hand.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    state = hand.restore(CHECKPOINTS) or {"best": 0.0, "since_best": 0}
    best, since_best = state["best"], state["since_best"]

    for epoch in range(hand.epoch, EPOCHS):
        for batch in hand.batches(train_set, batch_size=64, epochs=epoch + 1):
            for inputs, targets in hand.accumulate(batch):
                hand.backward(F.cross_entropy(model(inputs), targets))
            hand.step()

        with torch.no_grad():
            correct = hand.sum((model(images).argmax(1) == labels).sum())
        accuracy = float(correct) / num_labels
        since_best = 0 if accuracy > best else since_best + 1
        best = max(best, accuracy)
        hand.log(epoch=epoch + 1, loss=hand.loss, accuracy=accuracy)

        hand.save(CHECKPOINTS, best=best, since_best=since_best)
        if since_best == 3:
            break
    hand.close()
    if hand.is_first:
        print(f"best accuracy {best:.4f}")


if __name__ == "__main__":
    main()
