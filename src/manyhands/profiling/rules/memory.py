"""Advice rule about memory: a step that nearly fills its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core import format_bytes
from ..advice import Advice

if TYPE_CHECKING:
    from ..profile import Profile

TIGHT = 0.85
"""Fraction of a device's memory from which it counts as nearly full."""


def tight_memory(profile: Profile) -> Advice | None:
    """Advise if a step nearly fills the memory of its device."""
    held = [one for one in profile.ranks if one.memory is not None and one.device_memory]
    if not held:
        return None
    fullest = max(held, key=lambda one: max(one.memory.totals) / one.device_memory if one.memory else 0.0)
    assert fullest.memory is not None
    total, kinds = max(fullest.memory.totals), fullest.memory.peak
    if total < TIGHT * fullest.device_memory:
        return None
    kind = max(kinds, key=lambda name: kinds[name])
    remedies = {
        "activations": 'compute them again: recompute="blocks", or take half a batch at a time: accumulate=2',
        "optimizer state": 'shard it over the replicas: sharding="optimizer"',
    }
    return Advice(
        name="tight memory",
        evidence=f"a step holds {format_bytes(total, 3)} of {format_bytes(fullest.device_memory, 3)}, "
        f"most of it {kind}, {format_bytes(kinds[kind], 3)}",
        remedy=remedies.get(kind, "shard parameters and gradients over the devices: mh.Sharded()"),
        saves=f"about {format_bytes(kinds[kind] / 2, 3)} less",
    )
