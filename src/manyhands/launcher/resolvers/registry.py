"""The registry of resolvers, and their precedence if several of them find a cluster."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import replace

from ...core import SettingsError, counted
from .kubernetes import Kubernetes
from .mpi import Mpi
from .resolver import Environ, ResolvedCluster, Resolver
from .slurm import Slurm
from .tf_config import TfConfig
from .torchrun import Torchrun

RESOLVERS: tuple[Resolver, ...] = (Torchrun(), Mpi(), Kubernetes(), Slurm(), TfConfig())
"""All resolvers, the innermost launcher first: torchrun may run in a SLURM job, never the reverse."""
CHOICE = "MANYHANDS_CLUSTER"
"""The environment variable that names the resolver to use, if several contradict each other."""


def understood(environ: Environ | None = None) -> ResolvedCluster | None:
    """Return the cluster in which this process was started; None if no launcher or scheduler started it.

    >>> understood({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": "29500"}).source
    'torchrun'
    """
    given = os.environ if environ is None else environ
    present = [resolver for resolver in RESOLVERS if resolver.is_present(given)]
    chosen = given.get(CHOICE, "")
    if chosen:
        present = [resolver for resolver in present if resolver.name.lower() == chosen.lower()]
        if not present:
            names = ", ".join(resolver.name for resolver in RESOLVERS)
            raise SettingsError(
                f"{CHOICE} must name a scheduler whose variables are set, one of {names}",
                got=repr(chosen),
                remedy="correct its value, or unset it",
            )
    if not present:
        return None
    first, *others = (resolver.read(given) for resolver in present)
    for other in others:
        _require_agreement(first, other)
    also = tuple(f"{other.source} is also set, and agrees" for other in others)
    return replace(first, warnings=(*first.warnings, *also)) if also else first


def _require_agreement(inner: ResolvedCluster, outer: ResolvedCluster) -> None:
    """Raise SettingsError if two sources differ in their number of hosts and ranks, or in the first host."""
    remedy = f"set {CHOICE}={inner.source} or {CHOICE}={outer.source} to select one, or unset the other's variables"
    if outer.num_hosts != inner.num_hosts and outer.size != inner.size and outer.num_hosts > 1:
        raise SettingsError(
            f"{inner.source} and {outer.source} must describe the same cluster",
            got=f"{_counted(inner)} and {_counted(outer)}",
            remedy=remedy,
        )
    if outer.num_hosts == inner.num_hosts > 1 and _differ(inner.address, outer.address):
        raise SettingsError(
            "all sources must name the same first host",
            got=f"{inner.address} by {inner.source} and {outer.address} by {outer.source}",
            remedy=remedy,
        )


def _counted(cluster: ResolvedCluster) -> str:
    ranks = f", {cluster.size} ranks" if cluster.size is not None else ""
    return f"{counted(cluster.num_hosts, 'host')}{ranks} by {cluster.source}"


def _differ(one: str, other: str) -> bool:
    """Return whether two names cannot belong to the same host; an IP address and a host name may."""
    if _is_address(one) != _is_address(other):
        return False
    return one != other if _is_address(one) else one.split(".")[0] != other.split(".")[0]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
