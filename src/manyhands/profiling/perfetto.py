"""Traces for Perfetto and Chrome: phases, modules and operations of every rank, on one clock per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .operations import Bar

if TYPE_CHECKING:
    from .probe import RankProfile
    from .profile import Profile

PHASES = "phases"


def bars(one: RankProfile) -> list[Bar]:
    """Return all bars of a rank's timeline: phases of the timed steps, then everything of the profiled step."""
    found, at = [], 0.0
    for sample in one.samples:
        found += [Bar(PHASES, span.name, at + span.start, at + span.end) for span in sample.spans]
        at += sample.total
    if one.watched is not None and one.watched_sample is not None:
        found += [Bar(PHASES, span.name, at + span.start, at + span.end) for span in one.watched_sample.spans]
        found += [Bar(bar.track, bar.name, at + bar.start, at + bar.end) for bar in one.watched.bars]
    return found


def write(profile: Profile, path: Path) -> Path:
    """Write the trace of a profile, with a process for every rank and a thread for every track; return `path`."""
    events: list[dict[str, Any]] = []
    for one in profile.ranks:
        about = {"ph": "M", "pid": one.rank, "tid": 0}
        events.append({**about, "name": "process_name", "args": {"name": f"rank {one.rank} on {one.breakdown.host}"}})
        tracks: dict[str, int] = {}
        for bar in bars(one):
            if bar.track not in tracks:
                tracks[bar.track] = len(tracks)
                named = {"ph": "M", "pid": one.rank, "tid": tracks[bar.track], "name": "thread_name"}
                events.append({**named, "args": {"name": bar.track}})
            if bar.end > bar.start:
                when = {"ts": round(1e6 * bar.start, 3), "dur": round(1e6 * (bar.end - bar.start), 3)}
                events.append({"ph": "X", "pid": one.rank, "tid": tracks[bar.track], "name": bar.name, **when})
        events += _held(one)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def _held(one: RankProfile) -> list[dict[str, Any]]:
    """Return trace events that show memory by kind as a counter over the profiled step."""
    if one.memory is None or one.watched_sample is None:
        return []
    start, length = sum(sample.total for sample in one.samples), one.watched_sample.total
    return [
        {
            "ph": "C",
            "pid": one.rank,
            "name": "memory",
            "ts": round(1e6 * (start + moment * length), 3),
            "args": {kind: sizes[index] for kind, sizes in one.memory.bytes.items()},
        }
        for index, moment in enumerate(one.memory.moments)
    ]
