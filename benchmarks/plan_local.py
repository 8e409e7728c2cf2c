"""This machine: predicted against measured step times and peak memory, for strategies and over links between hosts.

The planner calibrates itself as `mh.plan` does: two batch sizes, steps of all devices at once, a sweep of sums. Then
every case is predicted, and its steps take turns with plain ones of a single device that tell how fast the machine is
just now: one that does other work is another one a minute later. What counts is the median over rounds of
predicted over measured. Hosts are network namespaces whose links have a rate; they need root.
"""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands import training
from manyhands.api.bench import Bench, steady, workload_of
from manyhands.api.runtime import runtime
from manyhands.core import StrategySpec
from manyhands.costs import Chip, link
from manyhands.distributed import Device, NullWorld, World, resolve
from manyhands.monitoring import View
from manyhands.planning import Cluster, estimate
from manyhands.testing import NamespaceHosts

from .plan_vtrain import Block

WIDTH, LAYERS, WORDS, LENGTH = 128, 4, 2048, 64
ROUNDS, WARM_UP, TURNS = 3, 2, 5
RATES = {"100mbit": 12.5e6, "1gbit": 125e6}
M_MMAP_THRESHOLD = -3


class GPT(nn.Module):
    """A GPT that two cores can train."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross-entropy of the token after each."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def cnn() -> nn.Module:
    """Convolutions on small pictures."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def classes(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Its optimizer."""
    return torch.optim.AdamW(model.parameters())


TASKS = {
    "GPT": mh.Task(
        model=GPT, loss=next_token, optimizer=adamw, data=torch.randint(WORDS, (256, LENGTH + 1)), batch_size=16
    ),
    "CNN": mh.Task(
        model=cnn,
        loss=classes,
        optimizer=adamw,
        data=(torch.randn(256, 3, 32, 32), torch.randint(10, (256,))),
        batch_size=16,
    ),
}
SPECS = {
    "one device": "single",
    "two replicas": "replicas=2",
    "four replicas": "replicas=4",
    "accumulate 4": "accumulate=4",
    "recompute": "recompute=blocks",
    "two stages": "stages=2,microbatches=4",
}
HAS_BLOCKS = ("GPT",)


Pairs = dict[str, list[tuple[float, float]]]
"""What was predicted and what was measured, by case and round."""


def cases(rounds: int = ROUNDS) -> Pairs:
    """Seconds of a step."""
    found: Pairs = {}
    for _ in range(rounds):
        for name, task in TASKS.items():
            for case, pair in _once(name, task):
                found.setdefault(case, []).append(pair)
    return found


def _once(name: str, task: mh.Task) -> Iterator[tuple[str, tuple[float, float]]]:
    """Every case of a task."""
    benches = {count: _Ready(task, count) for count in (2, 4)}
    for label, text in SPECS.items():
        spec = StrategySpec.parse(text)
        if _runs(spec, name):
            yield f"{name}, {label}", benches[max(2, spec.num_devices or 1)].here(spec)
    for rate, bytes_per_second in RATES.items():
        yield f"{name}, two hosts at {rate}", benches[2].over(rate, bytes_per_second)


class _Ready:
    """A bench that has calibrated itself for so many devices."""

    def __init__(self, task: mh.Task, devices: int) -> None:
        self.task = task
        self.bench = Bench(task, f"cpu*{devices}", 60.0)
        workload, _ = workload_of(task, "local", self.bench)
        self.workload, self.cluster = self.bench.calibrated(workload, self.bench.cluster(), "fp32")

    def here(self, spec: StrategySpec) -> tuple[float, float]:
        """Predicted and measured seconds of a step on this machine."""
        count = spec.num_devices or 1
        devices = self.bench.devices[:count] if count > 1 else [replace(self.bench.devices[0], share=1.0, slot=0)]
        where = replace(self.cluster, chip=self.cluster.chip_for(count), shared=False, part=None)
        return self._pair(spec, where, devices, lambda work: work)

    def over(self, rate: str, bytes_per_second: float) -> tuple[float, float]:
        """The same for two replicas on hosts of their own, as fast as devices are here while both work."""
        chip, network = self.cluster.chip_for(2), link("Ethernet", bytes_per_second)
        apart = replace(self.cluster, hosts=2, per_host=1, chip=chip, shared=False, part=None, network=network)
        with NamespaceHosts(2, rate=rate) as hosts:
            return self._pair(StrategySpec(replicas=2), apart, resolve("cpu*2")[0], hosts.joined)

    def _pair(
        self,
        spec: StrategySpec,
        where: Cluster,
        devices: Sequence[Device],
        placed: Callable[[Callable[[World], Any]], Callable[[World], Any]],
    ) -> tuple[float, float]:
        # A plain step is not predicted from itself, but from one of the other size that was calibrated.
        rows = self.workload.batch_size // (4 if spec == StrategySpec() else len(devices))
        work = placed(partial(by_turns, task=self.task, spec=spec, rows=rows))
        # As the bench measures: one device in this process, with its threads.
        found = runtime.start(work, devices, 120, _unheard, View())
        plain, split = ([steady(times[which]) for times in found] for which in (0, 1))
        guessed = partial(estimate, correction=self.bench.correction if len(devices) == 1 else None)
        alone = guessed(replace(self.workload, batch_size=rows), where, StrategySpec()).seconds
        now = replace(where, chip=_slowed(where.chip, fmean(plain) / alone))
        return guessed(self.workload, now, spec).seconds, max(split)


def by_turns(world: World, task: mh.Task, spec: StrategySpec, rows: int) -> tuple[list[float], list[float]]:
    """Seconds of steps of this rank by itself, of so many rows, and of those that all take together, one by one."""
    plain = training.Steps(
        NullWorld(world.rank_info.device, world.channel), task.replace(batch_size=rows), StrategySpec()
    )
    split = training.Steps(world, task, spec)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + TURNS):
        for steps, seconds in zip((plain, split), times, strict=True):
            world.barrier()
            began = time.perf_counter()
            steps.take()
            if turn >= WARM_UP:
                seconds.append(time.perf_counter() - began)
    plain.close()
    split.close()
    return times


def _slowed(chip: Chip, factor: float) -> Chip:
    """A chip that takes so many times as long for everything."""
    reach, streaming = chip.reach / factor, chip.streaming / factor
    return replace(chip, reach=reach, streaming=streaming, ramp=chip.ramp * factor, operation=chip.operation * factor)


def _runs(spec: StrategySpec, name: str) -> bool:
    return name in HAS_BLOCKS or not (spec.recompute or spec.stages > 1)


def _unheard(*_: object) -> None:
    pass


# -- memory ------------------------------------------------------------------------------------------------------------

MEMORY = {
    "GPT, one device": ("GPT", "single", 16),
    "GPT, accumulate 4": ("GPT", "accumulate=4", 32),
    "GPT, recompute": ("GPT", "recompute=blocks", 16),
    "CNN, one device": ("CNN", "single", 64),
}


def peaks() -> Pairs:
    """Bytes at the most."""
    found: Pairs = {}
    for label, (name, text, rows) in MEMORY.items():
        task = TASKS[name].replace(batch_size=rows)
        spec = StrategySpec.parse(text)
        bench = Bench(task, "cpu", 60.0)
        workload, _ = workload_of(task, "local", bench)
        guess = estimate(workload, bench.cluster(), spec).memory.total
        steps = partial(training.time_steps, task=task, spec=spec, budget=0.0)
        work = partial(peak, few=partial(steps, batch_size=spec.accumulate), make=steps)
        (measured,) = runtime.engine.start(work, resolve("cpu*2")[0][:1], timeout=120).wait(_unheard, _unheard)
        found[label] = [(guess, measured)]
    return found


def peak(world: World, few: Callable[[World], Any], make: Callable[[World], Any]) -> float:
    """Bytes that this process holds at the most beyond what it held before; what is freed is given back at once.

    Steps of a few rows come first: what libraries set up for themselves is no part of a step.
    """
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    few(world)
    gc.collect()
    library.malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    make(world)
    return float(_status("VmHWM") - before)


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
