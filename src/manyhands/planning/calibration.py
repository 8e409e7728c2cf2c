"""Calibration: constants of devices and links fitted to a few measured steps, with residuals for similar steps.

The constants are physical: the fraction of peak performance that matrix products reach, the time to launch an
operation, the fraction of a link's bandwidth that transfers reach. Their logarithms are fitted, with the catalogue's
values as the prior. The remaining residuals of measured steps are applied to similar steps: those with about as many
rows per micro-batch, as many tensor-parallel devices, and blocks of about that size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import StrategySpec
from .clusters import Cluster
from .estimate import Correction, estimate
from .workload import Workload

LOOSE = {"reach": 0.5, "ramp": 1.5, "streaming": 0.5, "operation": 1.5, "share": 0.5, "exchange": 1.0, "spread": 0.5}
"""The constants to fit, with the prior standard deviation of each one's logarithm around the catalogue's value."""
FRACTIONS = ("reach", "streaming", "share")
"""Constants that are fractions of a figure in the datasheet, so that they cannot exceed 1."""
NOISE = 0.05
"""Assumed standard deviation of the logarithm of a measured step's time."""
ALIKE = 0.6
"""Distance, in doublings, over which the residual of a measured step is informative for another step."""
TRUST = 0.05
"""Weight of the prior (the model is right, so the residual is 0) against measured steps."""


@dataclass(frozen=True)
class Observation:
    """The measured seconds of a step of a workload under a strategy, to which a cluster's constants are fitted."""

    workload: Workload
    spec: StrategySpec
    seconds: float


def calibrated(
    cluster: Cluster, observations: Sequence[Observation], loose: Mapping[str, float] = MappingProxyType(LOOSE)
) -> Cluster:
    """Return the cluster with constants fitted to measured steps; they stay close to the catalogue's values.

    Args:
        cluster: The cluster on which the steps were measured.
        observations: The measured steps.
        loose: The constants to fit, with the prior standard deviation of each one's logarithm.
    """
    cluster = replace(cluster, measured=True)  # so that the fit uses the same model as later estimates
    names = list(loose)
    start = np.zeros(len(names))
    target = np.log([one.seconds for one in observations])

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        made = _with(cluster, dict(zip(names, logs, strict=True)))
        seen = np.log([estimate(one.workload, made, one.spec).seconds for one in observations])
        prior = logs / np.array(list(loose.values()))
        return np.concatenate([_robust((seen - target) / NOISE), prior])

    found = _least_squares(residuals, start)
    return _with(cluster, dict(zip(names, found, strict=True)))


@dataclass(frozen=True)
class Residuals:
    """The residuals of measured steps against the model, which are applied to predictions of similar steps."""

    places: tuple[tuple[float, ...], ...]
    """For each measured step, its coordinates for similarity: rows, tensor-parallel devices and block size."""
    logs: tuple[float, ...]
    """For each measured step, the logarithm of the factor on compute time with which the model is right."""

    @classmethod
    def of(cls, cluster: Cluster, observations: Sequence[Observation]) -> Residuals:
        """Return the residuals of measured steps against the model of a (calibrated) cluster."""
        logs = tuple(_factor(cluster, one) for one in observations)
        places = tuple(_place(one.workload, one.spec, _rows(one.workload, one.spec)) for one in observations)
        return cls(places, logs)

    def correction(self, workload: Workload) -> Correction:
        """Return a function of a spec and rows per micro-batch, for `estimate`.

        It returns the factor on the workload's compute time that follows from similar measured steps.
        """

        def factor(spec: StrategySpec, rows: float) -> float:
            place = _place(workload, spec, rows)
            weights = [math.exp(-(math.dist(place, other) ** 2) / ALIKE**2) for other in self.places]
            return math.exp(sum(w * log for w, log in zip(weights, self.logs, strict=True)) / (sum(weights) + TRUST))

        return factor


def _with(cluster: Cluster, logs: dict[str, float]) -> Cluster:
    """Return the cluster with each constant in `logs` multiplied by the exponential of its value there."""
    factors = {name: math.exp(log) for name, log in logs.items()}
    chip = cluster.chip
    own: dict[str, Any] = {
        name: _bounded(name, getattr(chip, name) * factors[name])
        for name in ("reach", "ramp", "streaming", "operation")
        if name in factors
    }
    moved = replace(cluster, chip=replace(chip, **own))
    if "share" in factors:
        moved = replace(
            moved, inside=replace(moved.inside, share=_bounded("share", moved.inside.share * factors["share"]))
        )
    if "exchange" in factors:
        moved = replace(moved, exchange=(cluster.exchange or cluster.group(1, 1).beginning) * factors["exchange"])
    if "spread" in factors:
        moved = replace(moved, spread=cluster.spread * factors["spread"])
    return moved


def _bounded(name: str, value: float) -> float:
    """Return a constant's value, limited to 1 if it is a fraction of a figure in the datasheet."""
    return min(1.0, value) if name in FRACTIONS else value


def _least_squares(residuals: object, start: NDArray[np.float64], rounds: int = 25) -> NDArray[np.float64]:
    """Return the arguments that minimize the sum of squared residuals, by the Levenberg-Marquardt algorithm.

    Derivatives are approximated by finite differences. `residuals` maps arguments to an array.
    """
    assert callable(residuals)
    at, damping = start, 1e-2
    now = residuals(at)
    for _ in range(rounds):
        slopes = np.stack([(residuals(at + 1e-3 * unit) - now) / 1e-3 for unit in np.eye(len(at))], axis=1)
        square = slopes.T @ slopes
        for _ in range(6):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slopes.T @ now)
            new = residuals(at + np.clip(step, -1, 1))
            if new @ new < now @ now:
                gain = (now @ now - new @ new) / (now @ now)
                at, now, damping = at + np.clip(step, -1, 1), new, damping / 3
                break
            damping *= 4
        else:
            break
        if gain < 1e-5:
            break
    return at


def _robust(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return residuals whose squares are Huber's loss: beyond two standard deviations it grows only linearly."""
    size = np.abs(values)
    return np.sign(values) * np.where(size <= 2, size, np.sqrt(np.maximum(0.0, 4 * size - 4)))


def _factor(cluster: Cluster, one: Observation) -> float:
    """Return the logarithm of the factor on compute time with which the model predicts the measured time."""
    low, high = math.log(0.2), math.log(5.0)
    for _ in range(30):
        middle = (low + high) / 2
        factor = math.exp(middle)
        seen = estimate(one.workload, cluster, one.spec, correction=lambda *_, factor=factor: factor).seconds
        low, high = (middle, high) if seen < one.seconds else (low, middle)
    return (low + high) / 2


def _rows(workload: Workload, spec: StrategySpec) -> float:
    return math.ceil(workload.batch_size / spec.num_parts / (spec.accumulate * spec.microbatches))


def _place(workload: Workload, spec: StrategySpec, rows: float) -> tuple[float, ...]:
    network = workload.network(spec.precision)
    blocks = [piece.forward.flops for piece in network.pieces if piece.forward.flops]
    largest = max(blocks, default=1.0) / network.rows
    return math.log2(rows), math.log2(spec.tensor), math.log2(largest) / 2
