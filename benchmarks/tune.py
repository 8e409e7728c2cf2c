"""Tuning: what a study costs beside a plain loop over its trials, Optuna and Ray Tune, and whether it stays so.

`python -m benchmarks.tune [--quick]`. The same small network everywhere. manyhands is `mh.tune` as users call it, with
its journal, its measurement of what stacking gains, and the best trial's network on disk; the plain loop keeps nothing.

- `asha_steps_share`: the steps of ASHA over those of a search in which the same trials all come to their end, where its
  best is within 1% of that search's, else 1; the median over some seeds. The network is too narrow to learn its samples
  by heart: where the end is decided by that, no early measurement shows which trial will be first.
- `processes2_of_ceiling`: trials with a step of their own, which no stack takes, on two cores: the time of two
  independent processes that do half of the trials each by hand, over ours.
- `memory_growth_10k`: the memory of the process after 10,000 trivial trials over that after 1,000.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

import manyhands as mh

from .peers import environment
from .report import Check, Report, arguments, interleaved
from .tune_works import (
    BATCH,
    HIGH,
    LARGE,
    LOW,
    NARROW,
    NUM_ROWS,
    SMALL,
    data,
    half,
    loss,
    network,
    plain_loop,
    plain_trial,
)

SPACE = {"lr": mh.tuning.loguniform(LOW, HIGH)}
EPOCHS = 8
RAY_TRIALS = 20
REQUIREMENTS = environment.ROOT / "requirements" / "tuning_peers.txt"
FOLDER = environment.ROOT / ".peers-tuning"
INPUTS, LABELS = data()


def task(lr: float = 1e-3, width: int = SMALL) -> mh.Task:
    """The trial as a Task."""
    return mh.Task(
        model=lambda: network(width),
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=lr),
        data=(INPUTS[:NUM_ROWS], LABELS[:NUM_ROWS]),
        valid=(INPUTS[NUM_ROWS:], LABELS[NUM_ROWS:]),
        batch_size=BATCH,
    )


def narrow(lr: float = 1e-3) -> mh.Task:
    """A trial that keeps improving until it is stopped."""
    inputs, labels = data(4 * NUM_ROWS, NUM_ROWS, noise=4.0)
    return task(lr, NARROW).replace(
        data=(inputs[: 4 * NUM_ROWS], labels[: 4 * NUM_ROWS]), valid=(inputs[4 * NUM_ROWS :], labels[4 * NUM_ROWS :])
    )


def stepping(lr: float = 1e-3) -> mh.Task:
    """The task with a custom step, which cannot be vectorized."""
    return task(lr, LARGE).replace(loss=None, step=_step)


def _step(hand: Any, batch: Any) -> None:
    hand.minimize(loss(hand.model, batch))


def trivial(x: float = 0.0, y: float = 0.0) -> float:
    """A trial that costs nothing."""
    return (x - 2) ** 2 + y**2


def main() -> None:
    """Measures all cases."""
    quick = arguments(__doc__).quick
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(1)
    report = Report("tune", quick)
    over_plain(report, 24 if quick else 100, 2 if quick else 5)
    asha(report, 27 if quick else 60, 1 if quick else 5)
    two_processes(report, 8 if quick else 24, 1 if quick else 5)
    if not quick:
        many(report)
        ray(report)
    report.finish()


def tuned(
    make: Callable[..., Any],
    *,
    search: str = "random",
    stop: str | None = None,
    seed: int = 0,
    execution: str | None = None,
    **arguments: Any,
) -> tuple[float, mh.tuning.Study]:
    """Seconds of a study, and the study."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        options = [
            mh.options.Algorithm(search=search, stop=stop, seed=seed),
            mh.options.Execution(execution=execution),
            mh.options.Display(progress=False),
        ]
        study = mh.tune(make, SPACE, folder=folder, options=options, **arguments)
        return time.perf_counter() - began, study


def over_plain(report: Report, num: int, rounds: int) -> None:
    """A study, a plain loop, and Optuna over the same trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def by_optuna() -> float:
        began = time.perf_counter()
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
        study.optimize(lambda trial: plain_trial(trial.suggest_float("lr", LOW, HIGH, log=True), SMALL, EPOCHS), num)
        return time.perf_counter() - began

    times = interleaved(
        {
            "plain loop": lambda: plain_loop(num, SMALL, EPOCHS),
            "mh.tune": lambda: tuned(task, trials=num, epochs=EPOCHS, search="tpe", on="cpu")[0],
            "optuna": by_optuna,
            "plain loop again": lambda: plain_loop(num, SMALL, EPOCHS),
        },
        rounds,
    )
    rows = report.add(f"{num} small trials", times, "plain loop")
    report.checks["over_plain_loop"] = Check(value=rows["mh.tune"].ratio, at_most=1.3)


def asha(report: Report, num: int, seeds: int) -> None:
    """ASHA beside a search in which all trials come to their end."""
    epochs, shares = 27, []
    for seed in range(seeds):
        whole = tuned(narrow, trials=num, epochs=epochs, seed=seed, on="cpu", execution="stacked")[1]
        stopped = tuned(narrow, trials=num, epochs=epochs, seed=seed, on="cpu", stop="asha")[1]
        best = min(trial.value for trial in whole.finished)
        reached = min((trial.value for trial in stopped.finished), default=math.inf) <= 1.01 * best
        shares.append(sum(trial.epochs for trial in stopped.trials) / (num * epochs) if reached else 1.0)
    report.checks["asha_steps_share"] = Check(value=median(shares), at_most=0.3)


def two_processes(report: Report, num: int, rounds: int) -> None:
    """What cannot be stacked, on two cores."""
    mh.map(abs, [1, 2], on="cpu*2")  # the zygote is there
    options: dict[str, Any] = {"trials": num, "epochs": EPOCHS, "objective": "loss", "on": "cpu*2", "per_device": 1}
    times = interleaved(
        {
            "two independent loops": lambda: independent(num),
            "mh.tune": lambda: tuned(stepping, **options)[0],
            "two independent loops again": lambda: independent(num),
        },
        rounds,
    )
    rows = report.add(f"{num} trials that do not stack", times, "two independent loops")
    report.checks["processes2_of_ceiling"] = Check(value=1 / rows["mh.tune"].ratio, at_least=0.92)


def independent(num: int) -> float:
    """Two processes that know nothing of each other, half of the trials each; the longer of the two counts."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.SimpleQueue()
    halves = [
        context.Process(target=half, args=(barrier, queue.put, part, LARGE, EPOCHS))
        for part in (num - num // 2, num // 2)
    ]
    for one in halves:
        one.start()
    seconds = [queue.get() for _ in halves]
    for one in halves:
        one.join()
    return max(seconds)


def many(report: Report) -> None:
    """Ten thousand trivial trials: memory, and the processor's time of a trial early and late."""
    process, seen = psutil.Process(), []

    def counted(x: float = 0.0, y: float = 0.0) -> float:
        seen.append((time.process_time(), process.memory_info().rss) if len(seen) % 1000 == 999 else None)
        return trivial(x, y)

    with tempfile.TemporaryDirectory() as folder:
        space = {"x": mh.tuning.uniform(-5, 5), "y": mh.tuning.uniform(-5, 5)}
        mh.tune(counted, space, trials=10_000, folder=folder, on="cpu", options=mh.options.Display(progress=False))
    marks = [mark for mark in seen if mark is not None]
    report.checks["memory_growth_10k"] = Check(value=marks[-1][1] / marks[0][1], at_most=1.05)
    early, late = marks[1][0] - marks[0][0], marks[-1][0] - marks[-2][0]
    report.notes["ms_of_a_trivial_trial_early"], report.notes["ms_of_a_trivial_trial_late"] = early, late


def ray(report: Report) -> None:
    """Ray Tune over ours, on a few trials, since it takes long."""
    python = peers()
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "told.json"
        asked = {"trials": RAY_TRIALS, "width": SMALL, "epochs": EPOCHS, "folder": name, "target": str(target)}
        command = [str(python), "-m", "benchmarks.peers.ray_tune", json.dumps(asked)]
        subprocess.run(
            command, cwd=environment.ROOT, check=True, timeout=900, env={**os.environ, "RAY_DEDUP_LOGS": "0"}
        )
        told = json.loads(target.read_text())
    ours = median(tuned(task, trials=RAY_TRIALS, epochs=EPOCHS, on="cpu")[0] for _ in range(3))
    report.add(f"{RAY_TRIALS} small trials", {"mh.tune": [ours], "ray tune": [told["seconds"]]}, "mh.tune")
    report.notes["ray_tune_without_its_start"] = told["started"]
    report.checks["ray_tune_over_ours"] = Check(value=told["seconds"] / ours, at_least=20.0)


def peers() -> Path:
    """The peers' own environment, made once."""
    ready, wanted = FOLDER / "installed.txt", REQUIREMENTS.read_text()
    python = FOLDER / "bin" / "python"
    if not ready.exists() or ready.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(REQUIREMENTS)], check=True)
        ready.write_text(wanted)
    return python


if __name__ == "__main__":
    main()
