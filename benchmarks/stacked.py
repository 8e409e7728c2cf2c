"""A hundred networks as one program, against one in the usual loop, one in a CUDA graph, and vmap written by hand.

`python -m benchmarks.stacked [--quick] [--cpu]`. Everybody trains the same networks on the same arrays, which lie on
the device. Blocks of steps are timed from one synchronization to the next after a warm-up, and medians are compared. A
population is timed as people use it: it draws every member's own order, and reads every member's losses. `--cpu` takes
small networks and a few of them, which shows the form and not the figures. Results are saved after each work.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

import manyhands as mh
from manyhands.vectorized import Population

from .report import Check, Report
from .stacked_works import StackedWork, loss, works

BARS: dict[str, dict[str, float]] = {"transformer": {"at_least": 20.0}, "cnn": {"at_least": 18.0}}
LONG_RUN = 10**6
Blocks = list[float]
Step = Callable[[], object]


class Place:
    """Where it is measured, and how much."""

    def __init__(self, *, cpu: bool, quick: bool) -> None:
        self.device = torch.device("cpu") if cpu else torch.device("cuda", 0)
        self.is_cpu = cpu
        self.members = 4 if cpu else 100
        self.rounds = 3 if cpu or quick else 5

    def wait(self) -> None:
        """Until the device has done what it was asked."""
        if not self.is_cpu:
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Lets the last contender's memory go."""
        gc.collect()
        if not self.is_cpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """GiB at most since `tidy`."""
        return 0.0 if self.is_cpu else round(torch.cuda.max_memory_allocated() / 2**30, 3)


def timed(place: Place, block: Step, steps: int) -> Blocks:
    """Seconds per step of several blocks; the first does not count."""
    times = []
    for _ in range(place.rounds + 1):
        place.wait()
        began = time.perf_counter()
        block()
        place.wait()
        times.append((time.perf_counter() - began) / steps)
    return times[1:]


def batches(work: StackedWork, place: Place) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches, gathered on the device."""
    inputs, targets = (array.to(place.device) for array in work.data)
    while True:
        order = torch.randperm(len(inputs), device=place.device)
        for ids in order[: len(order) - len(order) % work.batch_size].split(work.batch_size):
            yield inputs[ids], targets[ids]


def autocast(place: Place, bf16: bool) -> Any:
    """Where a network is computed."""
    return torch.autocast(place.device.type, dtype=torch.bfloat16, enabled=bf16)


def one_eager(work: StackedWork, place: Place, bf16: bool) -> Blocks:
    """One network in the usual loop."""
    model = work.model().to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    feed = batches(work, place)

    def block() -> None:
        for _ in range(work.steps):
            with autocast(place, bf16):
                value = loss(model, next(feed))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()

    return timed(place, block, work.steps)


def one_captured(work: StackedWork, place: Place) -> Blocks:
    """One network whose whole step is a CUDA graph: the least that one can take."""
    model = work.model().to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True, fused=True)
    feed = batches(work, place)
    batch = tuple(tensor.clone() for tensor in next(feed))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=work.bf16, cache_enabled=False):
            value = loss(model, batch)  # type: ignore[arg-type]
        value.backward()
        optimizer.step()

    replay = captured(step)

    def block() -> None:
        for _ in range(work.steps):
            for static, tensor in zip(batch, next(feed), strict=True):
                static.copy_(tensor)
            replay()

    return timed(place, block, work.steps)


def by_hand(work: StackedWork, place: Place, count: int) -> Blocks:
    """Many networks by torch.func as its own tutorial has it, with an Adam of plain operations; in a CUDA graph too."""
    models = [work.model().to(place.device) for _ in range(count)]
    parameters, buffers = stack_module_state(models)
    base = models[0]
    first, second = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
    counter = torch.zeros((), device=place.device)
    arrays = [array.to(place.device) for array in work.data]
    static = [array[: work.batch_size].expand(count, *array[: work.batch_size].shape).clone() for array in arrays]

    def of_one(parameters: Any, buffers: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        def model(inputs: Tensor) -> Any:
            return functional_call(base, (parameters, buffers), (inputs,))

        with torch.autocast(place.device.type, dtype=torch.bfloat16, enabled=work.bf16, cache_enabled=False):
            return loss(model, (inputs, targets))  # type: ignore[arg-type]

    def step() -> None:
        gradients, _ = vmap(grad_and_value(of_one))(parameters, buffers, *static)
        counter.add_(1)
        with torch.no_grad():
            for name, p in parameters.items():
                first[name].lerp_(gradients[name], 0.1)
                second[name].mul_(0.999).addcmul_(gradients[name], gradients[name], value=0.001)
                scale = (second[name] / (1 - 0.999**counter)).sqrt_().add_(1e-8)
                p.mul_(1 - 1e-6).sub_(1e-4 * first[name] / (1 - 0.9**counter) / scale)

    for p in parameters.values():
        p.requires_grad_(False)
    run: Step = step if place.is_cpu else captured(step)

    def block() -> None:
        for _ in range(work.steps):
            ids = torch.randint(0, len(arrays[0]), (count, work.batch_size), device=place.device)
            for mine, array in zip(static, arrays, strict=True):
                mine.copy_(array[ids])
            run()

    return timed(place, block, work.steps)


def captured(step: Step) -> Step:
    """A step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def population(work: StackedWork, place: Place, count: int, capture: str) -> Blocks:
    """Ours."""
    spec = mh.Single(precision="bf16" if work.bf16 else "fp32", capture=capture)
    tasks = [work.task(number) for number in range(count)]
    with Population(tasks, spec, device=place.device, steps=LONG_RUN, notice=print) as many:
        many.step(8)
        return timed(place, lambda: many.step(work.steps), work.steps)


def main() -> None:
    """Measures all works."""
    asked = _arguments()
    warnings.filterwarnings("ignore")
    place = Place(cpu=asked.cpu, quick=asked.quick)
    if not asked.cpu:
        torch.cuda.init()
        torch.set_float32_matmul_precision("high")
    report = Report("stacked", asked.quick or asked.cpu)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it with what there is
        for key, work in works(small=asked.cpu).items():
            add(report, key, work, place)
            if asked.quick and not asked.cpu:
                break
    report.finish()


def add(report: Report, key: str, work: StackedWork, place: Place) -> None:
    """Measures all contenders of a work."""
    many, times = place.members, {}
    contenders: dict[str, Callable[[], Blocks]] = {"one, eager": lambda: one_eager(work, place, work.bf16)}
    if work.bf16:
        contenders["one, eager in fp32"] = lambda: one_eager(work, place, False)
    if not place.is_cpu:
        contenders["one, captured"] = lambda: one_captured(work, place)
    contenders[f"{many}, vmap by hand"] = lambda: by_hand(work, place, many)
    contenders[f"{many}, population"] = lambda: population(work, place, many, "graph")
    if not place.is_cpu:
        contenders[f"{many}, population, compiled"] = lambda: population(work, place, many, "compile")
    for count in work.sizes if not report.quick or place.is_cpu else ():
        if count != many:
            contenders[f"{count}, population"] = lambda count=count: population(work, place, count, "graph")
    for name, contender in contenders.items():
        place.tidy()
        try:
            times[name] = contender()
        except torch.OutOfMemoryError as error:
            print(f"{work.name}: {name} did not fit: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"{work.name}: {name} {median(times[name]) * 1e3:.4f} ms, {place.peak()} GiB", flush=True)
        report.notes[f"{work.name}: {name}, peak GiB"] = place.peak()
    report.add(work.name, times, "one, eager")
    check(report, key, times, many)
    report.save()


def check(report: Report, key: str, times: dict[str, Blocks], many: int) -> None:
    """The checks: the faster of our two ways against the faster plain loop."""
    ours = min(median(blocks) for name, blocks in times.items() if name.startswith(f"{many}, population"))
    eager = min(median(blocks) for name, blocks in times.items() if name.startswith("one, eager"))
    if key == "mlp":
        report.checks["mlp100_over_one"] = Check(value=ours / eager, at_most=0.9)
        if "one, captured" in times:
            report.checks["mlp100_over_captured_one"] = Check(value=ours / median(times["one, captured"]))
    else:
        report.checks[f"{key}100_gain"] = Check(value=many * eager / ours, **BARS[key])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the MLP alone, with fewer rounds")
    parser.add_argument("--cpu", action="store_true", help="small networks on the CPU: the form, not the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
