"""The cost of a step: `fit` against hand-written loops, Lightning and Accelerate, on one and on two processes.

`python -m benchmarks.step [--quick]`. Contenders of a case train alternately inside one process (or one pair of
processes), a block of steps each; the first steps do not count, so start-up is in no figure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from statistics import mean, median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import manyhands as mh

from .ours import fit_mirrored, fit_single, fit_unequal, step_seconds
from .peers import environment
from .report import Check, Report, arguments, interleaved
from .turns import Plan
from .works import CNN, MLP, WIDE, Work

SAVE_EVERY = 50
SAVE_FELT = 20
"""Steps after a save in which its writing may be felt."""
IMPORTS = {
    "torch": "import torch",
    "torch again": "import torch",
    "torch, manyhands": "import torch, manyhands",
    "mh.fit": "import manyhands as mh; mh.fit; mh.Task",
}

Times = Mapping[str, list[float]]


def main() -> None:
    """Measures all cases."""
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    report = Report("step", quick)
    single(report)
    mirrored(report)
    unequal(report)
    checkpoints(report)
    imports(report)
    if not quick:
        peers(report)
    report.finish()


def plans(quick: bool) -> dict[Work, Plan]:
    """How long a case trains, by work.

    Blocks are short, so that contenders meet the same noise, but a round is longer than the half second
    after which `fit` reports: every block of manyhands has a report in it.
    """
    if quick:
        return {CNN: Plan(block=1, rounds=4, warm_up=1), MLP: Plan(block=40, rounds=4, warm_up=40)}
    return {CNN: Plan(block=3, rounds=50, warm_up=6), MLP: Plan(block=80, rounds=80, warm_up=150)}


def single(report: Report) -> None:
    """One device: the check is on the network that computes, the small one shows the overhead in microseconds."""
    for work, plan in plans(report.quick).items():
        rows = report.add(f"{work.name}, 1 process", fit_single(work, plan).times, "plain")
        if work is CNN:
            report.checks["fit_over_plain"] = Check(value=rows["fit"].ratio, at_most=1.02)


def mirrored(report: Report) -> None:
    """Two processes: against DDP with its better settings, and against what two processes can do at all."""
    for work, plan in plans(report.quick).items():
        if report.quick and work is not CNN:
            continue
        timing = fit_mirrored(work, plan)
        best = min(("ddp", "ddp static"), key=lambda name: median(timing.times[name]))
        rows = report.add(f"{work.name}, 2 processes", timing.times, best)
        if work is CNN:
            report.checks["mirrored_over_ddp"] = Check(value=rows["mirrored"].ratio, at_most=1.02)
            report.checks["mirrored2_of_ceiling"] = Check(value=of_ceiling(timing.of_rank), at_least=0.92)


def unequal(report: Report) -> None:
    """Two processes of which one is slowed to half: together, over the sum of what each reaches alone."""
    plan = Plan(block=3, rounds=3, warm_up=16) if report.quick else Plan(block=6, rounds=25, warm_up=60)
    timing = fit_unequal(CNN, plan)
    report.add(f"{CNN.name}, 2 processes, one at half speed", timing.times, "two apart")
    report.checks["unequal_of_sum"] = Check(value=of_ceiling(timing.of_rank), at_least=0.9)


def of_ceiling(of_rank: list[dict[str, list[float]]]) -> float:
    """Samples per second of both together, over the sum of what each does without the other."""
    first, second = of_rank
    rounds = zip(first["mirrored"], first["two apart"], second["two apart"], strict=True)
    return median((2 / together) / (1 / one + 1 / other) for together, one, other in rounds)


def checkpoints(report: Report) -> None:
    """Extra time of saving every 50 steps: each stretch of 50 with the save in it, against its own last part.

    The writing in the background has ended, so the two differ by the save alone, within a second of each other.
    """
    num_stretches = 3 if report.quick else 60
    seconds = step_seconds(WIDE, SAVE_EVERY * (num_stretches + 1), mh.options.Checkpoints(save_every=SAVE_EVERY))
    stretches = [seconds[start : start + SAVE_EVERY] for start in range(SAVE_EVERY, len(seconds), SAVE_EVERY)]
    times = {
        "with its save": [mean(stretch) for stretch in stretches],
        "between saves": [mean(stretch[SAVE_FELT:]) for stretch in stretches],
    }
    rows = report.add("a checkpoint every 50 steps", times, "between saves")
    report.checks["checkpoint_share"] = Check(value=rows["with its save"].ratio - 1, at_most=0.02)


def imports(report: Report) -> None:
    """Fresh processes."""
    contenders = {name: partial(seconds_of, code) for name, code in IMPORTS.items()}
    if report.quick:
        contenders = {name: contenders[name] for name in ("torch", "torch, manyhands")}
    times = interleaved(contenders, 2 if report.quick else 12)
    rows = report.add("import", times, "torch")
    report.checks["import_over_torch"] = Check(value=rows["torch, manyhands"].ratio, at_most=1.10)


def seconds_of(code: str) -> float:
    """The time of a Python program, from its start to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def peers(report: Report) -> None:
    """Other libraries, each alternating with the hand-written loop in its own environment."""
    environment.make()
    for size, baseline in ((1, "plain"), (2, "ddp")):
        for work, plan in plans(report.quick).items():
            for peer in environment.PEERS:
                case = f"{peer} {work.name}, {size} process{'es' if size > 1 else ''}"
                report.add(case, environment.measure(peer, work, plan, size), baseline)


if __name__ == "__main__":
    main()
