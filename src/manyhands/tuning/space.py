"""Search spaces: ranges of parameters as plain data, which can be printed, compared and parsed from text."""

from __future__ import annotations

import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from ..core import SettingsError, Task, typed

Value = float | int | str | bool | None


class Range(ABC):
    """Base class of the ranges of one parameter; a searcher sees a value as a fraction of the range from 0 to 1."""

    is_ordered: ClassVar[bool] = True
    """Whether near values are alike, so that the range has a lower and an upper edge."""

    @abstractmethod
    def at(self, share: float) -> Value:
        """Return the value at the fraction `share` of the range; 0 gives the first value, 1 the last."""

    @abstractmethod
    def share(self, value: Value) -> float:
        """Return the fraction of the range at which a value lies; the inverse of `at`."""

    @abstractmethod
    def grid(self, num: int) -> list[Value]:
        """Return `num` evenly spaced values of the range, or all values if it has fewer."""


@dataclass(frozen=True)
class Uniform(Range):
    """Range of real numbers; with `log`, the logarithm of the number is distributed uniformly."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        _require_bounds(self.low, self.high, "loguniform" if self.log else "uniform")
        if self.log and self.low <= 0:
            raise SettingsError(
                "the lower bound of loguniform must be above 0",
                got=self.low,
                remedy="use mh.tuning.uniform, or a small positive bound",
            )

    def at(self, share: float) -> float:
        if self.log:
            return min(self.high, max(self.low, math.exp(_between(math.log(self.low), math.log(self.high), share))))
        return _between(self.low, self.high, share)

    def share(self, value: Value) -> float:
        low, high, at = self.low, self.high, float(value)  # type: ignore[arg-type]
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / (high - low)

    def grid(self, num: int) -> list[Value]:
        return [self.at(0.5 if num == 1 else i / (num - 1)) for i in range(num)]


@dataclass(frozen=True)
class Integers(Range):
    """Range of integers, both ends included; with `log`, the logarithm of the number is distributed uniformly."""

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        for bound in (self.low, self.high):
            if isinstance(bound, bool) or not isinstance(bound, int):
                raise SettingsError(
                    "the bounds of integers must be whole numbers", got=repr(bound), remedy="use mh.tuning.uniform"
                )
        _require_bounds(self.low, self.high, "integers")
        if self.log and self.low < 1:
            raise SettingsError(
                "the lower bound of integers with log must be at least 1", got=self.low, remedy="omit log"
            )

    def at(self, share: float) -> int:
        low, high = self._ends()
        place = _between(low, high, share)
        whole = round(math.exp(place) if self.log else place)
        return min(self.high, max(self.low, whole))

    def share(self, value: Value) -> float:
        low, high = self._ends()
        at = math.log(float(value)) if self.log else float(value)  # type: ignore[arg-type]
        return (at - low) / (high - low)

    def grid(self, num: int) -> list[Value]:
        if self.high - self.low < num:
            return list(range(self.low, self.high + 1))
        return list(dict.fromkeys(self.at(i / max(1, num - 1)) for i in range(num)))

    def _ends(self) -> tuple[float, float]:
        """Return bounds half a step beyond both ends, so that the ends are as likely as other integers."""
        low, high = self.low - 0.5, self.high + 0.5
        return (math.log(low), math.log(high)) if self.log else (low, high)


@dataclass(frozen=True)
class Choice(Range):
    """Range of some unordered values."""

    is_ordered = False
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if len(self.values) < 1:
            raise SettingsError(
                "mh.tuning.choice needs at least one value", remedy="write for example mh.tuning.choice(128, 256)"
            )
        for value in self.values:
            if not isinstance(value, float | int | str | bool | None):
                raise SettingsError(
                    "the values of mh.tuning.choice must be numbers, strings, bools or None",
                    got=type(value).__name__,
                    remedy="use a name for the value, and look it up in the task function",
                )
            if value != value:
                raise SettingsError(
                    "the values of mh.tuning.choice must be comparable", got=value, remedy="omit this value"
                )
        if len({(type(value), value) for value in self.values}) < len(self.values):
            raise SettingsError(
                "the values of mh.tuning.choice must be different", got=self.values, remedy="omit the duplicates"
            )

    def at(self, share: float) -> Value:
        return self.values[min(len(self.values) - 1, int(share * len(self.values)))]

    def share(self, value: Value) -> float:
        return (self.index(value) + 0.5) / len(self.values)

    def index(self, value: Value) -> int:
        """Return the position of a value, comparing types too, so that True differs from 1."""
        return next(i for i, one in enumerate(self.values) if type(one) is type(value) and one == value)

    def grid(self, num: int) -> list[Value]:
        return list(self.values)


Space = Mapping[str, Range]


def uniform(low: float, high: float) -> Uniform:
    """Return a range of real numbers from `low` to `high`, for a parameter in the space of `mh.tune`.

    >>> uniform(0.0, 0.5).at(0.5)
    0.25
    """
    return Uniform(low, high)


def loguniform(low: float, high: float) -> Uniform:
    """Return a range of real numbers whose logarithm is distributed uniformly, for example for learning rates.

    A number is proposed as often between 0.001 and 0.01 as between 0.01 and 0.1.

    >>> round(loguniform(1e-4, 1e-2).at(0.5), 6)
    0.001
    """
    return Uniform(low, high, log=True)


def integers(low: int, high: int, *, log: bool = False) -> Integers:
    """Return a range of integers from `low` to `high`, both included.

    With `log=True` the logarithm is distributed uniformly, as in `loguniform`.

    >>> sorted({integers(1, 3).at(i / 10) for i in range(11)})
    [1, 2, 3]
    """
    return Integers(low, high, log)


def choice(*values: Value) -> Choice:
    """Return a range of unordered values: numbers, strings, bools or None.

    >>> choice("relu", "gelu").grid(5)
    ['relu', 'gelu']
    """
    return Choice(values)


def parse_range(text: str) -> Range:
    """Return the range that a text in the syntax of the command line describes.

    Raises:
        SettingsError: The text is not a range.

    >>> parse_range("loguniform:1e-4..1e-1"), parse_range("choice:128,256"), parse_range("integers:1..8")
    (Uniform(low=0.0001, high=0.1, log=True), Choice(values=(128, 256)), Integers(low=1, high=8, log=False))
    """
    kind, _, rest = text.partition(":")
    low, dots, high = rest.partition("..")
    try:
        if kind == "choice" and rest:
            return Choice(tuple(_read(word.strip()) for word in rest.split(",")))
        if kind in ("uniform", "loguniform") and dots:
            return Uniform(float(low), float(high), log=kind == "loguniform")
        if kind == "integers" and dots:
            return Integers(int(low), int(high))
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
    raise SettingsError(
        "a range must be written uniform:LOW..HIGH, loguniform:LOW..HIGH, integers:LOW..HIGH or choice:A,B,C",
        got=repr(text),
        remedy="write for example lr=loguniform:1e-4..1e-1",
    )


_DESCRIBED = re.compile(r"(Uniform|Integers)\(low=([^,()]+), high=([^,()]+), log=(True|False)\)")


def described_ranges(space: Mapping[str, Any]) -> dict[str, Range]:
    """Return the ranges of numbers in the record of a study, which has them as text.

    >>> described_ranges({"lr": str(loguniform(1e-4, 1e-1)), "act": str(choice("relu", "gelu"))})
    {'lr': Uniform(low=0.0001, high=0.1, log=True)}
    """
    found: dict[str, Range] = {}
    for name, text in space.items():
        match = _DESCRIBED.fullmatch(str(text))
        if match is not None:
            kind, low, high, log = match.groups()
            is_log = log == "True"
            found[name] = (
                Uniform(float(low), float(high), is_log) if kind == "Uniform" else Integers(int(low), int(high), is_log)
            )
    return found


def as_space(space: Any) -> dict[str, Range]:
    """Return the search space that a user's dict describes.

    Its values are ranges, texts such as "uniform:0..1", or lists of values, which become choices.

    Raises:
        SettingsError: It is not a dict of these, or it is empty.
    """
    if not isinstance(space, Mapping) or not space:
        raise SettingsError(
            "a space must be a dict of the task's parameters and their ranges",
            got=type(space).__name__ if not isinstance(space, Mapping) else "an empty one",
            remedy='pass for example {"lr": mh.tuning.loguniform(1e-4, 1e-1)}',
        )
    made: dict[str, Range] = {}
    for name, one in space.items():
        if isinstance(one, str):
            one = parse_range(one)
        elif isinstance(one, Sequence) and not isinstance(one, tuple):  # in Keras and Ray a tuple is a range
            one = Choice(tuple(one))
        if not isinstance(one, Range):
            raise SettingsError(
                f"the range of {name!r} must be mh.tuning.uniform, loguniform, integers, choice or a list",
                got=repr(one),
                remedy="write for example mh.tuning.uniform(0.0, 0.5), or a list of the values to try",
            )
        made[str(name)] = one
    return made


def check_space(space: Space, task: Task | Callable[..., Any], params: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the tuned function, if the space fits its parameters.

    Args:
        space: The search space.
        task: The tuned function; a Task is refused.
        params: Fixed arguments of the function.

    Raises:
        SettingsError: The space names an unknown parameter, one that is also fixed, or values of a wrong type.
    """
    if isinstance(task, Task) or not callable(task):
        raise SettingsError(
            "mh.tune needs a function that returns a Task, whose parameters it varies",
            got=type(task).__name__,
            remedy="write def task(lr: float = 1e-3) -> mh.Task: ... and pass task",
        )
    both = sorted(set(space) & set(params))
    if both:
        raise SettingsError(
            "a parameter must be either fixed or searched", got=f"{both[0]!r} in both", remedy="omit one of them"
        )
    known = inspect.signature(task).parameters
    takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in known.values())
    for name, one in space.items():
        if name not in known and not takes_any:
            rule = f"a space must name parameters of the task, which has {', '.join(known) or 'none'}"
            raise SettingsError(rule, got=repr(name), remedy="rename this entry, or add the parameter to the task")
        # A float for an integer parameter would make every trial fail.
        if isinstance(one, Uniform) and name in known and known[name].annotation in (int, "int"):
            got = f"mh.tuning.{'log' * one.log}uniform"
            raise SettingsError(f"{name} must be a whole number in the task", got=got, remedy="use mh.tuning.integers")
    middle = {name: one.at(0.5) for name, one in space.items()}
    typed(task, {**params, **middle})
    for name, one in space.items():
        for value in one.values if isinstance(one, Choice) else ():
            typed(task, {**params, **middle, name: value})
    return task


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * min(1.0, max(0.0, share))


def _require_bounds(low: float, high: float, name: str) -> None:
    bounds = (low, high)
    are_numbers = all(isinstance(one, Real) and not isinstance(one, bool) and math.isfinite(one) for one in bounds)
    if not are_numbers or not low < high:
        got, remedy = f"{low!r} and {high!r}", "pass two numbers, the smaller one first"
        raise SettingsError(f"{name} needs a lower and a higher bound", got=got, remedy=remedy)


def _read(word: str) -> Value:
    """Return a word as the bool, None or number that it denotes, or else as it is."""
    named: dict[str, Value] = {"true": True, "false": False, "none": None}
    if word.lower() in named:
        return named[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
