"""Saturation curve: speed-up by number of devices, where more devices stop to pay off, why, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..core import StrategySpec, counted, format_bytes, format_duration, format_number
from ..costs import START, Link
from .clusters import Cluster
from .estimate import Estimate, estimate, servers_of
from .workload import Workload

MOST_DEVICES = 1024
"""Number of devices up to which curves go at least, if a batch has as many samples."""
WORTH = 0.5
"""Minimum efficiency (speed-up divided by devices) with which a number of devices is worth using."""
LEAST_GAIN = 1.02
"""Minimum speed-up for which a change is reported as a remedy."""
MOST_TRIED = 64
"""Maximum number of device counts that are tried between two points of the curve to find the exact saturation."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The fastest strategy found for a number of devices."""

    num_devices: int
    speedup: float
    estimate: Estimate

    @property
    def efficiency(self) -> float:
        """Speed-up divided by the number of devices."""
        return self.speedup / self.num_devices


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of hardware or settings that would make training faster, or let it use more devices."""

    text: str
    gain: float
    """Speed on the cluster's devices after the change, relative to the present speed."""
    saturates: int
    """Number of devices at which the speed-up saturates after the change."""
    is_lossy: bool = False
    """Whether the change alters the mathematics."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Speed-ups of a workload from 1 to 1,024 devices, or to four times those of the cluster if that is more."""

    points: tuple[Point, ...]
    saturates: int
    """The largest number of devices with an efficiency of at least one half."""
    reason: str
    """The largest loss with more devices than that, as a sentence."""
    remedies: tuple[Remedy, ...] = ()
    """Changes that would help, best first."""

    @property
    def never(self) -> bool:
        """Whether the efficiency is still at least one half at the end of the curve."""
        return self.saturates >= self.points[-1].num_devices


class Curves:
    """Compute the saturation curve of a workload on clusters of one kind, starting from the best strategy of a plan."""

    def __init__(self, workload: Workload, cluster: Cluster, best: StrategySpec) -> None:
        self._workload, self._cluster = workload, cluster
        self._best = best
        self._limit = max(MOST_DEVICES, 4 * cluster.num_devices)
        self._found: dict[int, Estimate] = {}
        self._alone = self._at(1).seconds

    def draw(self) -> Curve:
        """Return the curve with all points, where and why it saturates, and what would help."""
        points = tuple(self.point(count) for count in _grid(self._most()))
        saturates = self.saturation()
        return Curve(points=points, saturates=saturates, reason=self.reason(saturates), remedies=tuple(self.remedies()))

    def point(self, count: int) -> Point:
        """Return the fastest of a few strategies on `count` devices, and its speed-up over one device."""
        found = self._at(count)
        return Point(num_devices=count, speedup=self._alone / found.seconds, estimate=found)

    def saturation(self, *, is_exact: bool = True) -> int:
        """Return the largest number of devices with an efficiency of at least one half.

        Efficiency is not monotone: it is higher if the batch or the hosts divide evenly. So such numbers are tried in
        addition to the points of the curve. If `is_exact`, up to MOST_TRIED numbers above the largest efficient one are
        tried too.
        """
        most = self._most()
        even = {-(-self._workload.batch_size // rows) for rows in range(1, 33)}
        tried = sorted({count for count in {*_grid(most), *even, most} if count <= most})
        paying = max((count for count in tried if self._pays(count)), default=1)
        if paying == most:
            return most
        above = next(count for count in tried if count > paying)
        if is_exact:
            step = max(1, (above - paying) // MOST_TRIED)
            paying = next((count for count in range(above - 1, paying, -step) if self._pays(count)), paying)
            above = min(above, paying + step)
        while above - paying > 1:
            middle = (paying + above) // 2
            paying, above = (middle, above) if self._pays(middle) else (paying, middle)
        return paying

    def _pays(self, count: int) -> bool:
        return self.point(count).efficiency >= WORTH

    def reason(self, count: int) -> str:
        """Return why the curve saturates at `count` devices: the largest loss of time with one more, as a sentence."""
        work = self._workload
        if count == self._most() < self._limit:
            return f"the batch has only {counted(work.batch_size, 'sample')} to share out{_past_critical(work)}"
        count = min(self._most(), max(2, count + 1))
        found = self.point(count).estimate
        ideal = self._alone / count
        lost = {
            "communication": found.communication,
            "bubble": found.bubble,
            "stragglers": found.stragglers,
            "input": found.input,
            "host": max(0.0, found.compute + found.update - ideal),
        }
        largest = max(lost, key=lambda name: lost[name])
        return _WORDS[largest](found, self._cluster, lost[largest], work)

    def remedies(self) -> list[Remedy]:
        """Return changes that would help, best first. For each, the curve is computed again with one thing changed."""
        now = self.saturation(is_exact=False)
        here = self._cluster.num_devices
        speed = 1 / self._at(here).seconds
        result = []
        for text, is_lossy, workload, cluster, changes in self._changes():
            other = Curves(workload, cluster, replace(self._best, **changes))
            # Compare samples per second, because a larger batch has more samples per step.
            samples = workload.batch_size / self._workload.batch_size
            gain = samples / other._at(here).seconds / speed
            saturates = other.saturation(is_exact=False)
            if gain >= LEAST_GAIN or saturates > now:
                result.append(Remedy(text=text, gain=gain, saturates=saturates, is_lossy=is_lossy))
        return sorted(result, key=lambda one: (-one.gain, -one.saturates))

    def _changes(self) -> list[tuple[str, bool, Workload, Cluster, dict[str, Any]]]:
        work, cluster, spec = self._workload, self._cluster, self._best
        changes: list[tuple[str, bool, Workload, Cluster, dict[str, Any]]] = []
        network = cluster.network or cluster.with_devices(2 * cluster.per_host).network
        assert network is not None
        faster = replace(cluster, network=replace(network, bandwidth=4 * network.bandwidth))
        changes.append(("a network four times as fast", False, work, faster, {}))
        quicker = _with_links(replace(cluster, network=network), latency=0.25)
        changes.append(("links and collectives with a quarter of the latency", False, work, quicker, {}))
        if spec.precision == "fp32" and "bf16" in work.networks:
            changes.append(('computing in bf16, precision="bf16"', False, work, cluster, {"precision": "bf16"}))
        if work.noise is None or work.noise > work.batch_size:
            larger = replace(work, batch_size=4 * work.batch_size)
            unknown = "" if work.noise else ", if the gradient's noise allows it"
            changes.append((f"a batch of {larger.batch_size} samples{unknown}", False, larger, cluster, {}))
        if spec.servers:
            changes.append(("twice the servers", False, work, cluster, {"servers": 2 * spec.servers}))
            if work.whole_tensors:
                even = replace(work, whole_tensors=False)
                changes.append(("the largest parameter sharded over all servers", False, even, cluster, {}))
            changes.append(("sums between replicas instead of servers", False, work, cluster, {"servers": 0}))
        elif spec.sync == "allreduce" and (spec.replicas != 1 or spec.num_devices == 1):
            changes.append(('bf16 gradients, sync="bf16"', True, work, cluster, {"sync": "bf16"}))
            changes.append(('local steps, sync="localsteps(8)"', True, work, cluster, {"sync": "localsteps(8)"}))
        found = _by_rows(work)
        if found is not None and not spec.servers:
            name, by_rows = found
            text = f"{name} as mh.strategies.Embedding on parameter servers, which sends only the rows of a batch"
            changes.append((text, False, by_rows, cluster, {"servers": cluster.hosts, "sync": "allreduce"}))
        if work.feed:
            changes.append(("a feed twice as fast", False, replace(work, feed=2 * work.feed), cluster, {}))
        if cluster.spread > 0:
            changes.append(("devices of equal speed", False, work, replace(cluster, spread=0.0), {}))
        return changes

    def _most(self) -> int:
        return min(self._limit, max(2, self._workload.batch_size * self._best.tensor * self._best.stages))

    def _at(self, count: int) -> Estimate:
        if count not in self._found:
            self._found[count] = self._fastest(count)
        return self._found[count]

    def _fastest(self, count: int) -> Estimate:
        """Return the estimate of the fastest strategy on `count` devices."""
        cluster = self._cluster.with_devices(count)
        ways = self.ways(count)
        usable = [way for way in ways if way.num_parts <= self._workload.batch_size] or [ways[0]]
        made = [estimate(self._workload, cluster, way) for way in usable]
        return min(made, key=lambda one: one.seconds)

    def ways(self, count: int) -> list[StrategySpec]:
        """Return the strategies that are considered for `count` devices.

        They are replicas only, shards within a host or over all devices, and the tensor and pipeline axes of the
        plan's best strategy with more replicas.
        """
        base = replace(self._best, replicas=1, shards=1, tensor=1, stages=1, accumulate=1, microbatches=1)
        ways = [replace(base, replicas=count)]
        group = self._best.tensor * self._best.stages
        if group > 1 and count % group == 0:
            rest = count // group
            own = replace(self._best, replicas=rest, shards=1, sync=self._sync(rest))
            most = max(1, self._workload.batch_size // rest)
            ways.append(replace(own, accumulate=1, microbatches=min(max(own.accumulate, own.microbatches), most)))
        if (self._best.shards or 1) > 1 and count > 1:
            inside = min(count, self._cluster.with_devices(count).per_host)
            ways.append(replace(base, shards=count, sync=self._sync(1)))
            if count % inside == 0:
                outer = count // inside
                ways.append(replace(base, shards=inside, replicas=outer, sync=self._sync(outer)))
        return ways

    def _sync(self, replicas: int) -> str:
        """Return the sync policy for this number of replicas: that of the plan's best strategy if there are several."""
        return self._best.sync if replicas > 1 else "allreduce"


def _by_rows(work: Workload) -> tuple[str, Workload] | None:
    """Return the name of the largest embedding table, and the workload with only its used rows sent.

    None if no table has at least half of the gradients' bytes.
    """
    networks = {}
    for precision, network in work.networks.items():
        table = max(network.pieces, key=lambda piece: piece.param_bytes)
        is_table = not table.products and table.touched == 0 and 0 < table.output < table.param_bytes
        if not is_table or table.gradient_bytes < network.gradient_bytes / 2:
            return None
        rows = replace(table, table_bytes=table.gradient_bytes, touched=table.output)
        pieces = tuple(rows if piece is table else piece for piece in network.pieces)
        networks[precision] = replace(network, pieces=pieces)
    return table.name, replace(work, networks=networks)


def _with_links(cluster: Cluster, *, bandwidth: float = 1.0, latency: float = 1.0) -> Cluster:
    """Return the cluster with the bandwidth and latency of all links multiplied by factors."""

    def changed(way: Link) -> Link:
        return replace(way, bandwidth=bandwidth * way.bandwidth, latency=latency * way.latency)

    network = cluster.network and changed(cluster.network)
    start = latency * (cluster.exchange or START)
    return replace(cluster, inside=changed(cluster.inside), network=network, exchange=start)


def _grid(most: int) -> list[int]:
    """Return the numbers of devices at a curve's points, up to `most`: 1, 2, 3, 4, 6, 8, 12, …, two per doubling."""
    counts = {1 << power for power in range(most.bit_length())} | {3 << power for power in range(most.bit_length())}
    return sorted(count for count in counts if count <= most)


def _by_servers(found: Estimate, cluster: Cluster, lost: float, work: Workload) -> str:
    network = work.network(found.spec.precision)
    servers = servers_of(work, cluster, found.spec)
    assert servers is not None
    hot = max(network.pieces, key=lambda piece: piece.largest)
    whose = f", most of it the largest parameter of {hot.name!r}" if servers.hottest > 1.5 / servers.count else ""
    return (
        f"the hottest of {servers.count} servers: it holds {servers.hottest:.0%} of "
        f"{format_bytes(network.param_bytes, 3)}"
        f"{whose}, and {found.spec.replicas} workers wait {format_duration(lost)} for it"
    )


def _latency(found: Estimate, cluster: Cluster, work: Workload) -> float:
    """Return the seconds of communication in a step that would remain if all links had infinite bandwidth."""
    servers = servers_of(work, cluster, found.spec)
    if servers is not None:
        return sum(servers.rounds(0, 1))
    return estimate(work, _with_links(cluster, bandwidth=math.inf), found.spec).communication


def _by_network(found: Estimate, cluster: Cluster, lost: float, work: Workload) -> str:
    sent = format_bytes(work.network(found.spec.precision).gradient_bytes, 3)
    spans = found.num_devices > cluster.per_host
    grown = cluster.with_devices(found.num_devices)
    way = grown.network if spans and grown.network else cluster.inside
    what = "the network card" if spans else f"the link inside a host ({cluster.inside.name})"
    waited = _latency(found, grown, work)
    if waited > lost / 2:
        return (
            f"latency: that of exchanges between {found.num_devices} devices takes {format_duration(waited)} of a "
            f"{format_duration(found.seconds)} step; a faster link would not shorten it"
        )
    if found.spec.servers:
        return _by_servers(found, cluster, lost, work)
    return (
        f"{what}: {sent} of gradients at {format_number(way.rate / 1e9)} GB/s keep {found.num_devices} devices waiting "
        f"for {format_duration(lost)} of a {format_duration(found.seconds)} step"
    )


def _by_bubble(found: Estimate, cluster: Cluster, lost: float, work: Workload) -> str:
    return (
        f"the bubble: {found.spec.stages} stages wait {format_duration(lost)} for each other, with "
        f"{found.spec.microbatches} micro-batches"
    )


def _by_stragglers(found: Estimate, cluster: Cluster, lost: float, work: Workload) -> str:
    return f"stragglers: the slowest of {found.num_devices} takes {format_duration(lost)} longer than the mean"


def _by_input(found: Estimate, cluster: Cluster, lost: float, work: Workload) -> str:
    rate = format_number(work.feed or 0.0)
    return f"input: the feed reads {rate} samples/s on a host, and steps wait {format_duration(lost)} for it"


def _past_critical(work: Workload) -> str:
    """Return an addition to a sentence if a larger batch would exceed the gradient noise scale; else an empty text."""
    if work.noise is None or work.noise > work.batch_size:
        return ""
    return f"; a larger one would be past the critical batch, about {format_number(work.noise)} samples"


def _by_host(found: Estimate, cluster: Cluster, lost: float, work: Workload) -> str:
    rows = work.batch_size / found.spec.num_parts / (found.spec.accumulate * found.spec.microbatches)
    return (
        f"too little work: with {format_number(rows)} sample{'s' * (rows != 1)} a device spends "
        f"{format_duration(lost)} of a step on "
        f"starting operations and on work that does not shrink with the batch{_past_critical(work)}"
    )


_WORDS: dict[str, Callable[[Estimate, Cluster, float, Workload], str]] = {
    "communication": _by_network,
    "bubble": _by_bubble,
    "stragglers": _by_stragglers,
    "input": _by_input,
    "host": _by_host,
}
