"""Executor that trains trials whose networks have equal structure as one program (vmap); other trials run alone.

A trial that has reached the epoch up to which it is trained frees its place for the next one, so the device stays busy.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core import SettingsError, Task
from ..distributed import Device
from ..storage import Checkpoint, CheckpointStore
from ..training import CHECKPOINTS
from ..vectorized import Gain, Population, gain, groups
from .executors import Executor, InProcessExecutor
from .trial_work import TrialOutcome, TrialRunner, TrialWork, write_record

LEAST_GAIN, LOOK_AGAIN = 1.1, 2.0
"""Speed-ups by stacking below which trials are not stacked, and below which the speed-up is measured twice."""
SIZES = (4, 8, 16, 32, 64)
"""Numbers of trials in a vectorized ensemble that are considered."""
ENOUGH = 0.8
"""Use the smallest ensemble with this fraction of the best speed-up: searchers learn sooner from small ensembles."""
SAVE_SECONDS = 30.0
"""Seconds between checkpoints of all trials."""
MAX_STACKS = 8
"""Maximum number of vectorized ensembles that are kept for later trials, with their CUDA graphs."""


class _Reached(Exception):
    """Raised to pause an ensemble when a trial has completed its unit of work, or when checkpoints are due."""


@dataclass(eq=False)
class _TrialStack:
    """A vectorized ensemble, with the trial's unit of work and its start time for each busy member."""

    population: Population
    works: dict[int, TrialWork] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)

    @property
    def free(self) -> list[int]:
        return [number for number in range(len(self.population.members)) if number not in self.works]

    def goal(self, number: int) -> int:
        """Return the step at which the unit of work of member `number` is complete."""
        return self.works[number].until * self.population.num_steps_in_epoch


class Stacked(Executor):
    """Executor that trains many trials at a time in this process, as a few vectorized ensembles.

    Args:
        runner: Executes trials that are not stacked, and knows the run folders.
        device: The device to use.
        size: Maximum number of trials at a time.
        notice: Called with messages for the user.
        must_stack: Whether to raise an error for tasks that cannot be stacked, instead of running them alone.
    """

    def __init__(
        self, runner: TrialRunner, device: Device, size: int, notice: Callable[[str], None], *, must_stack: bool
    ) -> None:
        self._runner, self._device, self._size, self._notice = runner, device, size, notice
        self._must_stack = must_stack
        self._alone = InProcessExecutor(runner, device)
        self._pending: list[TrialWork] = []
        self._single: deque[TrialWork] = deque()
        self._stacks: list[_TrialStack] = []
        self._ready: list[TrialOutcome] = []
        self._noticed: set[str] = set()
        self._is_stopping = False
        self._saved_at = time.monotonic()

    @property
    def num_free(self) -> int:
        return self._size - self._num_busy

    @property
    def is_busy(self) -> bool:
        return bool(self._num_busy)

    @property
    def _num_busy(self) -> int:
        return len(self._pending) + len(self._single) + len(self._ready) + sum(len(s.works) for s in self._stacks)

    def start(self, work: TrialWork) -> int:
        self._pending.append(work)
        return 0

    def wait(self) -> list[TrialOutcome]:
        self._admit()
        for stack in self._stacks:
            if stack.works:
                self._advance(stack)
        if self._must_save:
            for stack in self._stacks:
                self._save_all(stack)
            self._saved_at = time.monotonic()
        if self._single and not self._ready:
            self._alone.start(self._single.popleft())
            self._ready += self._alone.wait()
        outcomes, self._ready = self._ready, []
        return outcomes

    def stop(self) -> None:
        self._is_stopping = True
        self._alone.stop()

    def close(self) -> None:
        for stack in self._stacks:
            stack.population.close()
        self._alone.close()

    def _admit(self) -> None:
        """Assign pending trials to free members of ensembles or to new ensembles, or queue them to run alone."""
        pending, self._pending = self._pending, []
        new: list[tuple[TrialWork, Task]] = []
        for work in pending:
            outcome = TrialOutcome(work.number)
            made = self._runner.prepared(work, outcome)
            if made is None:
                self._ready.append(outcome)
            elif not any(self._place(stack, work, made) for stack in self._stacks):
                new.append((work, made))
        for group in groups([task for _, task in new]) if new else []:
            chosen = [new[number] for number in group.tasks]
            if group.stacks:
                self._make_room()
                tasks = [task for _, task in chosen]
                epochs, notice = self._runner.epochs, self._notice_once
                population = Population(tasks, device=[self._device], epochs=epochs, notice=notice)
                stack = _TrialStack(population)
                self._stacks.append(stack)
                for number, (work, _) in enumerate(chosen):
                    self._begin(stack, number, work)
            elif self._must_stack and not group.is_broken:
                raise SettingsError(
                    "execution='stacked' needs tasks that can be stacked", got=group.reason, remedy="omit execution"
                )
            else:
                if not group.is_broken:
                    self._notice_once(f"trials are not stacked: {group.reason}")
                self._single.extend(work for work, _ in chosen)

    def _make_room(self) -> None:
        """Close idle ensembles, oldest first, so that at most MAX_STACKS exist and memory does not run out."""
        idle = [stack for stack in self._stacks if not stack.works]
        for stack in idle[: max(0, len(self._stacks) + 1 - MAX_STACKS)]:
            stack.population.close()
            self._stacks.remove(stack)

    def _place(self, stack: _TrialStack, work: TrialWork, task: Task) -> bool:
        """Assign a trial to a free member of an ensemble; return False if there is none or the structures differ."""
        if not stack.free:
            return False
        try:
            stack.population.replace(stack.free[0], task)
        except Exception:  # another structure, or an error of the user's code, which is reported when it runs alone
            return False
        self._begin(stack, stack.free[0], work)
        return True

    def _begin(self, stack: _TrialStack, number: int, work: TrialWork) -> None:
        """Assign a trial's unit of work to member `number`, and load the trial's checkpoint if it has one."""
        stack.works[number], stack.began[number] = work, time.perf_counter()
        folder = self._runner.run_folder(work.number) / CHECKPOINTS
        if folder.exists() and (store := CheckpointStore(folder)).steps():
            stack.population.load(number, vars(store.load()))

    def _advance(self, stack: _TrialStack) -> None:
        """Train an ensemble until a trial has completed its unit of work, or until checkpoints are due."""
        population = stack.population
        for number in stack.free:
            population.stop(number)

        def look(number: int, step: int, metrics: dict[str, float]) -> None:
            if self._must_save or any(self._is_there(stack, one) for one in stack.works):
                raise _Reached

        if not any(self._is_there(stack, number) for number in stack.works):
            with contextlib.suppress(_Reached):
                population.train(report=look)
        for number in [number for number in stack.works if self._is_there(stack, number)]:
            self._ready.append(self._outcome(stack, number))

    @property
    def _must_save(self) -> bool:
        return self._is_stopping or time.monotonic() - self._saved_at > SAVE_SECONDS

    def _is_there(self, stack: _TrialStack, number: int) -> bool:
        member = stack.population.members[number]
        return not member.is_training or member.step >= stack.goal(number)

    def _outcome(self, stack: _TrialStack, number: int) -> TrialOutcome:
        """Return the outcome of the trial of member `number`, and free the member."""
        population, member = stack.population, stack.population.members[number]
        work = stack.works.pop(number)
        seconds = (time.perf_counter() - stack.began.pop(number)) / max(1, len(stack.works) + 1)
        outcome = TrialOutcome(work.number, dict(member.metrics), seconds=seconds)
        outcome.epochs = member.step // population.num_steps_in_epoch
        if member.reason:
            outcome.reason, outcome.is_diverged = member.reason, True
        else:
            outcome.save = functools.partial(self._save, work, member.task, population.state(number))
        population.stop(number)
        return outcome

    def _save_all(self, stack: _TrialStack) -> None:
        """Write a checkpoint of every trial of an ensemble; if the study is stopping, end the trials as interrupted."""
        for number, work in list(stack.works.items()):
            self._save(work, stack.population.members[number].task, stack.population.state(number))
            if self._is_stopping:
                del stack.works[number]
                self._ready.append(TrialOutcome(work.number, is_interrupted=True))

    def _save(self, work: TrialWork, task: Task, state: dict[str, Any]) -> None:
        """Write a checkpoint into a trial's run folder, from which it can be resumed in an ensemble or alone."""
        folder = self._runner.run_folder(work.number)
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder, task, work.params, self._runner.epochs, str(self._device))
        with CheckpointStore(folder / CHECKPOINTS, keep=1) as store:
            store.claim()
            store.save(Checkpoint(**state))
            store.wait()

    def _notice_once(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._notice(text)


def _measured(task: Task, device: Device, most: int) -> Gain:
    """Measure the speed-up of stacking up to `most` trials.

    Measure twice if it is small, because other programs may have been busy.
    """
    found = gain(task, device=[device])
    if found(most) < LOOK_AGAIN:
        found = max(found, gain(task, device=[device]), key=lambda one: one(most))
    return found


def stack_size(task: Task, device: Device, limit: int | None, *, must_stack: bool) -> tuple[int, str]:
    """Return the number of trials to train as one ensemble, and the reason as a text for the user.

    The number is 1 if stacking is impossible or not faster.

    Args:
        task: The task of one trial.
        device: The device to use.
        limit: Maximum number of trials of the study.
        must_stack: Whether the user asked for stacking, so that an error is raised if it is impossible.
    """
    looked_at = groups([task])[0]
    if looked_at.reason:
        if must_stack and not looked_at.is_broken:
            raise SettingsError(
                "execution='stacked' needs tasks that can be stacked", got=looked_at.reason, remedy="omit execution"
            )
        return 1, f"trials are not stacked: {looked_at.reason}"
    most = min(SIZES[-1], limit or SIZES[-1])
    if most < SIZES[0] and not must_stack:
        return 1, ""
    measured = _measured(task, device, most)
    best = measured(most)
    if best < LEAST_GAIN and not must_stack:
        return 1, f"trials are not stacked: a stack of {most} is {best:.2f} times as fast as one after another"
    size = next((size for size in SIZES if measured(size) >= ENOUGH * best), most)
    size = max(1, min(size, most))
    return size, f"{size} trials at a time as one program, measured {measured(size):.1f} times as fast as one by one"
