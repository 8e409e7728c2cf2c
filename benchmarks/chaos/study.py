"""A study whose trials run in two processes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import manyhands as mh
from manyhands.tuning.journal import JOURNAL

from .programs import Lines, Program, until
from .study_driver import PACE
from .system import START_SECONDS, Broken, Fault, System

END_TRIAL = 6
"""The operation code of a journal's line that ends a trial."""
FINISH_SECONDS = 600.0


class Study(System):
    """A study in its own process, which a supervisor restarts."""

    name = "study"

    def open(self) -> None:
        self.num_trials = max(20, int(2 * self.seconds / PACE))
        self.disk, self.hurry = self.use_disk("disk"), self.folder / "hurry"
        self.programs = [self._program(self.disk.path, self.hurry)]
        self.journal = self.disk.path / "study" / JOURNAL
        self._lines, self._ended = Lines(self.journal), 0
        self.programs[0].start()
        if not until(lambda: self.progress() > 3, START_SECONDS, self.tend):
            raise Broken(f"the study did not start: {self.said()}")

    def _program(self, folder: Path, hurry: Path) -> Program:
        command = [sys.executable, "-m", "benchmarks.chaos.study_driver", str(folder), str(self.num_trials)]
        name = folder.name
        return Program(f"study in {name}", command, self.folder / f"output-{name}", env={"HURRY": str(hurry)})

    def faults(self) -> list[Fault]:
        driver = self.programs[0]
        retried = r"is retried \(attempt"
        return [
            Fault("kill a trial process", self.killed(driver.forks), retried),
            Fault("stop a trial process", self.stopped(driver.forks), lasts=3.0),
            Fault("kill a zygote", self.killed(driver.zygotes), r"process that starts ranks has died"),
            Fault("kill the driver", driver.kill),
            Fault("stop the driver", self.stopped(lambda: self.of(driver)), lasts=3.0),
            Fault("full disk", self.disk.fill, r"journal .* cannot be written: No space left", lasts=3.0),
            Fault("corrupt journal", self._tear),
        ]

    def progress(self) -> int:
        """Return the number of trials that have ended, read line by line; an interrupted write is read once more."""
        for line in self._lines.read():
            try:
                self._ended += json.loads(line).get("op_code") == END_TRIAL
            except ValueError:
                continue
        return self._ended

    def _tear(self) -> None:
        """Kill the driver and cut the last line of its journal, as a power failure does."""
        driver = self.programs[0]
        driver.kill()
        driver.process.wait()
        data = self.journal.read_bytes()
        start = data.rstrip(b"\n").rfind(b"\n") + 1
        self.journal.write_bytes(data[: start + (len(data) - start) // 2])

    def finish(self) -> None:
        self.hurry.touch()
        (driver,) = self.programs
        if not until(lambda: driver.code == 0, FINISH_SECONDS, self.tend):
            raise Broken(f"the study did not end: {self.said()}")
        control = self._program(self.folder / "control", self.hurry)
        try:
            control.start()
            if control.process.wait(FINISH_SECONDS):
                raise Broken(f"the control study failed: {control.output.read_text()}")
        finally:
            control.close()
        self._compare(self.journal.parent, self.folder / "control" / "study")

    def _compare(self, path: Path, control: Path) -> None:
        ends: Counter[Any] = Counter()
        for line in self.journal.read_bytes().splitlines():
            try:
                fact = json.loads(line)
            except ValueError:
                continue
            if fact.get("op_code") == END_TRIAL:
                ends[fact["trial_id"]] += 1
        if twice := sorted(number for number, count in ends.items() if count > 1):
            self.found("wrong_samples", f"trials {twice} have ended twice", len(twice))
        results = [
            {one.number: (one.params, one.values) for one in mh.tuning.Study(each).trials} for each in (path, control)
        ]
        different = [number for number, result in results[1].items() if results[0].get(number) != result]
        if different or len(results[0]) != len(results[1]):
            self.found("wrong_samples", f"trials {different} differ from the undisturbed study", max(1, len(different)))
