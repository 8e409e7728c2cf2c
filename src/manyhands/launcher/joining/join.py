"""Join: several hosts, each started with the same command, form one job. The first host is the one with the address."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core import RunError, SettingsError
from ...distributed import (
    Device,
    PortTaken,
    World,
    is_loopback,
    is_ours,
    listen,
    parse_endpoint,
    resolve,
    resolve_host,
    this_host,
)
from ..coordinator import LocalHost
from ..engine import AfterLoss, RunningJob
from ..local import LocalEngine
from ..pickles import pack
from ..rank import Assignment
from .agent import Agent
from .channel import Channel, JoinTimeouts, Message, ProtocolError
from .handshake import HostFacts, JoinRefused, introduce
from .listener import NOTIFY_SECONDS, HostsCoordinator, JoinListener, all_devices
from .probing import answer, candidates, chosen, describe_links, probe
from .tls import NoTls, tls_here
from .token import JoinToken, token_here
from .waiting import Wait


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
        facts = _FactsOf(this_host(), devices, hashlib.sha256(self.work.encode()).hexdigest())
        if not is_ours(address):
            return Other(_FirstHostAddress(address, port, token, tls), facts, timeout, notify)
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
            return Other(_FirstHostAddress(address, port, token, tls, taken), beside, timeout, notify)
        return First(JoinListener(listener, token, facts, self.hosts, notify, timeout, tls), devices, address)


@dataclass(frozen=True)
class _FactsOf:
    host: str
    devices: Sequence[Device]
    work: str

    def __call__(self, running: Sequence[int] = (), generation: int = -1) -> HostFacts:
        return HostFacts.here(self.devices, self.work, running, generation, self.host)


@dataclass(frozen=True)
class _FirstHostAddress:
    """What another host needs to connect to the first host, which runs the coordinator."""

    address: str
    port: int
    token: JoinToken
    tls: NoTls
    taken: PortTaken | None = None
    """The error of this host, if another program on it already listens on the port; that may be the first host."""

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class JoinedHosts(ABC):
    """One host's view of the joined hosts of a job, by which the host takes part in the job."""

    is_first = True
    here: Sequence[Device]
    """This host's devices."""
    devices: Sequence[Device]
    """The devices of all hosts."""
    notices: Sequence[str] = ()
    """Texts about the measured links between the hosts, and which one was chosen."""

    @abstractmethod
    def agree(self, value: Callable[[], str]) -> str:
        """Return, on all hosts, the value that `value` returns on the first host."""

    @abstractmethod
    def start(
        self, engine: LocalEngine, fn: Callable[[World], Any], *, timeout: float, after_loss: AfterLoss, unit: int = 1
    ) -> RunningJob:
        """Start the ranks of this host, which form one world with those of the other hosts.

        `after_loss` and `unit`, the number of ranks in a group, are as in `Engine.start`.
        """

    @abstractmethod
    def close(self, reason: str) -> None:
        """Leave the job, with a reason for the other hosts; do nothing if it has already ended."""


class First(JoinedHosts):
    """The view of the joined hosts on the first host, which runs the coordinator."""

    def __init__(self, join_listener: JoinListener, devices: Sequence[Device], address: str) -> None:
        self._join_listener, self._address = join_listener, address
        self.here = [replace(device, host=this_host()) for device in devices]
        try:
            join_listener.gather()
        except BaseException as error:
            join_listener.close(str(error))
            raise
        self.devices = all_devices(self.here, join_listener)
        links = probe([place.channel for place in join_listener.present], candidates(address))
        self._address = chosen(links, address)
        self.notices = describe_links(links, self._address)
        join_listener.send_to_all("begin", devices=[[d.kind, d.index, d.host, d.share, d.slot] for d in self.devices])

    def agree(self, value: Callable[[], str]) -> str:
        agreed = value()
        self._join_listener.send_to_all("agreed", value=agreed)
        return agreed

    def start(
        self, engine: LocalEngine, fn: Callable[[World], Any], *, timeout: float, after_loss: AfterLoss, unit: int = 1
    ) -> RunningJob:
        pickle_fd = pack(Assignment.here(fn, self.here, timeout, after_loss == "regroup"))
        try:
            here = LocalHost(this_host(), self.here, engine.warm_up(), pickle_fd)
            job = HostsCoordinator(
                here, self._join_listener, self._address, after_loss=after_loss, timeout=timeout, unit=unit
            )
            job.call()
            return job
        finally:
            os.close(pickle_fd)

    def close(self, reason: str) -> None:
        self._join_listener.close(reason)


class Other(JoinedHosts):
    """The view of the joined hosts on a host that has joined the first host."""

    is_first = False

    def __init__(
        self, first: _FirstHostAddress, facts: _FactsOf, timeout: float, notify: Callable[[str], None]
    ) -> None:
        self._first, self._facts, self._timeout, self._notify = first, facts, timeout, notify
        self.here = [replace(device, host=facts.host) for device in facts.devices]
        self._known: JoinToken | None = None
        self._channel = self._connect()
        try:
            while (message := self._wait_for("begin", "probe"))["kind"] == "probe":
                answer(self._channel, message, facts.host)
            described = message["devices"]
        except BaseException:
            self._channel.close()
            raise
        self.devices = [Device(str(k), int(i), str(h), float(s), int(n)) for k, i, h, s, n in described]

    def _connect(self) -> Channel:
        """Join the first host, and return the channel; retry until the time limit, because it may start later."""
        reason = ""
        wait = Wait(lambda: f"waiting for the first host, {self._first}: {reason}", self._timeout, self._notify)
        while True:
            try:
                return self._join([], -1)
            except JoinRefused as error:
                if self._first.taken is not None and error.code == "token":
                    raise SettingsError(
                        self._first.taken.rule,
                        got="a port of a job with another token",
                        remedy="give both commands the same --token-file, or choose another port",
                    ) from None
                raise
            except (OSError, RunError) as error:
                if self._first.taken is not None and isinstance(error, TimeoutError | ProtocolError):
                    # The program that holds the port is not the first host of a manyhands job.
                    raise self._first.taken from None
                if wait.is_over:
                    raise SettingsError(
                        "the first host must be reachable",
                        got=f"{self._first} ({error})",
                        remedy="run the same command there, and check the address and the network",
                    ) from None
                reason = str(error)
                wait.report()
                time.sleep(0.3)

    def _join(self, running: list[int], generation: int) -> Channel:
        limits = JoinTimeouts(self._timeout)
        sock = socket.create_connection((self._first.address, self._first.port), timeout=limits.connection)
        try:
            channel = Channel(sock, limits, self._first.tls.cover(sock, limits, is_first=False))
        except BaseException:
            sock.close()
            raise
        try:
            self._known = introduce(channel, self._first.token, self._facts(running, generation), self._known)
        except BaseException:
            channel.close()
            raise
        return channel

    def agree(self, value: Callable[[], str]) -> str:
        return str(self._wait_for("agreed")["value"])

    def _wait_for(self, *kinds: str) -> Message:
        reason = f"{self._facts.host} has joined, and waits for {self._first} to start the job"
        wait = Wait(lambda: reason, self._timeout, self._notify, min(NOTIFY_SECONDS, self._timeout))
        while True:
            try:
                message = self._channel.wait_for(*kinds, "over", seconds=wait.seconds_to_report)
                break
            except TimeoutError:
                if wait.is_over:
                    raise
                wait.report()
        if message["kind"] == "over":
            raise RunError(f"the first host has ended the job: {message['reason']}")
        return message

    def start(
        self, engine: LocalEngine, fn: Callable[[World], Any], *, timeout: float, after_loss: AfterLoss, unit: int = 1
    ) -> RunningJob:
        pickle_fd = pack(Assignment.here(fn, self.here, timeout, after_loss == "regroup"))
        try:
            token = self._first.token
            return Agent(
                self._channel,
                self._join,
                engine.warm_up(),
                pickle_fd,
                token=token,
                timeout=timeout,
                host=self._facts.host,
                notify=self._notify,
            )
        finally:
            os.close(pickle_fd)

    def close(self, reason: str) -> None:
        self._channel.send("leave", reason=reason)
        self._channel.close()
