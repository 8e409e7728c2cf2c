"""Check: decide whether steps under a strategy equal those of one device, and find where and why they differ."""

from __future__ import annotations

import dataclasses

import torch

from ..core import StrategySpec, Task
from ..distributed import NullWorld, World
from .carried_numbers import differing
from .cause import CallRecorder, first_not_finite
from .difference_reasons import reason
from .later_steps import judge_later
from .step_comparison import compare
from .trial_rows import Plan
from .trial_steps import Perturbation, Record, take_steps
from .verdict import BUFFER, NUMBER, OTHER, RANDOM, Verdict

MAGNIFIED = 30.0
"""A difference up to this multiple of the perturbation's effect counts as rounding."""
MOST_MAGNIFIED = 1e-3
"""Differences of the first gradient above this are not reported as equal, even where rounding may explain them."""
MOST_UNIT = 1e-6
"""Largest machine epsilon with which two computations can be compared; float32 has 1.2e-7."""


def judge(
    task: Task, spec: StrategySpec, plan: Plan, whole: Record, parts: Record, world: World | None = None
) -> Verdict:
    """Return the verdict on the steps `parts`, compared with `whole`; if they differ, find the reason."""
    alone = world or NullWorld()
    verdict = _judge_tensors(task, spec, plan, whole, parts, alone)
    # The tensors may differ because of a number that only some ranks change.
    is_explained = not verdict.equal and verdict.remedy != OTHER
    found = None if is_explained else _judge_numbers(task, spec, plan, whole, parts, alone)
    if found is None and verdict.equal:

        def judge_one(task: Task, plan: Plan, whole: Record, parts: Record) -> Verdict:
            return _judge_tensors(task, spec, plan, whole, parts, alone)

        found = judge_later(task, spec, plan, whole, alone, judge_one)
    return verdict if found is None else found


def _judge_numbers(
    task: Task, spec: StrategySpec, plan: Plan, whole: Record, parts: Record, alone: World
) -> Verdict | None:
    """Return the verdict on attributes whose numbers differ and are used in later steps; None if there are none."""
    tolerance = 1e-6 if whole.precision == "fp64" else 1e-3
    pairs = list(zip(whole.steps, parts.steps, strict=True))
    names = {name for ours, theirs in pairs for name in differing(ours.numbers, theirs.numbers, tolerance)}
    if len(pairs) < 2:
        return None
    if spec.servers:
        # The number of parts that a worker computes in a step varies, so even counts of calls differ.
        names |= set(differing(whole.steps[0].numbers, whole.steps[1].numbers, tolerance))
    if not names:
        return None
    try:
        nudged = Perturbation(nudged=tuple(sorted(names)))
        after = take_steps(alone, task, StrategySpec(), plan, precision=whole.precision, perturbed=nudged)
        carried = differing(whole.steps[1].numbers, after.steps[1].numbers, tolerance)
    except Exception:
        carried = list(names)
    # A later step may depend on such a number even if the first two do not.
    name = next((name for name in whole.steps[0].numbers if name in names and name in carried), "")
    if not name:
        return None
    ours, theirs = whole.steps[-1].numbers[name], parts.steps[-1].numbers.get(name, 0)
    why = f"it is {theirs:.6g} instead of {ours:.6g} after {len(pairs)} steps, and later steps start from it"
    if spec.servers and ours == theirs:
        why = "every worker changes its own in each part that it computes, and how many those are is not fixed"
    error = abs(theirs - ours) / max(abs(ours), 1e-12)
    return Verdict("different", spec, f"the attribute {name}", error, why, NUMBER)


def _judge_tensors(task: Task, spec: StrategySpec, plan: Plan, whole: Record, parts: Record, alone: World) -> Verdict:
    """Return the verdict on gradients, buffers, losses and weights."""
    found = list(compare(whole, parts))
    notes: list[str] = []
    if whole.num_draws and not spec.deterministic:
        notes.append("random numbers, dropout's too, are compared as with deterministic=True; a run needs it for them")
    worst = max((difference.error for difference in found if not difference.what.startswith("the update")), default=0.0)
    real = next((difference for difference in found if difference.is_real), None)
    if real is not None and whole.precision == "fp64":
        whole = dataclasses.replace(whole, unit=_unit_inside(task, plan, alone))
        found = list(compare(whole, parts)) if whole.unit else found
        real = next((difference for difference in found if difference.is_real), None)
        if real is None and whole.unit > MOST_UNIT:
            why = f"operations of the loss compute in a type that rounds to {whole.unit:.1e}, whatever the weights are"
            return Verdict("not verified", spec, why=why, notes=tuple(notes))

    def again(perturbed: Perturbation) -> Record:
        return take_steps(alone, task, StrategySpec(), plan, precision=whole.precision, perturbed=perturbed)

    if real is None:
        nan = next((difference for difference in found if difference.has_nan), None)
        if nan is not None:
            why = f"{nan.what} has NaN on one device too, first in {_source_of_nan(task, plan, alone) or 'backward'}"
            return Verdict("not verified", spec, nan.what, why=why, notes=tuple(notes))
        return _same_everywhere(parts, Verdict("equal", spec, error=worst, notes=tuple(notes)))
    if any(difference.is_real for difference in compare(whole, again(Perturbation(salt=1)))):
        notes.append("the step draws random numbers that are not layout-free, so they differ on every replica")
        return Verdict("different", spec, real.what, real.error, RANDOM, notes=tuple(notes))
    shaken = {(d.step, d.what): d.error for d in compare(whole, again(Perturbation(shake=whole.shake)))}
    magnified = [d for d in found if d.is_real and d.error <= MAGNIFIED * shaken[d.step, d.what]]
    real = next((d for d in found if d.is_real and d not in magnified), None)
    if real is None:
        most = max(magnified, key=lambda difference: difference.error)
        if any(d.step == 0 and not d.what.startswith("the update") and d.error > MOST_MAGNIFIED for d in magnified):
            why = f"rounding alone changes {most.what} by {shaken[most.step, most.what]:.1e} on one device"
            return Verdict("not verified", spec, most.what, most.error, why, notes=tuple(notes))
        notes.append(f"{most.what} differs by {most.error:.1e}, as much as rounding changes it on one device")
        return _same_everywhere(parts, Verdict("equal", spec, error=worst, notes=tuple(notes)))
    why, remedy = reason(task, spec, plan, whole, parts, real, alone)
    return Verdict("different", spec, real.what, real.error, why, remedy, tuple(notes))


def _unit_inside(task: Task, plan: Plan, alone: World) -> float:
    """Return the largest machine epsilon of a loss's operations if some use a dtype below float64; else 0."""
    if task.loss is None:
        return 0.0
    operations = CallRecorder()
    take_steps(alone, operations.watched(task), StrategySpec(), plan[:1])
    types = {value.dtype for call in operations.calls for operation in call for value in operation.values}
    units = [torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point or dtype.is_complex]
    unit = max(units, default=0.0)
    return unit if unit > torch.finfo(torch.float64).eps else 0.0


def _same_everywhere(parts: Record, verdict: Verdict) -> Verdict:
    """Return the given verdict of equal steps, or "different" if the replicas differ from each other."""
    differing = next((step.differing for step in parts.steps if step.differing), [])
    if not differing:
        return verdict
    name = differing[0].split(" ")[0]
    why, remedy = f"it is not equal on every replica: {', '.join(differing)}; nothing synchronizes it", BUFFER
    if name in parts.steps[0].weights:
        why = f"updates are not equal on every replica: {', '.join(differing[:5])}"
        remedy = "let the optimizer draw no random numbers, and change parameters in its step alone"
    return dataclasses.replace(verdict, outcome="different", first=name, error=float("inf"), why=why, remedy=remedy)


def _source_of_nan(task: Task, plan: Plan, alone: World) -> str:
    """Return the first operation of a step on one device whose result is not finite."""
    if task.loss is None:
        return ""
    operations = CallRecorder()
    take_steps(alone, operations.watched(task), StrategySpec(), plan)
    return next(filter(None, map(first_not_finite, operations.calls)), "")
