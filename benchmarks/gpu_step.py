"""A step on a GPU: `fit` against the plain loop, torch.compile, Lightning and Accelerate; times and peak memory.

`python -m benchmarks.gpu_step [--quick] [--works hf_bert,unet] [--peers eager,fit]`. Every contender trains the same
network on the same arrays, which are on the device; blocks of steps are timed from one synchronization to the next
after a warm-up, and medians are compared. fp32 matrix products run in TF32, as each of these libraries advises on such
a GPU. With `--works` or `--peers` the result is printed, and the recorded one stays.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh

from .gpu_works import WORKS, GpuWork, autocast, loss
from .report import Check, Report, arguments

PEAK_FLOPS = 989e12
"""The datasheet's dense bf16 rate of an H100 and an H200."""
BARS = {"mlp": 8.0, "resnet18": 4.5, "gpt_small": 6.0, "gpt2": 1.3}
BEST_BARS = {"hf_llama": 1.0, "hf_bert": 1.0, "unet": 1.0, "moe_masks": 0.98}
"""By work: the time of the fastest hand-written loop over that of `fit`."""
SHORT_EPOCHS, SHORT_EPOCHS_STEPS = "short_epochs", 3000
"""The name under which `--works` has the run with short epochs, and how many of its steps are timed."""
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
"""torch.compile's modes."""
LONG_RUN = 100_000
"""Steps that `fit` is asked for, as in real training; the measurement ends it earlier."""
Blocks = list[float]


class Clock:
    """Times blocks of steps."""

    def __init__(self, work: GpuWork, warm_up: int, rounds: int) -> None:
        self.work, self.left, self.rounds = work, warm_up, rounds
        self.blocks: Blocks = []
        self._began: float | None = None

    def tick(self) -> bool:
        """A step is done; True once all blocks are. More may follow until the run ends, and do not count."""
        if len(self.blocks) >= self.rounds:
            return True
        self.left -= 1
        if self.left > 0:
            return False
        torch.cuda.synchronize()
        now = time.perf_counter()
        if self._began is not None:
            self.blocks.append((now - self._began) / self.work.steps)
        self._began, self.left = now, self.work.steps
        return len(self.blocks) >= self.rounds


def batches(work: GpuWork) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches, gathered on the device."""
    inputs, targets = (array.cuda() for array in work.data())
    while True:
        order = torch.randperm(len(inputs), device="cuda")
        for ids in order[: len(order) - len(order) % work.batch_size].split(work.batch_size):
            yield inputs[ids], targets[ids]


def eager(work: GpuWork, clock: Clock, wrap: Callable[[nn.Module], Callable[..., Tensor]] = lambda m: m) -> None:
    """The usual loop."""
    torch.manual_seed(0)
    model = work.model().cuda()
    run = wrap(model)
    optimizer = work.optimizer(model)
    for batch in batches(work):
        with autocast(work):
            value = loss(run, batch)  # type: ignore[arg-type]
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if clock.tick():
            return


def compiled(work: GpuWork, clock: Clock) -> None:
    """The usual loop with torch.compile around the network."""
    eager(work, clock, torch.compile)
    torch._dynamo.reset()


def tuned(work: GpuWork, clock: Clock, mode: str, *, compiles_update: bool) -> None:
    """A hand-tuned loop: a mode of torch.compile for the network and, if asked, for the optimizer's update too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = work.model().cuda()
    run = torch.compile(model, mode=mode)
    optimizer = work.optimizer(model)
    update: Callable[[], Any] = optimizer.step
    if compiles_update:
        for group in optimizer.param_groups:
            group.update(lr=torch.tensor(group["lr"], device="cuda"), capturable=True, foreach=True)
        update = torch.compile(optimizer.step, mode=mode)
    for batch in batches(work):
        torch.compiler.cudagraph_mark_step_begin()
        with autocast(work):
            value = loss(run, batch)  # type: ignore[arg-type]
        value.backward()
        update()
        optimizer.zero_grad()
        if clock.tick():
            break
    torch._dynamo.reset()


def lightning(work: GpuWork, clock: Clock) -> None:
    """Lightning's Trainer, with everything off that would slow it."""
    import pytorch_lightning as pl

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.model()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return loss(self.net, batch)

        def on_train_batch_end(self, *_: object) -> None:
            if clock.tick():
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.net)

    class Endless(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return batches(work)

    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed" if work.bf16 else "32-true",
        max_steps=LONG_RUN,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        barebones=True,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Endless(), batch_size=None))


def accelerate(work: GpuWork, clock: Clock) -> None:
    """Accelerate around the usual loop."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    helper = Accelerator(mixed_precision="bf16" if work.bf16 else "no")
    model = work.model()
    model, optimizer = helper.prepare(model, work.optimizer(model))
    for batch in batches(work):
        with helper.autocast():
            value = loss(model, batch)
        helper.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        if clock.tick():
            return


class Ticks(mh.Callback):
    """Ends a manyhands run when its blocks are timed."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step(self, hand: mh.Hand) -> None:
        if self.clock.tick():
            hand.stop()


def ours(work: GpuWork, clock: Clock, capture: str = "auto") -> None:
    """`mh.fit`, told of a long run."""
    task = mh.Task(model=work.model, loss=loss, optimizer=work.optimizer, data=work.data(), batch_size=work.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        mh.fit(
            task,
            mh.Single(precision="bf16" if work.bf16 else "fp32", capture=capture),
            on="cuda:0",
            steps=LONG_RUN,
            epochs=LONG_RUN,
            folder=folder,
            callbacks=[Ticks(clock)],
            options=mh.options.Display(progress=False),
        )


def ours_graph(work: GpuWork, clock: Clock) -> None:
    """`mh.fit` that records and does not compile."""
    ours(work, clock, "graph")


CONTENDERS: dict[str, Callable[[GpuWork, Clock], None]] = {
    "eager": eager,
    "torch.compile": compiled,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "fit, recorded": ours_graph,
    "fit": ours,
}
TUNED: dict[str, Callable[[GpuWork, Clock], None]] = {
    f"torch.compile {mode}{' with update' * compiles_update}": partial(
        tuned, mode=mode, compiles_update=compiles_update
    )
    for mode in MODES
    for compiles_update in (False, True)
}
"""Hand-tuned loops, for the works that `fit` must not be slower on than the fastest of them."""


def main() -> None:
    """Measures the works."""
    asked = arguments(__doc__, "works", "peers")
    warnings.filterwarnings("ignore")
    torch.cuda.init()
    torch.set_float32_matmul_precision("high")
    report = Report("gpu_step", asked.quick, is_part=bool(asked.works or asked.peers))
    chosen = asked.works or (["mlp", "gpt_small"] if asked.quick else [*WORKS, SHORT_EPOCHS])
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it with what there is
        for key in chosen:
            if key == SHORT_EPOCHS:
                add_short_epochs(report)
            else:
                add(report, key, WORKS[key], asked.peers)
    report.finish()


def contenders(key: str, quick: bool) -> dict[str, Callable[[GpuWork, Clock], None]]:
    """The contenders of a work."""
    if quick or key not in {**BARS, **BEST_BARS}:
        return {name: CONTENDERS[name] for name in ("eager", "fit, recorded", "fit")}
    return CONTENDERS if key in BARS else {"eager": eager, **TUNED, "fit": ours}


def add(report: Report, key: str, work: GpuWork, chosen: list[str]) -> None:
    """Measures all contenders of a work, or the chosen ones."""
    times: dict[str, Blocks] = {}
    for name, contender in contenders(key, report.quick).items():
        if chosen and name not in chosen:
            continue
        print(f"{work.name}: {name}", flush=True)
        began = time.perf_counter()
        times[name] = measure(work, contender, report.quick)
        print(f"    {median(times[name]) * 1e3:.4f} ms, after {time.perf_counter() - began:.0f} s", flush=True)
        report.notes[f"{work.name}: {name}, peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    rows = report.add(work.name, times, "eager" if "eager" in times else next(iter(times)))
    if key in BARS and {"eager", "fit"} <= times.keys():
        report.checks[f"{key}_over_eager"] = Check(value=1 / rows["fit"].ratio, at_least=BARS[key])
    others = [row.seconds for name, row in rows.items() if name != "fit"]
    if key in BEST_BARS and others and "fit" in rows:
        best = min(others) / rows["fit"].seconds
        report.checks[f"{key}_over_best"] = Check(value=best, at_least=BEST_BARS[key])
    if work.flops and "fit" in times:
        share = work.flops / median(times["fit"]) / PEAK_FLOPS
        report.checks[f"{key}_mfu"] = Check(value=share, at_least=0.41)
    report.save()


def add_short_epochs(report: Report) -> None:
    """Measures `fit` with epochs of 32 steps against long ones, checkpoints included."""
    long = replace(WORKS["hf_bert"], steps=SHORT_EPOCHS_STEPS)
    rows = 32 * long.batch_size
    times = {}
    for name, work in {
        "long epochs": long,
        "epochs of 32 steps": replace(long, data=lambda: tuple(array[:rows] for array in long.data())),
    }.items():
        times[name] = measure(work, ours, quick=report.quick, rounds=1)
        print(f"{work.name}, {name}: {times[name][0] * 1e3:.4f} ms", flush=True)
    found = report.add(f"{long.name}, checkpoints included", times, "long epochs")
    report.checks["short_epochs_overhead"] = Check(value=found["epochs of 32 steps"].ratio, at_most=1.03)
    report.save()


def measure(
    work: GpuWork, contender: Callable[[GpuWork, Clock], None], quick: bool, rounds: int | None = None
) -> Blocks:
    """A contender's blocks, on a device that holds nothing else."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    clock = Clock(work, warm_up=30 if contender is not ours else work.settle, rounds=rounds or (3 if quick else 7))
    contender(work, clock)
    return clock.blocks


if __name__ == "__main__":
    main()
