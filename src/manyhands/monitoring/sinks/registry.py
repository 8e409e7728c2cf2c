"""The registry of sinks: creates sinks from the values that `log_to=` accepts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from ...core import Event, SettingsError
from .csv_file import CsvSink
from .function import FunctionSink
from .mlflow import MlflowSink
from .sink import Sink
from .tensorboard import TensorBoardSink
from .wandb import WandbSink

SINKS: dict[str, type[Sink]] = {sink.name: sink for sink in (CsvSink, TensorBoardSink, WandbSink, MlflowSink)}
LogTo = str | Sink | Callable[[Event], Any] | Sequence[str | Sink | Callable[[Event], Any]]


def make_sinks(log_to: LogTo | None) -> list[Sink]:
    """Return the sinks that `log_to` names; raise SettingsError for unknown, duplicate or unusable ones.

    >>> [str(sink) for sink in make_sinks("csv")]
    ['csv']
    """
    asked: Sequence[Any] = log_to if isinstance(log_to, (list, tuple)) else [] if log_to is None else [log_to]
    words = [word for item in asked for word in (item.split(",") if isinstance(item, str) else [item])]
    sinks = [_made(word.strip() if isinstance(word, str) else word) for word in words if word != ""]
    names = [str(sink) for sink in sinks if type(sink) in SINKS.values()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError("a sink must be named once", got=f"{twice!r} twice", remedy="omit one of them")
    for sink in sinks:
        sink.require()
    return sinks


def _made(asked: Any) -> Sink:
    if isinstance(asked, Sink):
        return asked
    if isinstance(asked, str) and asked in SINKS:
        return SINKS[asked]()
    if callable(asked) and not isinstance(asked, type):
        return FunctionSink(asked)
    close = difflib.get_close_matches(str(asked), SINKS, n=1)
    got = f"the class {asked.__name__}" if isinstance(asked, type) else repr(asked)
    raise SettingsError(
        f"log_to must be one of {', '.join(SINKS)}, an mh.monitoring.Sink, or a function of an event",
        got=got,
        remedy=f"did you mean {close[0]!r}?" if close else 'pass for example log_to="csv"',
    )
