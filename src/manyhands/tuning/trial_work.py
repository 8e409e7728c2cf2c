"""A trial's unit of work (train up to an epoch), its outcome, and the object that executes it in any process."""

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
"""Minimum seconds between checkpoints of a trial; saving after every short epoch would take too much CPU time."""
_OURS = str(Path(__file__).parents[1]) + os.sep
Tunable = Callable[..., Any]
"""The tuned function: takes hyper-parameters, and returns a Task or measurements (a number or a dict of numbers)."""


@dataclass(frozen=True)
class TrialWork:
    """Unit of work: train a trial from its last checkpoint until it has `until` epochs in total."""

    number: int
    params: Mapping[str, Any]
    until: int


@dataclass
class TrialOutcome:
    """The outcome of a trial's unit of work."""

    number: int
    """The number of the trial."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest value of every metric, by name."""
    epochs: int = 0
    """Number of epochs for which the trial has been trained in total."""
    seconds: float = 0.0
    """Seconds that this unit of work took."""
    reason: str = ""
    """Why the trial failed or diverged; empty if it did not."""
    traceback: str = ""
    """The traceback of the error in the user's code, if there was one."""
    is_lost: bool = False
    """Whether the trial's process has died. The trial can be resumed from its last checkpoint."""
    is_diverged: bool = False
    """Whether the loss was not finite."""
    mistake: SettingsError | None = None
    """An error in the study's settings that affects every trial, so that the study must end."""
    save: Callable[[], None] | None = None
    """Writes a checkpoint of the trial; None if there is one on disk already."""
    is_interrupted: bool = False
    """Whether the work ended early because the user stopped the study. The trial is resumed with the study."""


@dataclass(frozen=True)
class TrialRunner:
    """Execute trials of a study, with the settings that all trials share.

    Args:
        tunable: The tuned function.
        fixed: Arguments of `tunable` that are equal in all trials.
        epochs: Number of epochs of a trial that is not stopped early.
        folder: Folder of the trials' run folders.
        objectives: The metrics to optimize, the first of which is that of a function that returns a number.
        looked_at: Results of `look` that no trial has used yet, with their parameters.
    """

    tunable: Tunable
    fixed: Mapping[str, Any]
    epochs: int
    folder: Path
    objectives: tuple[Objective, ...]
    looked_at: list[tuple[dict[str, Any], Any]] = field(default_factory=list)

    def run_folder(self, number: int) -> Path:
        """Return the run folder of the trial with this number."""
        return self.folder / f"{number:05d}"

    def made(self, params: Mapping[str, Any]) -> Any:
        """Return the tuned function's result for these parameters: the one cached by `look`, or that of a new call."""
        for place, (known, made) in enumerate(self.looked_at):
            if known == params:
                del self.looked_at[place]
                return made
        return self.tunable(**typed(self.tunable, {**self.fixed, **params}))

    def look(self, params: Mapping[str, Any]) -> Any:
        """Call the tuned function before its trial starts; cache the result for the trial, as the call may be slow."""
        made = self.made(params)
        self.looked_at.append((dict(params), made))
        return made

    def prepared(self, work: TrialWork, outcome: TrialOutcome) -> Task | None:
        """Call the tuned function for a trial, and return its task; None if there is nothing to train.

        If the function has returned measurements or raised an error, these are in `outcome`.
        """
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
        """Execute a trial's unit of work; errors of the trial are returned in the outcome instead of raised."""
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
        """Return the error if the task does not measure the objectives; None if it does."""
        try:
            check_objectives(self.objectives, task)
        except SettingsError as error:
            return error
        return None

    def _measured(self, made: Any) -> dict[str, float]:
        """Return the measurements that a tuned function has returned, by name; a number is the first objective."""
        values = made if isinstance(made, Mapping) else {self.objectives[0].name: made}
        try:
            return {str(name): float(value) for name, value in values.items()}
        except (TypeError, ValueError):
            raise TaskError(
                "a function to tune must return a Task, a number, or a dict of numbers",
                got=repr(made)[:80],
                remedy="return a Task to be trained, or the measurements of the trial",
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
    """Observer of a trial's events: writes them to the event log, and the latest metrics into the outcome."""

    def __init__(self, outcome: TrialOutcome, log: EventLog) -> None:
        self._outcome, self._log = outcome, log

    def __call__(self, entry: Event) -> None:
        self._log.write(entry)
        if entry["kind"] == "epoch":
            self._outcome.metrics = {**entry["losses"], **entry["metrics"]}
            self._outcome.epochs = entry["epoch"] + 1


class _Until(Callback):
    """Callback that stops a run when it has a number of epochs in total; the run is saved and can be resumed."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def on_epoch(self, hand: Hand, metrics: Mapping[str, float]) -> None:
        if hand.epoch >= self._epochs:
            hand.stop()


class TrialWorker:
    """The object in a process of the pool whose method `do` executes trials."""

    def __init__(self, world: World, runner: TrialRunner) -> None:
        self._world, self._runner = world, runner

    def do(self, work: TrialWork) -> TrialOutcome:
        """Execute a trial's unit of work in this process, and return its outcome."""
        return self._runner.do(work, self._world)


def here(device: Device) -> NullWorld:
    """Return a world of one rank on `device`, for trials in this process."""
    return NullWorld(device, DirectChannel())


def write_record(folder: Path, task: Task, params: Mapping[str, Any], epochs: int, device: str) -> None:
    """Write the record (settings and parameters) with which a trial's run can be opened later, unless it exists."""
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
    """Return an error's traceback without its first frames in manyhands, so that it starts in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    start = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(_OURS)), len(frames))
    return "".join(traceback.format_list(frames[start:])) + f"{type(error).__name__}: {error}"
