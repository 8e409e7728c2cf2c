"""Ranks that somebody else has launched: torchrun, or a shell per rank with the same environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from ..core import DeviceError, SettingsError
from .devices import Device, resolve, this_host
from .line import DirectLine, Line
from .network import address_towards, interface_of, is_ours, listen, reach_store, resolve_host, serve_store
from .torch_world import TorchWorld
from .world import DEFAULT_TIMEOUT, NullWorld, Seat, World, current_world, enter_world

_kept: list[dist.Store] = []
"""The store that this process serves, for as long as it lives."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What the environment says of a rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    generation: int = 0
    is_served: bool = False
    """Whether the launcher itself serves the store."""

    @classmethod
    def found(cls, environ: Mapping[str, str] | None = None) -> Launched | None:
        """Reads torchrun's variables; None in a program that was started by hand.

        >>> Launched.found({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": "29500"}).size
        2
        """
        given = os.environ if environ is None else environ
        if "RANK" not in given or "WORLD_SIZE" not in given:
            return None
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in given:
                raise SettingsError(
                    "ranks that were launched need RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                    got=f"no {name}",
                    remedy="set it, or take RANK and WORLD_SIZE out of the environment",
                )
        launched = cls(
            rank=_number(given, "RANK"),
            size=_number(given, "WORLD_SIZE"),
            local_rank=_number(given, "LOCAL_RANK", "0"),
            local_size=_number(given, "LOCAL_WORLD_SIZE", "1"),
            address=given["MASTER_ADDR"],
            port=_number(given, "MASTER_PORT"),
            generation=_number(given, "TORCHELASTIC_RESTART_COUNT", "0"),
            is_served=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        if not launched.rank < launched.size:
            raise SettingsError(
                "RANK is below WORLD_SIZE", got=f"{launched.rank} of {launched.size}", remedy="number ranks from 0"
            )
        return launched


def join_launched(on: object = None, timeout: float = DEFAULT_TIMEOUT) -> World | None:
    """The world of this rank, joined at the first call; None in a program that was started by hand."""
    world = current_world()
    if world is not None:
        return world
    launched = Launched.found()
    if launched is None:
        return None
    seat = Seat(
        rank=launched.rank,
        size=launched.size,
        device=_device(launched, on),
        generation=launched.generation,
        timeout=timeout,
    )
    if launched.size == 1:
        world = NullWorld(seat.device, DirectLine())
    else:
        world = meet(launched.address, launched.port, seat, DirectLine(), is_served=launched.is_served)
    enter_world(world)
    return world


def meet(host: str, port: int, seat: Seat, line: Line, *, is_served: bool = False) -> TorchWorld:
    """Joins ranks on one or many hosts at an address of the first one, which serves the store unless somebody does."""
    address = resolve_host(host)
    if seat.rank == 0 and not is_served:
        if not is_ours(address):
            raise SettingsError(
                "rank 0 runs on the host whose address the others are given",
                got=f"{host} on {this_host()}",
                remedy="set MASTER_ADDR to an address of this host",
            )
        _kept[:] = [serve_store(listen(address, port))]
    store = reach_store(address, port, seat.timeout)
    # Gloo would take the interface of the host's name, which may lead nowhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address_towards(address)))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={os.environ['GLOO_SOCKET_IFNAME']}")
    return TorchWorld(seat, line, store, _backend(store, seat))


def _backend(store: dist.Store, seat: Seat) -> str:
    """Nccl beside gloo where every rank has a GPU of its own; ranks tell each other what they have."""
    mine = f"{seat.host}/{seat.device.torch}"
    prefix = f"devices{seat.generation}"
    store.set(f"{prefix}/{seat.rank}", mine)
    every = [store.get(f"{prefix}/{rank}").decode() for rank in range(seat.size)]
    is_alone = len({text for text in every if "/cuda" in text}) == seat.size
    return "cpu:gloo,cuda:nccl" if is_alone else "gloo"


def _device(launched: Launched, on: object) -> Device:
    """The device of this rank's number on its host; a CPU is shared by all of them."""
    found, _ = resolve(on)  # type: ignore[arg-type]
    if launched.local_rank < len(found):
        return found[launched.local_rank]
    if found[0].kind != "cpu":
        raise DeviceError(
            f"every rank of a host needs a device; {this_host()} has {', '.join(map(str, found))}",
            got=f"LOCAL_RANK={launched.local_rank}",
            remedy="launch fewer ranks there",
        )
    return Device("cpu", share=1 / max(1, launched.local_size), slot=launched.local_rank)


def _number(given: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = given.get(name, default) or ""
    if not text.isdecimal():
        raise SettingsError(f"{name} is a whole number", got=repr(text), remedy="correct the environment")
    return int(text)
