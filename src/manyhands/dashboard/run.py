"""A training run: its curves, the time of each rank, failures and recoveries."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from ..core import FileError, fields, read_json
from .log_source import LogSource
from .series import Series

RECORD = "run.json"
RECORD_LIMIT = 4 << 20
"""Maximum bytes of a run.json."""
NUM_NEWS = 1000
"""Number of time line entries kept."""
LONGEST_NEWS = 2000
"""Maximum characters of a time line entry."""
MOST_CURVES, MOST_RANKS = 1000, 4096
"""Number of curves and ranks kept per run; a curve takes up to 48 KiB."""
NUM_SAMPLES = 64
"""Number of timed steps per rank whose median is shown."""
LEAST_SECONDS = 0.2
"""Minimum seconds over which throughput is measured; timestamps of close events are too imprecise."""
NEWS = (
    "notice", "skipped", "lost", "recovered", "straggler", "hang", "member_lost", "followed", "chosen", "sync",
)  # fmt: skip
FAULTS = ("lost", "hang", "straggler", "skipped", "member_lost", "failed")
COMMON_FIELDS = ("v", "t", "kind", "text")


class Rank:
    """State of one rank."""

    def __init__(self) -> None:
        self.host = self.device = self.limit = ""
        self.seconds: dict[str, float] = {}
        """Seconds spent so far, by activity."""
        self.memory, self.pace = Series(), Series()
        self.held: dict[str, int] = {}
        self.samples: deque[dict[str, float]] = deque(maxlen=NUM_SAMPLES)
        self.peak = 0
        self.is_slow = False

    def phases(self) -> dict[str, float]:
        """Return the median seconds of each phase of a step, if steps were timed."""
        names = dict.fromkeys(name for sample in self.samples for name in sample)
        return {name: median(sample.get(name, 0.0) for sample in self.samples) for name in names}

    def to_dict(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "device": self.device,
            "limit": self.limit,
            "seconds": self.seconds,
            "phases": self.phases(),
            "pace": self.pace.last if len(self.pace) else None,
            "memory": self.memory.last if len(self.memory) else None,
            "peak": self.peak,
            "held": self.held,
            "slow": self.is_slow,
        }


class RunFolder(LogSource):
    """Folder written by `fit`."""

    kind, lock = "run", ".lock"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path)
        self.record: dict[str, Any] = {}
        self.record_error = ""
        self.has_left_out = False
        """Whether there were more curves than are kept."""
        self.losses: dict[str, Series] = {}
        self.metrics: dict[str, Series] = {}
        self.logged: dict[str, Series] = {}
        self.rates: dict[str, Series] = {}
        self.speed = Series()
        self.ranks: dict[int, Rank] = {}
        self.news: deque[dict[str, Any]] = deque(maxlen=NUM_NEWS)
        self.checkpoints: deque[tuple[float, int]] = deque(maxlen=NUM_NEWS)
        self.num_faults = self.num_recovered = 0
        self.step = self.epoch = 0
        self.total: int | None = None
        self.parameters: int | None = None
        self.end: dict[str, Any] = {}
        self.partition: dict[str, Any] | None = None
        self.split: dict[str, Any] | None = None
        self.plan: dict[str, Any] | None = None
        self.servers: dict[str, Any] = {}
        """Counters of the exchange between workers and parameter servers."""
        self.trial_state = ""
        """State that the study reports, if this is a trial that has ended."""
        self._timed_from: tuple[float, int] | None = None
        self._began_at, self._began_when = 0, 0.0

    def refresh(self) -> bool:
        # run.json exists before the first event; with parameter servers it is written again at the end.
        before = self.unreadable
        seen = super().refresh()
        if seen or not self.record:
            self._read_record()
        return seen or self.unreadable != before

    def _read_record(self) -> None:
        try:
            found = read_json(self.path / RECORD, RECORD_LIMIT)
            if not fields.holds(found, fields.RECORD_FIELDS):
                raise FileError(f"{RECORD} must be a record of a run", got="missing fields, or fields of other types")
        except FileNotFoundError:
            return
        except (OSError, FileError) as error:
            self.record_error = str(error)
        else:
            self.record, self.record_error = found, ""

    @property
    def unreadable(self) -> str:
        limits = f"curves beyond {MOST_CURVES}, or with names beyond {fields.LONGEST_NAME} characters, are left out"
        parts = [super().unreadable, self.record_error, limits if self.has_left_out else ""]
        return "; ".join(part for part in parts if part)

    @property
    def state(self) -> str:
        """One of running, finished, stopped, failed or interrupted."""
        if self.end or self.trial_state:
            return str(self.end.get("state") or self.trial_state)
        return "running" if self.is_alive else "interrupted"

    @property
    def steps_per_second(self) -> float | None:
        """Recent steps per second; for a run that has ended, the mean over all of its steps."""
        lasted = self.end.get("t", self._began_when) - self._began_when
        if lasted > 0 and self.step > self._began_at:
            return float((self.step - self._began_at) / lasted)
        return self.speed.last if len(self.speed) else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step: the median of timed steps, else the mean without validation and checkpoints."""
        rank = self.ranks.get(0, Rank())
        if rank.samples:
            return median(sum(sample.values()) for sample in rank.samples)
        busy = rank.seconds.get("total", 0.0) - rank.seconds.get("save", 0.0) - rank.seconds.get("validation", 0.0)
        num_steps = self.step - self._began_at
        return busy / num_steps if busy > 0 and num_steps > 0 else None

    # -- events ---------------------------------------------------------------------------------------------------

    def on_start(self, entry: dict[str, Any]) -> None:
        self.total, self.parameters, self.end = entry["total"], entry["parameters"], {}
        self._began_when, self._began_at = self._timed_from = entry["t"], entry["step"]
        self._add_news(entry, "resumed" if entry["step"] else "started")
        if entry["step"]:
            self._forget_after(entry["step"])

    def on_steps(self, entry: dict[str, Any]) -> None:
        steps = entry["steps"]
        for name, values in entry["losses"].items():
            self._curve(self.losses, name).extend(steps, values)
        for name, value in (entry.get("lr") or {}).items():
            self._curve(self.rates, name or "lr").add(steps[-1], value)
        for name, value in (entry.get("gradient_norm") or {}).items():
            self._curve(self.logged, f"gradient_norm {name}".rstrip()).add(steps[-1], value)
        self.step, self.epoch = steps[-1], entry["epoch"]
        self._time(entry["t"])

    def _time(self, moment: float) -> None:
        """Record the steps per second since the last measurement, validation and checkpoints included."""
        if self._timed_from is None:
            self._timed_from = moment, self.step
        then, step = self._timed_from
        if moment - then >= LEAST_SECONDS and self.step > step:
            self.speed.add(self.step, (self.step - step) / (moment - then))
            self._timed_from = moment, self.step

    def on_epoch(self, entry: dict[str, Any]) -> None:
        self.step, self.epoch = max(self.step, entry["step"]), entry["epoch"] + 1
        for name, value in entry["metrics"].items():
            self._curve(self.metrics, name).add(entry["step"], value)

    def on_log(self, entry: dict[str, Any]) -> None:
        for name, value in entry["values"].items():
            if fields.number(value):
                self._curve(self.logged, name).add(entry["step"], value)

    def _curve(self, group: dict[str, Series], name: str) -> Series:
        """Return the curve of a name, or one that is discarded if there are too many."""
        if name in group:
            return group[name]
        num_curves = sum(map(len, (self.losses, self.metrics, self.logged, self.rates)))
        if num_curves >= MOST_CURVES or len(name) > fields.LONGEST_NAME:
            self.has_left_out = True
            return Series()
        return group.setdefault(name, Series())

    def on_waits(self, entry: dict[str, Any]) -> None:
        rank = self._rank(entry)
        rank.seconds, rank.limit = entry["seconds"], entry.get("limit") or ""
        rank.memory.add(entry["t"], entry.get("memory"))

    def on_pace(self, entry: dict[str, Any]) -> None:
        self._rank(entry).pace.add(entry["step"], entry["seconds"])

    def on_profile(self, entry: dict[str, Any]) -> None:
        rank = self._rank(entry)
        rank.samples.append(entry["seconds"])
        rank.peak = max(rank.peak, entry["peak"])

    def on_used(self, entry: dict[str, Any]) -> None:
        rank = self._rank(entry)
        rank.held = {name: entry[name] for name in ("parameters", "optimizer")}
        rank.peak = max(rank.peak, entry["peak"])

    def on_straggler(self, entry: dict[str, Any]) -> None:
        self._rank(entry).is_slow = "is slow" in entry["text"]

    def on_recovered(self, entry: dict[str, Any]) -> None:
        self.num_recovered += 1
        self._forget_after(entry["step"])
        size = entry["size"]
        self.ranks = {number: rank for number, rank in self.ranks.items() if number < size}

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
        self.step = max(self.step, entry["step"])
        self.end = {"state": "stopped" if entry.get("stopped") else "finished", "t": entry["t"]}
        self._add_news(entry, self.end["state"])

    def on_failed(self, entry: dict[str, Any]) -> None:
        self.end = {"state": "failed", "t": entry["t"], "reason": entry["reason"][:LONGEST_NEWS]}
        self._add_news(entry, entry["reason"])

    def take(self, entry: dict[str, Any]) -> None:
        super().take(entry)
        kind = entry["kind"]
        self.num_faults += kind in FAULTS
        if kind in NEWS:
            self._add_news(entry, str(entry.get("text") or _describe(entry)))

    # -- data of the pages ----------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        first = next(iter(self.losses.values()), None)
        batch_size = self.record.get("batch_size")
        speed = self.steps_per_second
        return {
            **self.about(),
            "began": self.began,
            "step": self.step,
            "total": self.total,
            "epoch": self.epoch,
            "loss": first.last if first is not None and len(first) else None,
            "metrics": {name: series.last for name, series in self.metrics.items()},
            "steps_per_second": speed,
            "samples_per_second": speed * batch_size if speed is not None and batch_size else None,
            "task": self.record.get("task") or "",
            "strategy": _text(self.record.get("spec", {})),
            "devices": self.record.get("devices", []),
            "faults": self.num_faults,
            "recovered": self.num_recovered,
        }

    def detail(self) -> dict[str, Any]:
        series = {
            "losses": self.losses, "metrics": self.metrics, "logged": self.logged, "rates": self.rates,
            "speed": {"steps a second": self.speed} if len(self.speed) else {},
            "pace": {f"rank {n}": rank.pace for n, rank in sorted(self.ranks.items()) if len(rank.pace)},
            "memory": {f"rank {n}": rank.memory for n, rank in sorted(self.ranks.items()) if len(rank.memory)},
        }  # fmt: skip
        return {
            **self.summary(),
            "record": self.record,
            "parameters": self.parameters,
            "reason": self.end.get("reason", ""),
            "series": {group: {name: one.to_dict() for name, one in found.items()} for group, found in series.items()},
            "ranks": {number: rank.to_dict() for number, rank in sorted(self.ranks.items())},
            "news": list(self.news),
            "checkpoints": list(self.checkpoints),
            "partition": self.partition,
            "split": self.split,
            "servers": self.servers,
            "has_plan": self.plan is not None,
        }

    def placed(self) -> list[dict[str, Any]]:
        """Return the host and device of every rank, for the cluster page."""
        devices = self.record.get("devices", [])
        found = []
        # Device names lack the host if there is only one; a rank may have reported it.
        known = next((rank.host for rank in self.ranks.values() if rank.host), "this host")
        for number in sorted({*self.ranks, *range(len(devices))}):
            rank = self.ranks.get(number, Rank())
            named = str(devices[number]) if number < len(devices) else rank.device
            host, _, device = named.rpartition("/")
            memory = rank.memory.last if len(rank.memory) else None
            place = {"host": host or rank.host or known, "device": device or rank.device}
            found.append({**place, "rank": number, "memory": memory, "slow": rank.is_slow})
        return found

    def _rank(self, entry: dict[str, Any]) -> Rank:
        place = entry["rank"]
        rank = self.ranks.get(place)
        if rank is None:
            if place >= MOST_RANKS:
                raise ValueError("the run has too many ranks")
            rank = self.ranks[place] = Rank()
        rank.host, rank.device = entry.get("host") or rank.host, entry.get("device") or rank.device
        return rank

    def _add_news(self, entry: dict[str, Any], text: str) -> None:
        item = {"t": entry["t"], "kind": entry["kind"], "text": text[:LONGEST_NEWS], "fault": entry["kind"] in FAULTS}
        self.news.append({**item, "step": entry.get("step"), "rank": entry.get("rank")})

    def _forget_after(self, step: int) -> None:
        """Drop data after the step from which a run resumes, because these steps are repeated."""
        self.step = step
        for group in (self.losses, self.metrics, self.logged, self.rates):
            for series in group.values():
                series.forget_after(step)
        self.speed.forget_after(step)
        self._timed_from = None


def _describe(entry: dict[str, Any]) -> str:
    """Return a description of an event that has no text."""
    if entry["kind"] == "lost":
        return f"rank {entry.get('rank')} on {entry.get('host')} was lost: {entry.get('reason')}"
    if entry["kind"] == "recovered":
        return f"resumed at step {entry.get('step')} with {entry.get('size')} replicas, from {entry.get('source')}"
    if entry["kind"] == "skipped":
        return f"step {entry.get('step')} was left out"
    return ", ".join(f"{key} {value}" for key, value in entry.items() if key not in COMMON_FIELDS)


def _text(spec: dict[str, Any]) -> str:
    """Return a strategy in the syntax that users write."""
    return ",".join(f"{name}={'none' if value is None else value}" for name, value in spec.items()) or "single"
