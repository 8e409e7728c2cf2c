"""Epochs: how long it takes to read all samples once."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any


def seconds_per_sample(batches: Iterable[Any]) -> float:
    """Seconds for one pass over batches whose first part is a tensor, start of workers included."""
    began = perf_counter()
    count = sum(len(batch[0]) for batch in batches)
    return (perf_counter() - began) / count
