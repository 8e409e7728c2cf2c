"""Recovery after repeated kills: seconds until training continues, steps lost, and goodput, compared with torchrun.

`python -m benchmarks.recovery [--quick]`, at most 22 minutes. Two ranks train on this machine; one of them, drawn by
lot, is killed with SIGKILL again and again. torchrun does the same work with DDP and a checkpoint every ten steps, in
the same run, with its default and with its best known settings (`peers/torchrun.py` names them). A job that does not
step again within a quarter of a minute counts as not recovered, and a new one is started for the next kill.

Goodput is the time of useful steps as a share of all time. A useful step is one of the final history; a step that was
taken twice counts once. Its time is the pace at which the same job trained before any kill: the median, over windows of
an epoch's steps, of the time per step. The clock runs from the end of that to the last step, and whatever is not a
useful step at that pace is lost: detection, restart, repeated steps, and also whatever else slows this machine down.
How the time before the first kill itself fares by this measure is noted beside it.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

import manyhands as mh
from manyhands.core import read_events

from .kills import Clock, task
from .peers.torchrun import BEST, DEFAULT, LIMIT, Trial, trials
from .report import Check, Report, arguments

KILLS = 20
WINDOW = 64
"""Steps of an epoch, so that what is done once an epoch is in the pace too."""


@dataclass(frozen=True)
class Plan:
    """How long goodput is measured."""

    calm: float = 40.0
    seconds: float = 605.0
    kill_every: float = 60.0


LONG, SHORT = Plan(), Plan(calm=3.0, seconds=8.0, kill_every=4.0)


@dataclass(frozen=True)
class Kill:
    """What came of one kill."""

    seconds: float
    """Until the next step was taken."""
    steps_lost: int


class Killer:
    """Kills a rank, waits until training continues, and repeats."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lot = folder, random.Random(0)
        self.times: list[float] = []

    def strike(self) -> None:
        """Kills one rank."""
        program = psutil.Process()
        ranks = [rank for zygote in program.children() for rank in zygote.children()]
        victim = self.lot.choice(ranks)
        self.times.append(time.time())
        victim.send_signal(signal.SIGKILL)

    def wait_for_steps(self, count: int, seconds: float = 60.0) -> bool:
        """Waits until so many steps were taken since the last kill."""
        since = self.times[-1] if self.times else 0.0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            steps = {step for step, at in self.steps() if at > since}
            if len(steps) >= count:
                return True
            time.sleep(0.1)
        return False

    def steps(self) -> list[tuple[int, float]]:
        """Every step of every rank, and when."""
        lines = [line.split() for path in self.folder.glob("steps-*") for line in path.read_text().splitlines()]
        return sorted(((int(line[0]), float(line[1])) for line in lines if len(line) == 2), key=lambda pair: pair[1])

    def outcomes(self, run: mh.Run) -> list[Kill]:
        """By kill: from the clock of the ranks, and from the step at which the log says they resumed."""
        events = [entry for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "recovered"]
        steps, found = self.steps(), []
        for at in self.times:
            went_on = next((entry for entry in events if entry["t"] > at), None)
            if went_on is None:
                continue
            after = next((when for step, when in steps if when > went_on["t"] and step > went_on["step"]), None)
            reached = max((step for step, when in steps if when <= at), default=0)
            if after is not None:
                found.append(Kill(after - at, max(0, reached - went_on["step"])))
        return found


def train(folder: Path, act: Any) -> tuple[mh.Run, Killer, float]:
    """Trains while `act(killer)` does its worst in a thread; the seconds are those of the whole call."""
    killer = Killer(folder)

    def worst() -> None:
        try:
            act(killer)
        finally:
            (folder / "enough").touch()

    thread = threading.Thread(target=worst)
    thread.start()
    began = time.perf_counter()
    run = mh.fit(
        task,
        mh.Mirrored(2, capture="off"),
        on="cpu*2",
        epochs=1_000_000,
        folder=folder,
        callbacks=[Clock(folder)],
        options=mh.options.Display(progress=False),
    )
    seconds = time.perf_counter() - began
    thread.join()
    return run, killer, seconds


def kills(report: Report, count: int) -> list[Kill]:
    """Kills in a row, a few steps apart."""

    def act(killer: Killer) -> None:
        for _ in range(count):
            if not killer.wait_for_steps(killer.lot.randint(5, 25)):
                return
            killer.strike()
        killer.wait_for_steps(5)

    with tempfile.TemporaryDirectory() as folder:
        run, killer, _ = train(Path(folder), act)
        found = killer.outcomes(run)
    report.checks["recovered_of_20"] = Check(value=float(len(found)) * KILLS / count, at_least=KILLS)
    report.checks["seconds_to_step"] = Check(value=max(kill.seconds for kill in found), at_most=10.0)
    report.checks["steps_lost"] = Check(value=float(max(kill.steps_lost for kill in found)), at_most=1.0)
    return found


def goodput(report: Report, plan: Plan) -> None:
    """Useful steps at the undisturbed pace, as a share of the time after the first kill was due."""
    began: list[float] = []

    def act(killer: Killer) -> None:
        killer.wait_for_steps(20)
        began.append(time.time())
        time.sleep(plan.calm)
        killer.wait_for_steps(40)
        began.append(time.time())
        end = time.monotonic() + plan.seconds
        while time.monotonic() + plan.kill_every < end:
            time.sleep(killer.lot.uniform(0.7, 1.3) * plan.kill_every)
            killer.strike()
        time.sleep(max(0.0, end - time.monotonic()))

    with tempfile.TemporaryDirectory() as folder:
        run, killer, _ = train(Path(folder), act)
        first: dict[int, float] = {}
        for step, at in killer.steps():
            if step <= run.num_steps:
                first.setdefault(step, at)
        num_recovered = len(killer.outcomes(run))
    start, kills_begin = began
    times = sorted(first.values())
    calm = [at for at in times if start <= at < kills_begin]
    after = [at for at in times if at >= kills_begin]
    window = min(WINDOW, len(calm) // 3)
    pace = median((calm[i + window] - calm[i]) / window for i in range(0, len(calm) - window, window))
    wall = times[-1] - kills_begin
    lost = sum(
        later - earlier for earlier, later in pairwise(after) if any(earlier <= at < later for at in killer.times)
    )
    report.notes |= {
        "goodput_kills": len(killer.times), "goodput_recovered": num_recovered, "goodput_seconds": round(wall, 1),
        "goodput_steps": len(after), "goodput_pace_ms": round(1e3 * pace, 3),
        "goodput_before_kills": round(pace * (len(calm) - 1) / (calm[-1] - calm[0]), 4),
        "goodput_between_kills": round(1 - lost / wall, 4),
    }  # fmt: skip
    if plan is LONG:
        report.checks["goodput"] = Check(value=pace * len(after) / wall, at_least=0.9)


def torchrun(report: Report, ours: list[Kill], count: int) -> None:
    """The peer, kill by kill, with two sets of settings."""
    times: dict[str, list[float]] = {"manyhands": [kill.seconds for kill in ours][:count]}
    report.notes["manyhands: most steps lost"] = max(kill.steps_lost for kill in ours)
    for name, settings, label in (
        ("torchrun, best settings", BEST, "torchrun_best_recovered_of_20"),
        ("torchrun, default", DEFAULT, "torchrun_recovered_of_20"),
    ):
        found: list[Trial] = trials(settings, count)
        good = [trial for trial in found if trial.recovered]
        times[name] = [trial.seconds for trial in found]
        report.checks[label] = Check(value=len(good) * KILLS / count)
        report.notes[f"{name}: most steps lost"] = max((trial.steps_lost for trial in good), default=0)
        report.notes[f"{name}: median seconds where it recovered"] = round(
            median([trial.seconds for trial in good] or [LIMIT]), 2
        )
    report.add("from a kill to the next step", times, "manyhands")


def main() -> None:
    """Measures all of it."""
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    report = Report("recovery", quick)
    found = kills(report, 3 if quick else KILLS)
    goodput(report, SHORT if quick else LONG)
    if quick:
        report.add("from a kill to the next step", {"manyhands": [kill.seconds for kill in found]}, "manyhands")
    else:
        report.save()
        torchrun(report, found, KILLS)
    report.finish()


if __name__ == "__main__":
    main()
