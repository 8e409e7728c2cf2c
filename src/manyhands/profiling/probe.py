"""Probe of a task's steps on one rank: first some steps are timed, then some are profiled in detail."""

from __future__ import annotations

import linecache
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.distributed import Work

from ..capture import own_stream
from ..core import StrategySpec, Task
from ..distributed import World, message
from ..training import Breakdown, Hand, Sample, Steps, time_steps
from .memory import MemoryProfile, MemoryWatch
from .operations import OperationTable, watch
from .other_load import OtherLoad

WARMUP = 3
WATCHED = 3
"""Number of steps whose operations are profiled."""
TIMES_LARGER = 4
"""Factor of the larger batch size whose step time shows whether the given batch size is too small."""
TRIAL_SECONDS = 0.3
FEW = 5
FELT = 0.1
"""Fraction of a step from which waiting for data is examined."""
LINE_SECONDS = 1.0
NUM_LINES = 5
MIN_LINES = 20
"""Number of samples below which no line is named."""


@message
@dataclass(frozen=True, kw_only=True)
class Largest:
    """The trained parameter with the most bytes."""

    name: str
    bytes: int
    total: int
    """Bytes of all trained parameters."""
    rows: float | None = None
    """Fraction of the parameter's rows that are not zero in a step's gradient; None if it is no matrix."""


@message
@dataclass(frozen=True, kw_only=True)
class Larger:
    """Lower quartiles of step times, with a larger batch of `rows` samples and with the given batch."""

    rows: int
    seconds: float
    usual: float
    """Seconds of a step with the given batch; `seconds` are those with the larger one."""


@message
@dataclass(frozen=True, kw_only=True)
class ReadingLine:
    """A line of user code that takes time while samples are read, in the process that reads them."""

    place: str
    """File name and line number."""
    function: str
    text: str
    """The source of the line."""
    share: float
    """Fraction of the reading."""

    def __str__(self) -> str:
        return f"{self.place} in {self.function}" + (f": {self.text}" if self.text else "")


@message
@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Measurements of the steps of one rank; a measurement that was not made is None."""

    breakdown: Breakdown
    samples: tuple[Sample, ...] = ()
    plain: Breakdown | None = None
    """Breakdown of eager steps, in addition, if steps run as CUDA graphs."""
    watched: OperationTable | None = None
    watched_sample: Sample | None = None
    """The step whose operations are in the timeline."""
    memory: MemoryProfile | None = None
    ceiling: float | None = None
    """Maximum FLOPs per second that this device reaches while all ranks work."""
    device: str = ""
    device_memory: int = 0
    sent: int = 0
    """Bytes of gradients that the rank sends in a step."""
    threads: int = 1
    cores: int = 1
    """Number of cores that this rank may use; `threads` is the number of its compute threads."""
    with_fewer_threads: float | None = None
    """Seconds of a step with one thread per core, if there are more threads than cores."""
    larger: Larger | None = None
    largest: Largest | None = None
    workers: int = 0
    """Number of data-loading processes."""
    reading: tuple[ReadingLine, ...] = ()
    """Lines that take most of the reading, if steps wait for data."""
    other_load: float | None = None
    """Fraction of the rank's CPU cores that other programs used; None if the measurement was too short."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.breakdown.rank

    @property
    def parts(self) -> Breakdown:
        """The breakdown with separate phases: that of eager steps if there is one."""
        return self.plain or self.breakdown


def probe(world: World, task: Task, spec: StrategySpec, steps: int) -> RankProfile:
    """Return measurements of a task's steps on this rank, `steps` of which are timed; all ranks must call this."""
    with own_stream(world.device):
        return _probe(world, task, spec, steps)


def _probe(world: World, task: Task, spec: StrategySpec, steps: int) -> RankProfile:
    taken = Steps(world, task, spec)
    try:
        found = _Probe(taken).run(steps)
    finally:
        taken.close()
    world.barrier()
    found["ceiling"] = ceiling(world.device, spec.precision)
    # If a step takes long, its batch is not too small.
    is_short = max(world.gather_objects(found["breakdown"].total)) < TRIAL_SECONDS
    larger = TIMES_LARGER * taken.batch_size
    if is_short and taken.num_samples is not None and taken.num_samples >= larger:
        usual, slower = (
            quantiles(time_steps(world, task, spec, batch_size=size, budget=TRIAL_SECONDS))[0]
            for size in (taken.batch_size, larger)
        )
        found["larger"] = Larger(rows=larger, seconds=slower, usual=usual)
    return RankProfile(**found)


class _Probe:
    """Measures the steps of one rank."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._hand = steps, steps.hand

    def run(self, count: int) -> dict[str, Any]:
        """Take the steps, `count` of which are timed, and return the measurements by field of RankProfile."""
        hand, steps, device = self._hand, self._steps, self._hand.world.rank_info.device
        found: dict[str, Any] = {"device": str(device), "device_memory": device.memory}
        load = OtherLoad(hand.world.rank_info.host)
        steps.expect(WARMUP + count)
        for _ in range(WARMUP):
            steps.take()
        found["samples"] = self._timed(count)
        steps.settle()
        found["breakdown"] = self._breakdown(found["samples"])
        if found["breakdown"].seconds.get("captured"):
            steps.take()
            found["plain"] = self._breakdown(self._timed(WARMUP))
        found |= {"sent": hand.replica.num_bytes, "workers": steps.feed.workers, **self._threads()}
        samples: list[Sample] = []
        found["watched"] = watch(hand.model, hand.device, lambda: samples.append(steps.sample()), WATCHED)
        found["watched_sample"] = samples[-1]
        for name in ("breakdown", "plain"):
            if name in found:
                found[name] = _with_waits(found[name], found["watched"].waited, samples)
        found["memory"], found["largest"] = self._held()
        found["other_load"] = load.end(hand.world)
        found["reading"] = self._reading(found["breakdown"])
        return found

    def _timed(self, count: int) -> tuple[Sample, ...]:
        self._hand.world.barrier()
        with _noting_waits(self._hand):
            return tuple(self._steps.sample() for _ in range(count))

    def _breakdown(self, samples: tuple[Sample, ...]) -> Breakdown:
        world = self._hand.world
        rows = [{"step": one.step, "seconds": one.seconds, "total": one.total} for one in samples]
        return Breakdown.of(world.rank, world.rank_info.host, rows)

    def _reading(self, taken: Breakdown) -> tuple[ReadingLine, ...]:
        """Return the lines that take most of the reading; none if steps hardly wait for data."""
        if taken.seconds.get("input", 0.0) < FELT * taken.total:
            return ()
        counts = self._steps.feed.sample_lines(LINE_SECONDS)
        if counts.total() < MIN_LINES:
            return ()
        return tuple(
            ReadingLine(
                place=f"{Path(file).name}:{number}",
                function=function,
                text=linecache.getline(file, number).strip(),
                share=count / counts.total(),
            )
            for (file, number, function), count in counts.most_common(NUM_LINES)
        )

    def _threads(self) -> dict[str, Any]:
        """Return the numbers of compute threads and cores; with more threads, also a step's time with fewer."""
        threads, cores = torch.get_num_threads(), _num_cores()
        found: dict[str, Any] = {"threads": threads, "cores": cores}
        crowded = self._hand.device.type == "cpu" and threads > cores
        if any(self._hand.world.gather_objects(crowded)):
            torch.set_num_threads(min(threads, cores))
            try:
                found["with_fewer_threads"] = median(one.total for one in self._timed(FEW))
            finally:
                torch.set_num_threads(threads)
        return found

    def _held(self) -> tuple[MemoryProfile, Largest | None]:
        """Take one step, and return its memory profile and the largest parameter."""
        weight, following = _WeightsProbe(self._hand), MemoryWatch(self._hand)
        try:
            with following:
                self._steps.take()
        finally:
            weight.remove()
        return following.found(), weight.largest


@contextmanager
def _noting_waits(hand: Hand) -> Iterator[None]:
    """Within the context, count waits for torch's own collectives, such as gathers of parameters, as communication."""
    wait = Work.wait

    def noted(work: Any, *args: Any, **kwargs: Any) -> Any:
        spans = hand.times.spans
        if spans is None or spans.now == "communication" or threading.current_thread() is not threading.main_thread():
            return wait(work, *args, **kwargs)
        with spans.during("communication"):
            return wait(work, *args, **kwargs)

    Work.wait = noted  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Work.wait = wait  # type: ignore[method-assign]


def _with_waits(taken: Breakdown, waited: tuple[float, float], watched: list[Sample]) -> Breakdown:
    """Return a breakdown in which waits for tensor-parallel collectives are moved from their phase to communication.

    `waited` are the seconds of forward and backward that the steps in `watched` waited.
    """
    seconds = dict(taken.seconds)
    for phase, wait in zip(("forward", "backward"), waited, strict=True):
        whole = median(one.seconds[phase] for one in watched)
        moved = min(1.0, wait / whole) * seconds[phase] if whole else 0.0
        seconds[phase] -= moved
        seconds["communication"] += moved
    return replace(taken, seconds=seconds)


class _WeightsProbe:
    """Finds the largest parameter and its gradient's rows, by a hook just before the optimizer's update."""

    def __init__(self, hand: Hand) -> None:
        self._named = {name: p for name, p in hand.model.named_parameters() if p.requires_grad}
        self._hooks = [o.register_step_pre_hook(self._look) for o in hand.optimizers.values()]
        self.largest: Largest | None = None

    def _look(self, *_: Any) -> None:
        sizes = {name: p.numel() * p.element_size() for name, p in self._named.items()}
        if not sizes:
            return
        name = max(sizes, key=lambda one: sizes[one])
        gradient = self._named[name].grad
        rows = None
        if gradient is not None and gradient.dim() == 2 and not hasattr(gradient, "to_local"):
            rows = float((gradient != 0).any(dim=1).double().mean())
        self.largest = Largest(name=name, bytes=sizes[name], total=sum(sizes.values()), rows=rows)

    def remove(self) -> None:
        """Remove the hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SIZES = {"cpu": (256, 512, 1024), "cuda": (4096, 8192)}
SECONDS = 0.1
"""Seconds for which matrix products of one size are repeated."""
TYPES = {"bf16": torch.bfloat16, "fp64": torch.float64}


def ceiling(device: torch.device, precision: str) -> float:
    """Return the FLOPs per second of the fastest matrix product that is measured on a device."""
    sizes = SIZES.get(device.type, SIZES["cpu"])
    return max(_rate(size, device, TYPES.get(precision, torch.float32)) for size in sizes)


def _rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)
    torch.mm(left, right, out=result)
    _finish(device)
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(left, right, out=result)
        _finish(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
