"""Group tasks that can be stacked into one program, with reasons for tasks that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core import Task, TaskError, TorchScheduler, UsageError
from ..data import lies_in_memory, source_of
from .build import Built, build
from .program_equality import difference, network_difference
from .trial import try_stacked


@dataclass(frozen=True)
class TaskGroup:
    """A group of tasks that can be trained as one vectorized ensemble, or a single task that can only train alone."""

    tasks: tuple[int, ...]
    """The positions of the tasks."""
    reason: str = ""
    """Why the single task cannot be stacked; empty if the tasks can."""
    unlike: str = ""
    """How the tasks differ from those of an earlier group; empty for the first group."""
    is_broken: bool = False
    """Whether the task cannot be stacked because its own functions raise an error."""

    @property
    def stacks(self) -> bool:
        """Whether the tasks can be stacked."""
        return not self.reason


def groups(tasks: Sequence[Task]) -> list[TaskGroup]:
    """Group tasks by structure: tasks that differ only in numbers, such as learning rates, are in the same group.

    Every task is built and tried with a few samples. A task that cannot be stacked is in a group of its own.

    >>> import torch
    >>> def task(lr, width=8): return Task(
    ...     model=lambda: torch.nn.Linear(4, width), loss=lambda model, batch: model(batch).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr), data=data, batch_size=8)
    >>> data = torch.randn(16, 4)
    >>> found = groups([task(0.1), task(0.2, width=16), task(0.3)])
    >>> [group.tasks for group in found], found[1].unlike
    ([(0, 2), (1,)], 'weight is (8, 4) in one and (16, 4) in another')
    """
    alike: list[tuple[Built, list[int], str]] = []
    alone: list[TaskGroup] = []
    for number, task in enumerate(tasks):
        try:
            check_stackable(task)
            built = build(task)
            unlike = ""
            for first, numbers, _ in alike:
                found = difference_between(first, built)
                if not found:
                    numbers.append(number)
                    break
                unlike = unlike or found
            else:
                try_stacked(built)
                alike.append((built, [number], unlike))
        except UsageError as error:
            alone.append(TaskGroup((number,), reason=str(error)))
        except Exception as error:
            alone.append(TaskGroup((number,), reason=f"{type(error).__name__}: {error}", is_broken=True))
    return [*(TaskGroup(tuple(numbers), unlike=unlike) for _, numbers, unlike in alike), *alone]


def check_stackable(task: Task) -> None:
    """Raise TaskError if a task cannot be a member of a vectorized ensemble, as far as its arguments show."""
    if task.loss is None:
        raise TaskError("a stacked task must have a loss", got="a task with step=", remedy="train the task alone")
    if task.weights is not None:
        raise TaskError(
            "a stacked task must start with the values of its model function",
            got="weights=",
            remedy="train the task alone",
        )
    if isinstance(task.schedule, TorchScheduler):
        raise TaskError(
            "the schedule of a stacked task must be a function of (step, total)",
            got="an mh.TorchScheduler",
            remedy="train the task alone",
        )
    source = source_of(task)
    if not lies_in_memory(source):
        raise TaskError(
            "the data of a stacked task must be arrays in memory",
            got=source.name if task.collate is None else f"{source.name} with a custom collate",
            remedy="pass tensors or arrays, or train the task alone",
        )


def difference_between(first: Built, second: Built) -> str:
    """Describe why two tasks cannot be members of one vectorized ensemble; empty if they can."""
    if first.model is second.model:
        raise TaskError(
            "the model function must build a new network each time",
            got=f"the same {type(first.model).__name__} for two tasks",
            remedy=f"write model=lambda: {type(first.model).__name__}(...)",
        )
    return (
        _optimizer_difference(first, second)
        or network_difference(first.model, second.model)
        or _task_difference(first.task, second.task)
    )


def _optimizer_difference(first: Built, second: Built) -> str:
    if first.kind != second.kind:
        return f"the optimizer is {first.kind} in one and {second.kind} in another"
    if first.groups != second.groups:
        return "the optimizer's groups hold other parameters"
    for one, other in zip(first.updates, second.updates, strict=True):
        for flag, value in one.set.items():
            if other.set[flag] != value:
                return f"{first.kind} has {flag} in one only"
    return ""


def _task_difference(first: Task, second: Task) -> str:
    if (first.ema is None) != (second.ema is None):
        return "one has a moving average (ema) and another has none"
    for name in ("batch_size", "shuffle", "not_finite", "loss", "predict", "metrics", "collate", "data", "valid"):
        found = difference(getattr(first, name), getattr(second, name))
        if found:
            return f"{name} {found}"
    return ""
