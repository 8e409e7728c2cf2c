"""Population: trains tasks with the same structure as one vectorized program, or else one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import StrategySpec, Task, TaskError, UsageError, as_spec, require_positive, saves_all
from ..distributed import resolve
from .build import build_model
from .member import DONE, FAILED, STOPPED, TRAINING, VectorizedMember
from .member_training import CannotStack, MemberTraining
from .sequential import OneByOne
from .stacked_training import StackedTraining

Report = Callable[[int, int, dict[str, float]], None]
"""Function that is called with a member's number, its step, and its measurements: `loss`, `valid_loss`, `valid_…`."""


class Population:
    """Train tasks that differ in hyperparameters, seeds and sample order as one vectorized program.

    Each member computes what its task alone would with `deterministic=True`: it has its own initial weights, sample
    order, random numbers, schedule and clipping. A non-finite loss fails only its own member. `stop` ends the training
    of a member, and `replace` starts another task in its place. Tasks that cannot be computed as one program are
    trained one after another, with the same results, and a notice names the line and the reason.

    Args:
        tasks: Tasks with the same structure, such as those of one group of `groups`; others are refused.
        strategy: A strategy for one device: precision and capture.
        device: The device to train on; by default one of this machine.
        epochs: Number of epochs for which every member is trained.
        steps: Number of steps for which every member is trained, instead of `epochs`.
        notice: Called with messages for the user.

    >>> net = lambda: torch.nn.Linear(4, 1)
    >>> data = torch.randn(64, 4), torch.randn(64, 1)
    >>> def task(lr): return Task(
    ...     model=net, loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr), data=data, batch_size=16)
    >>> population = Population([task(lr) for lr in (0.01, 0.1)], device="cpu", epochs=2)
    >>> population.train()
    >>> [(member.step, member.status) for member in population.members]
    [(8, 'done'), (8, 'done')]
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        strategy: StrategySpec | str | None = None,
        *,
        device: Any = None,
        epochs: int = 1,
        steps: int | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.spec = as_spec(strategy) if strategy is not None else StrategySpec()
        _require_one_device(self.spec, len(tasks))
        require_positive(epochs=epochs, steps=steps)
        place = resolve(device, 1)[0][0]
        self.device = place.torch
        self._dtype = torch.float64 if self.spec.precision == "fp64" else None
        self._place, self._notice = place, notice
        self.members = [VectorizedMember(task) for task in tasks]
        """The progress of the members, in the order of the tasks; `replace` puts another member at the same place."""
        self._way: MemberTraining
        try:
            self._way = StackedTraining(self.members, self.spec, place, notice)
        except CannotStack as reason:
            self._way = self._one_by_one(reason)
        self.total = steps if steps is not None else self._way.num_steps_in_epoch * epochs
        """Number of steps after which a member is done."""

    @property
    def num_steps_in_epoch(self) -> int:
        """Number of steps in an epoch, which is the same for all members."""
        return self._way.num_steps_in_epoch

    # -- training -------------------------------------------------------------------------------------------------

    def train(self, until: int | None = None, *, every: int | None = None, report: Report | None = None) -> None:
        """Train every member up to step `until`, by default to its end.

        Members are measured after every epoch, or after every `every` steps, and at their end. Then `report` is called,
        which may call `stop` and `replace`. A failed member is not measured, but reported with its last measurements.
        """
        goal = self.total if until is None else min(until, self.total)
        pace = every or self._way.num_steps_in_epoch
        while active := [n for n, m in enumerate(self.members) if m.is_training and m.step < goal]:
            most = min(min(goal - self.members[n].step, pace - self.members[n].step % pace) for n in active)
            self._take(active, most)
            due = [n for n in active if self._is_due(self.members[n], goal, pace)]
            self._measure([n for n in due if self.members[n].status != FAILED])
            for number in due:
                member = self.members[number]
                if report is not None:
                    report(number, member.step, dict(member.metrics))

    def step(self, count: int = 1) -> Tensor:
        """Take `count` steps of every member that is training; return the losses by step and member.

        The loss is NaN where a member has not taken a step.
        """
        curves = torch.full((count, len(self.members)), torch.nan, dtype=torch.float64)
        done = 0
        while done < count and (active := [n for n, m in enumerate(self.members) if m.is_training]):
            most = min(count - done, *(self.total - self.members[n].step for n in active))
            taken = self._take(active, most)
            for number, losses in taken.items():
                curves[done : done + len(losses), number] = torch.tensor(losses, dtype=torch.float64)
            done += max(map(len, taken.values()))
        return curves

    def evaluate(self) -> list[dict[str, float]]:
        """Return the loss and metrics of every member on its validation data, as `valid_loss`, `valid_…`.

        Raises:
            TaskError: The tasks have no `valid=`.
        """
        if self.members[0].task.valid is None:
            raise TaskError(
                "evaluating members needs validation data",
                got="tasks without valid=",
                remedy="pass valid= to the tasks",
            )
        found = self._measured(list(range(len(self.members))))
        return [found[number] for number in range(len(self.members))]

    def close(self) -> None:
        """Release CUDA graphs and the compiler's processes; the state of the members stays available."""
        self._way.close()

    def __enter__(self) -> Population:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- members --------------------------------------------------------------------------------------------------

    def stop(self, member: int) -> None:
        """End the training of a member; its state stays available, and `replace` can put another task in its place."""
        found = self._member(member)
        if found.is_training:
            found.status = STOPPED

    def replace(self, member: int, task: Task) -> None:
        """Put another task in the place of a member; it starts at its first step.

        Raises:
            TaskError: The members are stacked, and the task has another structure.
        """
        self._member(member)
        try:
            self._way.replace(member, task)
        except CannotStack as reason:
            raise TaskError(
                "a stacked member can only be replaced by a task that stacks with the others",
                got=f"a task that does not: {reason}",
                remedy="train this task in another population",
            ) from reason
        self.members[member] = VectorizedMember(task)

    def state(self, member: int) -> dict[str, Any]:
        """Return the state of a member as the fields of a checkpoint of `fit`, with the names of its own network."""
        self._member(member)
        return self._way.state(member)

    def load(self, member: int, state: Mapping[str, Any]) -> None:
        """Resume a member from a result of `state`, of this or another population, or from a checkpoint of `fit`."""
        fresh = VectorizedMember(self._member(member).task)
        try:
            self._way.load(member, fresh, state)
        except CannotStack as reason:
            self._go_apart(reason)
            self._way.load(member, fresh, state)
        fresh.status = DONE if fresh.step >= self.total else TRAINING
        self.members[member] = fresh

    def model(self, member: int) -> torch.nn.Module:
        """Return the network of a member as a module on the CPU, with its averaged weights if it has any."""
        state = self.state(member)
        model = build_model(self.members[member].task, self._dtype)
        model.load_state_dict({**state["model"], **state["averages"]}, strict=saves_all(model))
        return model

    @property
    def num_bytes(self) -> int:
        """Bytes of all members' tensors on the device, without the temporary memory of a step."""
        return self._way.num_bytes

    def _member(self, number: int) -> VectorizedMember:
        if not 0 <= number < len(self.members):
            raise UsageError(
                f"the number of a member must be between 0 and {len(self.members) - 1}",
                got=number,
                remedy="choose one of them",
            )
        return self.members[number]

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _take(self, active: Sequence[int], most: int) -> dict[int, list[float]]:
        """Take at most `most` steps of the members in `active`; return their losses by member.

        If they cannot be stacked any longer, they are trained one after another from now on.
        """
        taken: dict[int, list[float]] = {}
        try:
            self._way.take(active, most, self.total, taken)
        except CannotStack as reason:
            self._record_losses(taken)
            self._go_apart(reason)
            # Some members may have taken steps before one failed.
            rest = [number for number in active if not taken.get(number)]
            return taken | self._take(rest, 1 if len(rest) < len(active) else most) if rest else taken
        self._record_losses(taken)
        return taken

    def _record_losses(self, taken: Mapping[int, list[float]]) -> None:
        for number, losses in taken.items():
            if not losses:
                continue
            member = self.members[number]
            member.record_losses(losses, skips=member.task.not_finite == "skip")
            if member.status == FAILED:
                self._notice(f"member {number} stops: {member.reason}")
            if member.is_training and member.step >= self.total:
                member.status = DONE

    def _go_apart(self, reason: CannotStack) -> None:
        """Switch from stacked training to training members one after another, with their present states."""
        before = self._way
        if not isinstance(before, StackedTraining):
            raise reason
        states = [before.state(number) for number in range(len(self.members))]
        before.close()
        self._way = self._one_by_one(reason, states)

    def _one_by_one(self, reason: CannotStack, states: Sequence[Mapping[str, Any]] | None = None) -> MemberTraining:
        self._notice(f"members are trained one after another: {reason}")
        return OneByOne(self.members, self.spec, self._place, self._notice, states)

    # -- measuring ------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_due(member: VectorizedMember, goal: int, pace: int) -> bool:
        return not member.is_training or member.step >= goal or member.step % pace == 0

    def _measure(self, numbers: Sequence[int]) -> None:
        measured = self._measured(numbers)
        for number in numbers:
            member = self.members[number]
            member.metrics = {**member.take_mean(), **measured.get(number, {})}

    def _measured(self, numbers: Sequence[int]) -> dict[int, dict[str, float]]:
        try:
            return self._way.measured(numbers)
        except CannotStack as reason:
            self._go_apart(reason)
            return self._way.measured(numbers)


def _require_one_device(spec: StrategySpec, num_tasks: int) -> None:
    if num_tasks == 0:
        raise UsageError("a population needs at least one task", remedy="pass one or more tasks")
    if (spec.replicas, spec.shards, spec.tensor, spec.stages, spec.context, spec.accumulate) != (
        1,
    ) * 6 or spec.servers:
        raise UsageError(
            "a population must run on one device, with whole batches",
            got=str(spec),
            remedy="pass a strategy with precision and capture only",
        )
