"""Checks on one device for what a strategy would change, before a rank takes a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..core import Attributes, DataError, Mean, StrategySpec, Task
from ..distributed import NullWorld, World, culprit
from .cause import ForwardChanges
from .restored_objects import remember_held
from .step_comparison import compare
from .trial import LOSS
from .trial_rows import Plan
from .trial_steps import Record, parts_of, take_steps
from .verdict import NUMBER, PARAMETERS, Verdict


def fails_in_parts(
    task: Task, spec: StrategySpec, plan: Plan, whole: Record, world: World | None = None
) -> Verdict | None:
    """Return the verdict on a loss that raises an error only on parts of a batch; None if it raises none.

    The loss runs on one device, where an error leaves no rank waiting. Networks with batch statistics are skipped:
    they may need more rows than a part has, unless they are synchronized.
    """
    if parts_of(spec) == 1 or whole.batch_norms or task.loss is None:
        return None
    try:
        alone = StrategySpec(accumulate=parts_of(spec))
        take_steps(world or NullWorld(), task, alone, plan, precision=whole.precision)
    except DataError:
        # A batch that cannot be split is refused with micro-batches; ranks collate their own samples.
        if spec.accumulate * spec.microbatches > 1:
            raise
        return None
    except Exception as error:
        return failed_in_parts(spec, error)
    return None


def not_linear(task: Task, spec: StrategySpec, plan: Plan, whole: Record, world: World) -> Verdict | None:
    """Return the verdict on a backward that is not proportional to the loss; None if it is.

    A worker of parameter servers computes the gradient of its part's mean, a multiple of the part's share in the whole
    batch's gradient. A hook that clamps gradients, for instance, changes the two differently.
    """
    loss, factor = task.loss, float(parts_of(spec))
    if loss is None or factor == 1:
        return None

    def multiplied(model: nn.Module, batch: Any) -> Any:
        value = loss(model, batch)
        return Mean(value.total * factor, value.count) if isinstance(value, Mean) else value * factor

    def first_gradients(task: Task) -> dict[str, Tensor]:
        return take_steps(world, task, StrategySpec(), plan[:1], precision=whole.precision).steps[0].gradients

    try:
        # Clipping by the norm, which is not proportional either, applies to the sum over all workers.
        unclipped = whole.steps[0].gradients if task.clip is None else first_gradients(task.replace(clip=None))
        scaled = first_gradients(task.replace(loss=multiplied, clip=None))
    except Exception:
        # The loss cannot be multiplied; an error of the user is raised again in the comparison of parts.
        return None
    relative = 1e-6 if whole.precision == "fp64" else 1e-2
    for name, gradient in unclipped.items():
        error, size = (scaled[name] / factor - gradient).abs().max(), gradient.abs().max()
        if error > relative * size + 1e-12:
            why = "its backward is not proportional to the loss: a hook or an autograd.Function clamps gradients, say"
            remedy = "change gradients in the optimizer's step, or use mh.Mirrored()"
            return Verdict("different", spec, f"the gradient of {name}", float(error / size), why, remedy)
    return None


def changes_parameters(task: Task, spec: StrategySpec, plan: Plan, whole: Record, world: World) -> Verdict | None:
    """Return the verdict on a forward that changes trained parameters; None if it changes none.

    A worker of parameter servers computes on its own copy, and sends only gradients to the servers.
    """
    if task.loss is None:
        return None
    watch = ForwardChanges()
    try:
        record = take_steps(world, watch.watched(task), StrategySpec(), plan, precision=whole.precision)
    except Exception:
        # What matters raises in the comparison of parts.
        return None
    moved = [name for step in record.steps for name in step.moved]
    if moved:
        why = f"forward changes {next(iter(watch.changed), moved[0])} itself, and servers get gradients only"
        return Verdict("different", spec, moved[0], float("inf"), why, PARAMETERS)
    if watch.unfrozen:
        why = f"forward sets requires_grad of {watch.unfrozen[0]}, and servers update what is trained at the start"
        remedy = "freeze parameters in the model function, detach outputs in place of freezing, or use mh.Mirrored()"
        return Verdict("different", spec, watch.unfrozen[0].split(" ")[0], float("inf"), why, remedy)
    return None


def keeps_state(task: Task, spec: StrategySpec, plan: Plan, whole: Record, world: World) -> Verdict | None:
    """Return the verdict on a loss whose calls depend on state that earlier calls left outside of buffers; else None.

    A worker of parameter servers computes a varying number of parts, and its first one may belong to a later step.
    So the second step is repeated here with the state before the first call.
    """
    make, built = task.model, list[nn.Module]()
    undo: list[Callable[[], None]] = []
    changed: list[str] = []

    def build() -> nn.Module:
        built.append(make())
        return built[-1]

    def begin(step: int) -> None:
        if step == 0:
            attributes = Attributes(built[-1])
            undo[:] = [
                lambda: changed.extend(attributes.changed()),
                attributes.put_back,
                remember_held(task.loss, task.model),
            ]
        else:
            for one in undo:
                one()

    if task.loss is None or len(whole.steps) < 2:
        return None
    try:
        fresh = take_steps(
            world, task.replace(model=build), StrategySpec(), plan, precision=whole.precision, begin=begin
        )
    except Exception:
        # What matters raises in the comparison of parts.
        return None
    real = next((difference for difference in compare(whole, fresh) if difference.is_real), None)
    if real is None or whole.strayed:
        return None
    where = f"{changed[0]} of the network" if changed else "what the loss refers to"
    why = (
        f"calls of the loss read what earlier calls left in {where}; every worker has its own copy, and the number of "
        "parts that a worker computes varies"
    )
    return Verdict("different", spec, real.what, real.error, why, NUMBER)


def failed_in_parts(spec: StrategySpec, error: Exception) -> Verdict:
    """Return the verdict on an error that occurs on a part of a batch but not on the whole."""
    why = f"it raises {type(error).__name__}: {error}, on a part of the batch, at {culprit(error)}"
    return Verdict("different", spec, "the loss", float("inf"), why, LOSS)
