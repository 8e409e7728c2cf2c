"""The Predictor of a task: its network with the inputs and outputs that the task declares."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core import Predictor, Signature, Task, TaskError, TensorSpec

INPUT = "input"
"""Name of an input whose argument of `forward` has no name."""
MAX_NAME = 64
"""Maximum characters of a name in an exported model."""


def input_name(model: nn.Module) -> str:
    """Return the name of the first argument of a network's `forward`; "input" if it has none.

    >>> input_name(nn.Bilinear(1, 1, 1)), input_name(nn.Sequential())
    ('input1', 'input')
    """
    try:
        first = next(iter(inspect.signature(model.forward).parameters.values()))
    except (TypeError, ValueError, StopIteration):
        return INPUT
    is_named = first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD) and first.name.isascii()
    return first.name if is_named and len(first.name) <= MAX_NAME else INPUT


def inputs_of(task: Task, batch: Any, name: str = INPUT) -> dict[str, Any]:
    """Return the inputs of `predict` from a batch: by name from a dict, else the batch's first elements.

    `name` is that of the only input of a task without `predict`, unless the batch is a dict.
    """
    if task.predict is None:
        if isinstance(batch, Mapping):
            key = next(iter(batch))
            return {str(key): batch[key]}
        return {name: batch[0] if isinstance(batch, (tuple, list)) else batch}
    names = list(inspect.signature(task.predict).parameters)[1:]
    if isinstance(batch, Mapping):
        missing = [name for name in names if name not in batch]
        if missing:
            raise TaskError(
                f"the inputs of predict must be keys of the batch, which has {', '.join(map(str, batch))}",
                got=", ".join(missing),
                remedy="name the parameters of predict after these keys",
            )
        return {name: batch[name] for name in names}
    elements = batch if isinstance(batch, (tuple, list)) else (batch,)
    if len(names) > len(elements):
        raise TaskError(
            f"predict can have at most as many inputs as the batch has elements, {len(elements)}",
            got=f"{len(names)} inputs",
            remedy="use fewer inputs",
        )
    return dict(zip(names, elements, strict=False))


def outputs_of(task: Task, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the task's predictions as its `predict` function returns them."""
    values = list(inputs.values())
    return model(*values) if task.predict is None else task.predict(model, *values)


def answers(task: Task, model: nn.Module, batch: Any) -> Any:
    """Return the task's predictions for a batch."""
    return outputs_of(task, model, inputs_of(task, batch))


def named(outputs: Any) -> dict[str, Tensor]:
    """Return outputs as a dict; a bare tensor is called "output"."""
    if isinstance(outputs, Tensor):
        return {"output": outputs}
    if isinstance(outputs, Mapping) and all(isinstance(value, Tensor) for value in outputs.values()):
        return dict(outputs)
    raise TaskError(
        "predict must return a tensor or a dict of tensors",
        got=type(outputs).__name__,
        remedy="select the tensors to return",
    )


class ModelPredictor(Predictor):
    """A Predictor that runs a trained network in this process."""

    def __init__(self, task: Task, model: nn.Module, batches: Sequence[Any]) -> None:
        self._task, self._model = task, model.eval()
        self._device = next(iter(model.parameters()), torch.empty(0)).device
        name = input_name(model)
        examples = [inputs_of(task, batch, name) for batch in batches]
        with torch.no_grad():
            answers = [named(outputs_of(task, model, example)) for example in examples]
        # The largest example: torch.export would treat a size of 1 as fixed.
        self.example = max(examples, key=lambda example: sum(value.numel() for value in example.values()))
        self.free = {name: _free_dims([example[name] for example in examples]) for name in self.example}
        """Dynamic dimensions other than the batch, in which samples differ, such as the length of a padded text."""
        self.signature = Signature(_specs(examples), _specs(answers))

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            moved = {name: value.to(self._device) for name, value in inputs.items()}
            return named(outputs_of(self._task, self._model, moved))


def _specs(examples: Sequence[Mapping[str, Tensor]]) -> dict[str, TensorSpec]:
    specs = {}
    for name, first in examples[0].items():
        free = {0, *_free_dims([example[name] for example in examples])}
        shape = tuple(None if dim in free else size for dim, size in enumerate(first.shape))
        specs[name] = TensorSpec(str(first.dtype).removeprefix("torch."), shape)
    return specs


def _free_dims(tensors: Sequence[Tensor]) -> set[int]:
    return {dim for dim in range(1, tensors[0].dim()) if len({tensor.shape[dim] for tensor in tensors}) > 1}
