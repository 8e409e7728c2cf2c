"""The hosts of a job: the views of the first host, which runs the coordinator, and of the others."""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core import RunError, SettingsError
from ...distributed import Device, PortTaken, World, this_host
from ..coordinator import LocalHost
from ..engine import AfterLoss, RunningJob
from ..local import LocalEngine
from ..pickles import pack
from ..rank import Assignment
from .agent import Agent
from .channel import Channel, JoinTimeouts, Message, ProtocolError
from .handshake import HostFacts, JoinRefused, introduce
from .host_ranks import HostRanks
from .listener import NOTIFY_SECONDS, HostsCoordinator, JoinListener, all_devices
from .probing import answer, candidates, chosen, describe_links, probe
from .tls import NoTls
from .token import JoinToken
from .waiting import Wait


@dataclass(frozen=True)
class FactsOf:
    """Returns the facts that this host reports when it joins."""

    host: str
    devices: Sequence[Device]
    work: str

    def __call__(self, running: Sequence[int] = (), generation: int = -1) -> HostFacts:
        return HostFacts.here(self.devices, self.work, running, generation, self.host)


@dataclass(frozen=True)
class FirstHostAddress:
    """What another host needs to connect to the first host, which runs the coordinator."""

    address: str
    port: int
    token: JoinToken
    tls: NoTls
    taken: PortTaken | None = None
    """The error of this host, if another program on it already listens on the port; that may be the first host."""

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def join_at(
    first: FirstHostAddress, facts: HostFacts, limits: JoinTimeouts, known: JoinToken | None
) -> tuple[Channel, JoinToken]:
    """Join the coordinator's host; return the channel, and the pass with which this host may rejoin.

    `known` is the pass of an earlier connection, if there was one.
    """
    sock = socket.create_connection((first.address, first.port), timeout=limits.connection)
    try:
        channel = Channel(sock, limits, first.tls.cover(sock, limits, is_first=False))
    except BaseException:
        sock.close()
        raise
    try:
        return channel, introduce(channel, first.token, facts, known)
    except BaseException:
        channel.close()
        raise


class JoinedHosts(ABC):
    """One host's view of the joined hosts of a job, by which the host takes part in the job."""

    is_first = True
    here: Sequence[Device]
    """This host's devices."""
    devices: Sequence[Device]
    """The devices of all hosts."""
    notices: Sequence[str] = ()
    """Texts about the measured links between the hosts, and which one was chosen."""
    term = 0
    """The term for which this host was elected to coordinate the job; 0 if it was not."""
    is_elected = False
    """Whether the coordinator is elected, so that this host may become the coordinator later."""

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

    def __init__(self, first: FirstHostAddress, facts: FactsOf, timeout: float, notify: Callable[[str], None]) -> None:
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
        self.welcome_messages: list[tuple[str, dict[str, Any]]] = [("begin", {"devices": described})]
        """What the first host has sent to all hosts, for hosts that join this one if it becomes the coordinator."""
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
        channel, self._known = join_at(
            self._first, self._facts(running, generation), JoinTimeouts(self._timeout), self._known
        )
        return channel

    def agree(self, value: Callable[[], str]) -> str:
        agreed = str(self._wait_for("agreed")["value"])
        self.welcome_messages.append(("agreed", {"value": agreed}))
        return agreed

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
                HostRanks(engine.warm_up(), pickle_fd),
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
