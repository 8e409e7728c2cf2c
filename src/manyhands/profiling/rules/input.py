"""Advice rules about input: late data, and batches that are too small for a step's fixed costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...core import counted, format_duration
from ..advice import Advice

if TYPE_CHECKING:
    from ..profile import Profile

FELT = 0.1
"""Fraction of a step's time from which waiting for data or copies is reported."""
NAMED = 0.2
"""Fraction of the reading from which a line is named."""
SMALL = 1.5
"""Throughput gain of a larger batch from which the given batch counts as too small."""
DROWNED = 0.3
"""Fraction of a step's time in exchanges above which no larger batch is suggested: it would only hide them."""


def starved_input(profile: Profile) -> Advice | None:
    """Advise if steps wait for data."""
    share = profile.share("input")
    if share < FELT:
        return None
    waited = profile.phases["input"]
    rest = sum(profile.phases.values()) - waited
    workers = max(one.workers for one in profile.ranks)
    readers = f"{counted(workers, 'worker process', 'worker processes')} read{'s' * (workers == 1)}"
    readers = readers if workers else "the training process itself reads"
    wanted = workers + max(1, math.ceil(waited / max(rest, 1e-9)))
    lines = [line for one in profile.ranks for line in one.reading if line.share >= NAMED]
    where, cheaper = "", "make a sample cheaper to read"
    if lines:
        slow = max(lines, key=lambda line: line.share)
        where, cheaper = f"; {slow.share:.0%} of the reading is {slow}", f"make {slow.place} faster"
    return Advice(
        name="starved input",
        evidence=f"{share:.0%} of a step, {format_duration(waited)}, is waiting for data, which {readers}{where}",
        remedy=f"read it ahead with Task(workers={min(wanted, 16)}), or {cheaper}",
        gain=(rest + waited) / max(rest, 1e-9),
    )


def slow_copy(profile: Profile) -> Advice | None:
    """Advise if steps wait for copies to the device."""
    share = profile.share("copy")
    if share < FELT:
        return None
    return Advice(
        name="slow copy",
        evidence=f"{share:.0%} of a step, {format_duration(profile.phases['copy'])}, is copying or casting its batch",
        remedy="keep data in a smaller type (uint8, bf16) and convert it in the network",
        gain=1 / (1 - share / 2),
    )


def tiny_batch(profile: Profile) -> Advice | None:
    """Advise if a larger batch has a much higher throughput, because a step's fixed costs dominate."""
    first = profile.ranks[0]
    if first.larger is None or profile.share("communication") > DROWNED:
        return None
    rows, seconds, usual = first.larger.rows, first.larger.seconds, first.larger.usual
    gain = (rows / seconds) / (profile.batch_size / usual)
    if gain < SMALL:
        return None
    samples = counted(profile.batch_size, "sample")
    evidence = f"a step of {samples} takes {format_duration(usual)}, one of {rows} {format_duration(seconds)}"
    watched = first.watched
    if watched is not None and watched.busy is not None:
        evidence += f", and the device is busy {watched.busy:.0%} of the time"
    elif watched is not None and watched.num_started:
        evidence += f", because most of it is starting {counted(round(watched.num_started), 'operation')}"
    return Advice(
        name="tiny batch",
        evidence=evidence,
        remedy=f"pass batch_size={rows} or more and raise the learning rate with it, or train many networks at a time",
        gain=gain,
    )
