"""Statistical efficiency: time, price and energy until a target loss, by batch size and number of devices.

A batch of B samples needs 1 + noise/B times the minimum number of steps, where noise is the gradient noise scale. So a
larger batch saves steps only up to about that size, and more devices are useful only up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core import StrategySpec
from .clusters import Cluster
from .curve import WORTH, Curves
from .estimate import Estimate, estimate
from .workload import Workload, relative_steps

FACTORS = (0.25, 0.5, 1, 2, 4, 8, 16)
"""Batch sizes, relative to the task's, for which the time to a target is predicted."""
DEVICES = (0.5, 1, 2, 4, 8)
"""Numbers of devices, relative to the cluster's, for which the time to a target is predicted."""
SAMPLES = 1e6
"""Default target: the loss that this number of samples reaches with the task's batch size."""
LEAST_SAVED = 0.9
"""Another batch size is recommended only if it reaches the target in less than this fraction of the time."""
PARTS = (1, 2, 4, 8, 16, 32, 64)
"""Factors on the number of micro-batches that are tried until a larger batch fits into memory."""


@dataclass(frozen=True, kw_only=True)
class BatchOption:
    """A batch size and a strategy, with what they need to reach a target loss."""

    batch_size: int
    spec: StrategySpec
    num_devices: int
    seconds: float
    """Seconds of a step."""
    steps: float
    """Steps to the target."""
    efficiency: float
    """Time to the target on one device, divided by the time on these devices and by their number."""
    cost: float | None
    """Price to the target; None if the cluster has no price."""
    energy: float | None
    """Kilowatt-hours to the target, at the devices' thermal design power; None if it is unknown."""

    @property
    def hours(self) -> float:
        """Hours to the target."""
        return self.steps * self.seconds / 3600


def resources(cluster: Cluster, num_devices: int, hours: float) -> tuple[float | None, float | None]:
    """Return the price and the kilowatt-hours of some devices of a cluster for a time; None for what is unknown.

    The energy is that of the devices at their thermal design power, without hosts, network and cooling.
    """
    cost = None if cluster.price is None else cluster.price * num_devices * hours
    watts = cluster.chip.watts
    return cost, None if watts is None else watts * num_devices * hours / 1000


def batch_options(
    workload: Workload, cluster: Cluster, best: StrategySpec, *, factor: float = 1.0, samples: float = SAMPLES
) -> list[BatchOption]:
    """Return the fastest strategies for several batch sizes and numbers of devices, by batch size and devices.

    Empty if the workload's gradient noise scale is unknown.

    Args:
        workload: The network and its batch size.
        cluster: The hardware; other numbers of its devices are considered too.
        best: The recommended strategy for the workload on the cluster.
        factor: Ratio of measured to predicted times.
        samples: The target: the loss that this number of samples reaches with the workload's batch size.
    """
    if workload.noise is None:
        return []
    noise, here, usual = workload.noise, cluster.num_devices, workload.batch_size
    counts = {round(here * ratio) for ratio in DEVICES if here * ratio >= 1 and (ratio <= 1 or not cluster.shared)}
    counts |= {best.num_devices or here}
    found: list[tuple[int, Estimate]] = []
    alone = []
    for ratio in FACTORS:
        size = round(ratio * workload.batch_size)
        if size < 1:
            continue
        load = replace(workload, batch_size=size)
        curves = Curves(load, cluster, best)
        alone.append(relative_steps(size, usual, noise) * curves.point(1).estimate.seconds)
        for count in sorted(counts):
            made = _fitting(load, cluster.with_devices(count), [best, *curves.ways(count)], count)
            if made is not None:
                found.append((size, made))
    result = []
    for size, made in found:
        relative, seconds = relative_steps(size, usual, noise), factor * made.seconds
        steps = samples / usual * relative
        cost, energy = resources(cluster, made.num_devices, steps * seconds / 3600)
        result.append(
            BatchOption(
                batch_size=size,
                spec=made.spec,
                num_devices=made.num_devices,
                seconds=seconds,
                steps=steps,
                efficiency=min(alone) / (relative * made.seconds * made.num_devices),
                cost=cost,
                energy=energy,
            )
        )
    return result


def recommended(options: Sequence[BatchOption], batch_size: int, num_devices: int) -> BatchOption | None:
    """Return the fastest option with sufficient efficiency, if it saves enough time; else None.

    The efficiency must be at least 50%, as at the saturation of a scaling curve. It includes the diminishing returns of
    a larger batch.

    Args:
        options: The options, as `batch_options` returns them.
        batch_size: The present batch size.
        num_devices: The present number of devices.
    """
    now = next((one for one in options if (one.batch_size, one.num_devices) == (batch_size, num_devices)), None)
    paying = [one for one in options if one.efficiency >= WORTH]
    if now is None or not paying:
        return None
    best = min(paying, key=lambda one: one.hours)
    return best if best.hours < LEAST_SAVED * now.hours else None


def _fitting(workload: Workload, cluster: Cluster, ways: Sequence[StrategySpec], count: int) -> Estimate | None:
    """Return the estimate of the fastest of some strategies that fits, with more micro-batches if needed."""
    made = []
    for way in dict.fromkeys(ways):
        if (way.num_devices or 1) != count:
            continue
        for parts in PARTS:
            names = "microbatches" if way.stages > 1 else "accumulate"
            spec = replace(way, **{names: getattr(way, names) * parts})
            if spec.num_parts * spec.accumulate * spec.microbatches > workload.batch_size:
                break
            one = estimate(workload, cluster, spec)
            if one.fits:
                made.append(one)
                break
    return min(made, key=lambda one: one.seconds, default=None)
