"""PowerSGD: approximates every gradient matrix by a low-rank product, with one power iteration per step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..distributed import Pending
from .policy import Policy, PolicyCollectives, require
from .policy_memory import PolicyMemory, key_of

NEGLIGIBLE = 1e-5
"""Relative norm of a row, after the earlier rows were projected out, below which it counts as linearly dependent."""


@dataclass(frozen=True)
class PowerSGD(Policy):
    """Sends low-rank factors of gradient matrices.

    Gradients that are not matrices, and matrices that would not become smaller, are summed exactly.

    >>> print(PowerSGD(rank=4))
    powersgd(4)
    """

    name = "powersgd"
    needs_matrices = True
    rank: int = 4
    warmup: int = field(default=10, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_count = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        require(is_count and self.rank >= 1, "rank must be a whole number of at least 1", self.rank)

    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        matrices, rest = self._parts(gradient, memory)
        # Factors are stored as a few long rows: products with few columns are several times slower on a CPU.
        fresh = [_fresh(m.shape[1], self.rank, m.dtype, m.device) for m in matrices.values()]
        right = orthonormal([self._start(name, m, memory) for name, m in matrices.items()], fresh)
        left = [q @ matrix.T for matrix, q in zip(matrices.values(), right, strict=True)]
        left, rest_sums, pending = _together(wire, left, rest)
        yield pending
        left = orthonormal(left)
        own = [p @ matrix for matrix, p in zip(matrices.values(), left, strict=True)]
        right, _, pending = _together(wire, own, [])
        self._keep(matrices, left, own, memory)
        yield pending
        for matrix, p, q in zip(matrices.values(), left, right, strict=True):
            torch.mm(p.T, q, out=matrix)
        for part, sums in zip(rest, rest_sums, strict=True):
            part.copy_(sums)
        memory.shared |= {key_of("q", name): q for name, q in zip(matrices, right, strict=True)}

    def _parts(self, gradient: Tensor, memory: PolicyMemory) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Split a flat gradient into matrices to factorize, by parameter, and parts whose factors are not smaller.

        All results are views of the gradient.
        """
        matrices, rest = {}, []
        for (name, shape), part in zip(memory.shapes.items(), gradient.split(memory.sizes), strict=True):
            rows = shape[0] if len(shape) > 1 else 1
            columns = part.numel() // max(1, rows)
            if (rows + columns) * self.rank < rows * columns:
                matrices[name] = part.view(rows, columns)
            else:
                rest.append(part)
        return matrices, rest

    def _start(self, name: str, matrix: Tensor, memory: PolicyMemory) -> Tensor:
        """Return the start of a parameter's power iteration: the factor of the last step, or zeros in the first."""
        held = memory.shared.get(key_of("q", name))
        wanted = (self.rank, matrix.shape[1])
        return held if held is not None and held.shape == wanted else matrix.new_zeros(wanted)

    def _keep(self, matrices: dict[str, Tensor], left: list[Tensor], own: list[Tensor], memory: PolicyMemory) -> None:
        """Store in the error feedback how far this replica's factors are from its gradient matrices."""
        kept, _ = self._parts(memory.feedback, memory)
        for name, p, q in zip(matrices, left, own, strict=True):
            torch.addmm(matrices[name], p.T, q, alpha=-1, out=kept[name])


@functools.lru_cache(maxsize=64)
def _fresh(columns: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return initial directions for matrices without a factor of an earlier step.

    They are pseudo-random, and the same on all replicas.
    """
    places = torch.arange(1, columns * rank + 1, device=device, dtype=torch.float64)
    # Sines of squares, because sines of evenly spaced numbers span only two directions.
    return places.square_().mul_(12.9898).sin_().to(dtype).view(rank, columns)


def _together(
    wire: PolicyCollectives, matrices: list[Tensor], rest: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], Pending]:
    """Start to sum several tensors in one all-reduce.

    Return the sums of `matrices`, the sums of `rest`, both valid once the collective has completed, and the collective.
    """
    parts = [*matrices, *rest]
    if not parts:
        return [], [], Pending()
    flat = torch.cat([part.reshape(-1) for part in parts])
    views = [view.view_as(part) for view, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]
    return views[: len(matrices)], views[len(matrices) :], wire.all_reduce(flat)


def orthonormal(matrices: Sequence[Tensor], instead: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return matrices with orthonormal rows that span the same space as those of each matrix, by Gram-Schmidt.

    A row that depends linearly on earlier rows becomes 0, or, if `instead` is given, the orthonormalized row of the
    matrix at the same place in `instead`. Matrices of one shape are processed in one batch.

    >>> orthonormal([torch.tensor([[3.0, 4.0], [3.0, 4.0]])])
    [tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])]
    """
    found: list[Tensor] = list(matrices)
    shapes = {matrix.shape: None for matrix in matrices}
    for shape in shapes:
        which = [index for index, matrix in enumerate(matrices) if matrix.shape == shape]
        stacked = torch.stack([matrices[index] for index in which])
        fresh = None if instead is None else torch.stack([instead[index] for index in which])
        for index, matrix in zip(which, _gram_schmidt(stacked, fresh).unbind(0), strict=True):
            found[index] = matrix
    return found


def _gram_schmidt(stacked: Tensor, fresh: Tensor | None) -> Tensor:
    done: list[Tensor] = []
    for number in range(stacked.shape[-2]):
        row = _unit_against(stacked[..., number, :], done)
        if fresh is not None:
            is_empty = row.abs().amax(-1, keepdim=True) == 0
            row = torch.where(is_empty, _unit_against(fresh[..., number, :], done), row)
        done.append(row)
    return torch.stack(done, -2)


def _unit_against(row: Tensor, done: list[Tensor]) -> Tensor:
    """Return a row without its components along the rows in `done`, scaled to length 1, or 0 if nothing remains."""
    # Divide by the largest number first: squares may overflow or underflow where the numbers do not.
    largest = row.abs().amax(-1, keepdim=True)
    row = torch.where(largest > 0, row / largest, torch.zeros_like(row))
    before = row.norm(dim=-1, keepdim=True)
    # Project twice, because the first pass leaves rounding errors that matter if the remainder is small.
    for _ in range(2):
        for other in done:
            row = row - (row * other).sum(-1, keepdim=True) * other
    after = row.norm(dim=-1, keepdim=True)
    return torch.where(after > NEGLIGIBLE * before, row / after, torch.zeros_like(row))
