"""Inference in bfloat16, if the operator selected it: inputs and outputs keep their types."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import Predictor, SettingsError

PRECISIONS = ("fp32", "bf16")


def in_precision(predictor: Predictor, precision: str) -> Predictor:
    """Return the predictor itself, or one that uses bfloat16 where autocast considers it safe."""
    return Bfloat16(predictor) if precision == "bf16" else predictor


def require_precision(precision: str) -> None:
    """Raise SettingsError for an unknown precision."""
    if precision not in PRECISIONS:
        raise SettingsError(
            f"precision is {' or '.join(PRECISIONS)}", got=repr(precision), remedy='pass precision="bf16"'
        )


class Bfloat16(Predictor):
    """Predictor with matrix products and convolutions in bfloat16, by torch's autocast rules."""

    def __init__(self, inner: Predictor) -> None:
        self.inner = inner
        self.signature = inner.signature

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(inputs.values())).device.type
        with torch.autocast(device, torch.bfloat16):
            answers = self.inner.run(inputs)
        outputs = self.signature.outputs
        return {name: answer.to(getattr(torch, outputs[name].dtype)) for name, answer in answers.items()}
