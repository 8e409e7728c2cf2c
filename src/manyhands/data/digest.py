"""Digest of a dataset's length and some samples, by which hosts check that their data is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..core import random_state, restore_random_state, seed_all
from .batch import map_leaves
from .source import IndexedSource, Source, as_ids

NUM_SAMPLES = 16


def data_digest(source: Source) -> str:
    """Return a digest that is equal if length and some samples are; random augmentation draws the same numbers.

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
    """Yield samples from all over the data if they can be read by index; else the first ones of a stream."""
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
