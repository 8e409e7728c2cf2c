"""Summons: where the ranks of a generation meet, and as whom each of them comes."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ..core import PeerLost
from ..distributed import (
    LOOPBACK,
    ControlChannel,
    NullWorld,
    RankInfo,
    RankKey,
    TorchWorld,
    World,
    enter_world,
    reach_store,
)


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo:
    """What a controller tells a rank: plain data that travels as JSON."""

    generation: int
    rank: int
    size: int
    port: int
    address: str = LOOPBACK
    interface: str = "lo"
    backend: str = "gloo"
    heard: int = 0
    """The last step whose loss the controller knows."""
    key: str = field(default="", repr=False)
    """The secret of this generation's ranks, in hex. It is sent over inherited sockets and Ray's calls alone."""
    salt: str = ""
    """From this and the token other hosts make the key."""

    def to_dict(self) -> dict[str, Any]:
        """As it travels."""
        return dataclasses.asdict(self)

    def answer(self, seat: RankInfo, line: ControlChannel) -> World:
        """Joins the others; `seat` says what does not change: the device, the host, the time limit."""
        mine = dataclasses.replace(seat, rank=self.rank, size=self.size, generation=self.generation, heard=self.heard)
        if self.size == 1:
            return NullWorld(line=line, seat=mine)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={self.interface}")
        try:
            store = reach_store(self.address, self.port, seat.timeout / 10)
        except RuntimeError as error:
            where = f"{self.address}:{self.port}"
            raise PeerLost("joining", "the store", f"nobody answers at {where}", str(error)) from error
        store.set_timeout(timedelta(seconds=seat.timeout))
        return TorchWorld(mine, line, store, self.backend, RankKey(bytes.fromhex(self.key)))


def join(summons: RendezvousInfo, seat: RankInfo, line: ControlChannel) -> World:
    """The world that a rank is called into; where it is over before it began, the next one."""
    while True:
        try:
            world = summons.answer(seat, line)
        except PeerLost as lost:
            if not line.recovers:
                raise
            summons = _next(line, summons.generation, lost, 0)
            continue
        enter_world(world)
        return world


def regroup(world: World, why: BaseException, step: int) -> World:
    """The world of the next generation, once the controller says who is in it; raises `why` where there will be none.

    `step` is the last one that this rank has taken.
    """
    summons = _next(world.line, world.seat.generation, why, step)
    world.close()
    return join(summons, world.seat, world.line)


def _next(line: ControlChannel, generation: int, why: BaseException, step: int) -> RendezvousInfo:
    line.confess(generation, str(why), step)
    told = line.wait_for_summons(generation)
    if told is None:
        raise why
    return RendezvousInfo(**told)
