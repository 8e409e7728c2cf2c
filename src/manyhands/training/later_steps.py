"""Compare further steps for differences that the first two may not show: other branches, and steps after many calls.

A forward that reads values of tensors in Python may take another branch for other rows: it may, for example, iterate
until a batch has converged. One that compares values may choose other rows. One that counts its calls may compute
something else after a warm-up. All are tried on one device, where a batch is computed in as many parts as under the
strategy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core import StrategySpec, Task
from ..data import IndexedSource, check_source, source_of
from ..distributed import World
from .carried_numbers import number_slots
from .step_comparison import compare
from .trial_rows import Plan, choose_rows
from .trial_steps import Record, parts_of, take_steps
from .verdict import Verdict

NUM_PLANS, NUM_STEPS = 12, 4
"""Number of further batches that are compared if a loss reads or compares values, and of those that are consecutive."""
JUMPS = (10, 1_000, 100_000)
"""Steps by which counters are advanced."""
MOST_SECONDS = 2.0
_READS = frozenset({"item", "tolist", "numpy", "bool", "float", "int", "index", "is_nonzero", "equal", "allclose"})
_COMPARES = frozenset(
    {"gt", "ge", "lt", "le", "sign", "round", "floor", "ceil", "argmax", "argmin", "argsort", "sort", "topk"}
)
"""Operations with steps in their results, which a small difference of a threshold shows in few batches only."""
Judge = Callable[[Task, Plan, Record, Record], Verdict]
"""Returns the verdict on the steps of a plan, given the records of whole batches and of batches in parts."""


class _ValueReads(TorchFunctionMode):
    """Detects whether a loss reads values of tensors in Python, or compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = [False]

    def watched(self, task: Task) -> Task:
        """Return the task with a loss whose reads are detected."""
        loss = task.loss
        assert loss is not None

        def compute(model: nn.Module, batch: Any) -> Any:
            with self:
                return loss(model, batch)

        return task.replace(loss=compute)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        self.found[0] |= name in _READS or (name in _COMPARES and any(map(_is_real, args[:1])))
        return func(*args, **(kwargs or {}))


def judge_later(
    task: Task, spec: StrategySpec, plan: Plan, whole: Record, alone: World, judge: Judge
) -> Verdict | None:
    """Return the verdict on further steps that differ if the batch is split on one device; None if there are none."""
    if parts_of(spec) == 1 or task.loss is None or whole.batch_norms or whole.strayed or whole.drawn_on_host:
        return None
    # Parts of a smaller last batch may have too few rows for operations of the network.
    advanced, plan, whole = list(_later_tasks(task, whole)), plan[:1], replace(whole, steps=whole.steps[:1])
    try:
        later = [*((task, rows) for rows in _later_plans(task, spec, plan, alone)), *((one, plan) for one in advanced)]
    except Exception:
        # A user error occurs again in the first step, where it is reported with its samples.
        return None
    # Values that are read differ most between small parts. If a loss needs more rows, larger parts are tried.
    for count in dict.fromkeys((max(len(plan[0]) // 2, parts_of(spec)), parts_of(spec))) if later else ():
        comparison = _SplitSteps(whole.precision, alone, count, judge)
        # Numbers that change in each call, such as a temperature, change once per part here and once per step on ranks.
        if comparison.can_split(task, plan, whole):
            found = comparison.first_different(task, whole, later)
            return None if found is None else replace(found, spec=spec)
    return None


@dataclass(frozen=True)
class _SplitSteps:
    """Compares steps on one device with the same ones in parts."""

    precision: str
    alone: World
    num_parts: int
    judge: Judge

    def taken(self, task: Task, plan: Plan, num_parts: int = 1) -> Record:
        return take_steps(self.alone, task, StrategySpec(accumulate=num_parts), plan, precision=self.precision)

    def can_split(self, task: Task, plan: Plan, whole: Record) -> bool:
        """Return whether the first step, which is equal on the ranks, is also equal in parts on one device."""
        try:
            return not _differs(whole, self.taken(task, plan, self.num_parts))
        except Exception:
            return False

    def first_different(self, task: Task, whole: Record, later: Sequence[tuple[Task, Plan]]) -> Verdict | None:
        """Return the first verdict of later steps whose outcome is "different"; None if there is none."""
        # CPU time of this thread, so that other load on the machine does not end the comparison early.
        begun = time.thread_time()
        for other, plan in later:
            if time.thread_time() - begun > MOST_SECONDS:
                break
            # A counter may be an index that cannot be advanced, and other rows may raise on one device, too.
            with contextlib.suppress(Exception):
                first = self.taken(other, plan)
                if other is not task and not _differs(whole, first):
                    continue
                verdict = self.judge(other, plan, first, self.taken(other, plan, self.num_parts))
                if verdict.outcome == "different":
                    return verdict
        return None


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _differs(ours: Record, theirs: Record) -> bool:
    return any(difference.is_real for difference in compare(ours, theirs))


def _later_plans(task: Task, spec: StrategySpec, plan: Plan, alone: World) -> Iterator[Plan]:
    """Yield plans of other rows if the loss reads or compares values of tensors."""
    source = source_of(task)
    if not isinstance(source, IndexedSource):
        return
    reads = _ValueReads()
    take_steps(alone, reads.watched(task), StrategySpec(), plan[:1])
    if reads.found[0]:
        batch_size = check_source(source, task.batch_size)
        for first in range(1, NUM_PLANS + 1, NUM_STEPS):
            seeds = range(task.seed + first, task.seed + first + NUM_STEPS)
            yield [choose_rows(source, batch_size, parts_of(spec), seed, len(plan[0]))[0] for seed in seeds]


def _later_tasks(task: Task, whole: Record) -> Iterator[Task]:
    """Yield tasks whose counters start with their values after many steps; none if the task has no counters."""
    if len(whole.steps) < 2:
        return
    first, second = whole.steps[:2]
    grown = {
        name: value - first.numbers[name]
        for name, value in second.numbers.items()
        if type(value) is int and type(first.numbers.get(name)) is int and value > first.numbers[name]
    }
    counting = {name: second.buffers[name] - first.buffers[name] for name in _counters(first.buffers, second.buffers)}
    if not grown and not counting:
        return
    for jump in JUMPS:
        yield task.replace(model=_advanced(task, {n: jump * v for n, v in grown.items()}, counting, jump))


def _counters(first: dict[str, Tensor], second: dict[str, Tensor]) -> Iterator[str]:
    for name, value in second.items():
        before = first.get(name)
        if before is None or before.shape != value.shape or value.numel() != 1:
            continue
        if not value.is_floating_point() and value.dtype != torch.bool and bool(value > before):
            yield name


def _advanced(task: Task, numbers: dict[str, Any], buffers: dict[str, Tensor], jump: int) -> Callable[[], nn.Module]:
    make, loss = task.model, task.loss

    def build() -> nn.Module:
        model = make()
        slots = number_slots(model, loss)
        for path, by in numbers.items():
            if path in slots:
                slots[path].put(slots[path].get() + by)
        held = dict(model.named_buffers())
        for name, step in buffers.items():
            if name in held:
                held[name] += (jump * step).to(held[name])
        return model

    return build
