"""Advice rules about communication: slow ranks, dominant parameters, busy links."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ...core import format_bytes, format_duration
from ..advice import Advice

if TYPE_CHECKING:
    from ..profile import Profile

EXPOSED = 0.2
"""Fraction of a step's time from which waiting for exchanges of gradients is reported."""
HOT, HEAVY = 0.5, 2**20
"""Fraction of all bytes, and minimum bytes, from which one parameter counts as dominant."""
SPARSE = 0.2
"""Fraction of a parameter's rows below which a sparse exchange is suggested."""
SETTLED = 0.6
"""Fraction of a step's time in exchanges from which fewer replicas may be faster."""


def slow_rank(profile: Profile) -> Advice | None:
    """Advise if the work of one rank takes longer than that of all other ranks, which wait for it."""
    slow = profile.stragglers
    if not slow or profile.spec.get("staleness", 0) is None:  # asynchronous workers do not wait
        return None
    worst = max(slow, key=lambda one: one.work)
    others = [one.breakdown for one in profile.ranks if one.rank != worst.rank]
    usual = median(one.work for one in others)
    longer = {
        name: seconds - median(o.seconds.get(name, 0.0) for o in others) for name, seconds in worst.seconds.items()
    }
    longer.pop("communication", None)
    phase = max(longer, key=lambda name: longer[name])
    return Advice(
        name="slow rank",
        evidence=f"rank {worst.rank} on {worst.host} needs {format_duration(worst.work)} for its own work in a step, "
        f"the others {format_duration(usual)}; most of the difference is in {phase}, and all wait for it",
        remedy="check what else runs on its device, or omit the device; otherwise "
        "mh.ParameterServer(backup=1) or sync=mh.sync.LocalSteps(8) do not wait for it in every step",
        gain=profile.seconds / max(usual + profile.transfer, 1e-9),
    )


def hot_parameter(profile: Profile) -> Advice | None:
    """Advise if one parameter dominates the bytes that replicas exchange."""
    hot = profile.ranks[0].largest
    if hot is None or len(profile.ranks) < 2 or profile.transfer < EXPOSED * profile.seconds:
        return None
    share = hot.bytes / max(1, hot.total)
    if share < HOT or hot.bytes < HEAVY:
        return None
    evidence = (
        f"{hot.name} has {share:.0%} of the bytes that replicas exchange "
        f"({format_bytes(hot.bytes, 3)} of {format_bytes(hot.total, 3)}), "
        f"and {profile.transfer / profile.seconds:.0%} of a step is waiting for exchanges"
    )
    remedy = (
        "shard it over the devices with mh.TensorParallel() or mh.Sharded(), or compress it: sync=mh.sync.PowerSGD(4)"
    )
    left = 0.5
    if hot.rows is not None and hot.rows < SPARSE:
        evidence += f"; a step touches {hot.rows:.1%} of its rows"
        remedy = (
            "make it mh.strategies.Embedding(rows, dim) and train with mh.ParameterServer(): "
            "it sends only the rows of a batch"
        )
        left = hot.rows
    saved = profile.transfer * share * (1 - left)
    return Advice(
        name="hot parameter",
        evidence=evidence,
        remedy=remedy,
        gain=profile.seconds / max(profile.seconds - saved, 1e-9),
    )


def exposed_communication(profile: Profile) -> Advice | None:
    """Advise if steps wait for the exchange of gradients."""
    share = profile.transfer / profile.seconds if profile.seconds else 0.0
    if len(profile.ranks) < 2 or share < EXPOSED or profile.spec.get("stages", 1) > 1:
        return None
    sent = max(one.sent for one in profile.ranks)
    amount = f", {format_bytes(sent, 3)} a rank" if sent else ""
    if profile.spec.get("servers"):
        return _exposed_to_servers(profile, share)
    fewer = "; so much of it that fewer replicas may be faster: mh.plan(task) tells" if share > SETTLED else ""
    return Advice(
        name="exposed communication",
        evidence=f"{share:.0%} of a step, {format_duration(profile.transfer)}, is waiting for exchanges{amount}",
        remedy="send less: sync=mh.sync.BF16() halves it, sync=mh.sync.LocalSteps(8) exchanges once in eight steps "
        f"(both change the mathematics), and a larger batch exchanges less often{fewer}",
        gain=1 / (1 - share / 2),
    )


def _exposed_to_servers(profile: Profile, share: float) -> Advice:
    spec = profile.spec
    remedy = f"more servers share the work, servers={2 * spec['servers']}"
    if spec.get("staleness", 0) == 0:
        remedy += (
            "; mh.ParameterServer(staleness=2) lets workers continue during an exchange (this changes the mathematics)"
        )
    return Advice(
        name="exposed communication",
        evidence=f"{share:.0%} of a step, {format_duration(profile.transfer)}, is waiting for pulls, pushes and "
        "other workers",
        remedy=f"{remedy}; mh.strategies.Embedding for large tables, and a larger batch, exchange less",
        gain=1 / (1 - share / 2),
    )
