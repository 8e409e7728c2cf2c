"""One cell: a network under a strategy, compared with the reference."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import manyhands as mh
from manyhands.core import UsageError

from . import reference
from .network import Entry, Network
from .reference import CannotTrain, Result
from .strategies import POPULATION, TIMEOUT, devices_of, spec_of, train_population, train_strategy

SAME, REFUSED, DIFFERS, CRASHED, HUNG, LEFT_OUT = "same", "refused", "differs", "crashed", "hung", "left out"
OUTCOMES = (SAME, REFUSED, DIFFERS, CRASHED, HUNG)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far two results may be apart.

    Attributes:
        relative: Of the largest number of a tensor.
        of_change: Of the change that training made, so that a wrong small gradient counts too.
        noise: Of the largest number of a tensor, where training changes almost nothing.
    """

    relative: float = 1e-7
    of_change: float = 1e-4
    noise: float = 1e-10

    @classmethod
    def of(cls, network: Network) -> Tolerance:
        """Return what a network's precision allows."""
        if network.rounding:
            return cls(relative=network.rounding / 10, of_change=network.rounding, noise=1e-7)
        return cls() if network.precision == "fp64" else cls(relative=1e-4, of_change=1e-2, noise=1e-6)

    def allows(self, error: float, size: float, change: float | None) -> bool:
        """Return whether numbers of a size, which training changed by so much, may differ by an error."""
        allowed = self.relative * size
        if change is not None:
            allowed = min(allowed, self.of_change * change + self.noise * size)
        return error <= allowed + 1e-13


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What came of a network under a strategy.

    Attributes:
        outcome: One of `OUTCOMES`, or "left out" where the plain loop cannot train the network.
        text: The refusal, the first difference, or the error.
        steps: Steps that were taken before a refusal or an error.
        check: What `mh.check` says: "equal", "different", "not verified", "refused" or "crashed"; empty where it was
            not asked.
        check_text: Its words.
        verdict: What the run's own verification said; empty where none was reported.
        torch: The version of torch.
    """

    network: str
    strategy: str
    seed: int
    outcome: str
    text: str = ""
    steps: int = 0
    seconds: float = 0.0
    check: str = ""
    check_text: str = ""
    check_seconds: float = 0.0
    verdict: str = ""
    torch: str = torch.__version__

    @property
    def check_agrees(self) -> bool | None:
        """Whether `mh.check` says what training shows; None where it was not asked or there is nothing to say."""
        if not self.check or self.outcome not in OUTCOMES:
            return None
        return self.check == "equal" if self.outcome == SAME else self.check in ("different", "refused")

    def to_dict(self) -> dict[str, Any]:
        """Return the cell, JSON-ready."""
        return asdict(self)


class References:
    """Reference results by network, of which the last one is kept: cells come network by network."""

    def __init__(self) -> None:
        self._key: tuple[str, int] | None = None
        self._value: Result | CannotTrain | None = None

    def of(self, entry: Entry, seed: int) -> Result:
        """Return the reference of a network.

        Raises:
            CannotTrain: The plain loop, or for random networks the product on one device, cannot train it.
        """
        if self._key != (entry.name, seed):
            self._value = _reference(entry, seed)
            self._key = entry.name, seed
        if isinstance(self._value, CannotTrain):
            raise self._value
        assert self._value is not None
        return self._value


def _reference(entry: Entry, seed: int) -> Result | CannotTrain:
    try:
        network = entry.network
        task = network.task(seed)
        plain = reference.train(task, network.precision)
        if not network.draws:
            return plain
        with tempfile.TemporaryDirectory() as folder:
            drawn = train_strategy(task, spec_of("single", network.precision, True), folder, [].append)
        return Result(drawn.losses, drawn.state, plain.start, plain.parameters)
    except CannotTrain as error:
        return error
    except Exception as error:
        return CannotTrain(f"{type(error).__name__}: {error}")


def run_cell(entry: Entry, strategy: str, seed: int, references: References, *, checks: bool) -> Cell:
    """Train a network under a strategy and compare the result with the reference."""
    about: dict[str, Any] = {"network": entry.name, "strategy": strategy, "seed": seed}
    try:
        expected = references.of(entry, seed)
    except CannotTrain as error:
        return Cell(**about, outcome=LEFT_OUT, text=str(error))
    network = entry.network
    task, spec = network.task(seed), spec_of(strategy, network.precision, network.draws)
    events: list[Any] = []
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if strategy == POPULATION:
                result = train_population(task, spec)
            else:
                result = train_strategy(task, spec, folder, events.append)
        difference = first_difference(expected, result, Tolerance.of(network))
        told = {"outcome": DIFFERS if difference else SAME, "text": difference}
    except Exception as error:
        told = _failure(error, steps_in(events))
    told["steps"] = steps_in(events)
    told["verdict"] = next((entry["text"] for entry in events if entry["kind"] == "verdict"), "")
    told["seconds"] = round(time.perf_counter() - began, 3)
    if checks and strategy != POPULATION:
        told.update(_checked(task, spec))
    return Cell(**about, **told)


def _failure(error: Exception, steps: int) -> dict[str, Any]:
    """Return the outcome of an error: a refusal names the reason and the remedy before the first step."""
    if isinstance(error, UsageError) and steps == 0 and error.rule and error.remedy:
        return {"outcome": REFUSED, "text": f"{type(error).__name__}: {error}"}
    late = f"after step {steps}: " if isinstance(error, UsageError) and steps else ""
    return {"outcome": CRASHED, "text": late + _told(error)}


def _told(error: Exception) -> str:
    """Return the first and the last lines of an error, between which may be a long traceback."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 2000 else f"{text[:600]}\n...\n{text[-1200:]}"


def _checked(task: mh.Task, spec: Any) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        verdict = mh.check(task, spec, on=devices_of(spec), timeout=TIMEOUT)
        said = {"check": getattr(verdict, "outcome", "equal" if verdict else "different"), "check_text": str(verdict)}
    except UsageError as error:
        # The verb does not take parameter servers at all, which says nothing about the network.
        is_silent = "parameter servers need a call of mh.fit" in str(error)
        said = {"check": "" if is_silent else "refused", "check_text": str(error)}
    except Exception as error:
        said = {"check": "crashed", "check_text": _told(error)}
    return {**said, "check_seconds": round(time.perf_counter() - began, 3)}


def steps_in(events: list[Any]) -> int:
    """Return the last step that events report."""
    return max((max(entry["steps"]) for entry in events if entry["kind"] == "steps" and entry["steps"]), default=0)


def first_difference(expected: Result, result: Result, tolerance: Tolerance) -> str:
    """Return where two results differ and by how much, the worst first; an empty text where they are equal."""
    found = sorted(_differences(expected, result, tolerance), key=lambda pair: -pair[0])
    return "; ".join(text for _, text in found[:4]) + (f"; {len(found) - 4} more" if len(found) > 4 else "")


def _differences(expected: Result, result: Result, tolerance: Tolerance) -> Iterator[tuple[float, str]]:
    if len(expected.losses) != len(result.losses):
        yield math.inf, f"{len(result.losses)} losses instead of {len(expected.losses)}"
    for step, (a, b) in enumerate(zip(expected.losses, result.losses, strict=False), 1):
        if not tolerance.allows(abs(a - b), max(abs(a), 1e-3), None):
            yield _ratio(abs(a - b), abs(a)), f"loss of step {step}: {b:.9g} instead of {a:.9g}"
    for name, a in expected.state.items():
        if name not in result.state:
            yield math.inf, f"{name} is missing"
        elif text := _tensors_differ(name, expected, a, result.state[name], tolerance):
            yield text
    for name in result.state.keys() - expected.state.keys():
        yield math.inf, f"{name} should not be there"


def _tensors_differ(
    name: str, expected: Result, a: Tensor, b: Tensor, tolerance: Tolerance
) -> tuple[float, str] | None:
    what = "parameter" if name in expected.parameters else "buffer"
    if a.shape != b.shape:
        return math.inf, f"{what} {name} has shape {tuple(b.shape)} instead of {tuple(a.shape)}"
    if a.dtype != b.dtype and (a.is_complex() != b.is_complex()):
        return math.inf, f"{what} {name} has dtype {b.dtype} instead of {a.dtype}"
    if a.numel() == 0:
        return None
    if not (a.is_floating_point() or a.is_complex()):
        return None if torch.equal(a, b) else (math.inf, f"{what} {name}: {_shown(b)} instead of {_shown(a)}")
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    error, size = float((a - b).abs().max()), float(a.abs().max())
    start = expected.start.get(name)
    change = None if start is None else float((a - start.to(wide)).abs().max())
    if tolerance.allows(error, size, change):
        return None
    return _ratio(error, size), f"{what} {name} differs by {error:.2e} of {size:.2e}"


def _ratio(error: float, size: float) -> float:
    return math.inf if math.isnan(error) else error / max(size, 1e-30)


def _shown(tensor: Tensor) -> str:
    return str(tensor.flatten()[:4].tolist())
