"""Auto: exact all-reduce until a synchronization policy is chosen, then the same network under that policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..core import format_duration
from ..sync import Auto, Local, choose, describe_choice, forecasts, is_open, make_policy, measure_links
from .local_sgd import replicated
from .replica import Replica

WORTH = 0.3
"""Fraction of a step spent waiting for the network from which the user gets a recommendation."""


@dataclass(frozen=True)
class PolicyChoice:
    """A policy for a network, with the reason and the measurements behind it."""

    sync: str
    changes: bool
    """Whether the policy differs from the exact sum."""
    warmup: int
    every: int
    """Number of steps after which the policy's behavior repeats."""
    reason: str
    figures: dict[str, Any]


def is_undecided(replica: Replica) -> bool:
    """Return whether the replica's policy is still to be chosen."""
    return isinstance(make_policy(replica.spec.sync), Auto) and replica.world.size > 1


def choice_for(replica: Replica, *, exact: float, alone: float) -> PolicyChoice:
    """Choose the policy, the same on all ranks, by the seconds of a step and those of a step without communication."""
    world, auto = replica.world, make_policy(replica.spec.sync)
    assert isinstance(auto, Auto)
    if not is_open(auto, exact=exact, alone=alone):
        return _exact(auto, exact, alone)
    links = measure_links(world)
    parameters = {n: p for group in replica.groups.values() for n, p in group.items() if p.requires_grad}
    mine = forecasts(links, parameters, world.size, exact=exact, alone=alone, lossy=auto.lossy)
    found = world.gather_objects([(str(f.policy), f.seconds, f.price) for f in mine])[0]
    first = [dataclasses.replace(mine[0], policy=make_policy(text), seconds=s, price=p) for text, s, p in found]
    chosen = choose(first)
    figures = {"latency": links.latency, "bandwidth": links.bandwidth, "exact": exact, "alone": alone}
    predicted = {str(forecast.policy): forecast.seconds for forecast in first}
    policy = chosen.policy
    return PolicyChoice(
        sync=str(policy),
        changes=policy.changes_mathematics,
        warmup=policy.warmup,
        every=policy.every if isinstance(policy, Local) else 1,
        reason=describe_choice(links, first, chosen, world),
        figures={**figures, "predicted": predicted},
    )


def _exact(auto: Auto, exact: float, alone: float) -> PolicyChoice:
    waits = f"{format_duration(exact - alone)} of {format_duration(exact)} in a step wait for the network"
    reason = f"sync=allreduce is kept: {waits}"
    if not auto.lossy and exact - alone > WORTH * exact:
        reason += "; mh.sync.Auto(lossy=True) may choose what changes the mathematics and sends less"
    figures = {"exact": exact, "alone": alone}
    return PolicyChoice(sync="allreduce", changes=False, warmup=0, every=1, reason=reason, figures=figures)


def under(replica: Replica, sync: str) -> Replica:
    """Return a replica of the same network and optimizers under another policy."""
    replica.close()
    spec = dataclasses.replace(replica.spec, sync=sync)
    successor = replicated(spec, replica.world, replica.model, replica.optimizers)
    successor.hooks = replica.hooks
    if not isinstance(make_policy(sync), Local):
        successor.buffers = replica.buffers
    return successor
