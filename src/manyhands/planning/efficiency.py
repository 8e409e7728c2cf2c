"""Statistical efficiency: how many steps a batch size needs, from the gradient noise at two batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import SettingsError


def noise_scale(small: int, squares: Sequence[float], large: int, large_squares: Sequence[float]) -> float:
    """The gradient noise scale in samples, from squared norms of gradients of small and of large batches.

    A batch of B samples has |G|² + tr Σ/B on average; two sizes give both. Beyond about so many samples a larger batch
    needs hardly fewer steps.

    >>> noise_scale(8, [1 + 160 / 8], 32, [1 + 160 / 32])
    160.0
    """
    if not 0 < small < large:
        raise SettingsError("two batch sizes differ", got=f"{small} and {large}", remedy="pass the smaller one first")
    first, second = sum(squares) / len(squares), sum(large_squares) / len(large_squares)
    signal = (large * second - small * first) / (large - small)
    noise = (first - second) / (1 / small - 1 / large)
    return max(0.0, noise) / signal if signal > 0 else float("inf")


def steps_needed(batch_size: float, noise: float) -> float:
    """Return the ratio of steps to a target to those of an infinite batch.

    >>> steps_needed(100, 100)
    2.0
    """
    return 1 + noise / batch_size


def best_batch(noise: float, seconds: dict[int, float]) -> int:
    """Return the batch size that reaches a target soonest, given the seconds of a step with each.

    >>> best_batch(1000, {100: 1.0, 1000: 2.0, 10000: 11.0})
    1000
    """
    return min(seconds, key=lambda size: steps_needed(size, noise) * seconds[size])
