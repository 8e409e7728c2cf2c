"""A survey: hosts that will train together compare their software and data, and measure the links between them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch

from ..core import SettingsError
from .links import MeasuredLink, best, measure
from .messages import message
from .world import World

MAX_SKEW = 2.0
"""Maximum difference of clocks in seconds: token expiry and the order of events depend on them."""


@message
@dataclass(frozen=True)
class RankFacts:
    """What one rank reports about itself: its place, its software versions, its clock and its data."""

    rank: int
    host: str
    device: str
    manyhands: str
    torch: str
    python: str
    clock: float
    data: str = ""
    """A digest of the task's data, if there is a task."""


@dataclass(frozen=True)
class Survey:
    """The result of a survey: all ranks, the links between hosts, and warnings."""

    ranks: tuple[RankFacts, ...]
    links: tuple[MeasuredLink, ...]
    warnings: tuple[str, ...]

    @property
    def chosen(self) -> dict[str, MeasuredLink]:
        """Return the fastest measured link of each host."""
        return best(list(self.links))


def survey(world: World, data: str = "") -> Survey:
    """Compare the ranks of a world, and measure the links between hosts; all ranks must call this.

    `data` is a digest of this rank's data; "" if there is none.
    """
    ranks = facts(world, data)
    links = measure(world) if world.size > 1 else []
    return Survey(tuple(ranks), tuple(links), tuple(differences(ranks)))


def require_alike(world: World) -> None:
    """Raise SettingsError if ranks have different versions of manyhands, torch or Python, which would fail later."""
    found = [text for text in differences(facts(world)) if " differs: " in text]
    if found:
        world.close()
        raise SettingsError(
            "all ranks must have the same versions of manyhands, torch and Python",
            got="; ".join(found),
            remedy="install the same versions on every host",
        )


def facts(world: World, data: str = "") -> list[RankFacts]:
    """Return what every rank reports about itself, in rank order; all ranks must call this."""
    world.barrier()
    mine = RankFacts(
        rank=world.rank,
        host=world.rank_info.host,
        device=str(world.rank_info.device),
        manyhands=version("manyhands"),
        torch=str(torch.__version__),
        python=platform.python_version(),
        clock=time.time(),
        data=data,
    )
    found: list[RankFacts] = world.gather_objects(mine)
    return found


def differences(ranks: Sequence[RankFacts]) -> list[str]:
    """Return what differs between hosts but must be equal, with the hosts and the remedy.

    >>> one = RankFacts(0, "host1", "cpu", "0.1", "2.13", "3.11", clock=0.0)
    >>> differences([one, RankFacts(1, "host2", "cpu", "0.1", "2.12", "3.11", clock=0.5)])
    ['torch differs: 2.13 on host1, 2.12 on host2; install the same version everywhere']
    """
    looks: list[tuple[str, Callable[[RankFacts], str], str]] = [
        ("manyhands", lambda one: one.manyhands, "install the same version everywhere"),
        ("torch", lambda one: one.torch, "install the same version everywhere"),
        ("Python", lambda one: ".".join(one.python.split(".")[:2]), "use the same Python everywhere"),
        ("the data", lambda one: one.data, "give every host the same files"),
    ]
    found = []
    for what, value, remedy in looks:
        hosts: dict[str, list[str]] = {}
        for one in ranks:
            hosts.setdefault(value(one), []).append(one.host)
        if len(hosts) > 1:
            values = ", ".join(f"{text} on {' '.join(dict.fromkeys(names))}" for text, names in hosts.items())
            found.append(f"{what} differs: {values}; {remedy}")
    early, late = min(ranks, key=lambda one: one.clock), max(ranks, key=lambda one: one.clock)
    if late.clock - early.clock > MAX_SKEW:
        skew = late.clock - early.clock
        found.append(f"the clock of {late.host} is {skew:.1f} s ahead of that of {early.host}; run an NTP service")
    return found
