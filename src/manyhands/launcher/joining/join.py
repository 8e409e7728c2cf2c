"""Join: several hosts, each started with the same command, form one job. The first host is the one with the address."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...core import SettingsError
from ...distributed import (
    PortTaken,
    address_towards,
    is_loopback,
    is_ours,
    listen,
    parse_endpoint,
    resolve,
    resolve_host,
    this_host,
)
from ..elections import election_at
from .elected import JobPart, gather_elected
from .hosts import FactsOf, First, FirstHostAddress, JoinedHosts, Other
from .listener import JoinListener
from .tls import tls_here
from .token import token_here


@dataclass(frozen=True, kw_only=True)
class Join:
    """How several hosts join one job, as a value of `on=`. All fields but `on` must be the same on every host.

    >>> Join(address="host1:7777", hosts=4, token_file="token").hosts
    4
    """

    address: str
    """HOST:PORT of the first host, which runs the coordinator."""
    hosts: int
    token_file: str = ""
    """A file with a secret that only its owner can read; `manyhands token FILE` creates one.

    It must be copied to all hosts. Without a file, the token is read from MANYHANDS_TOKEN.
    """
    tls: str = ""
    """A folder with tls.crt, tls.key and ca.crt: hosts then join over TLS and verify each other's certificates."""
    coordination: str = ""
    """The address of an etcd, "etcd://HOST:PORT" or several members separated by commas, which elects the coordinator.

    If the first host fails, another host then coordinates the job. Without it, the others wait for the first host.
    """
    on: str | None = None
    """This host's devices, such as "cuda:0,1" or "cpu*2"; by default all that it has."""
    work: str = ""
    """A text that identifies the work to run, and must be the same on all hosts."""

    def __post_init__(self) -> None:
        parse_endpoint(self.address)
        if not isinstance(self.hosts, int) or self.hosts < 1:
            raise SettingsError(
                "hosts must be a whole number of at least 1", got=repr(self.hosts), remedy="pass hosts=2 or more"
            )

    def gather(self, num_wanted: int | None, timeout: float, notify: Callable[[str], None]) -> JoinedHosts:
        """Wait until all hosts have joined, and return an object by which this host takes part in the job.

        Args:
            num_wanted: Number of devices over all hosts; None for all.
            timeout: Seconds to wait for the other hosts.
            notify: Called with notices for the user.
        """
        name, port = parse_endpoint(self.address)
        token, tls = token_here(self.token_file), tls_here(self.tls)
        tls.check()
        address = resolve_host(name)
        wanted = None if num_wanted is None else max(1, num_wanted // self.hosts)
        devices, notices = resolve(self.on, wanted)
        for text in notices:
            notify(text)
        facts = FactsOf(this_host(), devices, hashlib.sha256(self.work.encode()).hexdigest())
        if self.coordination:
            return self._elected(FirstHostAddress(address, port, token, tls), facts, timeout, notify)
        if not is_ours(address):
            return Other(FirstHostAddress(address, port, token, tls), facts, timeout, notify)
        try:
            listener = listen(address, port)
        except PortTaken as taken:
            if not is_loopback(address):
                raise SettingsError(
                    taken.rule,
                    got=taken.got,
                    remedy="run one command per host; to try several on one machine, use --join 127.0.0.1:PORT",
                ) from None
            # On loopback all hosts are on this machine, and the program that started first runs the coordinator.
            beside = replace(facts, host=f"{facts.host}-{os.getpid()}")
            notify(f"port {port} of {address} is taken: joining the job there, as host {beside.host}")
            return Other(FirstHostAddress(address, port, token, tls, taken), beside, timeout, notify)
        return First(JoinListener(listener, token, facts, self.hosts, notify, timeout, tls), devices, address)

    def _elected(
        self, first: FirstHostAddress, facts: FactsOf, timeout: float, notify: Callable[[str], None]
    ) -> JoinedHosts:
        """Join the coordinator that is elected at the address of `coordination`, or become it."""
        if first.token.expires is not None:
            raise SettingsError(
                "with coordination the token must not expire, because hosts join each coordinator with it",
                got="a token that expires",
                remedy="create a token without --hours",
            )
        is_candidate = is_ours(first.address)
        if is_loopback(first.address):
            # Several processes on this machine take part as hosts.
            facts = replace(facts, host=f"{facts.host}-{os.getpid()}")
        part = JobPart(
            election=election_at(self.coordination, first.token),
            join=first,
            facts=facts,
            num_hosts=self.hosts,
            address=first.address if is_candidate else address_towards(first.address),
            timeout=timeout,
            notify=notify,
        )
        return gather_elected(part, facts.devices, is_candidate=is_candidate)
