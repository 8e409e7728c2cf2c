"""A GPU: predicted against measured peak memory and step times of a GPT and a ResNet, in one device's ways to train.

`python -m benchmarks.plan_gpu [--cpu]`. Memory is what torch has given out at the most while a few steps are taken as
`fit` takes them, less what libraries had set up for themselves before. Step times are predicted twice, which is noted
and no check: from the catalogue alone, and from steps of a quarter and of half the batch. `--cpu` takes small networks,
which shows the form and not the figures.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands import training
from manyhands.api.bench import WIDE, Bench, steady, workload_of
from manyhands.core import StrategySpec
from manyhands.distributed import Device, NullWorld
from manyhands.planning import Cluster, Observation, Workload, calibrated, estimate

from .memory import Block
from .plan_local import adamw, classes, next_token
from .report import Check, Report

SPECS = {"fp32": "single", "bf16": "precision=bf16", "recompute": "recompute=blocks", "accumulate 4": "accumulate=4"}
BUDGET = {"cuda": 0.5, "cpu": 0.0}
"""Seconds of steps that are timed, by kind of device."""


class Gpt(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, width: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions beside a short way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.around = nn.Sequential()
        if stride > 1:
            self.around = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.around(x))


def resnet(width: int) -> nn.Module:
    """ResNet-18, of this width."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [
        nn.Sequential(Residual(before, after, 1 if before == after else 2), Residual(after, after, 1))
        for before, after in pairwise(widths)
    ]
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 1000))


def tasks(*, cpu: bool) -> dict[str, mh.Task]:
    """Both works, as large as they are on a GPU or as small as a test bears."""
    width, layers, words, length, rows = (32, 2, 64, 16, 4) if cpu else (1024, 12, 32768, 512, 16)
    channels, pixels, images = (4, 64, 4) if cpu else (64, 224, 128)
    pictures = (torch.randn(images, 3, pixels, pixels), torch.randint(1000, (images,)))
    return {
        "GPT": mh.Task(
            model=partial(Gpt, width, layers, words, length),
            loss=next_token,
            optimizer=adamw,
            data=torch.randint(words, (rows, length + 1)),
            batch_size=rows,
        ),
        "ResNet": mh.Task(
            model=partial(resnet, channels), loss=classes, optimizer=adamw, data=pictures, batch_size=images
        ),
    }


@dataclass(frozen=True)
class Case:
    """A work in one way: bytes and seconds, predicted and measured."""

    name: str
    bytes: tuple[float, float]
    seconds: tuple[float, float]
    listed: float
    """Seconds by the catalogue alone."""


def cases(device: Device) -> Iterator[Case]:
    """All works in all ways on a device."""
    for name, task in tasks(cpu=device.kind == "cpu").items():
        bench = Bench(task, str(device), 120.0)
        workload, _ = workload_of(task, name, bench)
        listed = bench.cluster()
        here = {precision: _calibrated(task, workload, listed, device, precision) for precision in ("fp32", "bf16")}
        for way, text in SPECS.items():
            spec = StrategySpec.parse(text)
            bytes_, seconds = _measured(partial(_steps, task, spec, task.batch_size), device)
            guess = estimate(workload, here[spec.precision], spec)
            by_list = estimate(workload, listed, spec).seconds
            yield Case(f"{name}, {way}", (guess.memory.total, bytes_), (guess.seconds, seconds), by_list)


def _calibrated(task: mh.Task, workload: Workload, listed: Cluster, device: Device, precision: str) -> Cluster:
    """From steps that are smaller than the predicted ones; libraries set themselves up on the way."""
    spec = StrategySpec(precision=precision)
    seen = []
    for rows in (workload.batch_size // 4, workload.batch_size // 2):
        seconds = steady(_steps(task, spec, rows, device))
        seen.append(Observation(replace(workload, batch_size=rows), spec, seconds))
    return calibrated(listed, seen, WIDE)


def _steps(task: mh.Task, spec: StrategySpec, rows: int, device: Device) -> list[float]:
    return training.time_steps(NullWorld(device), task, spec, batch_size=rows, budget=BUDGET[device.kind])


def _measured(steps: Callable[[Device], list[float]], device: Device) -> tuple[float, float]:
    """Bytes at the most, beyond what was there before, and seconds of a step."""
    gc.collect()
    if device.kind == "cpu":
        # The size of a process says nothing of networks as small as these: the form alone.
        seconds = steady(steps(device))
        return float(psutil.Process().memory_info().rss), seconds
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = steady(steps(device))
    return float(torch.cuda.max_memory_allocated() - before), seconds


def score(report: Report, device: Device) -> None:
    """Rows, the check of memory, and notes on time."""
    began = time.perf_counter()
    found = list(cases(device))
    errors = []
    for case in found:
        guess, held = (1e-9 * size for size in case.bytes)
        rows = report.add(f"{case.name}: gigabytes", {"measured": [held], "predicted": [guess]}, "measured")
        errors.append(abs(rows["predicted"].ratio - 1))
        guess, taken = case.seconds
        times = {"measured": [taken], "predicted": [guess], "by the catalogue": [case.listed]}
        report.add(f"{case.name}: step", times, "measured")
    report.checks["gpu_memory_error"] = Check(value=fmean(errors), at_most=0.10)
    report.notes["gpu_memory_worst_error"] = round(max(errors), 4)
    report.notes["gpu_step_error"] = round(fmean(abs(c.seconds[0] / c.seconds[1] - 1) for c in found), 4)
    report.notes["gpu_step_error_by_the_catalogue"] = round(fmean(abs(c.listed / c.seconds[1] - 1) for c in found), 4)
    report.notes["gpu_seconds_of_measuring"] = round(time.perf_counter() - began, 1)


def main() -> None:
    """Measures on a GPU, or shows the form on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="small networks on a CPU: the form, not the figures")
    asked = parser.parse_args()
    report = Report("plan_gpu", asked.cpu)
    score(report, Device("cpu" if asked.cpu else "cuda"))
    report.finish()


if __name__ == "__main__":
    main()
