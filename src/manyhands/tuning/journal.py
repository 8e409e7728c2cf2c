"""Journal of a study: an append-only log with one JSON line per event, in the format of Optuna's journal.

optuna-dashboard and Optuna can read it, also while a study runs. manyhands adds fields that Optuna ignores. If a
process is killed while it writes a line, the next process that opens the journal cuts the unfinished line off. If a
line is damaged later, only its content is lost. The end of a trial is synced to disk at once, but at most ten times a
second.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..core import (
    LINE_LIMIT,
    CheckpointError,
    FileError,
    RunError,
    SettingsError,
    counted,
    fields,
    open_regular,
    parse_json,
    read_lines,
    require_format,
)
from .objective import Objective
from .space import Choice, Integers, Range, Space, Uniform
from .trial import FAILED, FINISHED, RUNNING, STOPPED, Trial

JOURNAL = "journal.log"
FORMAT = 1
"""Version of the fields that manyhands adds to Optuna's, written with the study's settings."""
SYNC_SECONDS = 0.1
"""Minimum seconds between two syncs to disk."""
DAMAGED = "journal.damaged"
"""File for copies of unfinished lines that were cut off the journal."""
_CREATES = re.compile(rb'\{"op_code": ?%d,' % fields.CREATE_TRIAL)
_GIVEN = '"given":'
_STATES = {RUNNING: 0, FINISHED: 1, STOPPED: 2, FAILED: 3}
_NAMES = {number: name for name, number in _STATES.items()}


class Journal:
    """Append events to the journal of a study, which only one process at a time can open.

    Raises:
        SettingsError: Another process has the journal open.
    """

    def __init__(self, folder: Path, space: Space) -> None:
        self._space = space
        self._described = {name: json.dumps(describe(one)) for name, one in space.items()}
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / JOURNAL
        self._file = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise SettingsError(
                "only one program at a time can work on a study",
                got=f"{folder}, which another program uses",
                remedy="wait until that program ends, or stop it",
            ) from None
        self._size = _truncate(self._file, folder / DAMAGED)
        self._synced_at = 0.0
        self._is_synced = True
        self._who = f"manyhands-{os.getpid()}"

    def begin(self, name: str, objectives: Sequence[Objective], record: Mapping[str, Any]) -> None:
        """Write the study's name, its objectives, and `record`: settings that must not change when it is resumed."""
        directions = [1 if one.mode == "min" else 2 for one in objectives]
        self._write(fields.CREATE_STUDY, study_name=name, directions=directions)
        self._write(fields.STUDY_ATTRIBUTE, study_id=0, user_attr={"manyhands": {"format": FORMAT, **record}})
        self.sync()

    def propose(self, trial: Trial) -> None:
        """Write a new trial with its parameters, before it is started."""
        self._write(
            fields.CREATE_TRIAL,
            study_id=0,
            datetime_start=_now(),
            state=_STATES[RUNNING],
            params={name: _inner(self._space[name], value) for name, value in trial.params.items()},
            distributions=self._described,
            given=trial.params,
        )

    def lease(self, trial: Trial, worker: int, until: int) -> None:
        """Write that a worker now trains a trial up to epoch `until`."""
        self._write(
            fields.TRIAL_ATTRIBUTE, trial_id=trial.number, user_attr={"lease": {"worker": worker, "until": until}}
        )

    def killed(self, trial: Trial) -> None:
        """Write why the process of a trial has died, before the trial is retried or ended."""
        self._write(fields.TRIAL_ATTRIBUTE, trial_id=trial.number, user_attr={"killed": trial.kills[-1]})

    def report(self, trial: Trial, epoch: int, seconds: float) -> None:
        """Write the value that a trial has reported after `epoch` epochs, and the seconds that it has trained."""
        value = trial.reports[epoch]
        self._write(fields.REPORT, trial_id=trial.number, step=epoch, intermediate_value=value, seconds=seconds)

    def end(self, trial: Trial) -> None:
        """Write the final state and the results of a trial."""
        self._write(
            fields.END_TRIAL,
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
        """Force the written lines to disk (fsync)."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._unwritable(error) from error
        self._synced_at, self._is_synced = time.monotonic(), True

    def close(self) -> None:
        """Sync the journal to disk and close it, which releases its lock."""
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
            f"the study's journal {self.path} cannot be written: {error.strerror or error}; earlier results are kept. "
            "Free some space, and resume the study by its name"
        )


def read_journal(folder: Path) -> tuple[dict[str, Any], list[Trial]]:
    """Return a study's record (the settings with which it was started) and its trials, from the undamaged lines.

    A damaged line is skipped, with a warning that names it, and stays in the file. A trial whose parameters were in
    that line counts as failed. A trial whose end was in it counts as running, and is continued if the study is resumed.

    Raises:
        CheckpointError: So much is damaged that results cannot be assigned to their trials, or a newer version of
            manyhands has written the journal.
        FileError: The journal is not a regular file.
    """
    lines = _lines(folder / JOURNAL)
    _find_lost_trials(folder / JOURNAL, lines)
    record: dict[str, Any] = {}
    trials: list[Trial] = []
    for line in lines:
        fact = line.fact
        if line.creates:
            trials.append(_created(line, len(trials)))
        elif fact is None:
            continue
        elif fact["op_code"] == fields.STUDY_ATTRIBUTE:
            record = dict(fact["user_attr"].get("manyhands", record))
            require_format(str(folder / JOURNAL), record.pop("format", FORMAT), FORMAT, CheckpointError)
        elif fact["op_code"] in (fields.REPORT, fields.END_TRIAL) and fact["trial_id"] < len(trials):
            _take(trials[fact["trial_id"]], fact)
        elif fact["op_code"] == fields.TRIAL_ATTRIBUTE and fact["trial_id"] < len(trials):
            reason = fact["user_attr"].get("killed")
            trials[fact["trial_id"]].kills += [str(reason)] if reason is not None else []
    for trial in trials:
        if trial.state == FINISHED and len(trial.values) != len(record.get("objectives") or trial.values or [""]):
            trial.state, trial.reason = FAILED, f"its end has {counted(len(trial.values), 'value')} for the objectives"
    return record, trials


@dataclass
class _JournalLine:
    """A line of a journal, which may be damaged."""

    number: int
    """Position in the file, counted from 1."""
    raw: bytes
    """The bytes of the line; not kept if it is undamaged."""
    fact: dict[str, Any] | None
    """The content of the line; None if it is damaged."""
    creates: bool
    """Whether the line creates a trial, as far as this can be read from a damaged line."""


def _lines(path: Path) -> list[_JournalLine]:
    if not os.path.lexists(path):
        return []
    with os.fdopen(open_regular(path), "rb") as file:
        raws = [raw or b"" for raw in read_lines(file)]
    # The last line may be incomplete because another process is writing it.
    if raws and raws[-1] and not raws[-1].endswith(b"\n"):
        raws.pop()
    return [_line(number, raw) for number, raw in enumerate(raws, 1)]


def _line(number: int, raw: bytes) -> _JournalLine:
    try:
        fact = parse_json(raw)
    except FileError:
        return _JournalLine(number, raw, None, bool(_CREATES.match(raw)))
    if fields.is_journal_line(fact):
        return _JournalLine(number, b"\n", fact, fact["op_code"] == fields.CREATE_TRIAL)
    return _JournalLine(number, raw, None, isinstance(fact, dict) and fact.get("op_code") == fields.CREATE_TRIAL)


def _find_lost_trials(path: Path, lines: Sequence[_JournalLine]) -> None:
    """Mark the damaged lines that created a trial, because the number of a trial is the position of this line.

    Warn about damaged lines. Raise CheckpointError if it is unclear which of them created a trial.
    """
    unknown = [line for line in lines if line.fact is None and not line.creates]
    num_begun = sum(line.creates for line in lines)
    for line in lines:
        if line.fact is not None and line.fact.get("trial_id", 0) >= max(1, num_begun + len(unknown)):
            line.fact = None
    damaged = [line for line in lines if line.fact is None]
    num_lost = max((line.fact.get("trial_id", -1) for line in lines if line.fact), default=-1) + 1 - num_begun
    numbers = ", ".join(str(line.number) for line in damaged[:10]) + (", ..." if len(damaged) > 10 else "")
    if num_lost > 0 and num_lost != len(unknown):
        raise CheckpointError(
            f"results in {path} must belong to trials that it contains",
            got=f"{counted(num_lost, 'trial')} without a creation record, and damaged lines {numbers or 'none'}",
            remedy="restore the journal from a copy, or start a study with another name",
        )
    for line in unknown if num_lost > 0 else ():
        line.creates = True
    if damaged:
        text = f"{path}: {len(damaged)} damaged lines were skipped ({numbers}); they stay in the file"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _created(line: _JournalLine, number: int) -> Trial:
    """Return the trial `number` that a line creates.

    From a damaged line, its parameters are taken if they can be read; otherwise the trial counts as failed.
    """
    if line.fact is not None:
        return Trial(number, line.fact["given"])
    try:
        text = line.raw.decode(errors="replace")
        given = json.JSONDecoder().raw_decode(text, text.index(_GIVEN) + len(_GIVEN))[0]
        if isinstance(given, dict):
            return Trial(number, given)
    except (ValueError, RecursionError):
        pass
    return Trial(number, {}, state=FAILED, reason=f"line {line.number} of the journal, which began it, is damaged")


def _take(trial: Trial, fact: Mapping[str, Any]) -> None:
    if not trial.params and trial.state == FAILED:
        return
    trial.seconds = fact["seconds"]
    if fact["op_code"] == fields.REPORT:
        trial.reports[fact["step"]] = fact["intermediate_value"]
        return
    trial.state, trial.values = _NAMES[fact["state"]], tuple(fact.get("values") or ())
    trial.metrics, trial.reason, trial.is_feasible = fact["metrics"], fact["reason"], fact["feasible"]


def _truncate(file: int, damaged: Path) -> int:
    """Cut off an unfinished last line, copy it to the file `damaged`, and return the size of the complete lines."""
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
        with contextlib.suppress(OSError, FileError):
            copy = open_regular(damaged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(copy, os.pread(file, min(size - whole, LINE_LIMIT), whole) + b"\n")
            os.close(copy)
        os.ftruncate(file, whole)
    return whole


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _inner(one: Range, value: Any) -> Any:
    """Return a parameter's value as Optuna stores it: the index of a choice, or the number."""
    return one.index(value) if isinstance(one, Choice) else value


def describe(one: Range) -> dict[str, Any]:
    """Return a parameter's range as Optuna stores it in JSON."""
    if isinstance(one, Choice):
        return {"name": "CategoricalDistribution", "attributes": {"choices": list(one.values)}}
    assert isinstance(one, Uniform | Integers)
    whole = isinstance(one, Integers)
    attributes = {"step": 1 if whole else None, "low": one.low, "high": one.high, "log": one.log}
    return {"name": "IntDistribution" if whole else "FloatDistribution", "attributes": attributes}
