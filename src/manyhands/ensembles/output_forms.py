"""Meaning of a member's outputs, which decides how they are combined: logits, probabilities, or plain numbers."""

from __future__ import annotations

import torch
from torch import Tensor

LOGITS, PROBABILITIES, NUMBERS = "logits", "probabilities", "numbers"
_TINY = 1e-12


def form_of(answers: Tensor, labels: Tensor | None) -> str:
    """Return the form of predictions by member, row and class, judged by their values and labels.

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
    """Return logits as probabilities; anything else unchanged."""
    return answers.softmax(-1) if form == LOGITS else answers


def as_form(probabilities: Tensor, form: str) -> Tensor:
    """Return probabilities in the members' form: for logits their logarithms, whose softmax gives them back."""
    return probabilities.clamp_min(_TINY).log() if form == LOGITS else probabilities
