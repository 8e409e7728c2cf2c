"""Common torch errors, raised again with the samples that caused them and a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core import DataError

_DTYPES = re.compile(
    r"must have the same dtype|to have the same dtype|expected scalar type|Found dtype|should be the same|same type"
)
_TARGET = re.compile(r"Target (-?\d+) is out of bounds")
_INDEX = re.compile(r"index out of range in self|index (-?\d+) is out of bounds")


def explain_mistake(error: BaseException, data: Any, ids: Any = None, step: int | None = None) -> None:
    """Raise a well-known torch error again with the samples and a remedy; return for other errors."""
    where = "" if step is None else f" of step {step}"
    target = _TARGET.search(str(error))
    if target:
        value = int(target[1])
        raise DataError(
            "a target must be the index of a class, from 0 to the number of outputs minus one",
            got=f"{value} in {_rows_with(data, value, ids)}{where}",
            remedy=f"give the last layer at least {value + 1} outputs, number the classes from 0, or pass "
            f"ignore_index={value} if it marks samples without a class",
        ) from error
    wide = [
        f"{path} of {leaf.dtype}" for path, leaf in _leaves(data) if leaf.dtype in (torch.float64, torch.complex128)
    ]
    if wide and isinstance(error, RuntimeError) and _DTYPES.search(str(error)):
        raise DataError(
            "inputs must have the dtype of the network's parameters, float32 by default",
            got=f"{', '.join(wide)}{where} ({error})",
            remedy="convert the data, x.astype('float32') or x.float(), or train with precision=\"fp64\"",
        ) from error
    index = _INDEX.search(str(error)) if isinstance(error, IndexError) else None
    if index:
        raise DataError(
            "an index into an embedding must be non-negative and below its number of rows",
            got=f"{_ranges(data)}{where} ({error})",
            remedy="give the embedding more rows, or check for ids that mark padding",
        ) from error


def _rows_with(data: Any, value: int, ids: Any) -> str:
    """Return the ids of the samples that contain a value, as text."""
    rows: set[int] = set()
    for _, leaf in _leaves(data):
        if leaf.dim() and not leaf.is_floating_point() and not leaf.is_complex():
            rows |= set((leaf.reshape(len(leaf), -1) == value).any(1).nonzero().flatten().tolist())
    known = [int(ids[row]) for row in sorted(rows) if row < len(ids)] if ids is not None else []
    if not known:
        return "the first samples" if ids is None else "a sample"
    shown = ", ".join(map(str, known[:8])) + (" …" if len(known) > 8 else "")
    return f"sample{'s' * (len(known) != 1)} {shown}"


def _ranges(data: Any) -> str:
    """Return the smallest and largest value of every integer tensor, as text."""
    whole = [(path, leaf) for path, leaf in _leaves(data) if leaf.numel() and leaf.dtype in (torch.int64, torch.int32)]
    return ", ".join(f"{path} from {int(leaf.min())} to {int(leaf.max())}" for path, leaf in whole) or "no such indices"


def _leaves(data: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    if isinstance(data, Tensor):
        yield path, data
    elif isinstance(data, Mapping):
        for key, child in data.items():
            yield from _leaves(child, f"{path}[{key!r}]")
    elif isinstance(data, tuple | list):
        for index, child in enumerate(data):
            yield from _leaves(child, f"{path}[{index}]")
