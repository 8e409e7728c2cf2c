"""Train a small CNN that reads handwritten digits, in plain PyTorch on one device.

`image_classifier_manyhands.py` is the same program on any number of devices. Expect a validation accuracy of about 0.95
after eight epochs.
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", 8))


def block(inputs, outputs, stride=1):
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.SiLU()


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(*block(1, width), *block(width, 2 * width, 2), *block(2 * width, 2 * width))
        self.classify = nn.Linear(2 * width, 10)

    def forward(self, images):
        return self.classify(self.features(images).mean(dim=(2, 3)))


def digits():
    """1,797 images of 8 x 8 pixels; the last 297 are held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(outputs, batch):
    return (outputs.argmax(1) == batch[1]).float().mean()


def train(lr=3e-3, width=16, batch_size=64):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    train_set, valid_set = digits()
    loader = DataLoader(TensorDataset(*train_set), batch_size, shuffle=True)
    model = Net(width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    for epoch in range(EPOCHS):
        model.train()
        for batch in loader:
            batch = [tensor.to(device) for tensor in batch]
            value = loss(model, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            valid = [tensor.to(device) for tensor in valid_set]
            correct = accuracy(model(valid[0]), valid)
        print(f"epoch {epoch + 1}  loss {value:.4f}  accuracy {correct:.4f}")


if __name__ == "__main__":
    train()
