"""Folder with an event log of plans, of profiles, or of a server with its requests."""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import EVENTS, fields
from .log_source import PARTS, LogSource
from .log_tail import Tail

ACCESS = "access.jsonl"
NUM_NEWS = 1000
"""Number of latest entries kept for the timeline."""
LONGEST_NEWS = 2000
"""Maximum characters of a timeline entry."""
MOST_KEPT = 50
"""Number of latest plans, and of latest profiles, that are kept per log."""
MOST_NAMES = 1000
"""Maximum number of models, and of versions per model, that are kept."""
NUM_BUCKETS = 600
"""Maximum number of time buckets in which requests are counted; if there are more, neighbours are merged."""
LATE_SECONDS = 1.5
"""Age in seconds after which a bucket is complete, because servers write their access log every second."""
FIRST, RATIO, NUM_BOUNDS = 1e-5, 1.25, 80
"""Bounds of the latency histogram: the first one in seconds, the ratio of neighbours, and their number."""
SERVING = (
    "starting", "serving", "stopping", "stopped", "split", "rolled_back", "watch_failed",
    "version_loading", "version_failed", "version_available", "version_ended",
    "replica_lost", "replica_failed", "replica_replaced", "routing", "backend_up", "backend_down",
    "label", "replica_hung", "state_not_saved", "state_refused",
)  # fmt: skip
"""Kinds of events of a server or router that the timeline shows."""
ACCESS_FIELDS: fields.Fields = {
    "t": fields.moment,
    "status": fields.count,
    "ms": lambda value: fields.number(value) and math.isfinite(value),
}
"""The fields of a line of an access log."""
FAULTS = (
    "rolled_back", "watch_failed", "version_failed", "replica_lost", "replica_failed", "backend_down",
    "replica_hung", "state_not_saved", "state_refused",
)  # fmt: skip
"""Kinds of events in `SERVING` that are marked as faults."""


class Bucket:
    """Number, refusals and latency histogram of the requests in a time interval that begins at `t`."""

    __slots__ = ("bounds", "num", "num_refused", "t")

    def __init__(self, t: int) -> None:
        self.t, self.num, self.num_refused = t, 0, 0
        self.bounds = [0] * NUM_BOUNDS

    def add(self, status: int, seconds: float) -> None:
        """Count a request with its HTTP status and latency."""
        self.num += 1
        self.num_refused += status >= 400
        place = math.ceil(math.log(max(seconds, FIRST) / FIRST, RATIO))
        self.bounds[min(NUM_BOUNDS - 1, place)] += 1

    def join(self, other: Bucket) -> None:
        """Add the requests of another bucket."""
        self.num += other.num
        self.num_refused += other.num_refused
        self.bounds = [a + b for a, b in zip(self.bounds, other.bounds, strict=True)]

    def quantile(self, share: float) -> float | None:
        """Return the latency in seconds that this share of the requests does not exceed; None without requests."""
        wanted, seen = math.ceil(share * self.num), 0
        for place, num in enumerate(self.bounds):
            seen += num
            if seen >= wanted > 0:
                return float(FIRST * RATIO**place)
        return None


class Log(LogSource):
    """A folder with an event log that `serve --log`, `plan --log` or `profile --log` has written."""

    kind, lock = "log", ACCESS

    def __init__(self, name: str, path: Path) -> None:
        self.plans: deque[dict[str, Any]] = deque(maxlen=MOST_KEPT)
        self.profiles: deque[dict[str, Any]] = deque(maxlen=MOST_KEPT)
        self.news: deque[dict[str, Any]] = deque(maxlen=NUM_NEWS)
        self.versions: dict[str, dict[str, str]] = {}
        self.splits: dict[str, str] = {}
        self.current: dict[str, str] = {}
        """The current version by model."""
        self.labels: dict[str, dict[str, str]] = {}
        """Versions by model and label."""
        self.serving: dict[str, Any] = {}
        self.is_up = False
        self.buckets: dict[int, Bucket] = {}
        self.width = 1
        """Width of a bucket in seconds."""
        super().__init__(name, path)

    def _open(self) -> list[tuple[Tail, Any]]:
        events = Tail(self.path / EVENTS, without=(PARTS,))
        return [(events, self.take_event), (Tail(self.path / ACCESS), self.take_access)]

    def on_plan(self, entry: dict[str, Any]) -> None:
        self.plans.append(entry)

    def on_profiled(self, entry: dict[str, Any]) -> None:
        self.profiles.append(entry)

    @property
    def state(self) -> str:
        """One of serving, stopped or interrupted. A killed server writes no event, so its lock and age are checked."""
        if not self.is_up:
            return "stopped"
        here = socket.gethostname()
        is_here = (self.serving.get("host") or here) == here
        return "interrupted" if is_here and not self.is_alive else "serving"

    def on_starting(self, entry: dict[str, Any]) -> None:
        # A restarted server reports its versions, labels and splits again.
        self.versions, self.splits, self.current, self.labels = {}, {}, {}, {}

    def on_serving(self, entry: dict[str, Any]) -> None:
        self.serving, self.is_up = entry, True

    # A router's log has the form of a server's.
    on_routing = on_serving

    def on_stopped(self, entry: dict[str, Any]) -> None:
        self.is_up = False

    def on_split(self, entry: dict[str, Any]) -> None:
        self.splits.pop(entry["model"], None)
        if entry["shares"] and len(self.splits) < MOST_NAMES:
            self.splits[entry["model"]] = _shared_out(entry["shares"])

    def on_label(self, entry: dict[str, Any]) -> None:
        labels = self.labels.setdefault(entry["model"], {}) if len(self.labels) < MOST_NAMES else {}
        labels.pop(entry["label"], None)
        if entry["version"] is not None and len(labels) < MOST_NAMES:
            labels[entry["label"]] = str(entry["version"])

    def take(self, entry: dict[str, Any]) -> None:
        super().take(entry)
        kind = entry["kind"]
        if kind not in SERVING:
            return
        if kind.startswith("version_"):
            state = kind.removeprefix("version_")
            reason = f": {entry['reason']}"[:LONGEST_NEWS] if kind == "version_failed" and entry.get("reason") else ""
            self._note_version(entry["model"], str(entry["version"]), state + reason)
        if kind == "version_available" and len(self.current) < MOST_NAMES:
            self.current[entry["model"]] = str(entry["version"])
        values = [f"{key} {_words(key, value)}" for key, value in entry.items() if key not in ("v", "t", "kind")]
        text = f"{kind.replace('_', ' ')}: {', '.join(values)}" if values else kind
        self.news.append({"t": entry["t"], "kind": kind, "text": text[:LONGEST_NEWS], "fault": kind in FAULTS})

    def _note_version(self, model: str, version: str, state: str) -> None:
        known = self.versions if model in self.versions or len(self.versions) < MOST_NAMES else {}
        states = known.setdefault(model, {})
        if version in states or len(states) < MOST_NAMES:
            states[version] = state

    def take_access(self, line: dict[str, Any]) -> None:
        """Count the request of a line of the access log; raise ValueError if the line is malformed."""
        if not fields.holds(line, ACCESS_FIELDS):
            raise ValueError("the line is not an entry of an access log")
        self.changed = max(self.changed, min(line["t"], time.time()))
        at = int(line["t"]) // self.width * self.width
        bucket = self.buckets.get(at)
        if bucket is None:
            bucket = self.buckets[at] = Bucket(at)
            if len(self.buckets) > NUM_BUCKETS:
                self._widen()
                return self.take_access(line)
        return bucket.add(int(line["status"]), line["ms"] / 1e3)

    def _widen(self) -> None:
        """Double the width of all buckets, and merge neighbours."""
        self.width *= 2
        wide: dict[int, Bucket] = {}
        for bucket in self.buckets.values():
            at = bucket.t // self.width * self.width
            wide.setdefault(at, Bucket(at)).join(bucket)
        self.buckets = wide

    def _over_time(self) -> list[Bucket]:
        """Return the buckets in order of time, with empty ones for idle times, without the current incomplete one."""
        known = self.buckets
        if known and self.state == "serving":
            last = int(time.time() - LATE_SECONDS) // self.width * self.width - self.width
            known = {last: Bucket(last), **{at: bucket for at, bucket in known.items() if at <= last}}
        found: list[Bucket] = []
        for at in sorted(known):
            if found and at - found[-1].t > self.width:
                found += [Bucket(quiet) for quiet in sorted({found[-1].t + self.width, at - self.width})]
            found.append(known[at])
        return found

    def summary(self) -> dict[str, Any]:
        return {
            **self.about(),
            "plans": len(self.plans),
            "profiles": len(self.profiles),
            "serves": bool(self.serving),
            "current": self.current,
            "splits": self.splits,
        }

    def detail(self) -> dict[str, Any]:
        buckets = self._over_time()
        requests = {
            "x": [bucket.t for bucket in buckets],
            "rate": [bucket.num / self.width for bucket in buckets],
            "refused": [bucket.num_refused / self.width for bucket in buckets],
            "p50": [bucket.quantile(0.5) for bucket in buckets],
            "p99": [bucket.quantile(0.99) for bucket in buckets],
        }
        about = {
            "serving": self.serving,
            "versions": self.versions,
            "labels": self.labels,
            "news": list(self.news),
        }
        return {**self.summary(), **about, "requests": requests, "profiled": list(self.profiles)}


def _words(key: str, value: Any) -> str:
    """Return the value of an event's field as readable text; `key` is the name of the field."""
    if key == "shares":
        return _shared_out(value) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _shared_out(shares: Sequence[dict[str, Any]]) -> str:
    """Return the shares of a traffic split as text.

    >>> _shared_out([{"model": "m", "version": 1, "weight": 9.0}, {"model": "m", "version": 2, "weight": 1.0}])
    '90% m 1, 10% m 2'
    """
    total = sum(share["weight"] for share in shares) or 1.0
    names = (
        " ".join(str(share[key]) for key in ("model", "version") if share.get(key) is not None) for share in shares
    )
    return ", ".join(f"{100 * share['weight'] / total:.3g}% {name}" for share, name in zip(shares, names, strict=True))
