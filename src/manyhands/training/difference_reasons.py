"""Reasons: why a tensor differs between steps under a strategy and those of one device, and what the user can do."""

from __future__ import annotations

from ..core import StrategySpec, Task
from ..distributed import World
from .cause import CallRecorder, ForwardChanges, first_difference, first_other_output
from .one_device_checks import not_linear
from .step_comparison import Difference, compare
from .trial import LOSS
from .trial_rows import Plan
from .trial_steps import Record, parts_of, take_steps
from .verdict import BUFFER, MICRO, OTHER, PARAMETERS, SAMPLES


def reason(
    task: Task,
    spec: StrategySpec,
    plan: Plan,
    whole: Record,
    parts: Record,
    found: Difference,
    alone: World,
) -> tuple[str, str]:
    """Return why a tensor differs, and a remedy."""
    if whole.batch_norms and spec.batch_stats == "local":
        return 'batch statistics are local to each replica; use batch_stats="sync"', ""
    if whole.batch_norms and spec.accumulate * spec.microbatches > 1:
        return f"batch statistics are those of a micro-batch under accumulate ({whole.batch_norms[0]})", MICRO
    if whole.batch_norms and spec.servers:
        return f"batch statistics are those of each worker's part of a batch ({whole.batch_norms[0]})", SAMPLES
    if spec.tensor > 1 and not _differs_in_parts(task, spec, plan, whole, alone):
        return _of_tensor_ranks(task, spec, plan, whole, parts, found, alone)
    if (changed := _of_forward(task, spec, plan, whole, alone)) is not None:
        return changed
    # A tensor may differ because an earlier step updated weights differently, so earlier steps are tried first.
    plans = [] if task.loss is None else [plan[: step + 1] for step in range(found.step + 1)]
    cause = next(filter(None, (_cause(task, spec, one, whole.precision, alone) for one in plans)), "")
    unsynchronized = [
        item for item in parts.steps[found.step].differing if item.split(" ")[0] in whole.steps[0].buffers
    ]
    if unsynchronized and not (cause and found.what.startswith("the gradient")):
        return f"a buffer is not synchronized over the replicas: {', '.join(unsynchronized)}", BUFFER
    if cause and " of " in cause.split(" at ")[0]:
        return f"{cause} looks at other samples of the batch", SAMPLES
    if cause:
        rule = "a loss must be a mean over the batch's samples, or mh.mean(total, count)"
        return f"{cause} gives another result on parts of the batch than on all of it: {rule}", LOSS
    if found.what.startswith("the gradient") and (scaled := not_linear(task, spec, plan, whole, alone)) is not None:
        return scaled.why, scaled.remedy
    return _of_parameters(task, spec, plan, whole, alone) or _of_the_strategy(spec, found, task, whole.drawn_on_host)


def _of_parameters(task: Task, spec: StrategySpec, plan: Plan, whole: Record, alone: World) -> tuple[str, str] | None:
    """Return reason and remedy if forward changes parameters, or the optimizer replaces their memory; else None."""
    replaced = [name for step in whole.steps for name in step.replaced]
    if (changed := _of_forward(task, spec, plan, whole, alone)) is not None:
        return changed
    if replaced:
        why = (
            f"the optimizer's step replaces the memory of {replaced[0]} (p.data = ...) in place of changing its values"
        )
        return why, "write p.data.copy_(...) or p.add_(...) in the step, or use mh.Mirrored()"
    return None


def _of_forward(task: Task, spec: StrategySpec, plan: Plan, whole: Record, alone: World) -> tuple[str, str] | None:
    """Return reason and remedy if forward or the loss changes parameters, trained or not; else None."""
    if task.loss is None:
        return None
    watch = ForwardChanges()
    take_steps(alone, watch.watched(task), StrategySpec(), plan, precision=whole.precision)
    moved = [name for step in whole.steps for name in step.moved]
    where = next(iter((*watch.changed, *moved)), "")
    return (f"forward changes {where} itself, which {spec} does not synchronize", PARAMETERS) if where else None


def _differs_in_parts(task: Task, spec: StrategySpec, plan: Plan, whole: Record, alone: World) -> bool:
    """Return whether splitting the batch on one device already shows a difference."""
    if parts_of(spec) == 1:
        return False
    apart = take_steps(alone, task, StrategySpec(accumulate=parts_of(spec)), plan, precision=whole.precision)
    return any(difference.is_real for difference in compare(whole, apart))


def _of_tensor_ranks(
    task: Task, spec: StrategySpec, plan: Plan, whole: Record, parts: Record, found: Difference, alone: World
) -> tuple[str, str]:
    """Return the first module whose output differs under tensor parallelism, as a reason, and a remedy."""
    if not found.what.startswith(("the gradient", "the value")):
        return _of_parameters(task, spec, plan, whole, alone) or _of_the_strategy(spec, found, task)
    where = f"where {spec.tensor} ranks compute its layers together"
    module = ""
    if parts.outputs:
        again = take_steps(alone, task, StrategySpec(), plan[:1], precision=whole.precision, keeps_outputs=True)
        module = first_other_output(again.outputs, parts.outputs)
    if module:
        return f"forward of {module} returns something else {where}", _replicate(module.split(" ")[0])
    owner = found.what.removeprefix("the gradient of ").rpartition(".")[0] if "gradient" in found.what else ""
    seen = "every module returns the same, but " if parts.outputs else ""
    return f"{seen}backward of {owner or 'the network'} computes another gradient {where}", _replicate(owner)


def _replicate(name: str) -> str:
    layout = f'layout={{"{name}": "replicate"}} has every rank compute all of it; ' if name and name != "the" else ""
    return f"{layout}mh.Mirrored() and mh.Sharded() compute layers whole; report this network, which should be the same"


def _of_the_strategy(spec: StrategySpec, found: Difference, task: Task, drawn: str = "") -> tuple[str, str]:
    """Return reason and remedy for a difference that splitting the batch on one device does not show."""
    if drawn and spec.stages > 1:
        why = f"a partitioned network is traced once, and the trace repeats the numbers that {drawn} drew then"
        return why, "draw numbers with torch, compute both branches, or use mh.Mirrored() or mh.Sharded()"
    if found.what.startswith("the update"):
        return f"gradients are equal, but the optimizer computes another update under {spec}", OTHER
    if found.what.startswith("the buffer"):
        return "forward changes the buffer in a way that depends on how the batch is split", BUFFER
    if spec.num_parts * spec.accumulate * spec.microbatches > 1 and task.loss is None:
        return (
            "some operation looks at other samples of the batch, or a gradient is changed outside of the loss",
            SAMPLES,
        )
    return f"{spec} computes something else than one device there, or a gradient is changed outside of the loss", OTHER


def _cause(task: Task, spec: StrategySpec, plan: Plan, precision: str, alone: World) -> str:
    """Return the first operation that differs if the batch is split on one device; "" if there is none."""
    calls = []
    try:
        for accumulate in (1, max(2, parts_of(spec))):
            operations = CallRecorder()
            take_steps(
                alone,
                operations.watched(task),
                StrategySpec(accumulate=accumulate),
                plan,
                precision=precision,
                begin=lambda step, kept=operations.calls: kept.clear(),  # type: ignore[misc]
            )
            calls.append(operations.calls)
    except Exception:
        return ""
    rows, count = len(plan[-1]), len(calls[1])
    sizes = [rows // count + (part < rows % count) for part in range(count)]
    return first_difference(calls[0][0], calls[1], sizes) if count > 1 else ""
