"""Members of an ensemble: trained networks with the same inputs and outputs, from runs or exported models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..core import Signature, TaskError
from ..storage import Archive
from ..training import Run


@dataclass(frozen=True)
class Member:
    """A trained network as a member of an ensemble."""

    name: str
    model: nn.Module
    predict: Callable[..., Any]
    """Function of the model and its inputs that returns the predictions."""
    signature: Signature
    example: dict[str, Tensor]
    """A batch of inputs by name; empty for an exported model."""
    free: dict[str, set[int]]
    """By input, the dimensions that may have any size in an exported model."""

    def answer(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name for inputs that have been checked against the signature."""
        return named(self.predict(self.model, *(inputs[name] for name in self.signature.inputs)))


def member_of(source: Any) -> Member:
    """Return the member for a run or an exported model; raise TaskError for anything else."""
    if isinstance(source, Run):
        predictor = source.predictor()
        task = source.require_task()
        predict = task.predict or _plainly
        example = dict(predictor.example)
        return Member(source.name, source.model(), predict, predictor.signature, example, predictor.free)
    if isinstance(source, Archive):
        outputs = list(source.signature.outputs)

        def answer(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
            return dict(zip(outputs, model(*inputs), strict=True))

        return Member(f"version {source.version}", source.module, answer, source.signature, {}, {})
    raise TaskError(
        "members of an ensemble must be runs or exported models",
        got=type(source).__name__,
        remedy="pass runs, mh.load(path), or a study",
    )


def renamed(member: Member, first: Signature) -> Member:
    """Return a member with one input under the name that the input of the first member has.

    The names are those of arguments of `forward`, which may differ although the networks take the same rows.
    """
    own = member.signature.inputs
    if len(own) != 1 or len(first.inputs) != 1 or set(own) == set(first.inputs):
        return member
    (spec,), (name,) = own.values(), first.inputs
    return dataclasses.replace(
        member,
        signature=Signature({name: spec}, member.signature.outputs),
        example=dict(zip((name,), member.example.values(), strict=False)),
        free=dict(zip((name,), member.free.values(), strict=False)),
    )


def require_alike(names: Sequence[str], signatures: Sequence[Signature]) -> None:
    """Raise TaskError unless all members have the same inputs and outputs; `names` are for the error."""
    first = signatures[0]
    for name, other in zip(names[1:], signatures[1:], strict=True):
        for side in ("inputs", "outputs"):
            first_side, other_side = getattr(first, side), getattr(other, side)
            if {key: (spec.dtype, spec.shape[1:]) for key, spec in first_side.items()} != {
                key: (spec.dtype, spec.shape[1:]) for key, spec in other_side.items()
            }:
                shown = [
                    ", ".join(f"{key}: {spec}" for key, spec in specs.items()) for specs in (first_side, other_side)
                ]
                raise TaskError(
                    f"members of an ensemble must have the same {side}: {names[0]} has {shown[0]}",
                    got=f"{shown[1]} of {name}",
                    remedy="omit this member, or train it with the same inputs and outputs",
                )


def named(outputs: Any) -> dict[str, Tensor]:
    """Return a network's outputs as a dict by name; a single tensor gets the name "output"."""
    return {"output": outputs} if isinstance(outputs, Tensor) else dict(outputs)


def _plainly(model: nn.Module, *inputs: Tensor) -> Any:
    return model(*inputs)
