"""Export of Keras models, to be served, loaded and combined in ensembles like any other exported model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from keras import tree
from torch import Tensor

from ..core import TaskError
from ..storage import export as store_export
from .strategy import strategy_of

ROWS, FREE = 4, 8
"""Number of rows, and size of other dynamic dimensions, of the example with which a model is traced."""


def export(model: Any, path: str | Path, example: Any = None) -> Path | None:
    """Write the next version of a Keras model into a folder that `mh.serve` watches and `mh.load` reads.

    Inputs and outputs have the names of Keras' own export: those of the `keras.Input`s, the keys of a dict of outputs,
    and `output_0`, `output_1` for other outputs.

    Args:
        model: The built model.
        path: Folder of the model; each version is a numbered folder in it.
        example: A small batch of inputs, or a dict of inputs by name; by default made from the model's `keras.Input`s.

    Returns:
        The folder of the version. With several replicas, only the first writes it; the others get None.

    >>> import tempfile, keras
    >>> model = keras.Sequential([keras.Input((4,), name="features"), keras.layers.Dense(2)])
    >>> with tempfile.TemporaryDirectory() as root:
    ...     export(model, root).name
    '1'
    """
    strategy = strategy_of(model)
    if strategy is not None and not strategy.hand.is_first:
        return None
    inputs, free = _given(model, example) if example is not None else _declared(model)
    names = list(inputs)

    def predict(network: Any, *values: Tensor) -> Any:
        return _named(network(_packed(model, names, values), training=False))

    return store_export(model, predict, inputs, Path(path), free=free, extra={"model": model.name})


def _given(model: Any, example: Any) -> tuple[dict[str, Tensor], dict[str, set[int]]]:
    """Return the user's example by name, in the order of the model's `keras.Input`s if it has them."""
    names = [_name(tensor) for tensor in getattr(model, "inputs", None) or ()]
    if not isinstance(example, Mapping):
        return {names[0] if len(names) == 1 else "input": torch.as_tensor(example)}, {}
    if names and set(names) != set(example):
        raise TaskError(
            f"the example must have the inputs of the model, {', '.join(names)}",
            got=", ".join(map(str, example)),
            remedy="name them as the model's keras.Input does",
        )
    return {str(name): torch.as_tensor(example[name]) for name in names or example}, {}


def _declared(model: Any) -> tuple[dict[str, Tensor], dict[str, set[int]]]:
    """Return example inputs of a model with `keras.Input`s, and the dynamic dims of each except the rows, by name."""
    declared = getattr(model, "inputs", None)
    if not declared:
        raise TaskError(
            "exporting a model without keras.Input needs an example of its inputs",
            got=f"none for {model.name}",
            remedy="pass example=, such as some rows of the training data",
        )
    inputs, free = {}, {}
    for tensor in declared:
        shape = [ROWS, *(FREE if size is None else size for size in tensor.shape[1:])]
        inputs[_name(tensor)] = torch.zeros(shape, dtype=getattr(torch, tensor.dtype))
        free[_name(tensor)] = {dim for dim, size in enumerate(tensor.shape) if dim and size is None}
    return inputs, free


def _name(tensor: Any) -> str:
    return re.sub(r"\W", "_", tensor.name, flags=re.ASCII)


def _packed(model: Any, names: list[str], values: tuple[Tensor, ...]) -> Any:
    structure = getattr(model, "_inputs_struct", None)
    if structure is not None:
        return tree.pack_sequence_as(structure, list(values))
    return values[0] if len(values) == 1 else dict(zip(names, values, strict=True))


def _named(outputs: Any) -> dict[str, Tensor]:
    """Return outputs by the names that TensorFlow gives them."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return {f"output_{number}": output for number, output in enumerate(tree.flatten(outputs))}
