"""Step comparison: which tensors of two records of steps differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .trial_steps import Record, StepRecord, Tolerance


@dataclass(frozen=True)
class Difference:
    """The difference of a tensor between two records."""

    step: int
    what: str
    error: float
    limit: float
    has_nan: bool = False
    """Whether both are NaN in the same places."""

    @property
    def is_real(self) -> bool:
        """Whether the difference exceeds the tolerance."""
        return not self.error <= self.limit


def compare(whole: Record, parts: Record) -> Iterator[Difference]:
    """Compare two records by step: gradients, buffers, losses, and weights after the update."""
    tolerance = whole.tolerance
    before = whole.weights
    earlier: dict[str, Tensor] = {}
    unsettled: dict[str, Tensor] = {}
    for number, (ours, theirs) in enumerate(zip(whole.steps, parts.steps, strict=True)):
        scale = _scale(ours, tolerance)
        for name in ours.weights if parts.has_gradients else ():
            a, b = _pair(ours.gradients, theirs.gradients, name)
            error, has_nan = _error(a, b, tolerance.floor / tolerance.gradient * scale)
            yield Difference(number, f"the gradient of {name}", error, tolerance.gradient, has_nan)
        for name in dict.fromkeys((*ours.buffers, *theirs.buffers)):
            a, b = ours.buffers.get(name), theirs.buffers.get(name)
            if name in whole.unsaved:
                a, b = _common_part(a, b)
            error, has_nan = _error(a, b, 1e-3)
            yield Difference(number, f"the buffer {name}", error, tolerance.gradient, has_nan)
        for name, value in ours.losses.items():
            error, has_nan = _error(torch.tensor(value), torch.tensor(theirs.losses.get(name, float("nan"))), 1e-3)
            yield Difference(number, f"the value of {name}", error, tolerance.gradient, has_nan)
        moved = _largest({name: ours.weights[name] - before[name] for name in ours.weights})
        for name, weight in ours.weights.items():
            noise = unsettled[name] = _is_rounding(*_pair(ours.gradients, theirs.gradients, name), scale, tolerance)
            if number:
                noise = unsettled[name] = noise.maximum(earlier[name])
            update = _largest({name: weight - before[name]}) + 1e-2 * moved
            size = max(update, 1e-9 * _largest({name: weight}))
            error, has_nan = _error(weight, theirs.weights.get(name), size, fixed=True, without=noise)
            yield Difference(number, f"the update of {name}", error, tolerance.update, has_nan)
        earlier, unsettled = unsettled, {}
        before = ours.weights


def _scale(step: StepRecord, tolerance: Tolerance) -> float:
    """Return the largest gradient, or a typical size of gradients where all of them are only rounding."""
    largest = _largest(step.gradients)
    typical = max(map(abs, step.losses.values()), default=0.0) / max(_largest(step.weights), 1e-300)
    return typical if largest < tolerance.floor * typical else largest


def _common_part(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the values that two sizes of a cache have in common."""
    if a is None or b is None or a.dim() != b.dim():
        return a, b
    common = tuple(slice(0, min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
    return a[common], b[common]


def _pair(ours: dict[str, Tensor], theirs: dict[str, Tensor], name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return both gradients of a parameter; a missing one is zeros, as its update is compared in any case."""
    a, b = ours.get(name), theirs.get(name)
    zeros = None if a is None and b is None else torch.zeros_like(a if a is not None else b)  # type: ignore[arg-type]
    return (zeros if a is None else a), (zeros if b is None else b)


def _is_rounding(a: Tensor | None, b: Tensor | None, scale: float, tolerance: Tolerance) -> Tensor:
    """Return a mask of gradients that are only rounding, which sign-based optimizers turn into full-size updates."""
    if a is None or b is None or a.shape != b.shape:
        return torch.zeros(())
    return ((a.abs() <= 1e3 * tolerance.floor * scale) & (b.abs() <= 1e3 * tolerance.floor * scale) & (a != b)).float()


def _largest(named: dict[str, Tensor]) -> float:
    sizes = [float(t.abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in named.values() if t.numel()]
    return max(sizes, default=0.0)


def _error(
    a: Tensor | None, b: Tensor | None, least: float, *, fixed: bool = False, without: Tensor | None = None
) -> tuple[float, bool]:
    """Return the largest difference relative to the size of `a` (at least `least`), and whether both have NaN."""
    if a is None and b is None:
        return 0.0, False
    if a is None or b is None or a.shape != b.shape or a.is_complex() != b.is_complex():
        return float("inf"), False
    if not a.numel():
        return 0.0, False
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    nan = a.isnan()
    if not torch.equal(nan, b.isnan()):
        return float("inf"), False
    apart = torch.where(nan | (a == b), 0.0, (a - b).abs())
    if without is not None:
        apart = apart * (1 - without)
    size = least if fixed else max(_largest({"": a}), least)
    return float(apart.max()) / max(size, 1e-300), bool(nan.any())
