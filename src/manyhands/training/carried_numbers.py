"""Numbers that a network or a loss keeps in plain attributes, from one call to the next.

Unlike buffers they are not synchronized: every rank and every micro-batch changes its own. Counters of calls are made
to count steps under accumulation; other numbers that differ from those of one device are found by verification.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from .restored_objects import ClassNumbers, GlobalNumbers, content_of, global_state, held_by, is_users_class

Number = int | float
NUM_SEARCHED = 2
"""Steps in which counters are searched for; later ones follow those that were found."""
_TORCHS_OWN = frozenset(vars(nn.Module()))
_OF_COMPILER = "_torchdynamo"
"""Prefix of attributes that torch.compile sets, such as the address of the function that it compiles."""


@dataclass(frozen=True)
class NumberSlot:
    """A place in an attribute, container, class or closure that holds a number."""

    owner: Any
    key: Any

    def get(self) -> Any:
        """Return the current number, of an `itertools.count` the next one; None if it is not there any more."""
        value = self._content()
        return _arguments(value)[0] if isinstance(value, itertools.count) else value

    def _content(self) -> Any:
        if isinstance(self.owner, CellType):
            return self.owner.cell_contents
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.key)
        try:
            return self.owner[self.key]
        except LookupError:
            return None

    def put(self, value: Number) -> None:
        """Replace the number."""
        counted = self._content()
        if isinstance(counted, itertools.count):
            value = itertools.count(value, *_arguments(counted)[1:])  # type: ignore[assignment]
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, type):
            setattr(self.owner, self.key, value)
        else:
            self.owner[self.key] = value


def number_slots(model: nn.Module, function: Callable[..., Any] | None = None) -> dict[str, NumberSlot]:
    """Return the numbers in a network's modules and in what its loss refers to, by path.

    >>> layer = nn.Identity()
    >>> layer.calls, layer.kept = 3, {"mean": 0.5}
    >>> {path: slot.get() for path, slot in number_slots(layer).items()}
    {'calls': 3, 'kept["mean"]': 0.5}
    """
    found = dict(_of_modules(model))
    for path, slot in _of_function(function):
        found.setdefault(f"{path} of the loss", slot)
    places = {(id(slot.owner), slot.key) for slot in found.values()}
    found |= {path: slot for path, slot in _of_classes(model, function) if (id(slot.owner), slot.key) not in places}
    return found


def _of_modules(model: nn.Module) -> Iterator[tuple[str, NumberSlot]]:
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = vars(module)
        for name in [name for name in own if name not in _TORCHS_OWN and not name.startswith(_OF_COMPILER)]:
            yield from _in(own, name, f"{prefix}{name}")


def _of_classes(model: nn.Module, function: Any) -> Iterator[tuple[str, NumberSlot]]:
    """Yield numbers that are kept by classes and by what their methods refer to, such as default arguments."""
    kinds = dict.fromkeys(type(module) for module in model.modules())
    for index, held in enumerate(held_by(function, *filter(is_users_class, kinds))):
        if isinstance(held, ClassNumbers):
            yield from ((f"{held.kind.__name__}.{name}", NumberSlot(held.kind, name)) for name in held.names())
        elif isinstance(held, GlobalNumbers):
            yield from ((f"{name} of the module", NumberSlot(held.variables, name)) for name in held.names)
        elif isinstance(held, CellType):
            if isinstance(content_of(held), Number):
                yield f"variable {index} of a closure", NumberSlot(held, None)
        elif type(held) in (dict, list):
            yield from _in({"": held}, "", f"container {index} of a function or class")


def _of_function(function: Any, depth: int = 2) -> Iterator[tuple[str, NumberSlot]]:
    if isinstance(function, functools.partial):
        yield from _of_function(function.func, depth)
        for name, value in function.keywords.items():
            yield from _of_object(name, value, depth)
    elif isinstance(function, MethodType):
        yield from _of_object("self", function.__self__, depth)
    elif isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if isinstance(value, Number):
                yield name, NumberSlot(cell, None)
            else:
                yield from _of_object(name, value, depth)
        for name, value in global_state(function).items():
            if isinstance(value, Number):
                yield name, NumberSlot(function.__globals__, name)
            else:
                yield from _of_object(name, value, depth)
    elif function is not None:
        yield from _of_object(type(function).__name__, function, depth)


def _of_object(name: str, value: Any, depth: int) -> Iterator[tuple[str, NumberSlot]]:
    if isinstance(value, nn.Module):
        yield from ((f"{name}.{path}", slot) for path, slot in _of_modules(value))
    elif isinstance(value, list | dict):
        yield from _in({name: value}, name, name)
    elif isinstance(value, FunctionType | MethodType | functools.partial):
        if depth:
            yield from _of_function(value, depth - 1)
    elif not isinstance(value, (type, Tensor)) and hasattr(value, "__dict__"):
        for key in list(vars(value)):
            yield from _in(vars(value), key, f"{name}.{key}")


def _in(owner: Any, key: Any, path: str) -> Iterator[tuple[str, NumberSlot]]:
    value = owner[key]
    if isinstance(value, Number | itertools.count):
        yield path, NumberSlot(owner, key)
    elif type(value) in (dict, list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for inner in [inner for inner, held in items if isinstance(held, Number)]:
            shown = f'"{inner}"' if isinstance(inner, str) else inner
            yield f"{path}[{shown}]", NumberSlot(value, inner)


def _arguments(count: itertools.count[Any]) -> tuple[Number, ...]:
    """Return the next number of a count and, unless it is one, the step."""
    found: tuple[Number, ...] = ast.literal_eval(repr(count).removeprefix("count").replace(")", ",)"))
    return found


def numbers_of(slots: Mapping[str, NumberSlot]) -> dict[str, Number]:
    """Return the current numbers by path."""
    return {path: value for path, slot in slots.items() if isinstance(value := slot.get(), Number)}


def differing(ours: Mapping[str, Number], theirs: Mapping[str, Number], tolerance: float) -> list[str]:
    """Return the paths that are in both mappings, with different numbers."""
    return [path for path, a in ours.items() if path in theirs and not _are_close(a, theirs[path], tolerance)]


def _are_close(a: Number, b: Number, tolerance: float) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))
    return a == b


def nudge(slots: Mapping[str, NumberSlot], paths: Iterable[str]) -> None:
    """Change numbers a little, to find out whether later ones depend on them."""
    for path in paths:
        if path in slots:
            value = slots[path].get()
            slots[path].put(not value if isinstance(value, bool) else value + 1)


class Counters:
    """Lets the whole numbers that a forward changes, such as counts of calls, change once per step.

    On one device a step has one forward; under accumulation it has one per micro-batch, each of which starts from the
    numbers that the first one found.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._followed: dict[str, NumberSlot] = {}
        self._before: dict[str, Number] = {}

    def begin(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        """Remember the numbers before the first micro-batch of a step."""
        searches = self._num_steps < NUM_SEARCHED
        slots = number_slots(model, loss) if searches else self._followed
        self._before = {path: value for path, value in numbers_of(slots).items() if type(value) is int}
        if searches:
            self._candidates = slots
        self._num_steps += 1

    def again(self) -> None:
        """Restore the numbers before a further micro-batch."""
        if self._num_steps <= NUM_SEARCHED:
            for path, value in self._before.items():
                if self._candidates[path].get() != value:
                    self._followed[path] = self._candidates[path]
        for path, slot in self._followed.items():
            if path in self._before:
                slot.put(self._before[path])
