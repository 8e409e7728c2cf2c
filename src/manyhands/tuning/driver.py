"""Driver of a study: starts trials and decides what happens to them, and writes every event to the journal.

It asks the searcher for parameters, the executor to run trials, and the stopping policy how to continue a trial.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core import RunError, SettingsError
from ..options import Budget
from .executors import Executor
from .journal import Journal
from .objective import Objective
from .searching import Constraint, Searcher
from .space import Space
from .stopping import CONTINUE, PAUSE, STOP, Stopping, ToTheEnd
from .trial import FAILED, FINISHED, STOPPED, Trial
from .trial_work import TrialOutcome, TrialRunner, TrialWork

MAX_DRAWS = 1000
"""Number of proposals for one trial that may violate the constraint before the study is ended with an error."""
MAX_LOST = 3
"""Number of times that a trial's process dies until the trial counts as failed."""
ALIKE = 3
"""Number of trials that fail with the same error, while none succeeds, until the study is ended with an error."""
REPORT_TRACEBACK = 4000
"""Number of characters at the end of a traceback that such an error shows."""


class TrialsFailed(RunError):
    """Raised if the first trials of a study fail with the same error and none succeeds."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of a study: search space, objectives, stopping policy and limits."""

    space: Space
    objectives: tuple[Objective, ...]
    epochs: int
    """Number of epochs of a trial that is not stopped early."""
    stopping: Stopping
    budget: Budget
    trials: int | None = None
    """Maximum number of trials; None for no limit."""
    constraint: Constraint | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    """Maximum values of metrics; a finished trial that exceeds one is infeasible."""
    keep: int = 1
    """Number of best trials whose run folders are kept."""


class Driver:
    """Run the trials of a study until its budget or its number of trials is used up.

    Args:
        rules: The settings of the study.
        runner: Knows the run folders of trials.
        searcher: Proposes parameters.
        journal: Stores the study.
        trials: The trials that the journal already has, to which new ones are added.
        executor: Runs trials.
        num_devices: Number of devices, for the budget.
        on_change: Called with each trial whose state has changed.
    """

    def __init__(
        self,
        rules: Rules,
        runner: TrialRunner,
        searcher: Searcher,
        journal: Journal,
        trials: list[Trial],
        executor: Executor,
        num_devices: int,
        on_change: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        self.rules, self.trials = rules, trials
        self._runner, self._searcher, self._journal, self._executor = runner, searcher, journal, executor
        self._on_change = on_change
        self._leased: set[int] = set()
        self._waiting: set[int] = set()
        """Numbers of the trials that the stopping policy has paused."""
        self._due: deque[Trial] = deque()
        """Trials to continue before any other is started."""
        self._reasons: Counter[str] = Counter()
        self._spent = sum(trial.seconds for trial in trials)
        self._seconds = rules.budget.seconds_for(num_devices)
        self._best: list[tuple[float, int]] = []
        self._began = time.monotonic()
        self._save: Callable[[], None] | None = None
        self.is_stopping = False

    def run(self) -> None:
        """Run trials until the budget or the number of trials is used up and no trial is in progress."""
        self._take_up()
        while True:
            while self._executor.num_free and (work := self._next()) is not None:
                self._leased.add(work.number)
                worker = self._executor.start(work)
                self._journal.lease(self.trials[work.number], worker, work.until)
            if not self._executor.is_busy:
                if self._call_last():
                    continue
                break
            for outcome in self._executor.wait():
                self._leased.discard(outcome.number)
                self._take(self.trials[outcome.number], outcome)
        if not self.is_stopping:
            for number in sorted(self._waiting):
                self._end(self.trials[number], STOPPED, "others were better at this point")

    def stop(self) -> None:
        """Stop the study; trials in progress first reach a point from which they can be resumed."""
        self.is_stopping = True
        self._executor.stop()

    @property
    def seconds_left(self) -> float | None:
        """Seconds that are left of the time budget; None without a limit of time or cost."""
        return None if self._seconds is None else self._seconds - (time.monotonic() - self._began)

    def _take_up(self) -> None:
        """Restore the trials of an earlier process: ended ones for the searcher; others are queued or paused."""
        for trial in self.trials:
            if trial.is_over:
                self._searcher.observe(trial)
                self._forget(self._rank(trial))
            elif trial.reports and self._judge(trial) == PAUSE:
                self._waiting.add(trial.number)
            else:
                self._due.append(trial)

    def _next(self) -> TrialWork | None:
        """Return the next unit of work, for a queued, a promoted or a new trial (in this order), or None."""
        if self.is_stopping or self._is_over_budget:
            return None
        trial = self._due.popleft() if self._due else self._promoted()
        if trial is None:
            trial = self._new()
        if trial is None:
            return None
        until = self.rules.stopping.next_rung(trial, self.rules.epochs)
        return TrialWork(trial.number, trial.params, until)

    def _promoted(self) -> Trial | None:
        trial = self.rules.stopping.promoted(self.trials, self.rules.epochs, self._cost, self._waiting)
        if trial is not None:
            self._waiting.discard(trial.number)
        return trial

    def _call_last(self) -> bool:
        """Queue a paused trial if fewer than `rules.keep` trials have finished; return whether one was queued.

        Of the paused trials with the most epochs, the best one is queued. With few trials all of them could stay
        paused, but a study needs a best trial, and an ensemble its members.
        """
        num_finished = sum(trial.state == FINISHED for trial in self.trials)
        if self.is_stopping or self._is_over_budget or num_finished >= self.rules.keep:
            return False
        waiting = [self.trials[number] for number in self._waiting]
        if not waiting:
            return False
        first = min(waiting, key=lambda trial: (-trial.epochs, self._cost(trial.reports[trial.epochs]), trial.number))
        self._waiting.discard(first.number)
        self._due.append(first)
        return True

    def _new(self) -> Trial | None:
        number = len(self.trials)
        limits = [size for size in (self.rules.trials, self._searcher.size) if size is not None]
        if (limits and number >= min(limits)) or not self._searcher.is_ready(number, self.trials):
            return None
        trial = Trial(number, proposed(self._searcher, self.rules.constraint, number, self.trials))
        self._journal.propose(trial)
        self.trials.append(trial)
        self._on_change(trial)
        return trial

    def _take(self, trial: Trial, outcome: TrialOutcome) -> None:
        """Process the outcome of a trial's unit of work: end the trial, retry it, or apply the stopping policy."""
        if outcome.mistake is not None:
            raise outcome.mistake
        trial.seconds += outcome.seconds
        trial.metrics = outcome.metrics or trial.metrics
        if outcome.is_lost:
            trial.kills.append(outcome.reason.partition("\n")[0])
            self._journal.killed(trial)
        if outcome.is_lost and len(trial.kills) < MAX_LOST:
            self._due.append(trial)
            self._on_change(trial)
        elif outcome.is_interrupted:
            return
        elif outcome.is_diverged:
            self._end(trial, STOPPED, outcome.reason)
        elif outcome.reason:
            self._end(trial, FAILED, outcome.reason)
            self._count_failure(outcome)
        else:
            self._save = outcome.save
            self._advance(trial, outcome.epochs)

    def _advance(self, trial: Trial, epochs: int) -> None:
        """Process a trial that has reached its last epoch, which ends it, or a rung, at which it is judged."""
        values = tuple(one.of(trial.metrics) for one in self.rules.objectives)
        for one, value in zip(self.rules.objectives, values, strict=True):
            if math.isnan(value):  # NaN cannot be ranked
                self._end(
                    trial, STOPPED, f"its {one.name} is nan; lower the learning rate, or look at how it is measured"
                )
                return
        if epochs >= self.rules.epochs:
            if not isinstance(self.rules.stopping, ToTheEnd):
                self._report(trial, epochs, values[0])
            trial.values = values
            trial.is_feasible = all(
                trial.metrics.get(name, float("inf")) <= limit for name, limit in self.rules.limits.items()
            )
            self._end(trial, FINISHED, "")
            return
        self._report(trial, epochs, values[0])
        verdict = self._judge(trial)
        if verdict != STOP:
            self._saved()
        if verdict == STOP:
            self._end(trial, STOPPED, "it was worse than the others' median")
            return
        if verdict == CONTINUE:
            self._due.append(trial)
        else:
            self._waiting.add(trial.number)
        self._on_change(trial)

    def _saved(self) -> None:
        """Write a checkpoint of the trial that is being processed, unless there is one."""
        if self._save is not None:
            self._save()
        self._save = None

    def _report(self, trial: Trial, epochs: int, value: float) -> None:
        trial.reports[epochs] = value
        self._journal.report(trial, epochs, trial.seconds)

    def _judge(self, trial: Trial) -> str:
        return self.rules.stopping.judge(trial, self.trials, self.rules.epochs, self._cost)

    def _cost(self, value: float) -> float:
        return self.rules.objectives[0].cost(value)

    def _end(self, trial: Trial, state: str, reason: str) -> None:
        trial.state, trial.reason = state, reason
        dropped = self._rank(trial)
        self._journal.end(trial)
        self._searcher.observe(trial)
        self._forget(dropped)
        self._on_change(trial)

    def _rank(self, trial: Trial) -> int:
        """Rank a trial that has ended, and save it if it is among the best.

        Return the number of the trial whose run folder is no longer needed, or -1.
        """
        dropped = trial.number
        if trial.state == FINISHED and trial.is_feasible:
            self._best.append((self._cost(trial.value), trial.number))
            self._best.sort()
            dropped = self._best.pop()[1] if len(self._best) > self.rules.keep else -1
            if dropped != trial.number:
                self._saved()
        return dropped

    def _forget(self, number: int) -> None:
        """Delete the run folder of the trial with this number; -1 deletes none."""
        if number >= 0:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._runner.run_folder(number))

    def _count_failure(self, outcome: TrialOutcome) -> None:
        kind = outcome.traceback or outcome.reason
        self._reasons[kind] += 1
        succeeded = any(trial.state in (FINISHED, STOPPED) or trial.reports for trial in self.trials)
        if self._reasons[kind] >= ALIKE and not succeeded:
            raise TrialsFailed(
                f"{ALIKE} trials failed with the same error, and none succeeded; the last one, {outcome.number}, with "
                f"{self.trials[outcome.number].params}:\n\n{outcome.traceback[-REPORT_TRACEBACK:] or outcome.reason}"
            )

    @property
    def _is_over_budget(self) -> bool:
        left = self.seconds_left
        return left is not None and left <= 0


def proposed(searcher: Searcher, constraint: Constraint | None, number: int, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the parameters that the searcher proposes for a trial, the first ones that satisfy the constraint.

    Raises:
        SettingsError: MAX_DRAWS proposals violate the constraint.
    """
    for draw in range(MAX_DRAWS):
        params = searcher.propose(number, trials, draw)
        if constraint is None or constraint(dict(params)):
            return params
    raise SettingsError(
        "the constraint must accept some of the proposals",
        got=f"{MAX_DRAWS} rejected ones, such as {params}",
        remedy="relax the constraint, or change the space",
    )


def described(rules: Rules, search: str, seed: int) -> dict[str, Any]:
    """Return the settings that must not change when a study is resumed, as JSON-ready data."""
    return {
        "space": {name: f"{one}" for name, one in rules.space.items()},
        "objectives": [list(dataclasses.astuple(one)) for one in rules.objectives],
        "epochs": rules.epochs,
        "stop": str(rules.stopping) if not isinstance(rules.stopping, ToTheEnd) else None,
        "search": search,
        "seed": seed,
        "limits": dict(rules.limits),
    }


def as_json(params: Mapping[str, Any]) -> Any:
    """Return fixed parameters in the form in which the journal stores them: paths as strings, tuples as lists."""
    return json.loads(json.dumps(dict(params), default=str))


def require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise SettingsError if the settings `now` differ from those with which a resumed study was started."""
    for name, value in now.items():
        if before.get(name) != value:
            raise SettingsError(
                f"a resumed study must have the {name} with which it was started, {before.get(name)}",
                got=str(value),
                remedy="pass the same value, or another name for a new study",
            )
