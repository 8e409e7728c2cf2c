"""Search over the sensible strategies for a workload on a cluster, with the predicted cost of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..core import StrategySpec
from .clusters import Cluster
from .estimate import Correction, Estimate, estimate
from .workload import Workload

MOST_STAGES = 64
Refuses = Callable[[StrategySpec], str]
"""Function that returns why this version of manyhands cannot run a spec; an empty text if it can."""


@dataclass(frozen=True, kw_only=True)
class PlanOption:
    """One strategy of a plan, with its predicted cost."""

    estimate: Estimate
    refused: str = ""
    """Why this version of manyhands cannot run the strategy; empty if it can."""
    measured: float | None = None
    """Measured seconds of a step; None if the strategy was not tried."""

    @property
    def spec(self) -> StrategySpec:
        """The spec of the strategy."""
        return self.estimate.spec

    @property
    def seconds(self) -> float:
        """Seconds of a step: measured if the strategy was tried, else predicted."""
        return self.measured if self.measured is not None else self.estimate.seconds

    @property
    def can_run(self) -> bool:
        """Whether the strategy fits into memory and this version of manyhands can run it."""
        return self.estimate.fits and not self.refused


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search over strategies, with constraints on those that may be picked."""

    precision: str = "fp32"
    lossy: bool = False
    """Whether strategies with a sync policy that changes the mathematics may be picked."""
    refuses: Refuses = lambda spec: ""
    correction: Correction | None = None

    def options(self, workload: Workload, cluster: Cluster) -> list[PlanOption]:
        """Return all strategies found, those that can run first, then by time.

        Plain data parallel and one device are always among them.
        """
        found: dict[StrategySpec, PlanOption] = {}
        for spec in (self.control(workload, cluster), StrategySpec(precision=self.precision)):
            found[spec] = self.option(workload, cluster, spec)
        has_tables = any(piece.table_bytes for piece in workload.network(self.precision).pieces)
        if cluster.hosts > 1 or (has_tables and not cluster.measured):  # a measured cluster cannot try servers
            served = replace(self.control(workload, cluster), servers=cluster.hosts)
            found[served] = self.option(workload, cluster, served)
        for devices in _counts(cluster.num_devices):
            for layout in layouts(workload, cluster, devices):
                for spec in self._filled(workload, cluster, layout):
                    if spec not in found:
                        found[spec] = self.option(workload, cluster, spec)
        return sorted(found.values(), key=lambda o: (not o.estimate.fits, bool(o.refused), o.seconds))

    def control(self, workload: Workload, cluster: Cluster) -> StrategySpec:
        """Return plain data parallel on all devices, or on as many as there are samples in a batch."""
        return StrategySpec(replicas=min(cluster.num_devices, workload.batch_size), precision=self.precision)

    def option(self, workload: Workload, cluster: Cluster, spec: StrategySpec) -> PlanOption:
        """Return one strategy with its predicted cost, and with the reason if it cannot run."""
        made = estimate(workload, cluster, spec, correction=self.correction)
        return PlanOption(estimate=made, refused=self.refuses(spec))

    def _filled(self, workload: Workload, cluster: Cluster, layout: StrategySpec) -> Iterator[StrategySpec]:
        """Yield complete specs, with the mesh axes of `layout`, that fit into memory.

        They have as few micro-batches as possible, and recomputation only if needed. If none fits, yield the one that
        is nearest to fitting.
        """
        layout = replace(layout, precision=self.precision)
        most = workload.batch_size // layout.num_parts
        counts = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256) if count <= most]
        if layout.stages > 1:
            counts = [count for count in counts if layout.stages <= count <= 8 * layout.stages]
        ways = ("", "blocks") if any(piece.is_repeated for piece in workload.network(self.precision).pieces) else ("",)
        for recompute in ways:
            fitting = 0
            for count in counts:
                spec = _parted(layout, count, recompute)
                if estimate(workload, cluster, spec).fits:
                    fitting += 1
                    yield spec
                    if self.lossy and (spec.replicas or 1) > 1:
                        yield replace(spec, sync="bf16")
                    if fitting == (3 if layout.stages > 1 else 1):
                        break
            if fitting:
                return
        if counts:
            yield _parted(layout, counts[-1], ways[-1])  # the nearest to fitting, for the table and the error


def _parted(layout: StrategySpec, count: int, recompute: str) -> StrategySpec:
    """Return the spec `layout` with `count` micro-batches: pipelined if it has several stages, else accumulated."""
    if layout.stages > 1:
        return replace(layout, microbatches=count, recompute=recompute)
    return replace(layout, accumulate=count, recompute=recompute)


def layouts(workload: Workload, cluster: Cluster, devices: int) -> Iterator[StrategySpec]:
    """Yield the mesh axes (replicas, shards, tensor, stages) to consider for a number of devices.

    Tensor parallelism stays within a host, and there are at most as many stages as repeated blocks.
    """
    network = next(iter(workload.networks.values()))
    blocks = sum(piece.is_repeated for piece in network.pieces)
    products = any(piece.products > 1 for piece in network.pieces)
    for tensor in _divisors(min(cluster.per_host, devices), devices) if products else [1]:
        for stages in [1, *(n for n in _divisors(min(blocks, MOST_STAGES), devices // tensor) if n > 1)]:
            rest = devices // tensor // stages
            for shards in sorted({1, min(rest, max(1, cluster.per_host // (tensor * stages))), rest}):
                if rest % shards == 0 and rest <= workload.batch_size:
                    yield StrategySpec(replicas=rest // shards, shards=shards, tensor=tensor, stages=stages)


def _divisors(most: int, devices: int) -> list[int]:
    """Return the powers of two up to `most` that divide `devices`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most and devices % (1 << power) == 0]


def _counts(devices: int) -> list[int]:
    """Return the numbers of devices to consider: all, and up to three successive halves, since fewer may be faster."""
    counts = [devices]
    while counts[-1] % 2 == 0 and counts[-1] > 2 and len(counts) < 4:
        counts.append(counts[-1] // 2)
    return counts
