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
        packed = values[0] if len(values) == 1 else _packed(model, names, values)
        return _named(model, network(packed, training=False))

    return store_export(model, predict, inputs, Path(path), free=free, extra={"model": model.name})


def _given(model: Any, example: Any) -> tuple[dict[str, Tensor], dict[str, set[int]]]:
    named = example if isinstance(example, Mapping) else {"input": example}
    return {str(name): torch.as_tensor(value) for name, value in named.items()}, {}


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
        name = "input" if len(declared) == 1 else re.sub(r"\W", "_", tensor.name)
        shape = [ROWS, *(FREE if size is None else size for size in tensor.shape[1:])]
        dtype = getattr(torch, tensor.dtype)
        inputs[name] = torch.zeros(shape, dtype=dtype)
        free[name] = {dim for dim, size in enumerate(tensor.shape) if dim and size is None}
    return inputs, free


def _packed(model: Any, names: list[str], values: tuple[Tensor, ...]) -> Any:
    structure = getattr(model, "_inputs_struct", None)
    if structure is None:
        return dict(zip(names, values, strict=True))
    return tree.pack_sequence_as(structure, list(values))


def _named(model: Any, outputs: Any) -> Any:
    """Return a model's outputs as one tensor, or as a dict of tensors by output name."""
    if isinstance(outputs, (Tensor, Mapping)):
        return outputs
    names = getattr(model, "output_names", None) or [f"output_{number}" for number in range(len(outputs))]
    return dict(zip(names, outputs, strict=True))
