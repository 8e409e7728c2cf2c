"""Measure a task on the devices of this machine, to calibrate a plan."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch

from .. import costs, planning, training
from ..core import ManyhandsError, StrategyError, StrategySpec, Task
from ..costs import CannotTrace, Chip, Link, Network, chip, link, make_chip
from ..data import Cursor, Feed, check_source, first_dim, source_of
from ..distributed import Device, NullWorld, World, num_cores, resolve
from ..planning import Cluster, Correction, Observation, Workload
from .runtime import On, runtime

ROWS = 8
"""Number of samples with which a network is traced; its costs are proportional to the number of samples."""
WIDE = {"reach": 3.0, "streaming": 3.0, "operation": 3.0}
"""How far fitted constants of measured devices may be from the catalogue's: standard deviations of their logarithms."""
OPERATIONS_PER_CYCLE = {"AVX2": 32, "AVX512": 64}
"""fp32 operations per cycle of a core with two units for fused multiply-add, by torch's name of the instruction set."""
FASTEST_CLOCK, FASTEST_STREAM = 5e9, 40e9
"""Upper limits of a core's cycles per second, and of the bytes per second that it moves alone."""
SWEEP = (1 << 14, 1 << 22, 1 << 24)
"""Bytes of the tensors whose all-reduce is timed."""
FEED_SECONDS = 0.3
"""Seconds for which the data feed alone is timed."""


class Bench:
    """Measure a task on devices of this machine.

    Args:
        task: The task.
        on: Devices, as for `mh.fit`.
        timeout: Seconds within which a healthy operation completes.
    """

    def __init__(self, task: Task, on: On, timeout: float) -> None:
        self._task, self._timeout = task, timeout
        self._on = on
        self.correction: Correction | None = None
        """Ratio of measured to estimated step time, by spec and rows; None until `calibrated` was called."""

    @functools.cached_property
    def devices(self) -> list[Device]:
        """The devices of `on`; if `on` is None on a machine without accelerators, one CPU device per core."""
        found, _ = resolve(self._on)
        if self._on is None and [device.kind for device in found] == ["cpu"] and num_cores() > 1:
            found, _ = resolve(f"cpu*{num_cores()}")
        return found

    def cluster(self) -> Cluster:
        """Return a cluster of the devices, with constants from the hardware catalogue."""
        first = self.devices[0]
        made = _chip_of(first)
        return Cluster(
            hosts=1,
            per_host=len(self.devices),
            chip=made,
            inside=link(made.inside),
            shared=first.share < 1,
        )

    def calibrated(self, workload: Workload, cluster: Cluster, precision: str) -> tuple[Workload, Cluster]:
        """Return the workload with measured feed and gradient noise, and the cluster with fitted constants.

        The constants are fitted to steps at two batch sizes and, with several devices, to simultaneous steps and
        all-reduces.
        """
        spec = StrategySpec(precision=precision)
        seen = []
        for size in _sizes(workload.batch_size):
            seconds = self._seconds(spec, batch_size=size)
            if isinstance(seconds, float):
                seen.append(Observation(replace(workload, batch_size=size), spec, seconds))
        if seen:
            cluster = planning.calibrated(cluster, seen, WIDE)
            self.correction = _left_over(cluster, seen, workload)
        if len(self.devices) > 1:
            cluster = self._with_links(self._crowded(cluster, workload, spec))
        return replace(workload, feed=self._feed(), noise=self._noise(workload.batch_size)), cluster

    def _crowded(self, cluster: Cluster, workload: Workload, spec: StrategySpec) -> Cluster:
        """Return the cluster with the spread of step times over its devices while all of them compute.

        Devices that share hardware also get the constants that each has under this load. If the steps cannot run, the
        cluster is returned unchanged.
        """
        size = max(1, workload.batch_size // len(self.devices))
        each = functools.partial(_apart, task=self._task, spec=spec, batch_size=size)
        try:
            found = self._run(each, self.devices)
        except (ManyhandsError, RuntimeError, MemoryError):
            return cluster
        middle = [steady(times) for times in found]
        if len(middle) > 1:
            cluster = replace(cluster, spread=_spread(found))
        if not cluster.shared:
            return cluster
        one = replace(cluster, per_host=1, chip=cluster.chip_for(len(self.devices)), shared=False)
        seen = Observation(replace(workload, batch_size=size), spec, fmean(middle))
        return replace(cluster, part=planning.calibrated(one, [seen], WIDE).chip)

    def measure(self, spec: StrategySpec) -> float | str:
        """Return the seconds of a step under a strategy, or the reason as text if the step could not run."""
        return self._seconds(spec)

    def steps(self, batch_size: int) -> float:
        """Return the seconds of a step on one device, for a network that could not be traced."""
        seconds = self._seconds(StrategySpec(), batch_size=batch_size)
        if isinstance(seconds, str):
            raise StrategyError(
                "a step must run on one device to be measured", got=seconds, remedy="correct the task first"
            )
        return seconds

    def _seconds(self, spec: StrategySpec, **more: Any) -> float | str:
        devices = self.devices[: spec.num_devices]
        if spec.num_devices == 1:
            devices = [replace(self.devices[0], share=1.0, slot=0)]
        try:
            found = self._run(functools.partial(training.time_steps, task=self._task, spec=spec, **more), devices)
        except (ManyhandsError, RuntimeError, MemoryError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return float(max(steady(times) for times in found))

    def _run(self, fn: Callable[[World], Any], devices: Sequence[Device]) -> list[Any]:
        return runtime.call(fn, devices, self._timeout)

    def _with_links(self, cluster: Cluster) -> Cluster:
        times = self._run(_sweep, self.devices)[0]
        count = len(self.devices)
        (_, first), (middle, _), (large, last) = zip(SWEEP, times, strict=True)
        travelling = max(1e-9, last - times[1])
        rate = 2 * (count - 1) / count * (large - middle) / travelling
        way = Link(name=cluster.inside.name, bandwidth=rate, share=1.0, latency=0.0, source="measured")
        return replace(cluster, inside=way, exchange=first)

    def _feed(self) -> float | None:
        """Return the samples per second that the data feed delivers without training; None if it delivers none."""
        source = source_of(self._task)
        size = check_source(source, self._task.batch_size)
        feed = Feed(source, batch_size=size, workers=self._task.workers)
        samples, began = 0, time.perf_counter()
        try:
            for batch in feed.epoch(Cursor()):
                samples += batch.global_samples
                if time.perf_counter() - began > FEED_SECONDS:
                    break
        finally:
            feed.close()
        return samples / max(1e-9, time.perf_counter() - began) if samples else None

    def _noise(self, batch_size: int) -> float | None:
        """Return the gradient noise scale at the initial weights; None if it cannot be computed."""
        small, large = max(1, batch_size // 4), batch_size
        if self._task.loss is None or small == large:
            return None
        sample = functools.partial(training.gradient_squares, task=self._task, sizes=(small, large))
        with contextlib.suppress(ManyhandsError, RuntimeError, ValueError):
            few, many = self._run(sample, [replace(self.devices[0], share=1.0, slot=0)])[0]
            if few and many:
                return planning.noise_scale(small, few, large, many)
        return None


def workload_of(task: Task, name: str, bench: Bench) -> tuple[Workload, list[str]]:
    """Return the workload of a task, and notices.

    If the network cannot be traced, whole steps are measured instead, and a notice gives the reason.
    """
    source = source_of(task)
    batch_size = check_source(source, task.batch_size)
    feed = Feed(source, batch_size=batch_size, workers=0)
    try:
        batch = feed.peek(min(ROWS, batch_size))
    finally:
        feed.close()
    try:
        networks = {p: costs.trace(task, batch, rows=ROWS, precision=p) for p in ("fp32", "bf16")}
        return Workload(networks=networks, batch_size=batch_size, name=name), []
    except CannotTrace as error:
        network = _measured(task, batch_size, bench, first_dim(batch))
        return Workload(networks={"fp32": network}, batch_size=batch_size, name=name), [str(error)]


def _measured(task: Task, batch_size: int, bench: Bench, rows: int) -> Network:
    """Return a network that cannot be traced as a single part, with the step time measured at two batch sizes."""
    small, large = _sizes(batch_size)
    first, second = bench.steps(small), bench.steps(large)
    each = max(1e-9, (second - first) / (large - small))
    start = max(0.0, first - each * small)
    device = bench.cluster().chip
    return costs.one_piece(task, rows=ROWS, each=each, start=start, chip=device)


def _sizes(batch_size: int) -> tuple[int, int]:
    """Return two batch sizes to measure: a quarter of the task's batch size and that size; 1 and 2 for a size of 1."""
    return (max(1, batch_size // 4), batch_size) if batch_size > 1 else (1, 2)


def _chip_of(device: Device) -> Chip:
    if device.kind == "cpu":
        one, cores = chip("CPU"), num_cores()
        # The catalogue's core is a typical one. A measured core may be faster, so the peaks that bound the fitted
        # fractions are those of the fastest cores, and the fractions begin at the same products and bytes per second.
        peak = OPERATIONS_PER_CYCLE.get(torch.backends.cpu.get_cpu_capability(), 16) * FASTEST_CLOCK
        faster, wider = max(1.0, peak / one.flops["fp32"]), FASTEST_STREAM / one.bandwidth
        return replace(
            one,
            flops={precision: rate * cores * faster for precision, rate in one.flops.items()},
            reach=one.reach / faster,
            attention=one.attention / faster,
            bandwidth=FASTEST_STREAM * cores,
            streaming=one.streaming / wider,
            memory=float(device.memory),
        )
    described = torch.cuda.get_device_properties(device.index) if device.kind == "cuda" else None
    if described is None:
        return make_chip(device.kind, {"flops": 1e13, "memory": 16e9, "bandwidth": 4e11})
    try:
        known = chip(described.name)
    except ManyhandsError:
        known = make_chip(described.name, {"flops": 1e14, "memory": 1e9, "bandwidth": 1e12})
    return replace(known, memory=float(described.total_memory) * device.share)


def _left_over(cluster: Cluster, seen: Sequence[Observation], workload: Workload) -> Correction:
    """Return the correction of estimated step times by the measured ones.

    It covers for example full caches, with which twice the batch takes more than twice the time. Several devices that
    share a machine get no correction, because their constants were fitted while all of them computed.
    """
    left = planning.Residuals.of(cluster, seen).correction(workload)
    return lambda spec, rows: left(spec, rows) if spec.num_devices == 1 or not cluster.shared else 1.0


def steady(times: Sequence[float]) -> float:
    """Return the typical step time: the lower quartile, because other load on the machine can only add time.

    >>> steady([1.0, 1.1, 1.2, 9.0, 1.0])
    1.0
    """
    return sorted(times)[(len(times) - 1) // 4]


def _spread(found: Sequence[Sequence[float]]) -> float:
    """Return the relative standard deviation of step times over all devices, estimated robustly from the median."""
    every = [seconds for times in found for seconds in times]
    middle = median(every)
    return min(0.5, 1.48 * median(abs(seconds - middle) for seconds in every) / middle)


def _apart(world: World, task: Task, spec: StrategySpec, batch_size: int) -> list[float]:
    """Return the times of steps that this rank takes alone, while the other ranks take theirs at the same time."""
    world.barrier()
    alone = NullWorld(world.rank_info.device, world.channel)
    return training.time_steps(alone, task, spec, batch_size=batch_size)


def _sweep(world: World) -> list[float]:
    """Return the seconds of an all-reduce for each size in `SWEEP`, each as the median of five."""
    times = []
    for size in SWEEP:
        tensor = torch.zeros(size // 4, device=world.device)
        each = []
        for _ in range(5):
            world.barrier()
            began = time.perf_counter()
            world.all_reduce(tensor)
            if world.device.type != "cpu":
                torch.accelerator.synchronize(world.device)
            each.append(time.perf_counter() - began)
        times.append(median(each))
    return times
