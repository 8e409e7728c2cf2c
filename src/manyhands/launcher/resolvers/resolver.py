"""Base class of resolvers, which read a scheduler's or launcher's environment into a description of the cluster."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core import SettingsError, counted

Environ = Mapping[str, str]
CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
DEFAULT_PORT = 29500
"""The rendezvous port when none is given; the same as torchrun's."""
MOST_HOSTS, MOST_DIGITS = 65_536, 9
"""Maximum number of hosts, and of digits in a number: a corrupt variable must not exhaust memory."""


@dataclass(frozen=True)
class Host:
    """One host of a cluster, or one task on a host if the scheduler counts tasks."""

    name: str = ""
    """The name by which other hosts reach this one; empty if the source does not contain it."""
    num_devices: int | None = None
    """Number of ranks or devices on this host; None if the source does not contain it."""
    role: str = WORKER
    port: int = 0

    def __str__(self) -> str:
        return (self.name or "?") + (f":{self.port}" if self.port else "")


@dataclass(frozen=True)
class Standing:
    """The rank of a process and the number of ranks, in the whole job and on the host of the process."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1

    def __post_init__(self) -> None:
        if min(self.size, self.local_size) < 1:
            raise SettingsError(
                "a job must have at least one rank on every host",
                got=f"{self.size} ranks, {self.local_size} on this host",
                remedy="check how the ranks were started",
            )


@dataclass(frozen=True, kw_only=True)
class ResolvedCluster:
    """The description of a cluster that a resolver has read from one source, such as SLURM's environment."""

    source: str
    hosts: tuple[Host, ...]
    here: int
    """The index of this host in `hosts`."""
    address: str
    """The rendezvous address: a name or address of the first host."""
    port: int = DEFAULT_PORT
    standing: Standing | None = None
    """The rank of this process; None if the process represents its whole host."""
    generation: int = 0
    is_served: bool = False
    """Whether the launcher itself runs the rendezvous store."""
    variables: tuple[str, ...] = ()
    """The environment variables, or the file, from which the description was read."""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_numbers(self)
        _require_distinct(self.source, self.hosts)

    @property
    def host(self) -> Host:
        """Return the host on which this process runs."""
        return self.hosts[self.here]

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts."""
        return len(self.hosts)

    @property
    def size(self) -> int | None:
        """Return the number of ranks; None if the number of devices of some host is not known yet."""
        if self.standing is not None:
            return self.standing.size
        counts = [host.num_devices for host in self.hosts]
        return None if None in counts else sum(count or 0 for count in counts)


class Resolver(ABC):
    """Base class of resolvers, each of which reads the environment of one scheduler or launcher."""

    name = ""

    @abstractmethod
    def is_present(self, environ: Environ) -> bool:
        """Return whether this scheduler or launcher set up the environment."""

    @abstractmethod
    def read(self, environ: Environ) -> ResolvedCluster:
        """Return the cluster that the environment describes; raise SettingsError if it is inconsistent."""


def number(environ: Environ, *names: str, default: int | None = None) -> int:
    """Return the whole number in the first of these variables that is set, or `default`.

    Raise SettingsError for another value, or if no variable is set and there is no default.

    >>> number({"SLURM_NNODES": "4"}, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    4
    """
    for name in names:
        if environ.get(name, "") != "":
            text = environ[name].strip()
            if not text.isdecimal() or len(text) > MOST_DIGITS:
                digits = f" of at most {MOST_DIGITS} digits" if text.isdecimal() else ""
                rule, got = f"{name} must be a whole number{digits}", repr(environ[name][:80])
                raise SettingsError(rule, got=got, remedy="correct its value")
            return int(text)
    if default is None:
        raise SettingsError(
            f"{' or '.join(names)} must be set", remedy="set it, or start the program without a scheduler"
        )
    return default


def port_of(environ: Environ, default: int = DEFAULT_PORT, name: str = "MASTER_PORT") -> int:
    """Return the port in the variable `name`, or `default`; raise SettingsError if it is no valid port.

    >>> port_of({"MASTER_PORT": "3389"})
    3389
    """
    port = number(environ, name, default=default)
    if not 0 < port < 65536:
        raise SettingsError(f"{name} must be between 1 and 65535", got=port, remedy="choose another port")
    return port


def named(count: int, names: Mapping[int, str], num_devices: int | None) -> tuple[Host, ...]:
    """Return `count` hosts with `num_devices` devices each; `names` has the names of some of them, by index."""
    _require_few(count)
    return tuple(Host(names.get(index, ""), num_devices) for index in range(count))


def _require_few(count: int) -> None:
    if count > MOST_HOSTS:
        raise SettingsError(
            f"a job can have at most {MOST_HOSTS:,} hosts", got=f"{count:,}", remedy="correct the scheduler's variables"
        )


def _require_numbers(cluster: ResolvedCluster) -> None:
    source, count, standing = cluster.source, cluster.num_hosts, cluster.standing
    if not 0 <= cluster.here < count:
        raise SettingsError(
            f"{source} must number the {counted(count, 'host')} from 0",
            got=f"number {cluster.here}",
            remedy="check that every host has its own number",
        )
    if standing is None:
        return
    if not 0 <= standing.rank < standing.size:
        raise SettingsError(
            f"{source} must number the {standing.size} ranks from 0",
            got=f"rank {standing.rank}",
            remedy="check how the ranks were numbered",
        )
    if not 0 <= standing.local_rank < standing.local_size:
        raise SettingsError(
            f"{source} must number the {standing.local_size} ranks of a host from 0",
            got=f"local rank {standing.local_rank} on {cluster.host}",
            remedy="check how the ranks were numbered",
        )
    total = cluster_size(cluster.hosts)
    if total is not None and total != standing.size:
        raise SettingsError(
            f"{source}'s hosts must have {standing.size} ranks in total",
            got=f"{total} ({', '.join(f'{host} {host.num_devices}' for host in cluster.hosts)})",
            remedy="start the missing ranks, or use fewer",
        )


def cluster_size(hosts: Sequence[Host]) -> int | None:
    """Return the number of ranks on all hosts; None if it is not known for some host."""
    counts = [host.num_devices for host in hosts]
    return None if None in counts else sum(count or 0 for count in counts)


def _require_distinct(source: str, hosts: Sequence[Host]) -> None:
    seen: set[str] = set()
    for host in hosts:
        text = str(host)
        if host.name and text in seen:
            raise SettingsError(
                f"{source} must name every host once",
                got=f"{text} twice",
                remedy="remove one of them, or give it a different port" if host.port else "remove one of them",
            )
        seen.add(text)


def expand(text: str) -> list[str]:
    """Return the host names in a compressed list of SLURM; raise SettingsError if it is malformed.

    >>> expand("gpu[01-03,7],login,rack[1-2]n[1-2]")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login', 'rack1n1', 'rack1n2', 'rack2n1', 'rack2n2']
    """
    names = [name for part in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", text.strip()) for name in _expanded(part)]
    if not names or text.count("[") != text.count("]"):
        raise SettingsError(
            "a list of hosts must be written like node[01-03,07],login1", got=repr(text), remedy="correct the list"
        )
    return names


def _expanded(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part.strip()]
    tails = _expanded(part[match.end() :]) if part[match.end() :] else [""]
    numbers = _numbers(match[1])
    _require_few(len(numbers) * len(tails))
    return [f"{part[: match.start()]}{middle}{tail}" for middle in numbers for tail in tails]


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for piece in text.split(","):
        match = re.fullmatch(rf"(\d{{1,{MOST_DIGITS}}})(?:-(\d{{1,{MOST_DIGITS}}}))?", piece.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SettingsError(
                "a range of hosts must be written like [01-03,07]", got=f"[{text}]", remedy="correct the list"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        _require_few(len(found) + last + 1 - first)
        found += [str(index).zfill(len(match[1])) for index in range(first, last + 1)]
    return found
