"""Rendezvous info: the address at which the ranks of a generation meet, and the rank of each process."""

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
    """The coordinator's rendezvous data for one rank; it is sent as JSON."""

    generation: int
    rank: int
    size: int
    port: int
    address: str = LOOPBACK
    interface: str = "lo"
    backend: str = "gloo"
    reported_step: int = 0
    """The last step whose loss value the coordinator has received."""
    key: str = field(default="", repr=False)
    """The secret key of this generation's ranks, in hex; it is sent only over inherited sockets and Ray calls."""
    salt: str = ""
    """Other hosts derive the key from this salt and the join token."""
    term: int = 0
    """The term of the elected coordinator; 0 without an election."""

    def to_dict(self) -> dict[str, Any]:
        """Return the info as plain data that can be sent as JSON."""
        return dataclasses.asdict(self)

    def join_world(self, rank_info: RankInfo, channel: ControlChannel) -> World:
        """Join the other ranks and return their world; raise PeerLost if that fails.

        `rank_info` has the values that are equal in all generations: device, host and time limit.
        """
        own_info = dataclasses.replace(
            rank_info,
            rank=self.rank,
            size=self.size,
            generation=self.generation,
            reported_step=self.reported_step,
            term=self.term,
        )
        if self.size == 1:
            return NullWorld(channel=channel, rank_info=own_info)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={self.interface}")
        try:
            store = reach_store(self.address, self.port, rank_info.timeout / 10)
        except RuntimeError as error:
            where = f"{self.address}:{self.port}"
            raise PeerLost("joining", "the store", f"the store at {where} does not answer", str(error)) from error
        store.set_timeout(timedelta(seconds=rank_info.timeout))
        return TorchWorld(own_info, channel, store, self.backend, RankKey(bytes.fromhex(self.key)))


def join(info: RendezvousInfo, rank_info: RankInfo, channel: ControlChannel) -> World:
    """Join the ranks of a generation and return their world; if a peer fails while they connect, join the next one."""
    while True:
        try:
            world = info.join_world(rank_info, channel)
        except PeerLost as lost:
            if not channel.recovers:
                raise
            info = _next(channel, info.generation, lost, 0)
            continue
        enter_world(world)
        return world


def regroup(world: World, why: BaseException, step: int) -> World:
    """Report a failed peer, and return the world of the next generation when the coordinator announces it.

    Args:
        world: The world of the generation that has failed.
        why: The error that this rank has caught; raised again if there is no next generation.
        step: The last step that this rank has completed.
    """
    info = _next(world.channel, world.rank_info.generation, why, step)
    world.close()
    return join(info, world.rank_info, world.channel)


def _next(channel: ControlChannel, generation: int, why: BaseException, step: int) -> RendezvousInfo:
    channel.report_peer_failure(generation, str(why), step)
    info = channel.wait_for_rendezvous(generation)
    if info is None:
        raise why
    return RendezvousInfo(**info)
