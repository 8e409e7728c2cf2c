"""A step on a GPU: `fit` against the plain loop, torch.compile, Lightning and Accelerate; times and peak memory.

`python -m benchmarks.gpu_step [--quick]`. Everybody trains the same network on the same arrays, which lie on the
device; blocks of steps are timed from one synchronization to the next after a warm-up, and medians are compared.
Everybody's fp32 matrix products run in TF32, as each of these libraries advises on such a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor, nn

import manyhands as mh

from .gpu_works import WORKS, GpuWork, autocast, loss
from .report import Check, Report, arguments

PEAK_FLOPS = 989e12
"""The datasheet's dense bf16 rate of an H100 and an H200."""
BARS = {"mlp": 8.0, "resnet18": 4.5, "gpt_small": 6.0, "gpt2": 1.3}
LONG_RUN = 100_000
"""Steps that `fit` is told of, as in real training; the measurement ends it after some."""
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
    """Ends a run of ours when its blocks are timed."""

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
            progress=False,
            callbacks=[Ticks(clock)],
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


def main() -> None:
    """Measures all works."""
    quick = arguments(__doc__).quick
    warnings.filterwarnings("ignore")
    torch.cuda.init()
    torch.set_float32_matmul_precision("high")
    report = Report("gpu_step", quick)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it with what there is
        for key in ("mlp", "gpt_small") if quick else WORKS:
            add(report, key, WORKS[key])
    report.finish()


def add(report: Report, key: str, work: GpuWork) -> None:
    """Measures all contenders of a work."""
    times: dict[str, Blocks] = {}
    for name, contender in CONTENDERS.items():
        if (report.quick or key not in BARS) and name in ("Lightning", "Accelerate", "torch.compile"):
            continue
        print(f"{work.name}: {name}", flush=True)
        times[name] = measure(work, contender, report.quick)
        print(f"    {median(times[name]) * 1e3:.4f} ms", flush=True)
        report.notes[f"{work.name}: {name}, peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    rows = report.add(work.name, times, "eager")
    if key in BARS:
        report.checks[f"{key}_over_eager"] = Check(value=1 / rows["fit"].ratio, at_least=BARS[key])
    if work.flops:
        share = work.flops / median(times["fit"]) / PEAK_FLOPS
        report.checks[f"{key}_mfu"] = Check(value=share, at_least=0.41)
    report.save()


def measure(work: GpuWork, contender: Callable[[GpuWork, Clock], None], quick: bool) -> Blocks:
    """A contender's blocks, on a device that holds nothing else."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    clock = Clock(work, warm_up=30 if contender is not ours else work.settle, rounds=3 if quick else 7)
    contender(work, clock)
    return clock.blocks


if __name__ == "__main__":
    main()
