"""Checks of the fields of events, journal lines and run.json on which readers depend.

A log may be damaged, or written by another program: a line whose fields do not pass their checks is skipped as a whole,
so that its readers, such as dashboard pages, need no further checks. Fields that are not listed may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

Check = Callable[[Any], bool]
Fields = Mapping[str, Check]

LATEST = 1e11
"""Latest valid time of an event in seconds since the epoch: about the year 5138."""
LONGEST_NAME = 300
"""Maximum characters of the name of a host, a device, a model, a phase or a curve."""
MOST_PHASES = 100
"""Maximum number of phases of a step."""
MOST_STEPS = 10**8
"""Maximum steps of one run: lists of losses have one entry for each."""


def number(value: Any) -> bool:
    """Return whether a value is a number that fits into 64 bits, including NaN and infinity."""
    return isinstance(value, float) or (type(value) is int and -(2**63) <= value < 2**63)


def count(value: Any) -> bool:
    """Return whether a value is a nonnegative integer that a float represents exactly."""
    return type(value) is int and 0 <= value < 2**53


def step(value: Any) -> bool:
    """Return whether a value can be the number of a step."""
    return type(value) is int and 0 <= value <= MOST_STEPS


def moment(value: Any) -> bool:
    """Return whether a value can be the time of an event, in seconds since the epoch."""
    return number(value) and 0 <= value <= LATEST


def text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def label(value: Any) -> bool:
    """Return whether a value is a string short enough for a name."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME


def phases(value: Any) -> bool:
    """Return whether a value maps at most MOST_PHASES names of phases to seconds."""
    return named(number)(value) and len(value) <= MOST_PHASES and all(map(label, value))


def mapping(value: Any) -> bool:
    """Return whether a value is a JSON object."""
    return isinstance(value, dict)


def maybe(check: Check) -> Check:
    """Return a check that also accepts None, and a field that is missing."""
    return lambda value: value is None or check(value)


def listed(check: Check) -> Check:
    """Return a check of lists whose items pass `check`."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def named(check: Check) -> Check:
    """Return a check of JSON objects whose values pass `check`."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def having(**checks: Check) -> Check:
    """Return a check of JSON objects whose fields pass their `checks`."""
    return lambda value: isinstance(value, dict) and holds(value, checks)


def holds(value: Mapping[str, Any], checks: Fields) -> bool:
    """Return whether the fields of a JSON object pass their checks; a missing field is checked as None."""
    return all(check(value.get(name)) for name, check in checks.items())


_ANY = {"rank": maybe(count), "step": maybe(step)}
_PLACE = {"rank": count, "host": maybe(label), "device": maybe(label)}
_OPTION = having(strategy=text, devices=count, seconds=maybe(number), measured=maybe(number), memory=maybe(number))
_CURVE = having(
    devices=listed(count),
    speedup=listed(number),
    saturates=number,
    reason=text,
    remedies=listed(having(text=text, gain=number, saturates=number)),
)
_SHARE = having(model=label, weight=number)
_VERSION = {"model": label, "version": count}
FIELDS: dict[str, Fields] = {
    "start": {"total": maybe(count), "epochs": maybe(count), "parameters": maybe(count), "step": step},
    "steps": {
        "steps": lambda value: listed(step)(value) and bool(value),
        "losses": named(listed(maybe(number))),
        "lr": maybe(named(maybe(number))),
        "gradient_norm": maybe(named(maybe(number))),
        "epoch": count,
    },
    "epoch": {"epoch": count, "step": step, "metrics": named(maybe(number))},
    "log": {"step": step, "values": mapping},
    "waits": {**_PLACE, "seconds": phases, "limit": maybe(text), "memory": maybe(number)},
    "pace": {**_PLACE, "step": step, "seconds": number},
    "points": {
        "rank": count, "curve": label, "first": listed(number), "x": listed(number), "total": listed(number),
        "count": listed(count), "low": listed(number), "high": listed(number), "last": number,
    },
    "compacted": {"counts": named(count)},
    "profile": {**_PLACE, "step": step, "seconds": phases, "total": number, "peak": number},
    "usage": {
        "host": maybe(label), "cpu": number, "memory": number, "sent": maybe(number), "received": maybe(number),
        "gpus": maybe(listed(having(used=number, memory=number))),
    },
    "used": {**_PLACE, "parameters": number, "optimizer": number, "peak": number},
    "straggler": {**_PLACE, "step": maybe(step), "text": text},
    "skipped": {"step": step},
    "coordinator": {"term": count, "host": label, "text": text},
    "lost": {"rank": maybe(count), "step": maybe(step)},
    "recovered": {"step": step, "size": count},
    "checkpoint": {"step": step},
    "parts": {
        "rank": count, "size": count, "steps": listed(step), "losses": listed(number), "accumulate": maybe(count)
    },
    "partition": {
        "title": text,
        "boxes": listed(having(parts=listed(text))),
        "arrows": listed(having(num_bytes=maybe(number))),
    },
    "split": {"lines": maybe(listed(text)), "model": maybe(label), "shares": maybe(listed(_SHARE))},
    "plan": {
        "task": text, "cluster": text, "batch_size": maybe(count), "best": text, "alone": maybe(number),
        "options": listed(_OPTION), "curve": _CURVE,
    },
    "profiled": {
        "task": text,
        "strategy": text,
        "seconds": number,
        "ranks": listed(having(rank=count, phases=named(number))),
        "advice": listed(having(name=text)),
    },
    "ensemble": {
        "members": maybe(lambda value: isinstance(value, list)),
        "calibration": maybe(mapping),
        "comparison": maybe(mapping),
    },
    "end": {"step": step},
    "failed": {"reason": text},
    "notice": {"text": text},
    "serving": {"devices": maybe(listed(text)), "host": maybe(label)},
    "routing": {"devices": maybe(listed(text)), "host": maybe(label), "backends": maybe(listed(text))},
    "label": {"model": label, "label": label, "version": maybe(count)},
    **{f"version_{state}": _VERSION for state in ("loading", "failed", "available", "ended")},
}  # fmt: skip
"""Checks of the fields of each kind of event."""
RECORD_FIELDS: Fields = {
    "spec": mapping,
    "params": maybe(mapping),
    "defaults": maybe(mapping),
    "environment": maybe(mapping),
    "tags": maybe(listed(label)),
    "notes": maybe(text),
    "devices": listed(text),
    "batch_size": maybe(count),
    "task": maybe(text),
    "servers": maybe(mapping),
}
"""Checks of the fields of a run.json."""
CREATE_STUDY, STUDY_ATTRIBUTE, CREATE_TRIAL, END_TRIAL, REPORT, TRIAL_ATTRIBUTE = 0, 2, 4, 6, 7, 8
"""Optuna's operation codes of a study's journal lines."""
_STUDY = having(
    objectives=maybe(listed(lambda value: listed(text)(value) and len(value) == 2)),
    space=maybe(mapping),
    params=maybe(mapping),
    search=maybe(text),
)
JOURNAL_FIELDS: dict[int, Fields] = {
    STUDY_ATTRIBUTE: {"user_attr": lambda value: mapping(value) and _STUDY(value.get("manyhands", {}))},
    CREATE_TRIAL: {"given": mapping, "distributions": maybe(named(text))},
    END_TRIAL: {
        "trial_id": count, "state": lambda value: value in (0, 1, 2, 3), "values": maybe(listed(number)),
        "metrics": named(maybe(number)), "seconds": number, "reason": text,
        "feasible": lambda value: isinstance(value, bool),
    },
    REPORT: {"trial_id": count, "step": count, "intermediate_value": number, "seconds": number},
    TRIAL_ATTRIBUTE: {"trial_id": count, "user_attr": mapping},
}  # fmt: skip
"""Checks of the fields of a study's journal lines, by operation code."""


def is_journal_line(value: Any) -> bool:
    """Return whether a value is a well-formed line of a study's journal."""
    is_line = isinstance(value, dict) and type(value.get("op_code")) is int
    return is_line and count(value.get("trial_id", 0)) and holds(value, JOURNAL_FIELDS.get(value["op_code"], {}))


def is_event(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is a well-formed event.

    >>> is_event({"t": 1.0, "kind": "end", "step": 3}), is_event({"t": 1.0, "kind": "end", "step": "3"})
    (True, False)
    """
    if not (isinstance(value, dict) and isinstance(value.get("kind"), str) and moment(value.get("t"))):
        return False
    if not holds(value, FIELDS.get(value["kind"], {})) or not holds(value, _ANY):
        return False
    return value["kind"] != "steps" or all(len(one) == len(value["steps"]) for one in value["losses"].values())
