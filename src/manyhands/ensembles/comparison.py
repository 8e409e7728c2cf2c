"""Comparison of an ensemble with its best member on labelled data, and what would make the ensemble better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .combination import NUMBERS, Combination, MeanCombination, Vote, Weighted, as_probabilities

_TINY = 1e-12
MIN_ROWS = 10
"""Number of rows below which nothing is compared."""


@dataclass(frozen=True)
class MemberComparison:
    """An ensemble compared with its best member; lower is better."""

    measure: str
    """What is compared: "loss" (mean negative log likelihood), "error rate" or "squared error"."""
    together: float
    """Of the ensemble."""
    best: float
    """Of the best member."""
    member: str
    """Name of the best member."""
    num_rows: int
    is_worse: bool
    """Whether the ensemble is worse by more than the standard error of the difference."""
    advice: str = ""
    """What would help, if the ensemble is worse; measured on rows that it was not fitted to."""

    def __str__(self) -> str:
        numbers = f"{self.measure} {self.together:.4g} instead of {self.best:.4g} of {self.member}"
        if not self.is_worse:
            return f"the ensemble is not worse than its best member: {numbers}, on {self.num_rows:,} rows"
        return f"the ensemble is worse than its best member: {numbers}, on {self.num_rows:,} rows; {self.advice}"


def compared(
    answers: Tensor, labels: Tensor, combination: Combination, names: Sequence[str]
) -> MemberComparison | None:
    """Return the comparison for predictions by member and row; None if the data cannot tell."""
    form = combination.form
    if form == NUMBERS:
        fits = labels.numel() == answers[0].numel()
    else:
        fits = not labels.is_floating_point() and labels.shape == answers.shape[1:-1]
    if not fits or len(answers) < 2 or len(labels) < MIN_ROWS:
        return None
    votes = isinstance(combination, Vote)
    alone = torch.stack([_by_row(one, labels, form, votes) for one in answers])
    together = _by_row(combination(answers), labels, form, votes)
    best = int(alone.mean(1).argmin())
    gap = together - alone[best]
    is_worse = float(gap.mean()) > max(float(gap.std()) / math.sqrt(len(gap)), _TINY)
    return MemberComparison(
        measure="squared error" if form == NUMBERS else "error rate" if votes else "loss",
        together=float(together.mean()),
        best=float(alone[best].mean()),
        member=names[best],
        num_rows=len(labels),
        is_worse=is_worse,
        advice=_advice(answers, labels, combination, alone, names) if is_worse else "",
    )


def _advice(answers: Tensor, labels: Tensor, combination: Combination, alone: Tensor, names: Sequence[str]) -> str:
    """Return the best of fitted weights, fewer members and one member, chosen and measured on different rows."""
    form, votes = combination.form, isinstance(combination, Vote)
    first, second = slice(0, None, 2), slice(1, None, 2)
    order = alone[:, first].mean(1).argsort().tolist()

    def measured(kind: Combination, members: Sequence[int], rows: slice) -> float:
        return float(_by_row(kind(answers[list(members)][:, rows]), labels[rows], form, votes).mean())

    found = {f"{names[order[0]]} alone has": float(alone[order[0], second].mean())}
    if not isinstance(combination, Weighted):
        weighted = Weighted(len(answers), form)
        wanted = labels[first].reshape(answers[0, first].shape) if form == NUMBERS else labels[first]
        weighted.fit(answers[:, first], wanted)
        found['combine="weighted" gives'] = measured(weighted, range(len(answers)), second)
    means = {size: MeanCombination(size, form) for size in range(2, len(answers))}
    if means:
        size = min(means, key=lambda one: measured(means[one], order[:one], first))
        found[f"members={size}, the best {size} only, gives"] = measured(means[size], order[:size], second)
    text = min(found, key=lambda one: found[one])
    return f"{text} {found[text]:.4g} on held-out rows"


def _by_row(answers: Tensor, labels: Tensor, form: str, votes: bool) -> Tensor:
    """Return the loss of every row in float64."""
    if form == NUMBERS:
        errors = (answers.double() - labels.double().reshape(answers.shape)).square()
        return errors.flatten(1).mean(1) if errors.dim() > 1 else errors
    probabilities = as_probabilities(answers.double(), form)
    if votes:
        losses = (probabilities.argmax(-1) != labels).double()
    else:
        right = probabilities.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
        losses = -right.clamp_min(_TINY).log()
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses
