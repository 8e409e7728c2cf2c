"""Uncertainty of ensembles: how far members disagree, and how well confidence matches accuracy (calibration)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .combination import NUMBERS, as_probabilities

NUM_BINS = 15
"""Number of bins of confidence with which calibration is measured."""


def spread(answers: Tensor, form: str) -> Tensor:
    """Return the members' disagreement for each row: the standard deviation of their predictions over the members.

    For classes it is that of the probability of the predicted class; for numbers it is averaged over the numbers of a
    row. The first dimension of `answers` is the member, and `form` is the form of the output.
    """
    values = as_probabilities(answers if answers.is_floating_point() else answers.float(), form)
    deviation = values.std(0, unbiased=False)
    if form == NUMBERS:
        return deviation.flatten(1).mean(1) if deviation.dim() > 1 else deviation
    winner = values.mean(0).argmax(-1, keepdim=True)
    return _by_row(deviation.gather(-1, winner).squeeze(-1))


def mutual_information(answers: Tensor, form: str) -> Tensor:
    """Return the mutual information of class and member for each row, in nats: the uncertainty about the model.

    It is 0 if all members predict the same probabilities, even if these are far from 0 and 1.

    >>> sure = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]])
    >>> unsure = torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]])
    >>> [round(float(mutual_information(one, "probabilities")), 3) for one in (sure, unsure)]
    [0.368, 0.0]
    """
    values = as_probabilities(answers, form)
    return _by_row((entropy(values.mean(0)) - entropy(values).mean(0)).clamp_min(0.0))


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy of class probabilities (the last dimension), in nats."""
    found: Tensor = torch.special.entr(probabilities).sum(-1)
    return found


@dataclass(frozen=True)
class Calibration:
    """How well the confidence of predictions matches their accuracy.

    The confidence of a row is the probability of its predicted class.
    """

    error: float
    """Expected calibration error: the mean difference between confidence and accuracy over bins of confidence."""
    accuracy: float
    """Fraction of rows whose predicted class is correct."""
    loss: float
    """Mean negative log likelihood of the labels."""
    confidence: tuple[float, ...]
    """Mean confidence in each bin that has rows."""
    right: tuple[float, ...]
    """Accuracy in each bin that has rows."""
    counts: tuple[int, ...]
    """Number of rows in each bin that has rows."""

    def __str__(self) -> str:
        return f"calibration error {self.error:.4f}, accuracy {self.accuracy:.4f}, loss {self.loss:.4f}"


def calibration(probabilities: Tensor, labels: Tensor) -> Calibration:
    """Return the calibration of predicted class probabilities; the last dimension of `probabilities` is the class.

    >>> calibration(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1])).error
    0.25
    """
    probabilities, labels = probabilities.double().flatten(0, -2), labels.long().flatten()
    confidence, choice = probabilities.max(-1)
    right = (choice == labels).double()
    bins = (confidence * NUM_BINS).long().clamp_max(NUM_BINS - 1)
    rows = []
    for number in range(NUM_BINS):
        inside = bins == number
        if inside.any():
            rows.append((float(confidence[inside].mean()), float(right[inside].mean()), int(inside.sum())))
    error = sum(count * abs(predicted - observed) for predicted, observed, count in rows) / len(labels)
    likelihood = probabilities.gather(-1, labels[:, None]).clamp_min(1e-12).log()
    predicted, observed, counts = zip(*rows, strict=True)
    return Calibration(round(error, 12), float(right.mean()), -float(likelihood.mean()), predicted, observed, counts)


def _by_row(values: Tensor) -> Tensor:
    """Return one number per row: the mean over its other dimensions, such as the positions of a sequence."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values
