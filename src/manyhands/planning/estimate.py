"""Predict the seconds of a training step on a cluster under a strategy, broken down by cause, and its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from ..core import StrategySpec
from ..costs import Chip, ExchangeGroup, Network, NetworkPart, PassCost, Servers, all_gather, all_reduce, blend, send
from .clusters import Cluster
from .memory import USABLE_SHARE, Footprint, footprint, is_sequence
from .schedules import in_flight, makespan, split_stages
from .workload import Workload, period, wire_share

BUCKET, FIRST_BUCKET = 25e6, 1e6
"""Bytes of gradients per bucket, and of the first bucket."""
JITTER = 0.1
"""Relative standard deviation of the time that hosts need to launch the operations between two collectives."""
CONTENTION = (0.15, 0.02)
"""Slowdown of computation during a concurrent exchange: over links inside a host, and over a network."""
ROUND = 5e-4
"""Overhead in seconds of a pull or push between a worker and the parameter servers, apart from its bytes.

It is half the time of a step of a tiny network, measured on two cores.
"""
EXTRA = 3
"""Number of operations to whose launch time a collective's is equal."""

Correction = Callable[[StrategySpec, float], float]
"""Function of a spec and the rows of a micro-batch that returns the measured factor on the compute time."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted seconds of a step by cause, and the memory of a device."""

    spec: StrategySpec
    num_devices: int
    batch_size: int
    compute: float
    communication: float = 0.0
    """Seconds in which computation waits for communication."""
    bubble: float = 0.0
    """Seconds in which pipeline stages wait for other stages."""
    stragglers: float = 0.0
    """Seconds in which replicas wait for the slowest one."""
    input: float = 0.0
    """Seconds in which a step waits for its batch."""
    update: float = 0.0
    """Seconds of the optimizer's update."""
    memory: Footprint
    """Peak memory of the rank that needs most."""
    fits: bool
    """Whether `memory` fits into a device."""
    host_share: float = 0.0
    """Fraction of the compute time in which the device waits for its host to launch operations."""
    factor: float = 1.0
    """Ratio of measured to predicted time; 1 if nothing was measured."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of a whole step, multiplied by the measured factor."""
        parts = self.compute + self.communication + self.bubble + self.stragglers + self.input + self.update
        return parts * self.factor

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all devices together."""
        return self.batch_size / self.seconds

    def parts(self) -> dict[str, float]:
        """Return the seconds of a step by cause, such as "compute" or "communication"."""
        names = ("compute", "communication", "bubble", "stragglers", "input", "update")
        return {name: getattr(self, name) * self.factor for name in names}


def waiting(count: int) -> float:
    """Return by how many standard deviations the step time of the slowest of `count` replicas exceeds the mean.

    >>> [round(waiting(n), 1) for n in (1, 8, 50, 512)]
    [0.0, 1.4, 2.2, 3.0]
    """
    return 0.0 if count < 2 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def waiting_for(count: int, backups: int) -> float:
    """Return by how many standard deviations a step exceeds the mean if `backups` slower replicas are not waited for.

    A step needs the first `count` of `count + backups` replicas.

    >>> round(waiting_for(46, 4), 1)
    1.3
    """
    whole = count + backups
    return waiting(count) if backups == 0 else NormalDist().inv_cdf((count - 0.375) / (whole + 0.25))


def estimate(
    workload: Workload,
    cluster: Cluster,
    spec: StrategySpec,
    *,
    servers: Servers | None = None,
    pushers: int | None = None,
    correction: Correction | None = None,
) -> Estimate:
    """Predict the time and memory of a step of a workload on a cluster under a strategy.

    Args:
        workload: The network and its batch size.
        cluster: The hardware.
        spec: The strategy.
        servers: Parameter servers; None derives them from the spec, which may have none.
        pushers: Number of workers that push gradients to the servers; None for all.
        correction: Measured factor on the compute time, such as `Residuals.correction` returns.
    """
    whole = workload.network(spec.precision)
    network = whole.of_worker() if spec.servers else whole
    cluster = replace(cluster, chip=cluster.chip_for(spec.num_devices or 1)) if cluster.shared else cluster
    parts = spec.num_parts
    rows = math.ceil(workload.batch_size / parts / (spec.accumulate * spec.microbatches))
    times = _Times(network, cluster, spec, rows, _way(workload, cluster, spec))
    scale = correction(spec, rows) if correction else 1.0
    stages = times.stages(scale, workload.balanced)
    micros = spec.accumulate * spec.microbatches
    forward, backward = [s.forward for s in stages], [s.backward for s in stages]
    sending = 0.0
    if spec.stages > 1:
        widest = max(s.output for s in stages[:-1]) * rows / network.rows
        sending = send(widest / spec.tensor, cluster.way(spec.tensor))
    span = micros * times.both(stages)
    if len(stages) > 1:
        span = spec.accumulate * makespan(forward, backward, sending, spec.microbatches, spec.schedule)
    busiest = max(stages, key=lambda s: s.forward + s.backward)
    mean = sum(s.forward + s.backward for s in stages) / len(stages)
    exposed_tensor = max(s.exchange for s in stages) * micros
    servers = servers or servers_of(workload, cluster, spec)
    gradients = max(_exchanged(workload, cluster, spec, s, micros) for s in stages) if servers is None else 0.0
    update = max(_update(network, s.pieces, cluster.chip, spec) for s in stages)
    compute = micros * mean - exposed_tensor if len(stages) > 1 else span - exposed_tensor
    late = cluster.spread * _waited(spec) * (compute + exposed_tensor)
    served = 0.0
    if servers is not None:
        sizes = [workload.wire * piece.served(micros * rows / network.rows) for piece in whole.pieces]
        size = sum(sizes)
        served = _served(busiest, servers, sizes, pushers or parts)
        if spec.staleness != 0:  # asynchronous workers wait only if the servers are the bottleneck
            served = max(0.0, sum(servers.rounds(size, pushers or parts)) - span)
    gradients += micros * _attended(network, cluster, spec, rows)
    communication = exposed_tensor + gradients + served
    busy = span + gradients + served + late + update
    hosts = max(1, min(cluster.hosts, spec.num_devices or 1))
    reading = workload.batch_size / (hosts * workload.feed) if workload.feed else 0.0
    held = max(
        (
            footprint(
                network,
                s.pieces,
                spec,
                rows,
                in_flight(spec.schedule, i, len(stages), spec.microbatches) if len(stages) > 1 else 1,
            )
            for i, s in enumerate(stages)
        ),
        key=lambda one: one.total,
    )
    return Estimate(
        spec=spec,
        num_devices=spec.num_devices or 1,
        batch_size=workload.batch_size,
        compute=compute,
        communication=communication,
        bubble=max(0.0, span - micros * mean) if len(stages) > 1 else 0.0,
        stragglers=late,
        input=max(0.0, reading - busy),
        update=update,
        memory=held,
        fits=held.total <= USABLE_SHARE * cluster.chip.memory,
        host_share=max(0.0, 1 - times.device / times.whole) if times.whole else 0.0,
    )


@dataclass(frozen=True)
class _Way:
    """How a device executes operations."""

    captured: bool
    """Whether a captured step (CUDA graphs) replaces launching operations one by one."""
    fused: bool
    """Whether neighbouring operations are fused, as by torch.compile."""
    sequence: bool
    """Whether tensor parallelism also shards norms and sums of rows, along the sequence."""


def _way(workload: Workload, cluster: Cluster, spec: StrategySpec) -> _Way:
    on_cpu = cluster.chip.name == "CPU"
    captured = workload.captured and spec.capture != "off" and not on_cpu
    fused = captured and spec.capture in ("auto", "compile") if workload.fused is None else workload.fused
    # Constants that were fitted to measured steps include the cost of launching operations.
    return _Way(captured and not cluster.measured, fused, is_sequence(spec))


def servers_of(workload: Workload, cluster: Cluster, spec: StrategySpec) -> Servers | None:
    """Return the parameter servers of a spec, or None if it has none; in a cluster they are on separate hosts."""
    if not spec.servers:
        return None
    network = workload.network(spec.precision)
    even = 1 / spec.servers
    hottest = max(even, network.largest / max(1, network.param_bytes)) if workload.whole_tensors else even
    way = cluster.network if cluster.network is not None and cluster.hosts > 1 else cluster.inside
    return Servers(count=spec.servers, hottest=hottest, way=way, start=ROUND, waits=True)


def _waited(spec: StrategySpec) -> float:
    """Return by how many standard deviations of replicas' step times a step exceeds the mean; 0 if asynchronous."""
    if spec.servers and spec.staleness != 0:
        return 0.0
    return waiting_for((spec.num_devices or 1) - spec.backup, spec.backup)


@dataclass(frozen=True)
class _Stage:
    """The pieces of a network that run on one rank, and their seconds per micro-batch.

    `exchange` is the part of `forward + backward` that waits for tensor-parallel all-reduces; `output` is in bytes.
    """

    pieces: tuple[NetworkPart, ...]
    forward: float
    backward: float
    exchange: float
    backwards: tuple[float, ...]
    forwards: tuple[float, ...]
    output: float


class _Times:
    """The seconds of all pieces of a network under a strategy, for micro-batches of `rows` rows."""

    def __init__(self, network: Network, cluster: Cluster, spec: StrategySpec, rows: float, way: _Way) -> None:
        self._network, self._cluster, self._spec = network, cluster, spec
        group = cluster.group(spec.tensor, 1)
        late = 1 + JITTER * waiting(spec.tensor)
        samples = rows / network.rows / spec.context
        self.device = self.whole = 0.0
        self._rows = []
        cached: dict[NetworkPart, tuple[float, float, float, float]] = {}
        for piece in network.pieces:
            key = _kind(piece)
            if key not in cached:
                both = piece.forward + piece.backward
                alone = cluster.chip.computing(
                    both, samples, spec.precision, spec.tensor, fused=way.fused, sequence=way.sequence
                )
                sending = 0.5 if network.precision == "bf16" else 1.0  # products are bf16, but `output` may be fp32
                lot = _Lot(cluster.chip, spec, samples, way)
                once = sending * piece.output * samples
                cached[key] = (*_piece_times(piece, lot, all_reduce(once, group), late), alone)
            forward, backward, exchange, alone = cached[key]
            self.device += alone
            self.whole += forward + backward - exchange
            self._rows.append((forward, backward, exchange))

    def stages(self, scale: float, balanced: bool) -> list[_Stage]:
        """Return the pipeline stages: balanced so that the slowest is as fast as possible, or with equal block counts.

        All times are multiplied by `scale`.
        """
        pieces = self._network.pieces
        units = _units(pieces)
        ends = [*units[1:], len(pieces)]
        costs = [sum(sum(row[:2]) for row in self._rows[start:end]) for start, end in zip(units, ends, strict=True)]
        if not balanced:
            costs = [1.0] * len(units)
        count = min(self._spec.stages, len(units))
        starts = [units[first] for first in split_stages(costs, count)] if count > 1 else [0]
        made = []
        for start, end in zip(starts, [*starts[1:], len(pieces)], strict=True):
            rows = self._rows[start:end]
            made.append(
                _Stage(
                    pieces=pieces[start:end],
                    forward=scale * sum(row[0] for row in rows),
                    backward=scale * sum(row[1] for row in rows),
                    exchange=scale * sum(row[2] for row in rows),
                    forwards=tuple(scale * row[0] for row in rows),
                    backwards=tuple(scale * row[1] for row in rows),
                    output=pieces[end - 1].output,
                )
            )
        return made

    @staticmethod
    def both(stages: Sequence[_Stage]) -> float:
        return stages[0].forward + stages[0].backward


def _units(pieces: Sequence[NetworkPart]) -> list[int]:
    """Return the indices of pieces at which a stage may begin: blocks, or any piece if there are no repeated blocks.

    Pieces that are not blocks stay with the block before them; those at the start stay with the first block.
    """
    blocks = [index for index, piece in enumerate(pieces) if piece.is_repeated]
    if len(blocks) > 1:
        return [0, *blocks[1:]]
    return list(range(max(1, len(pieces) - 1)))


@lru_cache(maxsize=4096)
def _kind(piece: NetworkPart) -> NetworkPart:
    """Return a piece without its name and parameters, as the key under which times of equal blocks are cached."""
    return NetworkPart(
        name="",
        forward=piece.forward,
        backward=piece.backward,
        output=piece.output,
        products=piece.products,
        is_split=piece.is_split,
        is_repeated=piece.is_repeated,
    )


@dataclass(frozen=True)
class _Lot:
    """What a device computes: a number of samples (relative to the traced number), under a strategy."""

    chip: Chip
    spec: StrategySpec
    samples: float
    way: _Way

    def computing(self, work: PassCost, spread: int) -> float:
        way = self.way
        return self.chip.computing(
            work, self.samples, self.spec.precision, spread, fused=way.fused, sequence=way.sequence
        )


def _piece_times(piece: NetworkPart, lot: _Lot, sum_seconds: float, late: float) -> tuple[float, float, float]:
    """Return the seconds of a piece's forward, of its backward, and of both while waiting for tensor-parallel sums.

    Args:
        piece: The piece.
        lot: The samples, the device and the strategy.
        sum_seconds: Seconds of one all-reduce of the piece's output.
        late: Factor on the launch time of hosts, which wait for the slowest before a collective.
    """
    spec, chip, way = lot.spec, lot.chip, lot.way
    spread = spec.tensor if piece.products or piece.is_split else 1
    sums = piece.products / 2 if spread > 1 else 0.0
    once = sums * sum_seconds
    again = bool(spec.recompute) and piece.is_repeated
    result, waited = [], 0.0
    for work, rounds in ((piece.forward, 1), (piece.backward, 2 if again and spec.recompute != "selective" else 1)):
        device = lot.computing(work, spread)
        operations = work.launches(fused=way.fused) + rounds * sums * EXTRA
        if work is piece.backward and again:
            repeated = _repeated(piece.forward, spec, fused=way.fused)
            device += lot.computing(repeated, spread)
            operations += repeated.launches(fused=way.fused)
        host = chip.starting(operations, captured=way.captured) * (late if sums else 1.0)
        total = blend(device + rounds * once, host)
        waited += total - blend(device, host)
        result.append(total)
    return result[0], result[1], waited


def _repeated(work: PassCost, spec: StrategySpec, *, fused: bool) -> PassCost:
    """Return the cost of what backward recomputes of a block: its forward, or with "selective" all but its products."""
    if spec.recompute != "selective":
        return work
    if fused:  # fused kernels of backward compute these results again in any case
        return PassCost()
    return PassCost(
        moved=work.moved - work.product_moved, unsharded=work.unsharded, operations=work.operations - work.products
    )


def _attended(network: Network, cluster: Cluster, spec: StrategySpec, rows: float) -> float:
    """Return the seconds in which keys and values go around the ranks of the context axis, once per attention.

    Both are as large as a block's output; backward sends them again, with their gradients.
    """
    if spec.context == 1:
        return 0.0
    held = sum(piece.output for piece in network.pieces if piece.is_repeated) * rows / network.rows / spec.context
    return 6 * send(held, cluster.way(spec.context)) * (spec.context - 1)


def _exchanged(workload: Workload, cluster: Cluster, spec: StrategySpec, stage: _Stage, micros: int) -> float:
    """Return the seconds in which a stage waits for the exchange of gradients, and of sharded parameters."""
    stride = spec.tensor * spec.stages
    shards, replicas = spec.shards or 1, (spec.replicas or 1) * spec.context
    waited = behind = 0.0
    if shards > 1:
        group = cluster.group(shards, stride)
        wide = workload.gathered / spec.tensor
        gathers = [all_gather(p.param_bytes * wide, group) for p in stage.pieces if p.param_bytes]
        scatters = [all_gather(p.gradient_bytes / spec.tensor, group) for p in stage.pieces if p.gradient_bytes]
        waited += micros * _copied(workload, cluster.chip, spec, stage)
        if gathers:
            again = gathers if spec.sharding == "full" else []
            ahead = max(gathers[0], sum(gathers) - stage.forward)
            behind = max(0.0, *[*again, *scatters][-1:], sum(scatters) + sum(again) - stage.backward)
            travelling = sum(gathers) + sum(again) + sum(scatters)
            beside = max(0.0, min(travelling - ahead - behind, stage.forward + stage.backward))
            waited += micros * (ahead + behind + beside * CONTENTION[group.hosts > 1])
    if replicas > 1:
        group = cluster.group(replicas, stride * shards)
        share = workload.wire * wire_share(spec.sync) / (spec.tensor * shards)
        every = period(spec.sync)
        overlaps = workload.overlaps and len(stage.pieces) > 1 and every == 1
        stretch = 1 + behind / stage.backward if stage.backward else 1.0
        waited += _overlapped(stage, group, share, stretch, overlaps=overlaps) / every
    return waited


def _copied(workload: Workload, chip: Chip, spec: StrategySpec, stage: _Stage) -> float:
    """Return the seconds for copies of sharded parameters and gradients from and to the buffers of collectives."""
    times = 2 if spec.sharding == "full" else 1  # parameters are gathered for forward, and again for backward
    size = sum(times * workload.gathered * piece.param_bytes + piece.gradient_bytes for piece in stage.pieces)
    return 2 * size / spec.tensor / (chip.bandwidth * chip.streaming)


def _overlapped(stage: _Stage, group: ExchangeGroup, share: float, stretch: float, *, overlaps: bool) -> float:
    """Return the seconds of bucketed gradient exchanges that backward does not hide.

    `share` is the ratio of bytes on the network to those of the gradients, and `stretch` the factor by which backward
    takes longer because it also waits for the exchanges of another group.
    """
    now = end = size = travelling = 0.0
    limit = FIRST_BUCKET
    for piece, seconds in zip(reversed(stage.pieces), reversed(stage.backwards), strict=True):
        now += seconds * stretch
        size += piece.gradient_bytes * share
        if size >= limit * min(1.0, share) or piece is stage.pieces[0]:
            cost = all_reduce(size, group) if size else 0.0
            end = max(end, now) + cost
            travelling += cost
            size, limit = 0.0, BUCKET
    if not overlaps:
        return travelling
    beside = min(travelling, now)
    return max(0.0, end - now) + beside * CONTENTION[group.hosts > 1]


def _served(stage: _Stage, servers: Servers, sizes: Sequence[float], pushers: int) -> float:
    """Return the seconds of pulls that forward does not hide, and of pushes that backward does not hide.

    Pulls are in the order in which forward needs parameters. `sizes` are the bytes of each piece.
    """
    pull, push = servers.rounds(sum(sizes), pushers)
    total = sum(sizes) or 1
    arrived = now = 0.0
    for size, seconds in zip(sizes, stage.forwards, strict=True):
        arrived += pull * size / total
        now = max(now, arrived) + seconds
    waited = pull if servers.waits else now - stage.forward
    end = now = 0.0
    for size, seconds in zip(reversed(sizes), reversed(stage.backwards), strict=True):
        now += seconds
        end = max(end, now) + push * size / total
    return waited + max(0.0, end - now)


def _update(network: Network, pieces: Sequence[NetworkPart], chip: Chip, spec: StrategySpec) -> float:
    """Return the optimizer's seconds: it reads and writes parameters and state once, and reads gradients."""
    own = sum(piece.gradient_bytes for piece in pieces)
    state = 2 * network.state_bytes * own / max(1, network.gradient_bytes)
    return (3 * own + state) / (spec.tensor * (spec.shards or 1)) / (chip.bandwidth * chip.streaming)
