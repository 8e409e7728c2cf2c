"""Collate samples into a batch as PyTorch does, except that fields of dictionaries may differ in length.

`Fields` is a batch of dictionaries, with the length of each sample before padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate


class Fields(dict[str, Any]):
    """A batch of samples that are dictionaries: one tensor for every field, so that `model(**batch)` works.

    If samples differ in length, a field is padded with zeros at the end. The length of each sample is available, also
    if nothing was padded:

    >>> batch = Fields({"tokens": torch.tensor([[5, 6, 7], [8, 0, 0]])}, padded={"tokens": torch.tensor([3, 1])})
    >>> batch.lengths("tokens")
    tensor([3, 1])
    >>> batch.mask("tokens")
    tensor([[ True,  True,  True],
            [ True, False, False]])
    """

    def __init__(self, fields: dict[str, Any], padded: dict[str, Tensor] | None = None) -> None:
        super().__init__(fields)
        self.padded = padded or {}
        """The length of every sample, for each field that was padded."""

    def lengths(self, field: str) -> Tensor:
        """Return the length of every sample in a field, on the batch's device."""
        values: Tensor = self[field]
        found = self.padded.get(field)
        return values.new_full((len(values),), values.shape[1], dtype=torch.int64) if found is None else found

    def mask(self, field: str) -> Tensor:
        """Return a mask of shape (samples, longest) that is True for a sample's values and False for padding."""
        places = torch.arange(self[field].shape[1], device=self[field].device)
        return places < self.lengths(field).unsqueeze(1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Fields, (dict(self), self.padded)


def _flat(batch: Fields) -> tuple[list[Any], tuple[tuple[str, ...], tuple[str, ...]]]:
    return [*batch.values(), *batch.padded.values()], (tuple(batch), tuple(batch.padded))


def _nested(children: Iterable[Any], keys: tuple[tuple[str, ...], tuple[str, ...]]) -> Fields:
    names, padded = keys
    values = list(children)
    return Fields(
        dict(zip(names, values[: len(names)], strict=True)), dict(zip(padded, values[len(names) :], strict=True))
    )


# torch otherwise treats a subclass of dict as an opaque value, without the tensors in it.
pytree.register_pytree_node(Fields, _flat, _nested, serialized_type_name="manyhands.Fields")


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples into one batch.

    Dictionaries become `Fields`: arrays, tensors and lists of numbers are stacked, and padded with zeros if they differ
    in their first dim. Anything else is collated by `torch.utils.data.default_collate`.

    >>> batch = collate([{"tokens": [5, 6, 7], "label": 1}, {"tokens": [8], "label": 0}])
    >>> batch
    {'tokens': tensor([[5, 6, 7],
            [8, 0, 0]]), 'label': tensor([1, 0])}
    >>> batch.lengths("tokens")
    tensor([3, 1])
    """
    first = samples[0]
    if type(first) is tuple:
        return [collate(column) for column in zip(*samples, strict=True)]
    if not isinstance(first, Mapping):
        return _stacked(list(samples))
    keys = first.keys()
    strange = next((sample for sample in samples if sample.keys() != keys), None)
    if strange is not None:
        raise ValueError(f"all samples must have the fields {', '.join(keys)}, but one has {', '.join(strange)}")
    fields, padded = {}, {}
    for key in keys:
        fields[key], lengths = _field(key, [sample[key] for sample in samples])
        if lengths is not None:
            padded[key] = lengths
    return Fields(fields, padded)


def _field(key: str, values: list[Any]) -> tuple[Any, Tensor | None]:
    """Return one field of all samples as a batch, and the lengths of its values, or None if it was not padded."""
    first = values[0]
    if isinstance(first, bytes):
        return values, None
    if not _is_sequence(first):
        return collate(values), None
    arrays = [value if isinstance(value, Tensor | np.ndarray) else torch.tensor(value) for value in values]
    if len({array.shape for array in arrays}) == 1:
        return _stacked(arrays), None
    return _padded(key, [torch.as_tensor(array) for array in arrays])


def _is_sequence(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    return isinstance(value, list) and all(isinstance(item, Number) for item in value)


def _padded(key: str, arrays: list[Tensor]) -> tuple[Tensor, Tensor]:
    rests = {tuple(array.shape[1:]) for array in arrays}
    if len(rests) > 1 or any(array.ndim == 0 for array in arrays):
        shapes = sorted({tuple(array.shape) for array in arrays})
        raise ValueError(
            f"samples may differ only in their first dimension, but the field {key!r} has the shapes {shapes}"
        )
    lengths = torch.tensor([len(array) for array in arrays])
    # An empty list does not show the dtype of its numbers.
    kind = next((array.dtype for array in arrays if len(array)), arrays[0].dtype)
    batch = torch.zeros(len(arrays), int(lengths.max()), *rests.pop(), dtype=kind)
    for row, array in zip(batch, arrays, strict=True):
        row[: len(array)] = array
    return batch, lengths


def _stacked(values: list[Any]) -> Any:
    """Stack values into one tensor as PyTorch does, but faster for numeric arrays."""
    first = values[0]
    if type(first) is Tensor:
        return torch.stack(values)
    if isinstance(first, np.generic) and first.dtype.kind in "biuf":
        return torch.from_numpy(np.array(values))
    if type(first) is not np.ndarray or first.dtype.kind not in "biuf" or any(v.shape != first.shape for v in values):
        return default_collate(values)
    return torch.from_numpy(np.stack(values))
