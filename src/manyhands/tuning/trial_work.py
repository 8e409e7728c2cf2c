"""Unit of work of a trial and the function that executes it, in this process or in another."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core import (
    EVENTS,
    Event,
    EventLog,
    LossNotFinite,
    SettingsError,
    StrategySpec,
    Task,
    TaskError,
    random_state,
    replace_text,
    restore_random_state,
    typed,
)
from ..distributed import Device, DirectChannel, NullWorld, World
from ..training import RECORD, Callback, Hand, Job, train
from .objective import Objective, check_objectives

SAVE_SECONDS = 2.0
"""Minimum seconds between checkpoints; saving after every short epoch would cost too much CPU time."""
_OURS = str(Path(__file__).parents[1]) + os.sep
Tunable = Callable[..., Any]
"""Function of hyper-parameters that returns a Task, or its measurements: a number or a dict of numbers."""


@dataclass(frozen=True)
class TrialWork:
    """Train a trial from its current state up to `until` epochs."""

    number: int
    params: Mapping[str, Any]
    until: int


@dataclass
class TrialOutcome:
    """Result of a trial's unit of work."""

    number: int
    metrics: dict[str, float] = field(default_factory=dict)
    epochs: int = 0
    """Total number of epochs the trial has been trained for."""
    seconds: float = 0.0
    reason: str = ""
    """Why the trial failed; empty if it did not."""
    traceback: str = ""
    is_lost: bool = False
    """Whether the trial's process was killed; the trial is resumed from its last checkpoint."""
    is_diverged: bool = False
    mistake: SettingsError | None = None
    """Error that affects every trial and ends the study."""
    save: Callable[[], None] | None = None
    """Saves the trial's weights if they are not on disk yet."""
    is_interrupted: bool = False
    """Whether the user asked to stop; the trial is resumed together with the study."""


@dataclass(frozen=True)
class TrialRunner:
    """Execute the trials of a study; holds the settings that all of them share."""

    tunable: Tunable
    fixed: Mapping[str, Any]
    epochs: int
    folder: Path
    objectives: tuple[Objective, ...]
    looked_at: list[tuple[dict[str, Any], Any]] = field(default_factory=list)

    def run_folder(self, number: int) -> Path:
        """Return the run folder of a trial."""
        return self.folder / f"{number:05d}"

    def made(self, params: Mapping[str, Any]) -> Any:
        """Call the tuned function with these parameters, or return its result cached by `look`."""
        for place, (known, made) in enumerate(self.looked_at):
            if known == params:
                del self.looked_at[place]
                return made
        return self.tunable(**typed(self.tunable, {**self.fixed, **params}))

    def look(self, params: Mapping[str, Any]) -> Any:
        """Call the tuned function and cache the result for the trial with these parameters, as it may be slow."""
        made = self.made(params)
        self.looked_at.append((dict(params), made))
        return made

    def prepared(self, work: TrialWork, outcome: TrialOutcome) -> Task | None:
        """Return a trial's task; None if `outcome` already has its measurements or its error."""
        try:
            made = self.made(work.params)
            if isinstance(made, Task):
                outcome.mistake = self._mistake(made)
                return None if outcome.mistake else made
            outcome.metrics, outcome.epochs = self._measured(made), work.until
        except (Exception, SystemExit) as error:
            outcome.reason, outcome.traceback = f"{type(error).__name__}: {error}", _user_traceback(error)
        return None

    def do(self, work: TrialWork, world: World) -> TrialOutcome:
        """Execute a trial's work; errors are reported in the outcome, not raised."""
        began = time.perf_counter()
        outcome = TrialOutcome(work.number)
        states = random_state(torch.device("cpu"))
        try:
            task = self.prepared(work, outcome)
            if task is not None:
                self._train(task, work, world, outcome)
        except LossNotFinite as error:
            outcome.reason, outcome.is_diverged = str(error), True
        except (Exception, SystemExit) as error:
            outcome.reason, outcome.traceback = f"{type(error).__name__}: {error}", _user_traceback(error)
        finally:
            restore_random_state(states, torch.device("cpu"))
        outcome.seconds = time.perf_counter() - began
        return outcome

    def _mistake(self, task: Task) -> SettingsError | None:
        """Return the error if the objectives do not fit the task, which affects every trial; otherwise None."""
        try:
            check_objectives(self.objectives, task)
        except SettingsError as error:
            return error
        return None

    def _measured(self, made: Any) -> dict[str, float]:
        """Return the measurements of a tuned function by name; a bare number is the first objective."""
        values = made if isinstance(made, Mapping) else {self.objectives[0].name: made}
        try:
            return {str(name): float(value) for name, value in values.items()}
        except (TypeError, ValueError):
            raise TaskError(
                "a function to tune must return a Task, a number, or a dict of numbers",
                got=repr(made)[:80],
                remedy="return one of these",
            ) from None

    def _train(self, task: Task, work: TrialWork, world: World, outcome: TrialOutcome) -> None:
        folder = self.run_folder(work.number)
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder, task, work.params, self.epochs, str(world.rank_info.device))
        log = EventLog(folder / EVENTS)
        tap = _EventTap(outcome, log)
        world.channel.taps.append(tap)
        try:
            job = Job(
                task=task,
                spec=StrategySpec(),
                folder=folder,
                epochs=self.epochs,
                resume=True,
                keep=1,
                save_seconds=SAVE_SECONDS,
                callbacks=(_Until(work.until),),
            )
            end = train(world, job)
            outcome.metrics = {**outcome.metrics, **end.metrics}
            outcome.is_interrupted = outcome.epochs < work.until
        finally:
            world.channel.taps.remove(tap)
            world.channel.stopping = False
            log.close()


class _EventTap:
    """Write a run's events to its log and record the latest metrics in the outcome."""

    def __init__(self, outcome: TrialOutcome, log: EventLog) -> None:
        self._outcome, self._log = outcome, log

    def __call__(self, entry: Event) -> None:
        self._log.write(entry)
        if entry["kind"] == "epoch":
            self._outcome.metrics = {**entry["losses"], **entry["metrics"]}
            self._outcome.epochs = entry["epoch"] + 1


class _Until(Callback):
    """Stop a run after a number of epochs; it is saved and can be resumed."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def on_epoch(self, hand: Hand, metrics: Mapping[str, float]) -> None:
        if hand.epoch >= self._epochs:
            hand.stop()


class TrialWorker:
    """Execute trials in a separate process."""

    def __init__(self, world: World, runner: TrialRunner) -> None:
        self._world, self._runner = world, runner

    def do(self, work: TrialWork) -> TrialOutcome:
        """Execute a trial's work and return its outcome."""
        return self._runner.do(work, self._world)


def here(device: Device) -> NullWorld:
    """Return a single-process world for trials in this process."""
    return NullWorld(device, DirectChannel())


def write_record(folder: Path, task: Task, params: Mapping[str, Any], epochs: int, device: str) -> None:
    """Write the record that is needed to open a run later, unless it exists."""
    path = folder / RECORD
    if path.exists():
        return
    record = {
        "spec": StrategySpec().to_dict(),
        "params": dict(params),
        "epochs": epochs,
        "steps": None,
        "batch_size": task.batch_size,
        "seed": task.seed,
        "devices": [device],
        "changes_mathematics": [],
        "save_every": None,
        "start_from": None,
    }
    replace_text(path, json.dumps(record, indent=2, default=str) + "\n")


def _user_traceback(error: BaseException) -> str:
    """Return the traceback starting at the first frame in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    start = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(_OURS)), len(frames))
    return "".join(traceback.format_list(frames[start:])) + f"{type(error).__name__}: {error}"
