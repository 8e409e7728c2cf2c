"""Roles of a cluster described for parameter servers: a TF_CONFIG with chief, ps, worker and evaluator."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ..core import Event, SettingsError, StrategySpec, Task
from ..distributed import Device, DirectChannel, NullWorld, resolve_host
from ..launcher import CHIEF, EVALUATOR, SERVER, TOKEN_VARIABLE, WORKER, Host, ResolvedCluster, described

SHORTEST = 16
"""Minimum number of characters of a token."""


@dataclass(frozen=True, kw_only=True)
class ProcessRole:
    """The role of this process among coordinator (chief), servers and workers of a described cluster."""

    role: str
    number: int
    chief: Host
    here: Host
    num_servers: int
    num_workers: int
    token: bytes = dataclasses.field(repr=False)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the coordinator, which hands out the work."""
        return self.role == CHIEF

    @property
    def address(self) -> str:
        """The address on which the coordinator listens."""
        return f"tcp://{resolve_host(self.chief.name)}:{self.chief.port}"

    def fitted(self, spec: StrategySpec) -> StrategySpec:
        """Return `spec` with the cluster's numbers of servers and workers; raise SettingsError if it names others."""
        if spec.followers and self.num_servers % 2:
            raise SettingsError(
                "with followers, a cluster must have two ps tasks for every server",
                got=f"{self.num_servers} ps tasks",
                remedy="list the followers after the servers, or omit followers",
            )
        servers = self.num_servers // 2 if spec.followers else self.num_servers
        for name, asked, there in (
            ("servers", spec.servers, servers),
            ("workers", spec.replicas, self.num_workers),
        ):
            if asked not in (None, there) and not (name == "servers" and asked == 1):
                raise SettingsError(
                    f"the strategy and the cluster must have the same number of {name}",
                    got=f"{asked} and {there}",
                    remedy=f"omit {name}, or correct TF_CONFIG",
                )
        return dataclasses.replace(spec, servers=servers, replicas=self.num_workers)


def find_role(environ: Mapping[str, str] | None = None) -> ProcessRole | None:
    """Return this process's role in a cluster with parameter servers; None without such a cluster."""
    given = os.environ if environ is None else environ
    cluster = described(environ=given)
    if cluster is None or not _of(cluster, SERVER):
        return None
    chiefs, workers = _of(cluster, CHIEF), _of(cluster, WORKER)
    if not chiefs or not workers:
        raise SettingsError(
            "a cluster with parameter servers must have a chief and workers",
            got=", ".join(sorted({host.role for host in cluster.hosts})),
            remedy='add "chief": ["HOST:PORT"] and "worker": [...] to the cluster in TF_CONFIG',
        )
    here = cluster.host
    return ProcessRole(
        role=here.role,
        number=_of(cluster, here.role).index(here),
        chief=chiefs[0],
        here=here,
        num_servers=len(_of(cluster, SERVER)),
        num_workers=len(workers),
        token=token_of(given),
    )


def token_of(environ: Mapping[str, str]) -> bytes:
    """Return the secret that all members of a job share, from the environment."""
    text = environ.get(TOKEN_VARIABLE, "").strip()
    if len(text) < SHORTEST:
        raise SettingsError(
            f"members of a cluster must share a secret of at least {SHORTEST} characters in {TOKEN_VARIABLE}",
            got="no secret" if not text else f"{len(text)} characters",
            remedy=f"run `manyhands token FILE` once, and `export {TOKEN_VARIABLE}=$(head -n1 FILE)` for every member",
        )
    return text.encode()


def run_member(place: ProcessRole, task: Task, spec: StrategySpec, device: Device, timeout: float) -> None:
    """Run as server, follower or worker until the coordinator ends the job; return immediately as an evaluator."""
    if place.role == EVALUATOR:
        return
    from .members import Membership

    follows = place.role == SERVER and place.number >= spec.servers
    Membership(
        task=task,
        spec=spec,
        role="follower" if follows else "server" if place.role == SERVER else "worker",
        number=place.number - spec.servers if follows else place.number,
        coordinator=place.address,
        token=place.token,
        timeout=timeout,
        listens=(resolve_host(place.here.name), place.here.port) if place.role == SERVER else None,
    ).run(NullWorld(Device("cpu") if place.role == SERVER else device, DirectChannel(_print_notice)))


def _print_notice(entry: Event) -> None:
    """Print notices to stderr, since a member has no run folder and no progress view."""
    if entry["kind"] == "notice":
        print(entry["text"], file=sys.stderr, flush=True)


def _of(cluster: ResolvedCluster, role: str) -> list[Host]:
    return [host for host in cluster.hosts if host.role == role]
