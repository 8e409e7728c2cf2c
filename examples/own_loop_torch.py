"""Run a training loop with checkpoints and early stopping, in plain PyTorch on one device.

Run it again with a larger EPOCHS and it resumes where it stopped. `own_loop_manyhands.py` is the same program on any
number of devices. Expect a best accuracy of about 0.89 after 15 epochs.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", 15))
CHECKPOINT = Path("runs/own_loop_torch.pt")


def digits():
    """1,797 images of 64 pixels; the last 297 are held out."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    train_set, (images, labels) = digits()
    images, labels = images.to(device), labels.to(device)
    loader = DataLoader(TensorDataset(*train_set), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    start, best, since_best = 0, 0.0, 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, best, since_best = state["epoch"], state["best"], state["since_best"]

    for epoch in range(start, EPOCHS):
        for batch in loader:
            inputs, targets = (tensor.to(device) for tensor in batch)
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        with torch.no_grad():
            correct = (model(images).argmax(1) == labels).sum()
        accuracy = float(correct) / len(labels)
        since_best = 0 if accuracy > best else since_best + 1
        best = max(best, accuracy)
        print(f"epoch {epoch + 1}  loss {loss:.6f}  accuracy {accuracy:.4f}")

        CHECKPOINT.parent.mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1, "best": best, "since_best": since_best}, CHECKPOINT)
        if since_best == 3:
            break
    print(f"best accuracy {best:.4f}")


if __name__ == "__main__":
    main()
