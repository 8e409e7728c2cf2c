"""The kinds of data that `Task.data` accepts, the functions that make sources of them, and a digest of samples."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from ..core import DataError, Task, random_state, restore_random_state, seed_all
from .batch import map_leaves
from .bucketed import Bucketed, BucketSource
from .files import Files, files_source
from .huggingface import huggingface_source, is_huggingface, is_splits, refuse_splits
from .loader import loader_source
from .map_style import MapSource
from .source import ArrayRows, ArraySource, Collate, IndexedSource, Source, SubsetSource, as_ids, is_arrays
from .stream import StreamSource

NOT_SAMPLES = (dict, str, bytes, type, torch.Tensor, np.ndarray)
"""Types with items that are not collections of samples; arrays with rows are recognized before."""

Kind = tuple[Callable[[Any], bool], Callable[[Any, Collate | None], Source]]
"""A function that returns whether data is of a kind, and the function that makes a source of such data."""


def as_source(data: Any, *, collate: Collate | None = None) -> Source:
    """Return the source that reads data of any kind that `Task.data` accepts; raise DataError for any other object.

    >>> import numpy as np
    >>> as_source((np.zeros((8, 2)), np.zeros(8))).size
    8
    """
    for matches, make in KINDS:
        if matches(data):
            return make(data, collate)
    raise DataError(
        "data must be arrays, a dataset, an iterable, a DataLoader, or a function that returns one of these",
        got=_described(data),
        remedy="pass for example a dataset, which has __getitem__ and __len__, or __iter__",
    )


def source_of(task: Task) -> Source:
    """Return the source of a task's training data."""
    source = as_source(task.data, collate=task.collate)
    if not task.drop_last or source.drop_last:
        return source
    dropping = copy.copy(source)  # a source that the user passed must not change
    dropping.drop_last = True
    return dropping


def _from_loader(loader: DataLoader[Any], collate: Collate | None) -> Source:
    own = None if loader.collate_fn is default_collate else loader.collate_fn
    return loader_source(loader, _from_dataset(loader.dataset, collate or own))


def _from_dataset(dataset: Any, collate: Collate | None) -> Source:
    """Return the source of a DataLoader's dataset, in which a tuple or list contains samples and not arrays."""
    if isinstance(dataset, tuple | list):
        return MapSource(dataset, collate)
    return as_source(dataset, collate=collate)


def _from_arrays(data: Any, collate: Collate | None) -> Source:
    return ArraySource(data) if collate is None else MapSource(ArrayRows(data), collate)


def _from_tensors(data: TensorDataset, collate: Collate | None) -> Source:
    return _from_arrays(data.tensors, collate)


def _from_subset(data: Subset[Any], collate: Collate | None) -> Source:
    inner = as_source(data.dataset, collate=collate)
    return (
        SubsetSource(inner, data.indices) if isinstance(inner, ArraySource | SubsetSource) else MapSource(data, collate)
    )


def _from_bucketed(data: Bucketed, collate: Collate | None) -> Source:
    return BucketSource(as_source(data.data, collate=collate), data)


def _from_iterable(data: Iterable[Any], collate: Collate | None) -> Source:
    if _is_one_shot(data):
        raise DataError(
            "data must be readable more than once",
            got=f"{type(data).__name__}, which can be read only once",
            remedy="pass a function that creates it",
        )
    return StreamSource(lambda: data, type(data).__name__, collate)


def _from_function(function: Callable[[], Any], collate: Collate | None) -> Source:
    made = function()
    if _is_one_shot(made):
        name = getattr(function, "__name__", type(made).__name__)
        return StreamSource(function, name, collate)
    if callable(made) and not _is_mapped(made) and not isinstance(made, Iterable):
        raise DataError("a data function must return data", got=_described(made), remedy="return a dataset from it")
    return as_source(made, collate=collate)


def _is_mapped(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, NOT_SAMPLES)


def _is_iterable(data: Any) -> bool:
    return isinstance(data, Iterable) and not isinstance(data, NOT_SAMPLES)


def _is_one_shot(data: Any) -> bool:
    return isinstance(data, Iterator) and iter(data) is data


def _described(data: Any) -> str:
    if isinstance(data, dict):
        return f"a dict with {', '.join(f'{key}: {type(value).__name__}' for key, value in data.items())}"
    return type(data).__name__


KINDS: list[Kind] = [
    (lambda data: isinstance(data, Files), files_source),
    (lambda data: isinstance(data, Bucketed), _from_bucketed),
    (is_huggingface, huggingface_source),
    (is_splits, refuse_splits),
    (lambda data: isinstance(data, DataLoader), _from_loader),
    (lambda data: type(data) is TensorDataset, _from_tensors),
    (lambda data: type(data) is Subset, _from_subset),
    (is_arrays, _from_arrays),
    (lambda data: isinstance(data, IterableDataset), _from_iterable),
    (_is_mapped, MapSource),
    (_is_iterable, _from_iterable),
    (callable, _from_function),
]
"""The kinds of data, of which the first that matches is used. A new kind is one file and one line here."""


NUM_SAMPLES = 16


def data_digest(source: Source) -> str:
    """Return a digest of the length and of some samples, by which hosts find out whether their data is the same.

    Generators are seeded before a sample is read, so that random augmentation draws the same numbers.

    >>> from .sources import as_source
    >>> data_digest(as_source(torch.arange(5))) == data_digest(as_source(torch.arange(5)))
    True
    """
    known = hashlib.sha256(str(source.size).encode())
    cpu = torch.device("cpu")
    before = random_state(cpu)
    try:
        for sample in _some(source):
            map_leaves(lambda leaf: known.update(_bytes(leaf)), sample)
    finally:
        restore_random_state(before, cpu)
    return f"{source.size if source.size is not None else 'a stream'} samples, {known.hexdigest()[:12]}"


def _some(source: Source) -> Iterator[Any]:
    """Yield samples that are spread evenly over the data, or the first samples of a stream."""
    if isinstance(source, IndexedSource):
        for number in np.unique(np.linspace(0, source.size - 1, NUM_SAMPLES).astype(np.int64)):
            seed_all(0)
            yield source.fetch(as_ids([number]))
        return
    seed_all(0)
    window = next(source.windows(seed=0, epoch=0, shuffle=False, start=0, batch_size=source.batch_size or NUM_SAMPLES))
    yield window.fetch(window.ids)


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        plain = leaf.detach().cpu().contiguous()
        return str((plain.dtype, tuple(plain.shape))).encode() + plain.view(-1).view(torch.uint8).numpy().tobytes()
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode()
