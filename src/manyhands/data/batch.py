"""Batches: nested tensors, their rows and slices, and the position of the feed after a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..core import DataError, random_state, restore_random_state
from .collate import Fields
from .order import Ids


@dataclass(frozen=True)
class Cursor:
    """Position of a feed: an epoch, and the number of its samples that all replicas together have consumed."""

    epoch: int = 0
    position: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the cursor as JSON-serializable data."""
        return {"epoch": self.epoch, "position": self.position}

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> Cursor:
        """Create a cursor from the result of `to_dict`."""
        return cls(int(values["epoch"]), int(values["position"]))


@dataclass(frozen=True)
class Batch:
    """One replica's part of a global batch.

    A replica that has no samples in a micro-batch must still take part in the collectives. It gets a padding row: a
    sample of another replica that counts as size 0 and is not in `ids`.
    """

    data: Any
    """Nested tensors on the device."""
    sizes: tuple[int, ...]
    """Number of samples of this replica in each micro-batch."""
    global_sizes: tuple[int, ...]
    """Number of samples of all replicas in each micro-batch."""
    ids: Ids
    """Ids of this replica's samples, in order; for a stream, their positions."""
    cursor: Cursor
    """The feed's position after this batch."""

    @property
    def num_samples(self) -> int:
        """Number of samples of this replica."""
        return sum(self.sizes)

    @property
    def global_samples(self) -> int:
        """Number of samples of all replicas."""
        return sum(self.global_sizes)

    def micros(self) -> Iterator[tuple[Any, int, int]]:
        """Yield the micro-batches: (slice of the data, samples of this replica, samples of all replicas)."""
        if len(self.sizes) == 1:
            yield self.data, self.sizes[0], self.global_sizes[0]
            return
        yield from zip(split(self.data, self.sizes), self.sizes, self.global_sizes, strict=True)


class SampleList(list[Any]):
    """A list in a batch that has one item per sample: splitting the batch splits the list, whatever its items are."""


class SampleTuple(tuple[Any, ...]):
    """A tuple in a batch that has one item per sample: splitting the batch splits the tuple, whatever its items are."""


# torch.export and functorch otherwise treat subclasses of lists and tuples as opaque values.
pytree.register_pytree_node(
    SampleList,
    lambda data: (list(data), None),
    lambda children, _: SampleList(children),
    serialized_type_name="manyhands.SampleList",
)
pytree.register_pytree_node(
    SampleTuple,
    lambda data: (list(data), None),
    lambda children, _: SampleTuple(children),
    serialized_type_name="manyhands.SampleTuple",
)


class SampleMarker:
    """Call a custom collate function, and mark the lists and tuples in its batch that have one item per sample.

    They are recognized by their number of items, unless each item has as many rows as there are samples: two images
    with two boxes each look like two columns of two samples. Then a batch with one more sample is collated to decide.

    >>> marked = SampleMarker(lambda samples: (torch.stack(samples), list(samples)))([torch.zeros(2), torch.ones(2)])
    >>> [type(column).__name__ for column in marked]
    ['Tensor', 'SampleList']
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._has_one_per_sample: dict[tuple[Any, ...], bool] = {}

    def __call__(self, samples: list[Any]) -> Any:
        batch = self._collate(samples)
        return self._marked(batch, samples, ()) if len(samples) > 1 else batch

    def _marked(self, data: Any, samples: list[Any], path: tuple[Any, ...]) -> Any:
        if type(data) in (list, tuple):
            if len(data) == len(samples) and self._is_per_sample(data, samples, path):
                return SampleList(data) if isinstance(data, list) else SampleTuple(data)
            return type(data)([self._marked(child, samples, (*path, index)) for index, child in enumerate(data)])
        if type(data) is dict:
            return {key: self._marked(child, samples, (*path, key)) for key, child in data.items()}
        return data

    def _is_per_sample(self, data: Any, samples: list[Any], path: tuple[Any, ...]) -> bool:
        if next(tensors(data), None) is None:
            return False
        if not _children_split(data, len(samples)):
            return True
        if path not in self._has_one_per_sample:
            self._has_one_per_sample[path] = self._grows(samples, path)
        return self._has_one_per_sample[path]

    def _grows(self, samples: list[Any], path: tuple[Any, ...]) -> bool:
        """Return whether the list at `path` of the collated batch has one more item if there is one more sample."""
        states = random_state(torch.device("cpu"))
        try:
            found = self._collate([*samples, samples[0]])
            for key in path:
                found = found[key]
            return len(found) == len(samples) + 1
        except Exception:
            return False
        finally:
            restore_random_state(states, torch.device("cpu"))


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Return nested data with `function` applied to everything that is not a container.

    Containers are tuples, lists, mappings, and dataclasses without a `to` method.
    """
    if isinstance(data, tuple | list | Mapping) or (_is_dataclass(data) and not hasattr(data, "to")):
        return _map_children(lambda child: map_leaves(function, child), data)
    return function(data)


def _map_children(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply `function` to the items of a container; return anything else unchanged."""
    if type(data) is dict:
        return {key: function(child) for key, child in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(function, data))
    if isinstance(data, tuple | list):
        return type(data)([function(child) for child in data])
    if isinstance(data, Fields):
        changed_fields = {key: function(child) for key, child in data.items()}
        return Fields(changed_fields, {key: function(lengths) for key, lengths in data.padded.items()})
    if isinstance(data, Mapping):
        # A copy keeps attributes that a mapping class has in addition to its items.
        changed: Any = copy.copy(data)
        for key, child in data.items():
            changed[key] = function(child)
        return changed
    if _is_dataclass(data):
        changed = copy.copy(data)
        for field in fields(data):
            # Frozen dataclasses do not allow plain assignments.
            object.__setattr__(changed, field.name, function(getattr(data, field.name)))
        return changed
    return data


def _children(data: Any) -> Iterable[Any]:
    """Return the items of a container; an empty tuple for anything else."""
    if isinstance(data, Mapping):
        return data.values()
    if isinstance(data, tuple | list):
        return data
    return [getattr(data, field.name) for field in fields(data)] if _is_dataclass(data) else ()


def _is_dataclass(data: Any) -> bool:
    return is_dataclass(data) and not isinstance(data, type)


def tensors(data: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nested batch."""
    if isinstance(data, torch.Tensor):
        yield data
    else:
        for child in _children(data):
            yield from tensors(child)
        if isinstance(data, Fields):
            yield from data.padded.values()


def first_dim(data: Any) -> int:
    """Return the number of rows of a nested batch; raise DataError if it has no tensor with rows.

    >>> first_dim({"x": torch.zeros(4, 2)})
    4
    """
    rows = _num_rows(data)
    if rows is not None:
        return rows
    raise DataError(
        "a batch must contain a tensor whose first dimension is its samples",
        got=_outline(data),
        remedy="return such tensors from collate",
    )


def _num_rows(data: Any) -> int | None:
    if isinstance(data, torch.Tensor):
        return int(data.shape[0]) if data.ndim else None
    if isinstance(data, SampleList | SampleTuple):
        return len(data)
    return next((rows for rows in map(_num_rows, _children(data)) if rows is not None), None)


def to_device(data: Any, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None) -> Any:
    """Move a nested batch to a device; `dtype` applies to floating-point tensors only.

    >>> to_device([torch.zeros(1), torch.tensor([0])], torch.device("cpu"), dtype=torch.float64)
    [tensor([0.], dtype=torch.float64), tensor([0])]
    """

    def move(leaf: Any) -> Any:
        tensor = _as_tensor(leaf)
        if not isinstance(tensor, torch.Tensor):
            return tensor.to(device) if hasattr(tensor, "to") else tensor
        wanted = dtype if dtype is not None and tensor.is_floating_point() else None
        if dtype is torch.float64 and tensor.is_complex():
            wanted = torch.complex128
        if tensor.device == device and wanted is None:
            return tensor
        return tensor.to(device, wanted, non_blocking=non_blocking)

    return map_leaves(move, data)


def _as_tensor(leaf: Any) -> Any:
    """Convert a numeric numpy array to a tensor; return anything else unchanged."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    return leaf


def copied(data: Any) -> Any:
    """Return a nested batch in new containers with new tensors, for a trial that may change or empty them.

    >>> batch = {"x": torch.zeros(2)}
    >>> copied(batch).pop("x").add_(1), batch
    (tensor([1., 1.]), {'x': tensor([0., 0.])})
    """
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, data)


def split(data: Any, sizes: Sequence[int]) -> list[Any]:
    """Return contiguous slices of a nested batch along dim 0, as views; for size 0 the first row, as a padding row.

    >>> split((torch.arange(3), ["a", "b", "c"]), [1, 2])
    [(tensor([0]), ['a']), (tensor([1, 2]), ['b', 'c'])]
    """
    rows = max(1, sum(sizes))
    parts, start = [], 0
    for size in sizes:
        first, stop = (start, start + size) if size else (0, 1)
        parts.append(_part(data, first, stop, rows))
        start += size
    return parts


def _part(data: Any, start: int, stop: int, rows: int) -> Any:
    if not _splits(data, rows):
        raise _unsplittable(data, rows)
    if isinstance(data, torch.Tensor):
        return data[start:stop]
    if isinstance(data, SampleList | SampleTuple):
        return type(data)(data[start:stop])
    if _is_sequence(data) and not _children_split(data, rows):
        return data[start:stop] if len(data) == rows else data
    return _map_children(lambda child: _part(child, start, stop, rows), data)


def _splits(data: Any, rows: int) -> bool:
    """Return whether data can be split into rows: along its tensors, or as a sequence with one item per row."""
    if isinstance(data, torch.Tensor):
        return _has_rows(data, rows)
    if isinstance(data, SampleList | SampleTuple):
        return len(data) == rows
    if _is_sequence(data):
        return _children_split(data, rows) or len(data) == rows or next(tensors(data), None) is None
    if isinstance(data, Mapping | tuple) or _is_dataclass(data):
        return all(_splits(child, rows) for child in _children(data))
    return not hasattr(data, "to")


def _children_split(data: Sequence[Any], rows: int) -> bool:
    nested = [
        child for child in data if isinstance(child, torch.Tensor | Mapping | tuple | list) or _is_dataclass(child)
    ]
    return all(_splits(child, rows) for child in nested) and any(_has_samples(child, rows) for child in nested)


def _has_samples(data: Any, rows: int) -> bool:
    """Return whether data contains tensors or one item per row, unlike a single sample such as a tree of words."""
    if isinstance(data, tuple | list) and len(data) == rows:
        return True
    return isinstance(data, torch.Tensor) or any(_has_samples(child, rows) for child in _children(data))


def _is_sequence(data: Any) -> bool:
    return isinstance(data, tuple | list) and not hasattr(data, "_fields")


def _has_rows(tensor: torch.Tensor, rows: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == rows


def _unsplittable(data: Any, rows: int) -> DataError:
    return DataError(
        f"to be split into micro-batches, a batch of {rows} samples must have them along dim 0 of every tensor",
        got=_outline(next((tensor for tensor in tensors(data) if not _has_rows(tensor, rows)), data)),
        remedy="use accumulate=1, or a collate that keeps samples along dim 0",
    )


def _outline(data: Any) -> str:
    return f"a tensor of shape {tuple(data.shape)}" if isinstance(data, torch.Tensor) else type(data).__name__
