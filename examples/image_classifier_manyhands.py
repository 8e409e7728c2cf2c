"""Train a small CNN that reads handwritten digits, on all devices of this machine.

Shows the parts of an `mh.Task`: model, loss, optimizer, data, validation data and a metric. The model has BatchNorm
layers, whose statistics are synchronized over all devices. `image_classifier_torch.py` is the same program in plain
PyTorch.

    python image_classifier_manyhands.py
    manyhands fit image_classifier_manyhands.py --on 'cpu*2' --epochs 8 lr=1e-3

Expect a validation accuracy of about 0.94 after eight epochs, on any number of devices.
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import manyhands as mh

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


def task(lr: float = 3e-3, width: int = 16, batch_size: int = 64) -> mh.Task:
    train_set, valid_set = digits()
    return mh.Task(
        model=lambda: Net(width),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        data=train_set,
        valid=valid_set,
        metrics={"accuracy": accuracy},
        batch_size=batch_size,  # of all devices together
    )


if __name__ == "__main__":
    print(mh.fit(task, mh.Mirrored(), epochs=EPOCHS))
