"""The partition of a network before a run: its outline, or the error that it would raise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core import StrategySpec, UsageError, set_training
from ..distributed import Device, NullWorld, groups_along, place_of
from .first_call import calling, require_partitionable
from .partition_drawing import Outline, drawn
from .pipeline import StagedPlacement, homes_of_stages, named_devices
from .placed import autocast_of
from .placement import Placement, placed_homes
from .placement_rules import check_map, module_names, too_many_stages
from .recompute import recomputed_by
from .schedules import stages_per_rank
from .split_table import table_of

if TYPE_CHECKING:
    from .tensor import Layout

Probe = Callable[[nn.Module, Callable[[Any], Any]], Any]


def outline(
    spec: StrategySpec,
    model: nn.Module,
    devices: Sequence[Device],
    probe: Probe,
    *,
    layout: Layout | None = None,
    slots: float = 0.0,
    rows: float = 0.0,
) -> Outline:
    """Partition a network as `fit` would, on this machine and without starting processes; others as for `table_of`."""
    layers = () if layout is None else tuple(layout.ways)
    placement = _placed(spec, model, devices, probe, measures=True, layers=layers)
    assert placement.first is not None
    found = drawn(str(spec), placement.first, placement, _names(spec, devices))
    if spec.shards == 1 and spec.tensor == 1:
        return found
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    stages = [[n for n in sizes if placement.holds(n, rank)] for rank in range(spec.stages)]
    largest = max(stages, key=lambda names: sum(sizes[name] for name in names))
    table = table_of(model, spec, layout=layout, slots=slots, rows=rows, names=largest)
    return dataclasses.replace(found, table=table)


def _names(spec: StrategySpec, devices: Sequence[Device]) -> list[str]:
    """Return the devices of every stage of the first replica."""
    groups = groups_along(spec.axes, *(axis for axis in ("shards", "tensor") if axis in spec.axes))
    firsts = [next(g for g in groups if stage * spec.tensor in g) for stage in range(spec.stages)]
    return [" ".join(str(devices[rank]) for rank in ranks) for ranks in firsts]


def check_partition(spec: StrategySpec, model: nn.Module, devices: Sequence[Device], probe: Probe | None) -> None:
    """Raise for a partition that is not possible; the network may be on the meta device.

    Without a probe, when data is created only in the ranks, checks that need a call of the network happen there.
    """
    require_partitionable(model)
    recomputed_by(model, spec.recompute)
    named = named_devices(spec, model) if spec.place else {}
    check_map(module_names(model), {pattern: place_of(name, devices[: spec.stages]) for pattern, name in named.items()})
    num_stages = spec.stages * stages_per_rank(spec.schedule)
    layers = sum(not any(True for _ in module.children()) for module in model.modules())
    if not spec.place and layers < num_stages:
        raise too_many_stages(num_stages, layers)
    if probe is None:
        return
    try:
        _placed(spec, model, devices, probe, measures=False)
    except UsageError:
        raise
    except Exception:
        # An error in the user's code is raised again in the ranks; an error about missing values is not.
        return


def _placed(
    spec: StrategySpec,
    model: nn.Module,
    devices: Sequence[Device],
    probe: Probe,
    *,
    measures: bool,
    layers: Sequence[str] = (),
) -> Placement:
    device = torch.device("cpu")
    scope = autocast_of(spec, device)
    set_training(model)
    found = calling(model, probe, scope(), computes=measures)
    kind = Placement if spec.place else StagedPlacement
    placement = kind(model, spec, spec.stages, device, scope, found, layers=layers)
    if isinstance(placement, StagedPlacement):
        placement.settle(lambda works: homes_of_stages(placement, works, NullWorld(), measures=measures))
        return placement
    named = named_devices(spec, model).items()
    patterns = {pattern: place_of(name, devices[: spec.stages]) for pattern, name in named}
    placement.settle(placed_homes(placement, patterns, NullWorld(), measures=measures))
    return placement
