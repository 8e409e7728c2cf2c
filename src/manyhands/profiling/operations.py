"""Time of a step by operation and by module, and its timeline, measured by torch's profiler."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, record_function

from ..distributed import message

MODULE = "module "
STEP = "manyhands step"
EVALUATED = "autograd::engine::evaluate_function"
MAX_BARS = 4000
"""Maximum number of bars in the timeline; the longest ones are kept."""
WAITING = "_c10d_functional::wait_tensor"
"""The operation that waits for the collective of a tensor-parallel layer."""
_NAMES = (MODULE, STEP, "Optimizer.")
"""Prefixes of named ranges that are not operations; on a GPU they appear beside the kernels."""


@message
@dataclass(frozen=True)
class OperationStats:
    """One kind of operation: its number of calls per step, and the seconds of a step that it takes by itself."""

    name: str
    count: float
    seconds: float


@message
@dataclass(frozen=True)
class ModuleTime:
    """Seconds of a step that a module takes in forward and in backward, without its submodules."""

    name: str
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Seconds of a step in forward and backward together."""
        return self.forward + self.backward


@message
class Bar(NamedTuple):
    """A bar on a track of the timeline, in seconds from the start of the step."""

    track: str
    name: str
    start: float
    end: float


@message
@dataclass(frozen=True, kw_only=True)
class OperationTable:
    """Operations and modules of a step, slowest first, as medians over the profiled steps."""

    operations: tuple[OperationStats, ...]
    modules: tuple[ModuleTime, ...]
    bars: tuple[Bar, ...]
    """Bars of the last profiled step."""
    busy: float | None = None
    """Fraction of the time in which the accelerator was busy; None on a CPU."""
    waited: tuple[float, float] = (0.0, 0.0)
    """Seconds of forward and of backward in which tensor-parallel layers waited for collectives."""
    num_started: float = 0.0
    """Number of operations that the host launches in a step."""


def watch(model: nn.Module, device: torch.device, take: Callable[[], None], num_steps: int) -> OperationTable:
    """Take `num_steps` steps by calling `take` under torch's profiler, and return their operations."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    profiler = torch.profiler.profile(activities=activities, acc_events=True)
    with _hushed():
        profiler.start()
    try:
        with _naming_modules(model):
            for _ in range(num_steps):
                with record_function(STEP):
                    take()
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
    finally:
        with _hushed():
            profiler.stop()
    events: Any = profiler.events()
    return _summed(list(events), device)


@contextmanager
def _hushed() -> Iterator[None]:
    """Discard stderr within the context: the profiler library prints a line whenever it starts or stops."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def _naming_modules(model: nn.Module) -> Iterator[None]:
    """Within the context, mark start and end of every module's forward by global hooks, without changing modules."""
    names = {module: name for name, module in model.named_modules()}
    running: list[tuple[nn.Module, Any]] = []

    def enter(module: nn.Module, *_: Any) -> None:
        if module in names:
            mark = record_function(f"{MODULE}{names[module]}")
            mark.__enter__()
            running.append((module, mark))

    def leave(module: nn.Module, *_: Any) -> None:
        while running and module in names:
            last, mark = running.pop()
            mark.__exit__(None, None, None)
            if last is module:
                break

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _summed(events: list[Any], device: torch.device) -> OperationTable:
    on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU and not event.is_async]
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    on_device = [event for event in kernels if not event.name.startswith(_NAMES)]
    steps = [event for event in on_host if event.name == STEP]
    owners = _owners(on_host)
    is_cuda = device.type == "cuda"
    ends = [step.time_range.end for step in steps]
    counts, seconds = _Sums(len(steps)), _Sums(len(steps))
    modules, others = _Sums(len(steps)), _Sums(len(steps))
    for event in on_host:
        if event.name.startswith((*_NAMES, "autograd::")):
            continue
        step = next((number for number, end in enumerate(ends) if event.time_range.start <= end), len(ends) - 1)
        own = float(event.self_device_time_total if is_cuda else event.self_cpu_time_total) * 1e-6
        counts.add(event.name, step, 1.0)
        seconds.add(event.name, step, own)
        parent = event.cpu_parent
        if event.name.startswith("aten::") and (parent is None or not parent.name.startswith("aten::")):
            others.add("started", step, 1.0)
        if event.name == WAITING:
            others.add("backward" if _evaluated(event) else "forward", step, event.time_range.elapsed_us() * 1e-6)
        owner = owners.get(id(event))
        if owner is not None:
            modules.add(owner, step, own)
    usual, often = seconds.medians(), counts.medians()
    operations = [OperationStats(name, often[name], spent) for name, spent in usual.items() if spent > 0]
    spent, usually = modules.medians(), others.medians()
    names = dict.fromkeys(name for name, _ in spent)
    times = [ModuleTime(name, spent.get((name, 0), 0.0), spent.get((name, 1), 0.0)) for name in names]
    return OperationTable(
        operations=tuple(sorted(operations, key=lambda one: -one.seconds)),
        modules=tuple(sorted(times, key=lambda one: -one.seconds)),
        bars=tuple(_bars(on_host, on_device, steps)),
        busy=_busy(on_device, steps) if is_cuda else None,
        waited=(usually.get("forward", 0.0), usually.get("backward", 0.0)),
        num_started=usually.get("started", 0.0),
    )


class _Sums:
    """Sums by key and step; their medians over the steps ignore occasional interference on the machine."""

    def __init__(self, num_steps: int) -> None:
        self._sums: dict[Any, list[float]] = defaultdict(lambda: [0.0] * num_steps)

    def add(self, key: Any, step: int, value: float) -> None:
        self._sums[key][step] += value

    def medians(self) -> dict[Any, float]:
        return {key: median(values) for key, values in self._sums.items()}


def _owners(events: Iterable[Any]) -> dict[int, tuple[str, int]]:
    """Return, by id of an event, the module in which it ran, and 1 if that was in backward, else 0.

    An operation of backward carries the sequence number of the forward operation whose gradient it computes.
    """
    forward: dict[int, str] = {}
    found: dict[int, tuple[str, int]] = {}
    ordered = sorted(events, key=lambda event: event.time_range.start)
    for event in ordered:
        module = _module(event)
        if module is not None:
            found[id(event)] = (module, 1 if _evaluated(event) is not None else 0)
            if event.sequence_nr >= 0 and _evaluated(event) is None:
                forward[event.sequence_nr] = module
    for event in ordered:
        node = _evaluated(event)
        if id(event) not in found and node is not None and node.sequence_nr in forward:
            found[id(event)] = (forward[node.sequence_nr], 1)
    return found


def _module(event: Any) -> str | None:
    """Return the name of the innermost module whose forward contains an event; None outside of modules."""
    while event is not None:
        if event.name.startswith(MODULE):
            return str(event.name.removeprefix(MODULE))
        event = event.cpu_parent
    return None


def _evaluated(event: Any) -> Any:
    """Return the event of the autograd node whose backward contains an event; None outside of backward."""
    while event is not None:
        if event.name.startswith(EVALUATED):
            return event
        event = event.cpu_parent
    return None


def _bars(on_host: list[Any], on_device: list[Any], steps: list[Any]) -> list[Bar]:
    """Return the events of the last step as bars of the timeline: modules, operations by thread, and kernels."""
    if not steps:
        return []
    first, last = steps[-1].time_range.start, steps[-1].time_range.end
    found = []
    for event in [*on_host, *on_device]:
        start, end = event.time_range.start, event.time_range.end
        if start < first or end > last or event.name == STEP or end <= start:
            continue
        track = "modules" if event.name.startswith(MODULE) else "operations"
        if event.device_type == torch.autograd.DeviceType.CUDA:
            track = "device"
        elif event.thread != steps[-1].thread:
            track = f"thread {event.thread}"
        name = event.name.removeprefix(MODULE) or "the network"
        found.append(Bar(track, name, (start - first) * 1e-6, (end - first) * 1e-6))
    longest = sorted(found, key=lambda bar: bar.start - bar.end)[:MAX_BARS]
    return sorted(longest, key=lambda bar: (bar.track, bar.start, -bar.end))


def _busy(on_device: list[Any], steps: list[Any]) -> float:
    """Return the fraction of the steps in which some kernel ran."""
    whole = sum(step.time_range.elapsed_us() for step in steps)
    covered, until = 0.0, float("-inf")
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in on_device):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return min(1.0, covered / whole) if whole else 0.0
