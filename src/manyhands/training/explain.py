"""Determine how a task's network would be split, without running it and without its values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..core import StrategySpec, Task, random_state, restore_random_state, set_training
from ..data import check_source, first_dim, map_leaves, source_of
from ..distributed import FakeWorld, World, current_world, hidden_process_group
from ..strategies import SplitTable, in_double, lay_out, optimizers_of, require_loss, sequence_notes, table_of
from .hand import NUM_FOLLOWED
from .memory import state_bytes
from .restored_objects import left_alone

if TYPE_CHECKING:
    from ..strategies import Layout

Result = TypeVar("Result")

MOST_BUILT = 10**9
"""Parameters of a network up to which it is built with its values to find out how it is split."""


def explain(task: Task, spec: StrategySpec) -> tuple[SplitTable, Layout | None]:
    """Return the split table of a task under a definite spec, and the layout that ranks can reuse."""

    def found(model: nn.Module) -> tuple[SplitTable, Layout | None]:
        if spec.precision == "fp64":
            model = in_double(model)
        layout, rows = layout_of(task, model, spec)
        notes = _split_sequences(task, model, spec)
        return table_of(model, spec, layout=layout, slots=slots_of(task, model), rows=rows, notes=notes), layout

    return on_network(task, found)


def on_network(task: Task, function: Callable[[nn.Module], Result]) -> Result:
    """Call a function with the network without its values; where that fails, with its values unless they are many.

    A module that the network keeps in a plain list, say, stays without values and cannot be computed.
    """
    model = without_values(task)
    if model is not None:
        try:
            return function(model)
        except Exception:
            if sum(parameter.numel() for parameter in model.parameters()) > MOST_BUILT:
                raise
    return function(built(task))


def layout_of(task: Task, model: nn.Module, spec: StrategySpec) -> tuple[Layout | None, float]:
    """Return the layout, and the ratio of a rank's batch size to the number of samples it was found with."""
    if spec.tensor == 1:
        return None, 0.0
    batch, size = few_samples(task, spec)
    with left_alone(task.loss, task.model), hidden_process_group():
        layout = _in_world(spec, lambda world: lay_out(model, spec, world, _probe(task, batch)))
    return layout, size / max(1, first_dim(batch)) / spec.num_parts


def _split_sequences(task: Task, model: nn.Module, spec: StrategySpec) -> list[str]:
    """Return what context parallelism computes on whole sequences; raise for a network that it cannot split."""
    if spec.context == 1:
        return []
    require_loss(spec, task.loss is not None)
    batch, _ = few_samples(task, spec)
    with left_alone(task.loss, task.model), hidden_process_group():
        return sequence_notes(model, spec, _probe(task, batch))


def can_explain(task: Task) -> bool:
    """Return whether the data can be read here; a function that makes data runs in the ranks."""
    return not inspect.isfunction(task.data)


def built(task: Task) -> nn.Module:
    """Return the task's network; random states are restored."""
    states = random_state(torch.device("cpu"))
    try:
        return task.model()
    finally:
        restore_random_state(states, torch.device("cpu"))


def without_values(task: Task) -> nn.Module | None:
    """Return the task's network on the meta device; None where it cannot be built there."""
    states = random_state(torch.device("cpu"))
    try:
        with torch.device("meta"):
            model = task.model()
            set_training(model)
            return model
    except Exception:
        return None
    finally:
        restore_random_state(states, torch.device("cpu"))


def few_samples(task: Task, spec: StrategySpec, count: int = NUM_FOLLOWED) -> tuple[Any, int]:
    """Return a few samples, and the batch size."""
    source = source_of(task)
    size = check_source(source, task.batch_size)
    window = next(source.windows(seed=0, epoch=0, shuffle=False, start=0, batch_size=min(count, size)))
    batch = window.fetch(window.ids[:count])
    if spec.precision == "fp64":
        batch = _wide(batch)
    return batch, size


def _wide(batch: Any) -> Any:
    return map_leaves(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, batch)


def _probe(task: Task, batch: Any) -> Callable[..., Any]:
    assert task.loss is not None
    loss = task.loss
    return lambda model, fake: loss(model, fake(batch))


def _in_world(spec: StrategySpec, function: Callable[[World], Any]) -> Any:
    """Call a function with a world for the spec: the current one, or a fake one outside of ranks."""
    here = current_world()
    if here is not None:
        return function(here)
    world = FakeWorld(spec.num_devices or 1)
    try:
        return function(world)
    finally:
        world.close()


def slots_of(task: Task, model: nn.Module) -> float:
    """Return the bytes of optimizer state per byte of trained parameters."""
    optimizers = optimizers_of(model, task.make_optimizer).values()
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return sum(map(state_bytes, optimizers)) / max(1, trained)
