"""The Predictor of a task: its network behind the inputs and outputs that the task declares."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core import Predictor, Signature, Task, TaskError, TensorSpec


def inputs_of(task: Task, batch: Any) -> dict[str, Any]:
    """What `predict` takes from a batch: by name from a dict, else the batch's first elements."""
    if task.predict is None:
        if isinstance(batch, Mapping):
            name = next(iter(batch))
            return {str(name): batch[name]}
        return {"input": batch[0] if isinstance(batch, (tuple, list)) else batch}
    names = list(inspect.signature(task.predict).parameters)[1:]
    if isinstance(batch, Mapping):
        missing = [name for name in names if name not in batch]
        if missing:
            raise TaskError(
                f"predict's inputs are taken from the batch, which has {', '.join(map(str, batch))}",
                got=", ".join(missing),
                remedy="name predict's parameters after the batch's keys",
            )
        return {name: batch[name] for name in names}
    elements = batch if isinstance(batch, (tuple, list)) else (batch,)
    if len(names) > len(elements):
        raise TaskError(
            f"predict takes its inputs from the batch's {len(elements)} elements",
            got=f"{len(names)} inputs",
            remedy="take fewer",
        )
    return dict(zip(names, elements, strict=False))


def outputs_of(task: Task, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """What the task predicts, as its own function returns it."""
    values = list(inputs.values())
    return model(*values) if task.predict is None else task.predict(model, *values)


def named(outputs: Any) -> dict[str, Tensor]:
    """Outputs as a dict; a bare tensor is called "output"."""
    if isinstance(outputs, Tensor):
        return {"output": outputs}
    if isinstance(outputs, Mapping) and all(isinstance(value, Tensor) for value in outputs.values()):
        return dict(outputs)
    raise TaskError(
        "predict returns a tensor or a dict of tensors",
        got=type(outputs).__name__,
        remedy="pick the tensors to answer with",
    )


class ModelPredictor(Predictor):
    """A trained network in this process."""

    def __init__(self, task: Task, model: nn.Module, example: Any) -> None:
        self._task, self._model = task, model.eval()
        self._device = next(iter(model.parameters()), torch.empty(0)).device
        inputs = {name: value.to(self._device) for name, value in inputs_of(task, example).items()}
        self.example = inputs
        with torch.no_grad():
            outputs = named(outputs_of(task, model, inputs))
        self.signature = Signature(
            {name: _rows_free(value) for name, value in inputs.items()},
            {name: _rows_free(value) for name, value in outputs.items()},
        )

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            moved = {name: value.to(self._device) for name, value in inputs.items()}
            return named(outputs_of(self._task, self._model, moved))


def _rows_free(tensor: Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), (None, *tensor.shape[1:]))
