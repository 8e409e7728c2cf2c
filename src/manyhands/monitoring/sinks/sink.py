"""Base classes of sinks, which send a run's events to other tools. To add one, add a file and register it."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ...core import Event, SettingsError, StrategySpec, Task
from .names import numbers_of, spread, text_of

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""The possible values of `status` at the end of a run."""
_APART = ("params", "defaults", "environment")
"""Fields of a record that are no settings; the environment, such as the command line, stays on this machine."""


@dataclass(frozen=True, kw_only=True)
class About:
    """Description of a run, which a sink receives before the first event."""

    name: str
    folder: Path
    """The run's folder, to which a sink may write files."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of the task function."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's strategy, devices, epochs, batch size, seed and versions."""

    @classmethod
    def of(cls, folder: Path, spec: StrategySpec, record: Mapping[str, Any], task: object) -> About:
        """Return the description of a run; parameters of the task function that were not set have their defaults.

        Args:
            folder: The run's folder.
            spec: The run's strategy.
            record: The contents of its run.json.
            task: The task, or the task function.
        """
        settings = {"strategy": str(spec), **{name: value for name, value in record.items() if name not in _APART}}
        params = {**default_params(task), **record["params"]}
        return cls(name=folder.name, folder=folder, params=params, settings=settings)

    def flat(self) -> dict[str, Any]:
        """Return settings and task parameters as one flat dict of plain values; task parameters keep their names.

        >>> About(name="a", folder=Path("runs/a"), params={"lr": 0.1}, settings={"spec": {"replicas": 2}}).flat()
        {'spec.replicas': 2, 'lr': 0.1}
        """
        return {**_flat(self.settings), **_flat(self.params)}


class Sink(ABC):
    """Base class of sinks. A sink handles a run's events on a separate thread in the process that started the run.

    If a method raises, the error is reported once and the sink receives no more events; training continues.

    >>> class Lines(Sink):
    ...     def take(self, entry):
    ...         print(entry["kind"])
    >>> Lines().take({"kind": "epoch"})
    epoch
    """

    name: ClassVar[str] = ""
    package: ClassVar[str] = ""
    """The package that the sink needs; empty for none."""
    extra: ClassVar[str] = ""
    """The extra of manyhands that installs the package."""
    link: str = ""
    """URL or other location of the run in the tool, which is reported after `start`; empty for none."""

    def __str__(self) -> str:
        return self.name or type(self).__name__

    def require(self) -> None:
        """Import the package that the sink needs; raise SettingsError if the sink cannot work.

        This is called in the main thread before the run starts.
        """
        if not self.package:
            return
        try:
            importlib.import_module(self.package)
        except ImportError as error:
            raise SettingsError(
                f"log_to={self.name!r} needs the package {error.name or self.package}",
                got=f"{type(error).__name__}: {error}",
                remedy=f"install it: pip install 'manyhands[{self.extra}]'",
            ) from None

    def start(self, about: About) -> None:  # noqa: B027 (nothing to do is a working default)
        """Handle the start of the run."""

    @abstractmethod
    def take(self, entry: Event) -> None:
        """Handle an event: a dict with its `kind`, its time `t` and its values."""

    def end(self, status: str) -> None:  # noqa: B027
        """Handle the end of the run; `status` is finished, stopped or failed."""


class NumberSink(Sink):
    """Base class of sinks that record numbers by step and name, such as `train/loss`, and lines of text."""

    most: ClassVar[int] = 0
    """Maximum number of steps of one event that are recorded, evenly spread; 0 for all.

    Events come about twice a second. On one device the sink runs in the process that trains, so its work takes time
    from training.
    """

    def __init__(self) -> None:
        self._step = 0

    def take(self, entry: Event) -> None:
        if entry["kind"] == "start":
            self._step = entry["step"]
            if self._step:
                self.go_back(self._step)
        for step, values in spread(list(numbers_of(entry, self._step)), self.most):
            self.numbers(step, values, entry["t"])
            self._step = max(self._step, step)
        if text := text_of(entry):
            self.text(self._step, text)
        self.flush()

    @abstractmethod
    def numbers(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Record the values of a step; `at` is their time in seconds since the Unix epoch."""

    def text(self, step: int, text: str) -> None:
        """Record a line of text, such as a notice, that was reported after a step."""

    def go_back(self, step: int) -> None:
        """Handle a resume from this step, after which values of later steps are recorded again."""

    def flush(self) -> None:
        """Write buffered values; called after every event."""


def default_params(task: object) -> dict[str, Any]:
    """Return the defaults of a task function's parameters; none of a task."""
    if isinstance(task, Task) or not callable(task):
        return {}
    parameters = inspect.signature(task).parameters.items()
    return {name: item.default for name, item in parameters if item.default is not inspect.Parameter.empty}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif value is not None:
            flat[f"{prefix}{name}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat
