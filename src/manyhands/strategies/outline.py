"""Outline: a network's cut before anything runs: as it would be, or as the error that it would end in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..cluster import Device, NullWorld, place_of
from ..core import StrategySpec, UsageError
from .drawing import Outline, drawn
from .homes import check_map, module_names, too_many_stages
from .pipeline import StagedPlacement, homes_of_stages, named_devices
from .placed import autocast_of
from .placement import Placement, calling, placed_homes, require_cuttable
from .recompute import recomputed_by
from .schedules import stages_per_rank

Probe = Callable[[nn.Module, Callable[[Any], Any]], Any]


def outline(spec: StrategySpec, model: nn.Module, devices: Sequence[Device], probe: Probe) -> Outline:
    """Cuts a network as `fit` would, on this machine and without starting anything."""
    placement = _placed(spec, model, devices, probe, measures=True)
    assert placement.first is not None
    return drawn(str(spec), placement.first, placement, [str(device) for device in devices])


def check_cut(spec: StrategySpec, model: nn.Module, devices: Sequence[Device], probe: Probe | None) -> None:
    """Refuses a cut that cannot be made, from a network that need not have values.

    Without a probe, where the data is made in the ranks only, what depends on a call of the network is seen there.
    """
    require_cuttable(model)
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
        # A slip of the person's own comes again in the ranks; a network that needs its values there does not.
        return


def _placed(
    spec: StrategySpec, model: nn.Module, devices: Sequence[Device], probe: Probe, *, measures: bool
) -> Placement:
    device = torch.device("cpu")
    scope = autocast_of(spec, device)
    model.train()
    found = calling(model, probe, scope(), computes=measures)
    kind = Placement if spec.place else StagedPlacement
    placement = kind(model, spec, spec.stages, device, scope, found)
    if isinstance(placement, StagedPlacement):
        placement.settle(lambda works: homes_of_stages(placement, works, NullWorld(), measures=measures))
        return placement
    named = named_devices(spec, model).items()
    patterns = {pattern: place_of(name, devices[: spec.stages]) for pattern, name in named}
    placement.settle(placed_homes(placement, patterns, NullWorld(), measures=measures))
    return placement
