"""Conversion of events to numbers by step, under names such as `train/loss` that logging tools group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ...core import Event

_GROUPS = ("train", "valid", "test")
_STEPS_ALONE = ("steps", "losses", "epoch", "v", "t", "kind")
Numbers = tuple[int, dict[str, float]]


def numbers_of(entry: Event, last_step: int) -> Iterator[Numbers]:
    """Yield the numbers of an event by step; numbers of an event without a step are attributed to `last_step`.

    >>> list(numbers_of({"kind": "steps", "steps": [1, 2], "losses": {"loss": [3.0, 2.0]}, "epoch": 0}, 0))
    [(1, {'train/loss': 3.0}), (2, {'train/loss': 2.0, 'epoch': 0.0})]
    >>> list(numbers_of({"kind": "epoch", "step": 2, "epoch": 0, "metrics": {"valid_accuracy": 0.5}}, 2))
    [(2, {'valid/accuracy': 0.5, 'epoch': 1.0})]
    """
    kind = entry["kind"]
    if kind == "start":
        yield entry["step"], _finite({"model/parameters": entry.get("parameters")})
    elif kind == "steps":
        yield from _steps(entry)
    elif kind == "epoch":
        named = {grouped(name): value for name, value in entry["metrics"].items()}
        yield entry["step"], _finite({**named, "epoch": entry["epoch"] + 1})
    elif kind == "waits":
        yield last_step, _finite(_shares(entry))
    elif kind == "log":
        yield entry["step"], _finite(entry["values"])


def spread(points: list[Numbers], most: int) -> list[Numbers]:
    """Return at most `most` of the points, evenly spread and including the last one; all of them if `most` is 0.

    >>> [step for step, _ in spread([(step, {}) for step in range(1, 11)], 4)]
    [2, 5, 7, 10]
    """
    if not most or len(points) <= most:
        return points
    return [points[(place + 1) * len(points) // most - 1] for place in range(most)]


def text_of(entry: Event) -> str:
    """Return the text of an event; empty for events without text."""
    if entry["kind"] == "notice":
        return str(entry["text"])
    if entry["kind"] == "failed":
        return str(entry["reason"])
    if entry["kind"] == "log":
        return "  ".join(f"{name} {value}" for name, value in entry["values"].items() if isinstance(value, str))
    return ""


def grouped(name: str) -> str:
    """Return a metric's name as a path, so that tools group metrics of training, validation and test.

    >>> grouped("valid_top_5"), grouped("auc")
    ('valid/top_5', 'auc')
    """
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if group in _GROUPS and rest else name


def _steps(entry: Event) -> Iterator[Numbers]:
    """Yield the numbers of a "steps" event by step; values that are not lists belong to the event's last step."""
    steps = entry["steps"]
    beside = {name: value for name, value in entry.items() if name not in _STEPS_ALONE}
    columns = dict(_leaves({**entry["losses"], **beside}))
    for place, step in enumerate(steps):
        is_last = place == len(steps) - 1
        values = {f"train/{name}": _at(value, place, len(steps), is_last) for name, value in columns.items()}
        if is_last:
            values["epoch"] = entry["epoch"]
        yield step, _finite(values)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts with their paths, such as "lr/encoder"."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}".rstrip("/"), value


def _at(value: Any, place: int, count: int, is_last: bool) -> Any:
    """Return the value for one of `count` steps: that of a list of this length, else the value for the last step."""
    if isinstance(value, list):
        return value[place] if len(value) == count else None
    return value if is_last else None


def _shares(entry: Event) -> dict[str, Any]:
    """Return the shares of a replica's time by activity, under names such as "time/rank0/compute"."""
    seconds = entry["seconds"]
    total = seconds.get("total") or 1e-9
    return {f"time/rank{entry['rank']}/{name}": value / total for name, value in seconds.items() if name != "total"}


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among the values as floats, because tools reject or hide other values."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
