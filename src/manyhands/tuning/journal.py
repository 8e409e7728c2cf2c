"""The journal: every fact of a study, one line each, in the file format of Optuna's journal.

So optuna-dashboard and Optuna itself read it, while a study goes on too. Ours are further fields, which Optuna passes
over. A line counts once it is whole: what a killed program left unfinished at the end is cut off by the next one.
Results are pushed to the disk at once, but at most ten times a second.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..core import RunError, SettingsError
from .objective import Objective
from .space import Choice, Integers, Range, Space, Uniform
from .trial import FAILED, FINISHED, RUNNING, STOPPED, Trial

JOURNAL = "journal.log"
SYNC_SECONDS = 0.1
CREATE_STUDY, STUDY_ATTRIBUTE, CREATE_TRIAL, END_TRIAL, REPORT, TRIAL_ATTRIBUTE = 0, 2, 4, 6, 7, 8
_STATES = {RUNNING: 0, FINISHED: 1, STOPPED: 2, FAILED: 3}
_NAMES = {number: name for name, number in _STATES.items()}


class Journal:
    """Appends facts; one program at a time holds it."""

    def __init__(self, folder: Path, space: Space) -> None:
        self._space = space
        self._described = {name: json.dumps(describe(one)) for name, one in space.items()}
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / JOURNAL
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise SettingsError(
                "one program at a time works on a study",
                got=f"{folder}, which another one holds",
                remedy="wait for it to end",
            ) from None
        self._size = _cut(self._file)
        self._synced_at = 0.0
        self._is_synced = True
        self._who = f"manyhands-{os.getpid()}"

    def begin(self, name: str, objectives: Sequence[Objective], record: Mapping[str, Any]) -> None:
        """The study: its objectives, and everything that must be the same when it goes on."""
        directions = [1 if one.mode == "min" else 2 for one in objectives]
        self._write(CREATE_STUDY, study_name=name, directions=directions)
        self._write(STUDY_ATTRIBUTE, study_id=0, user_attr={"manyhands": record})
        self.sync()

    def propose(self, trial: Trial) -> None:
        """A trial's parameters, before it is begun."""
        self._write(
            CREATE_TRIAL,
            study_id=0,
            datetime_start=_now(),
            state=_STATES[RUNNING],
            params={name: _inner(self._space[name], value) for name, value in trial.params.items()},
            distributions=self._described,
            given=trial.params,
        )

    def lease(self, trial: Trial, worker: int, until: int) -> None:
        """Who works on a trial, and how far it is to go."""
        self._write(TRIAL_ATTRIBUTE, trial_id=trial.number, user_attr={"lease": {"worker": worker, "until": until}})

    def report(self, trial: Trial, epoch: int, seconds: float) -> None:
        """What a trial had reached after so many epochs."""
        value = trial.reports[epoch]
        self._write(REPORT, trial_id=trial.number, step=epoch, intermediate_value=value, seconds=seconds)

    def end(self, trial: Trial) -> None:
        """What became of a trial."""
        self._write(
            END_TRIAL,
            trial_id=trial.number,
            state=_STATES[trial.state],
            values=list(trial.values) or None,
            datetime_complete=_now(),
            metrics=trial.metrics,
            seconds=trial.seconds,
            reason=trial.reason,
            feasible=trial.is_feasible,
        )
        self._is_synced = False
        if time.monotonic() - self._synced_at > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Pushes what was written to the disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._unwritable(error) from error
        self._synced_at, self._is_synced = time.monotonic(), True

    def close(self) -> None:
        """Lets the study go."""
        try:
            if not self._is_synced:
                self.sync()
        finally:
            os.close(self._file)

    def _write(self, code: int, **values: Any) -> None:
        line = json.dumps({"op_code": code, "worker_id": self._who, **values}, separators=(",", ":"), default=str)
        data = line.encode() + b"\n"
        try:
            written = os.pwrite(self._file, data, self._size)
        except OSError as error:
            raise self._unwritable(error) from error
        if written < len(data):
            os.ftruncate(self._file, self._size)
            raise self._unwritable(OSError(28, "No space left on device"))
        self._size += written

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(
            f"the study's journal {self.path} cannot be written: {error.strerror or error}; what was written before is "
            "kept: free some space, and go on with the study's name and resume"
        )


def read_journal(folder: Path) -> tuple[dict[str, Any], list[Trial]]:
    """A study's record and its trials, as far as lines are whole."""
    record: dict[str, Any] = {}
    trials: list[Trial] = []
    for line in _lines(folder / JOURNAL):
        code = line["op_code"]
        if code == STUDY_ATTRIBUTE:
            record = line["user_attr"]["manyhands"]
        elif code == CREATE_TRIAL:
            trials.append(Trial(len(trials), line["given"]))
        elif code == REPORT:
            trial = trials[line["trial_id"]]
            trial.reports[line["step"]] = line["intermediate_value"]
            trial.seconds = line["seconds"]
        elif code == END_TRIAL:
            trial = trials[line["trial_id"]]
            trial.state, trial.values = _NAMES[line["state"]], tuple(line["values"] or ())
            trial.metrics, trial.seconds = line["metrics"], line["seconds"]
            trial.reason, trial.is_feasible = line["reason"], line["feasible"]
    return record, trials


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _cut(file: int) -> int:
    """Cuts an unfinished last line off; returns the length of what is whole."""
    size = os.fstat(file).st_size
    whole = size
    while whole:
        start = max(0, whole - 65536)
        found = os.pread(file, whole - start, start).rfind(b"\n")
        if found >= 0:
            whole = start + found + 1
            break
        whole = start
    if whole != size:
        os.ftruncate(file, whole)
    return whole


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _inner(one: Range, value: Any) -> Any:
    """A value as Optuna keeps it: the place of a choice, else the number."""
    return one.index(value) if isinstance(one, Choice) else value


def describe(one: Range) -> dict[str, Any]:
    """A range as Optuna's JSON."""
    if isinstance(one, Choice):
        return {"name": "CategoricalDistribution", "attributes": {"choices": list(one.values)}}
    assert isinstance(one, Uniform | Integers)
    whole = isinstance(one, Integers)
    attributes = {"step": 1 if whole else None, "low": one.low, "high": one.high, "log": one.log}
    return {"name": "IntDistribution" if whole else "FloatDistribution", "attributes": attributes}
