"""Choose the samples on which the whole step and the split step are compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..core import mix
from ..data import Ids, IndexedSource, Order, Source, Window, tensors

NUM_CANDIDATES = 512
"""Rows of arrays that are searched for those in which parts of a batch differ most."""
Plan = list[list[int]]
"""The ids of the samples of each step, in order."""
_SALT = 0x7269616C


def choose_rows(source: Source, batch_size: int, parts: int, seed: int, most: int) -> Plan:
    """Return the rows of two steps, of a full batch and of the smaller last one, from all over the data.

    In the first step the rows with the most repeated or extreme values, such as padding and ignored targets, are last,
    so that they fall into different parts than the rest. The row with the fewest is in both steps: a step in which
    nothing counts has no mean. Of a stream, the first rows are taken.

    >>> from ..data import as_source
    >>> [len(rows) for rows in choose_rows(as_source(torch.arange(41)), 16, parts=2, seed=0, most=64)]
    [16, 9]
    """
    first, second = step_sizes(source, batch_size, parts, most)
    if not isinstance(source, IndexedSource):
        return [list(range(first)), list(range(first, 2 * first))]
    order = Order(source.size, mix(seed, _SALT), 0, shuffle=True)
    wanted = first + second
    candidates = order[: NUM_CANDIDATES if source.max_workers == 0 else wanted]
    ranked = candidates[_ranks(source, seed, candidates)]
    chosen = [*ranked[: first - first // 2], *ranked[len(ranked) - first // 2 :]]
    rest = [ranked[0], *(row for row in order[:wanted] if row not in set(chosen))]
    return [[int(row) for row in rows] for rows in (chosen, (rest * second)[:second])]


def step_sizes(source: Source, batch_size: int, parts: int, most: int) -> tuple[int, int]:
    """Return the sizes of a full batch and of the last one; large ones are reduced and stay uneven over the parts."""
    ragged = 0 if source.drop_last or not source.size else source.size % batch_size
    return _reduced(batch_size, parts, most), _reduced(ragged or batch_size, parts, most)


def windows(source: Source, plan: Plan, seed: int) -> Iterator[Window]:
    """Yield the batches of a plan, not yet read."""
    if isinstance(source, IndexedSource):
        read = source.reader(seed, 0)
        yield from (Window(torch.tensor(rows, dtype=torch.int64).numpy(), read) for rows in plan)
    else:
        stream = source.windows(seed=seed, epoch=0, shuffle=False, start=0, batch_size=len(plan[0]))
        yield from islice(stream, len(plan))


def _reduced(size: int, parts: int, most: int) -> int:
    if size <= max(most, 2 * parts):
        return size
    return max(2 * parts, most // parts * parts) + (1 if size % parts else 0)


def _ranks(source: IndexedSource, seed: int, ids: Ids) -> Any:
    """Return the order of rows by their amount of repeated or extreme values; unchanged if they cannot be read."""
    try:
        batch = source.reader(seed, 0)(ids)
    except Exception:
        # Rows of different shapes may not collate in such numbers; the steps themselves report errors.
        return slice(None)
    score = torch.zeros(len(ids), dtype=torch.float64)
    for leaf in tensors(batch):
        if leaf.ndim and len(leaf) == len(ids) and leaf.numel():
            score += _score(leaf.reshape(len(ids), -1))
    return score.argsort(stable=True).numpy()


def _score(rows: Tensor) -> Tensor:
    if rows.is_complex():
        return torch.zeros(len(rows), dtype=torch.float64)
    if rows.shape[1] == 1:
        return _standard(rows[:, 0])
    low = 0 if rows.is_floating_point() else rows.min()
    return _standard((rows == low).sum(1)) + _standard((rows[:, 1:] == rows[:, :-1]).sum(1))


def _standard(values: Tensor) -> Tensor:
    wide = values.double().nan_to_num()
    spread = wide.std(correction=0)
    return (wide - wide.mean()) / spread if spread > 0 else torch.zeros_like(wide)
