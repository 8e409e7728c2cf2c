"""Folder of a training run: its curves, the times of its ranks, failures and recoveries."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path
from typing import Any

from ..core import FileError, fields, read_json
from .log_source import MOST_VALUES, LogSource, num_values
from .run_curves import MOST_CURVES, RunCurves, RunProgress
from .run_ranks import RunRanks
from .run_usage import RunUsage

RECORD = "run.json"
RECORD_LIMIT = 4 << 20
"""Maximum bytes of a run.json."""
NUM_NEWS = 1000
"""Number of latest entries kept for the timeline, and of latest checkpoints."""
NUM_OUTLINE = 32
"""Number of points of the small curve in the list of runs."""
MOST_PARAMS = 50
"""Maximum number of parameters, and of tags, of a run in the list of runs."""
LONGEST_VALUE = 100
"""Maximum characters of a parameter in the list of runs."""
LONGEST_NEWS = 2000
"""Maximum characters of a timeline entry."""
NEWS = (
    "notice", "skipped", "lost", "recovered", "straggler", "hang", "member_lost", "followed", "chosen", "sync",
    "coordinator",
)  # fmt: skip
"""Kinds of events that the timeline shows."""
FAULTS = ("lost", "hang", "straggler", "skipped", "member_lost")
"""Events that count as faults. The error with which a run ended is not one of them: it may be a mistake of the user."""
COMMON_FIELDS = ("v", "t", "kind", "text")
"""Fields of events that descriptions omit."""


class RunFolder(LogSource):
    """Folder of a run that `mh.fit` has written."""

    kind, lock = "run", ".lock"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path)
        self.record: dict[str, Any] = {}
        self.record_error = ""
        self.ranks, self.curves, self.progress = RunRanks(), RunCurves(), RunProgress()
        self.usage = RunUsage()
        self.parts = (self.ranks, self.curves, self.progress, self.usage, self)
        self.news: deque[dict[str, Any]] = deque(maxlen=NUM_NEWS)
        self.checkpoints: deque[tuple[float, int]] = deque(maxlen=NUM_NEWS)
        self.num_faults = self.num_recovered = 0
        self.partition: dict[str, Any] | None = None
        self.split: dict[str, Any] | None = None
        self.plan: dict[str, Any] | None = None
        self.servers: dict[str, Any] = {}
        """Latest counters of the exchange between workers and parameter servers."""
        self.trial_state = ""
        """For the run of a trial that has ended, the state that its study reports; else empty."""

    def refresh(self) -> bool:
        # run.json exists before the first event; with parameter servers it is written again at the end.
        before = self.unreadable
        seen = super().refresh()
        if seen or not self.record:
            self._read_record()
        return seen or self.unreadable != before

    def _read_record(self) -> None:
        """Read run.json; an error is stored in `record_error`, and a missing file is ignored."""
        try:
            found = read_json(self.path / RECORD, RECORD_LIMIT)
            if not fields.holds(found, fields.RECORD_FIELDS):
                raise FileError(f"{RECORD} must be a record of a run", got="missing fields, or fields of other types")
            if num_values(found) > MOST_VALUES:
                raise FileError(f"{RECORD} must have at most {MOST_VALUES:,} values", got="more")
        except FileNotFoundError:
            return
        except (OSError, FileError) as error:
            self.record_error = str(error)
        else:
            self.record, self.record_error = found, ""

    @property
    def unreadable(self) -> str:
        limits = f"curves beyond {MOST_CURVES}, or with names beyond {fields.LONGEST_NAME} characters, are left out"
        parts = [super().unreadable, self.record_error, limits if self.curves.has_left_out else ""]
        return "; ".join(part for part in parts if part)

    @property
    def state(self) -> str:
        """One of running, finished, stopped, failed or interrupted."""
        if self.has_ended or self.trial_state:
            return str(self.progress.end.get("state") or self.trial_state)
        return "running" if self.is_alive else "interrupted"

    def _of_record(self, name: str) -> dict[str, Any]:
        """Return an optional group of the run's record."""
        return self.record.get(name) or {}

    @property
    def has_ended(self) -> bool:
        """Whether the event log contains the end or the failure of the run."""
        return bool(self.progress.end)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step: the median of profiled steps, else the mean without validation and checkpoints.

        None if no step is known.
        """
        return self.ranks.step_seconds(self.progress.num_steps)

    # -- events ---------------------------------------------------------------------------------------------------

    def on_start(self, entry: dict[str, Any]) -> None:
        self._add_news(entry, "resumed" if entry["step"] else "started")

    def on_recovered(self, entry: dict[str, Any]) -> None:
        self.num_recovered += 1

    def on_checkpoint(self, entry: dict[str, Any]) -> None:
        self.checkpoints.append((entry["t"], entry["step"]))

    def on_partition(self, entry: dict[str, Any]) -> None:
        self.partition = {name: entry[name] for name in ("title", "boxes", "arrows")}

    def on_split(self, entry: dict[str, Any]) -> None:
        self.split = {"lines": entry["lines"] or []}

    def on_plan(self, entry: dict[str, Any]) -> None:
        self.plan = entry

    def on_servers(self, entry: dict[str, Any]) -> None:
        self.servers = {name: value for name, value in entry.items() if name not in (*COMMON_FIELDS, "step")}

    def on_end(self, entry: dict[str, Any]) -> None:
        self._add_news(entry, self.state)

    def on_failed(self, entry: dict[str, Any]) -> None:
        self._add_news(entry, entry["reason"])

    def take(self, entry: dict[str, Any]) -> None:
        super().take(entry)
        kind = entry["kind"]
        self.num_faults += kind in FAULTS
        if kind in NEWS:
            self._add_news(entry, str(entry.get("text") or _describe(entry)))

    # -- data of the pages ----------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        progress = self.progress
        first = next(iter(self.curves.losses.values()), None)
        batch_size = self.record.get("batch_size")
        speed = progress.steps_per_second
        return {
            **self.about(),
            "began": self.began,
            "step": progress.step,
            "total": progress.total,
            "epoch": progress.epoch,
            "loss": first.last if first is not None and len(first) else None,
            "outline": first.outline(NUM_OUTLINE) if first is not None else [],
            "params": _shown({**self._of_record("defaults"), **self._of_record("params")}),
            "tags": (self.record.get("tags") or [])[:MOST_PARAMS],
            "notes": (self.record.get("notes") or "")[:LONGEST_NEWS],
            "commit": str(self._of_record("environment").get("commit") or "")[:LONGEST_VALUE],
            "lasted": self.changed - self.began,
            "metrics": {name: series.last for name, series in self.curves.metrics.items()},
            "steps_per_second": speed,
            "samples_per_second": speed * batch_size if speed is not None and batch_size else None,
            "task": self.record.get("task") or "",
            "strategy": _text(self.record.get("spec", {})),
            "devices": self.record.get("devices", []),
            "faults": self.num_faults,
            "recovered": self.num_recovered,
        }

    def detail(self) -> dict[str, Any]:
        speed = self.progress.speed
        speeds = {"speed": {"steps per second": speed} if len(speed) else {}}
        series = {**self.curves.series(), **speeds, **self.ranks.series()}
        return {
            **self.summary(),
            "record": self.record,
            "parameters": self.progress.parameters,
            "reason": self.progress.end.get("reason", "")[:LONGEST_NEWS],
            "series": {group: {name: one.to_dict() for name, one in found.items()} for group, found in series.items()},
            "clock": self.progress.clock(),
            "gaps": self.curves.gaps,
            "usage": self.usage.to_dict(),
            "ranks": {number: rank.to_dict() for number, rank in sorted(self.ranks.by_number.items())},
            "news": list(self.news),
            "checkpoints": list(self.checkpoints),
            "partition": self.partition,
            "split": self.split,
            "servers": self.servers,
            "has_plan": self.plan is not None,
        }

    def _add_news(self, entry: dict[str, Any], text: str) -> None:
        item = {
            "t": entry["t"],
            "kind": entry["kind"],
            "text": text[:LONGEST_NEWS],
            "fault": entry["kind"] in (*FAULTS, "failed"),
        }
        self.news.append({**item, "step": entry.get("step"), "rank": entry.get("rank")})


def _describe(entry: dict[str, Any]) -> str:
    """Return a description of an event that has no text of its own."""
    if entry["kind"] == "lost":
        return f"rank {entry.get('rank')} on {entry.get('host')} was lost: {entry.get('reason')}"
    if entry["kind"] == "recovered":
        replicas = f"{entry.get('size')} replica{'s' * (entry.get('size') != 1)}"
        return f"resumed at step {entry.get('step')} with {replicas}, from {entry.get('source')}"
    if entry["kind"] == "skipped":
        return f"step {entry.get('step')} was left out"
    return ", ".join(f"{key} {value}" for key, value in entry.items() if key not in COMMON_FIELDS)


def _shown(params: dict[str, Any]) -> dict[str, Any]:
    """Return the first parameters of a run for a list: numbers as they are, and others as text, possibly cut."""
    first = itertools.islice(params.items(), MOST_PARAMS)
    return {
        name[:LONGEST_VALUE]: value if fields.number(value) else str(value)[:LONGEST_VALUE] for name, value in first
    }


def _text(spec: dict[str, Any]) -> str:
    """Return the spec of a run's record as a strategy that users can write, such as "replicas=2,accumulate=4"."""
    return ",".join(f"{name}={'none' if value is None else value}" for name, value in spec.items()) or "single"
