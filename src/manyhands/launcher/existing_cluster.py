"""Ranks that another launcher has started: torchrun, a scheduler, or a shell on every host."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from ..core import DeviceError, SettingsError
from ..distributed import (
    DEFAULT_TIMEOUT,
    ControlChannel,
    Device,
    DirectChannel,
    NotAuthentic,
    NullWorld,
    RankInfo,
    RankKey,
    SignedStore,
    TorchWorld,
    World,
    address_towards,
    current_world,
    enter_world,
    interface_of,
    is_ours,
    is_this_host,
    listen,
    reach_store,
    require_alike,
    resolve,
    resolve_host,
    serve_store,
    this_host,
)
from .joining import TLS_VARIABLE, TOKEN_VARIABLE, Join, token_here
from .resolvers import CHIEF, WORKER, Host, HostsFile, ResolvedCluster, Standing, is_hosts_file, understood

TRAINERS = (CHIEF, WORKER)
"""The roles that process training samples."""
_kept: list[dist.Store] = []
"""The store that this process serves, kept alive until the process exits."""


def described(on: object = None, environ: Mapping[str, str] | None = None) -> ResolvedCluster | None:
    """Return the cluster in a hosts file, if `on` names one, else in the environment; None if there is no cluster."""
    given = os.environ if environ is None else environ
    return HostsFile(str(on), is_this_host).read(given) if is_hosts_file(on) else understood(given)


def launched(
    on: object = None,
    environ: Mapping[str, str] | None = None,
    *,
    per_host: bool = False,
    roles: Sequence[str] = TRAINERS,
) -> ResolvedCluster | None:
    """Return the cluster of which this process is a rank, with its rank; None if no launcher started this program.

    With `per_host`, a process that represents a host with several devices is one rank too. Only hosts whose role is in
    `roles` have ranks.

    >>> launched(environ={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": "29500"}).size
    2
    """
    cluster = described(on, environ)
    if cluster is None or (cluster.standing is None and cluster.num_hosts == 1):
        return None
    return cluster if cluster.standing is not None else _with_standing(cluster, per_host, roles)


def whole_host(on: object = None, environ: Mapping[str, str] | None = None) -> Join | None:
    """Return how this host joins the others with one rank per device, if a scheduler started one process per host.

    Return None if the process is one rank, or if no launcher started it. With MANYHANDS_TOKEN set, hosts always join
    with one rank per device; the token is required if any host has several devices.
    """
    given = os.environ if environ is None else environ
    cluster = described(on, given)
    if cluster is None or cluster.standing is not None or cluster.num_hosts == 1:
        return None
    trainers = _hosts_of(cluster, TRAINERS)
    own = None if is_hosts_file(on) else on
    num_devices = cluster.host.num_devices or 1
    found, _ = resolve(own)  # type: ignore[arg-type]
    if own is None and found[0].kind == "cpu" and num_devices > 1:
        own = f"cpu*{num_devices}"
    several = own is not None and len(resolve(own)[0]) > 1  # type: ignore[arg-type]
    several = several or len(found) > 1 or any((host.num_devices or 1) > 1 for host in trainers)
    if not several and not given.get(TOKEN_VARIABLE):
        return None
    tls = given.get(TLS_VARIABLE, "")
    return Join(address=f"{cluster.address}:{cluster.port}", hosts=len(trainers), tls=tls, on=own)  # type: ignore[arg-type]


def _hosts_of(cluster: ResolvedCluster, roles: Sequence[str]) -> list[Host]:
    """Return the hosts with one of these roles; raise SettingsError if this host is not one of them."""
    found = [host for host in cluster.hosts if host.role in roles]
    if cluster.host not in found:
        raise SettingsError(
            f"training must be started by tasks of the role {' or '.join(roles)}",
            got=f"{cluster.host.role} at {cluster.host}, by {cluster.source}",
            remedy="do not start the training in this process",
        )
    return found


def _with_standing(cluster: ResolvedCluster, per_host: bool, roles: Sequence[str]) -> ResolvedCluster:
    """Return the cluster with one rank per host.

    Raise SettingsError if a host has several devices, unless `per_host` allows that.
    """
    members = _hosts_of(cluster, roles)
    many = [host for host in members if (host.num_devices or 1) > 1]
    if many and not per_host:
        raise SettingsError(
            f"a process that {cluster.source} started must be one rank on one device, except in mh.fit and mh.launch",
            got=f"one process for the {many[0].num_devices} devices of {many[0]}",
            remedy="use mh.fit or mh.launch, or start a process per device (torchrun --nproc-per-node, srun "
            "--ntasks-per-node)",
        )
    standing = Standing(members.index(cluster.host), len(members))
    hosts = tuple(replace(host, num_devices=1) for host in cluster.hosts) if many else cluster.hosts
    return replace(cluster, hosts=hosts, standing=standing)


def join_launched(
    on: object = None, timeout: float = DEFAULT_TIMEOUT, *, per_host: bool = False, roles: Sequence[str] = TRAINERS
) -> World | None:
    """Return the world of this rank, joined at the first call; None if no launcher started this program."""
    world = current_world()
    if world is not None:
        return world
    cluster = launched(on, per_host=per_host, roles=roles)
    if cluster is None:
        return None
    standing = cluster.standing
    assert standing is not None
    rank_info = RankInfo(
        rank=standing.rank,
        size=standing.size,
        device=_device(standing, None if is_hosts_file(on) else on),
        generation=cluster.generation,
        timeout=timeout,
    )
    if standing.size == 1:
        world = NullWorld(rank_info.device, DirectChannel())
    else:
        world = meet(
            cluster.address,
            cluster.port,
            rank_info,
            DirectChannel(),
            is_served=cluster.is_served,
            names=_host_by_rank(cluster),
        )
        require_alike(world)
    enter_world(world)
    return world


def _host_by_rank(cluster: ResolvedCluster) -> list[str]:
    """Return the host name of every rank; an empty list if the number of ranks per host is not known."""
    if cluster.size == cluster.num_hosts:
        return [host.name for host in cluster.hosts]
    counts = [host.num_devices or 1 for host in cluster.hosts]
    found = [host.name for host, count in zip(cluster.hosts, counts, strict=True) for _ in range(count)]
    return found if len(found) == cluster.size else []


def meet(
    host: str,
    port: int,
    rank_info: RankInfo,
    channel: ControlChannel,
    *,
    is_served: bool = False,
    names: Sequence[str] = (),
) -> TorchWorld:
    """Join the other ranks through a store at an address of the first host, and return their world.

    Rank 0 serves the store, unless `is_served`. `names` are the hosts of all ranks, if known, for the error that names
    missing ranks. Raise SettingsError if a rank does not join in time.
    """
    address = resolve_host(host)
    if rank_info.rank == 0 and not is_served:
        if not is_ours(address):
            raise SettingsError(
                "rank 0 must run on the host whose address the other ranks use",
                got=f"{host} on {this_host()}",
                remedy="set MASTER_ADDR to an address of this host",
            )
        _kept[:] = [serve_store(listen(address, port))]
    try:
        store = reach_store(address, port, rank_info.timeout)
    except RuntimeError:
        raise SettingsError(
            f"rank 0 must answer {this_host()} within {rank_info.timeout:.0f} s",
            got=f"no answer from {host}:{port}",
            remedy="start rank 0 there, and check the address, the network and the firewall",
        ) from None
    # Gloo would use the interface that the host name resolves to, which other hosts may not reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address_towards(address)))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={os.environ['GLOO_SOCKET_IFNAME']}")
    backend, key = _introduced(store, rank_info, names)
    world = TorchWorld(rank_info, channel, store, backend, key)
    if not is_served:
        atexit.register(_end_together, store, rank_info)
    return world


def _end_together(store: dist.Store, rank_info: RankInfo) -> None:
    """Delay the exit of rank 0, which serves the store, briefly: other ranks may still read from the store."""
    if hasattr(sys, "last_value"):
        return  # This rank failed; the others notice when its process ends.
    name, deadline = f"ended{rank_info.generation}", time.monotonic() + rank_info.patience
    with contextlib.suppress(RuntimeError):
        store.add(name, 1)
        while rank_info.rank == 0 and store.add(name, 0) < rank_info.size and time.monotonic() < deadline:
            time.sleep(0.01)


def _introduced(store: dist.Store, rank_info: RankInfo, names: Sequence[str]) -> tuple[str, RankKey]:
    """Return the backend and the key of ranks that another launcher started, after they exchange their devices.

    The backend is gloo, and NCCL too if every rank has its own GPU. The key is derived from the token in
    MANYHANDS_TOKEN and a random number of every rank. Without a token there is no key: ranks then decode only plain
    data, but cannot distinguish their messages from those of other processes on their network.
    """
    token = token_here("") if os.environ.get(TOKEN_VARIABLE) else None
    signing = (
        RankKey.none()
        if token is None
        else RankKey(bytes.fromhex(token.rank_key("introduction", rank_info.generation)))
    )
    signed = SignedStore(store, signing, rank_info.patience)
    keys = [f"devices{rank_info.generation}/{rank}" for rank in range(rank_info.size)]
    own_nonce = secrets.token_hex(16)
    signed.set(keys[rank_info.rank], f"{own_nonce} {rank_info.host}/{rank_info.device.torch}")
    try:
        every = [signed.get(key).decode().partition(" ")[::2] for key in keys]
    except NotAuthentic:
        raise SettingsError(
            f"all ranks must have the same {TOKEN_VARIABLE}, or none of them may have one",
            got="a rank whose devices are not signed with the token of this rank",
            remedy="set the same value for every rank, and check that no other program uses this port",
        ) from None
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        missing_ranks = ", ".join(f"{rank} on {names[rank]}" if names else str(rank) for rank in missing[:8])
        raise SettingsError(
            f"all {rank_info.size} ranks must connect within {rank_info.timeout:.0f} s",
            got=f"{rank_info.size - len(missing)}; rank {missing_ranks} did not connect",
            remedy="start the missing ranks with the same command, or use fewer ranks",
        ) from None
    is_alone = len({text for _, text in every if "/cuda" in text}) == rank_info.size
    backend = "cpu:gloo,cuda:nccl" if is_alone else "gloo"
    if token is None:
        return backend, RankKey.none()
    # The own number is not read back: an attacker could restore all values of an earlier job, which are signed too, and
    # then replay its messages.
    nonces = [own_nonce if rank == rank_info.rank else nonce for rank, (nonce, _) in enumerate(every)]
    return backend, RankKey(bytes.fromhex(token.rank_key(" ".join(nonces), rank_info.generation)))


def _device(standing: Standing, on: object) -> Device:
    """Return the device of this rank: the GPU with its local number, or a share of the CPU of its host.

    Raise DeviceError if the host has fewer GPUs than ranks.
    """
    found, _ = resolve(on)  # type: ignore[arg-type]
    if standing.local_rank < len(found):
        return found[standing.local_rank]
    if found[0].kind != "cpu":
        raise DeviceError(
            f"every rank of a host needs its own device; {this_host()} has {', '.join(map(str, found))}",
            got=f"local rank {standing.local_rank}",
            remedy="launch fewer ranks on this host",
        )
    return Device("cpu", share=1 / max(1, standing.local_size), slot=standing.local_rank)
