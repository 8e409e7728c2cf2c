"""Combinations of the predictions of an ensemble's members: mean, vote, weighted mean and stacking.

The form of an output decides how it is combined: logits, probabilities or plain numbers. Weights are fitted to
validation data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import SettingsError

LOGITS, PROBABILITIES, NUMBERS = "logits", "probabilities", "numbers"
_TINY = 1e-12


def form_of(answers: Tensor, labels: Tensor | None) -> str:
    """Return the form of an output: "logits", "probabilities" or "numbers", inferred from values and labels.

    `answers` has the dimensions member, row and, for classes, class. `labels` are those of the rows, if known.

    >>> form_of(torch.tensor([[[2.0, -1.0]]]), torch.tensor([0]))
    'logits'
    >>> form_of(torch.tensor([[[0.7, 0.3]]]), torch.tensor([0]))
    'probabilities'
    """
    if not answers.is_floating_point() or answers.dim() < 3 or answers.shape[-1] < 2:
        return NUMBERS
    if bool((answers >= 0).all()) and torch.allclose(answers.sum(-1), torch.ones_like(answers[..., 0]), atol=1e-4):
        return PROBABILITIES
    is_class = labels is not None and not labels.is_floating_point() and labels.shape == answers.shape[1:-1]
    return LOGITS if is_class else NUMBERS


def as_probabilities(answers: Tensor, form: str) -> Tensor:
    """Return predictions with logits converted to probabilities; those of another form are returned unchanged."""
    return answers.softmax(-1) if form == LOGITS else answers


def as_form(probabilities: Tensor, form: str) -> Tensor:
    """Return probabilities in the form of the members' output: for "logits" their logarithms, else unchanged."""
    return probabilities.clamp_min(_TINY).log() if form == LOGITS else probabilities


ROUNDS = 200
"""Maximum number of iterations with which weights are fitted."""


class Combination(nn.Module):
    """Base class of rules that combine the members' predictions for one output into one prediction per row.

    The result has the form of the members' output.

    Args:
        num_members: Number of members of the ensemble.
        form: The form of the output: "logits", "probabilities" or "numbers".
    """

    name: ClassVar[str] = ""
    """The name of the rule in `combine=`."""
    needs_data: ClassVar[bool] = False
    """Whether `fit` must be called with labelled data before the rule is used."""

    def __init__(self, num_members: int, form: str) -> None:
        super().__init__()
        self.num_members, self.form = num_members, form

    @abstractmethod
    def forward(self, answers: Tensor) -> Tensor:
        """Return the combined prediction for every row; the first dimension of `answers` is the member."""

    def of_some(self, answers: Tensor, who: Sequence[int]) -> Tensor:
        """Return the combined prediction of some members.

        `who` has the numbers of the members whose predictions are in `answers`, in this order.
        """
        found: Tensor = self(answers)
        return found

    def fit(self, answers: Tensor, labels: Tensor) -> None:
        """Fit the weights to the members' predictions on labelled data; does nothing for a rule without weights."""


class MeanCombination(Combination):
    """Mean of the members' predictions; for logits and probabilities, the mean of the probabilities."""

    name = "mean"

    def forward(self, answers: Tensor) -> Tensor:
        return as_form(as_probabilities(answers, self.form).mean(0), self.form)


class Vote(Combination):
    """Vote of the members: for classes the fractions of votes, for real numbers the median, for integers the mode."""

    name = "vote"

    def forward(self, answers: Tensor) -> Tensor:
        if not answers.is_floating_point():
            return answers.long().mode(0).values.to(answers.dtype)
        if self.form == NUMBERS:
            ordered = answers.sort(0).values
            return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2  # Tensor.median takes the lower
        votes = F.one_hot(answers.argmax(-1), answers.shape[-1]).to(answers.dtype)
        return as_form(votes.mean(0), self.form)


class Weighted(Combination):
    """Weighted mean of the members' predictions, with nonnegative weights that sum to 1.

    The weights maximize the likelihood of the validation data, or for numbers minimize the squared error.
    """

    name = "weighted"
    needs_data = True

    def __init__(self, num_members: int, form: str) -> None:
        super().__init__(num_members, form)
        self.register_buffer("weights", torch.full((num_members,), 1.0 / num_members))
        self.weights: Tensor

    def forward(self, answers: Tensor) -> Tensor:
        return self._weighed(answers, self.weights)

    def of_some(self, answers: Tensor, who: Sequence[int]) -> Tensor:
        weights = self.weights[list(who)]
        total = weights.sum()
        weights = weights / total if total > 0 else torch.full_like(weights, 1.0 / len(who))
        return self._weighed(answers, weights)

    def fit(self, answers: Tensor, labels: Tensor) -> None:
        if self.form == NUMBERS:
            self.weights.copy_(_least_squares(answers.double(), labels.double()))
            return
        right = _of_label(as_probabilities(answers.double(), self.form), labels).clamp_min(1e-12)
        weights = self.weights.double()
        for _ in range(ROUNDS):
            # Expectation-maximization for the weights of a mixture, whose likelihood has only one maximum.
            shares = weights[:, None] * right
            weights = (shares / shares.sum(0)).mean(1)
        self.weights.copy_(weights)

    def _weighed(self, answers: Tensor, weights: Tensor) -> Tensor:
        shaped = weights.to(answers.dtype).view(-1, *[1] * (answers.dim() - 1))
        return as_form((as_probabilities(answers, self.form) * shaped).sum(0), self.form)


class Stacking(Combination):
    """Linear model of the members' predictions (log probabilities for classes), fitted to the validation data.

    It has a weight per member, and a bias per class or one for numbers.
    """

    name = "stacked"
    needs_data = True

    def __init__(self, num_members: int, form: str) -> None:
        super().__init__(num_members, form)
        self.register_buffer("weights", torch.full((num_members,), 1.0 / num_members))
        self.register_buffer("bias", torch.zeros(1))
        self.weights: Tensor
        self.bias: Tensor

    def forward(self, answers: Tensor) -> Tensor:
        shaped = self.weights.to(answers.dtype).view(-1, *[1] * (answers.dim() - 1))
        mixed = (self._features(answers) * shaped).sum(0) + self.bias.to(answers.dtype)
        if self.form == NUMBERS:
            return mixed
        return mixed.log_softmax(-1) if self.form == LOGITS else mixed.softmax(-1)

    def of_some(self, answers: Tensor, who: Sequence[int]) -> Tensor:
        """Return the combined prediction of some members, with the mean of their predictions for the missing ones.

        `who` has the numbers of the members whose predictions are in `answers`, in this order.
        """
        features = [answers[list(who).index(m)] if m in who else answers.mean(0) for m in range(self.num_members)]
        found: Tensor = self(torch.stack(features))
        return found

    def fit(self, answers: Tensor, labels: Tensor) -> None:
        features = self._features(answers.double())
        classes = features.shape[-1] if self.form != NUMBERS else 1
        weights = torch.full((len(answers),), 1.0 / len(answers), dtype=torch.float64, requires_grad=True)
        bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([weights, bias], max_iter=ROUNDS, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            mixed = (features * weights.view(-1, *[1] * (features.dim() - 1))).sum(0) + bias
            loss = F.mse_loss(mixed, labels.double()) if self.form == NUMBERS else _cross_entropy(mixed, labels)
            # Slight regularization towards the plain mean, so that few rows do not lead to extreme weights.
            loss = loss + 1e-3 * ((weights - 1 / len(answers)).square().sum() + bias.square().sum())
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        self.weights.copy_(weights.detach())
        self.bias = bias.detach().to(self.weights.dtype)

    def _features(self, answers: Tensor) -> Tensor:
        return answers if self.form == NUMBERS else as_probabilities(answers, self.form).clamp_min(1e-12).log()


COMBINATIONS: dict[str, type[Combination]] = {kind.name: kind for kind in (MeanCombination, Vote, Weighted, Stacking)}


def require_combination(name: str) -> type[Combination]:
    """Return the class of the combination with this name; raise SettingsError if there is none."""
    if name not in COMBINATIONS:
        raise SettingsError(
            f"combine must be one of {', '.join(COMBINATIONS)}", got=repr(name), remedy="choose one of them"
        )
    return COMBINATIONS[name]


def _of_label(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the probability that each member assigns to the correct class, by member and row."""
    index = labels.long().expand(len(probabilities), *labels.shape).unsqueeze(-1)
    return probabilities.gather(-1, index).squeeze(-1).flatten(1)


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), labels.long().flatten())


def _least_squares(answers: Tensor, labels: Tensor) -> Tensor:
    """Return nonnegative weights that sum to 1 and minimize the squared error, found by multiplicative updates."""
    flat, wanted = answers.flatten(1), labels.expand_as(answers[0]).flatten()
    gram, slope = flat @ flat.T / flat.shape[1], flat @ wanted / flat.shape[1]
    weights = torch.full((len(flat),), 1.0 / len(flat), dtype=torch.float64)
    rate = 1.0 / gram.abs().max().clamp_min(1e-12)
    for _ in range(10 * ROUNDS):
        weights = weights * torch.exp(-rate * (gram @ weights - slope))
        weights = weights / weights.sum()
    return weights
