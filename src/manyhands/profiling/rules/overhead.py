"""Advice rules about work around the network: threads, updates, validation, checkpoints, code between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core import format_duration
from ..advice import Advice

if TYPE_CHECKING:
    from ..profile import Profile

CROWDED = 1.1
"""Slowdown of a step by more threads than cores from which it is reported."""
VALIDATION, SAVING, UPDATE, IDLE = 0.25, 0.05, 0.4, 0.25
"""Fractions of the time from which validation, checkpoints, updates and idle time are reported."""


def many_threads(profile: Profile) -> Advice | None:
    """Advise if a rank has more compute threads than cores, and steps are faster with fewer threads."""
    tried = [one for one in profile.ranks if one.with_fewer_threads is not None]
    if not tried:
        return None
    now = max(one.breakdown.total for one in tried)
    then = max(one.with_fewer_threads or 0.0 for one in tried)
    if now < CROWDED * then:
        return None
    worst = max(tried, key=lambda one: one.threads / one.cores)
    return Advice(
        name="too many threads",
        evidence=f"rank {worst.rank} computes with {worst.threads} threads on {worst.cores} "
        f"core{'s' * (worst.cores != 1)}; with {worst.cores} a step took {format_duration(then)} "
        f"instead of {format_duration(now)}",
        remedy=f"remove torch.set_num_threads, or set OMP_NUM_THREADS={worst.cores}",
        gain=now / then,
    )


def frequent_validation(profile: Profile) -> Advice | None:
    """Advise if validation takes much of the time, as measured in a run or estimated from forward passes."""
    share, how = profile.upkeep.get("validation", 0.0), "of the run went into"
    if not profile.upkeep and profile.epoch_steps and profile.valid_steps:
        validating = profile.valid_steps * profile.phases.get("forward", 0.0)
        share, how = validating / (validating + profile.epoch_steps * profile.seconds), "of an epoch will be"
    if share < VALIDATION:
        return None
    return Advice(
        name="frequent validation",
        evidence=f"{share:.0%} {how} validation, which comes after every epoch",
        remedy="validate on a part of the data, or let an epoch be several passes",
        gain=1 / (1 - 0.75 * share),
    )


def costly_checkpoints(profile: Profile) -> Advice | None:
    """Advise if saving checkpoints delays the steps of a run."""
    share = profile.upkeep.get("save", 0.0)
    if share < SAVING:
        return None
    return Advice(
        name="costly checkpoints",
        evidence=f"{share:.0%} of the run went into checkpoints",
        remedy="pass a larger save_every, or a folder on a faster disk",
        gain=1 / (1 - share),
    )


def costly_update(profile: Profile) -> Advice | None:
    """Advise if the optimizer's update takes a large share of a step."""
    share = profile.share("optimizer")
    if share < UPDATE:
        return None
    return Advice(
        name="costly update",
        evidence=f"{share:.0%} of a step, {format_duration(profile.phases['optimizer'])}, is the optimizer's update",
        remedy="pass fused=True to the optimizer, or accumulate more samples between updates with a larger batch",
        gain=1 / (1 - share / 2),
    )


def idle_between(profile: Profile) -> Advice | None:
    """Advise if much of a step is spent outside of data loading, the network, exchanges and the update."""
    share = profile.share("idle")
    if share < IDLE or profile.share("captured"):
        return None
    return Advice(
        name="idle between steps",
        evidence=f"{share:.0%} of a step, {format_duration(profile.phases['idle'])}, is spent outside of the network, "
        "its exchanges and its update",
        remedy="look at callbacks and at code that runs between steps; where steps are very short, take larger batches",
        gain=1 / (1 - share),
    )
