"""Shorten sequences of repeated blocks in a network, so that the cost of a block is measured only once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

KEPT = 3
"""Blocks of a sequence that stay: a first, a last and one in between."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """A sequence of consecutive equal blocks in a container."""

    container: nn.Module
    start: int
    length: int


def rows_of(model: nn.Module) -> list[RepeatedBlocks]:
    """Return the sequences of equal blocks that are long enough to be shortened.

    >>> row, = rows_of(nn.Sequential(nn.Linear(2, 4), *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(9))))
    >>> row.start, row.length
    (1, 9)
    """
    found: list[RepeatedBlocks] = []
    for container in model.modules():
        if type(container) in (nn.ModuleList, nn.Sequential):
            kinds = [_kind(child) for child in container.children()]
            start = 0
            for place in range(1, len(kinds) + 1):
                if place == len(kinds) or kinds[place] != kinds[start]:
                    is_long = place - start > 2 * KEPT - 1 and any(True for _ in list(container)[start].children())  # type: ignore[call-overload]
                    if is_long:
                        found.append(RepeatedBlocks(container, start, place - start))
                    start = place
    inner = {module for row in found for child in row.container.children() for module in child.modules()}
    return [row for row in found if row.container not in inner]


def _kind(block: nn.Module) -> list[Any]:
    """Return a key that is equal for equal blocks: modules, sizes and settings, except indices."""
    return [
        (
            name,
            type(module),
            [(key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in module._parameters.items() if p is not None],
            [(key, v) for key, v in vars(module).items() if isinstance(v, int | float | str) and not _counts(key)],
        )
        for name, module in block.named_modules()
    ]


def _counts(key: str) -> bool:
    return key.endswith(("idx", "index"))


@contextmanager
def shortened(lengths: Mapping[RepeatedBlocks, int]) -> Iterator[None]:
    """Shorten each sequence to this many blocks within the context."""
    before = {row: dict(row.container._modules) for row in lengths}
    try:
        for row, count in lengths.items():
            blocks = list(before[row].values())
            left = [*blocks[: row.start + count], *blocks[row.start + row.length :]]
            row.container._modules.clear()
            row.container._modules.update({str(place): block for place, block in enumerate(left)})
        yield
    finally:
        for row, modules in before.items():
            row.container._modules.clear()
            row.container._modules.update(modules)
