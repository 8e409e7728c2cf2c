"""The listener that accepts hosts before a job starts and while it runs, and the coordinator of several hosts."""

from __future__ import annotations

import contextlib
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...core import SettingsError, event
from ...distributed import Device, Unproved
from ..coordinator import Coordinator, LocalHost, ProcessExit, Rendezvous
from ..engine import AfterLoss
from ..processes import turn
from ..rank_group import RankHost
from ..rendezvous import RendezvousInfo
from .channel import Channel, JoinTimeouts, Message, ProtocolError
from .handshake import HostFacts, HostVerifier
from .reachability import excluded_hosts
from .tls import NoTls, NotTls
from .token import JoinToken
from .waiting import Wait

NOTIFY_SECONDS = 1.0
"""Seconds of waiting for other hosts after which the first notice about it is printed."""


class RemoteHost(RankHost):
    """Another host that has joined, whose agent the coordinator reaches over a channel."""

    def __init__(self, channel: Channel, facts: HostFacts) -> None:
        self.channel, self.facts = channel, facts
        self.host, self.devices = facts.host, facts.placed()

    @property
    def running(self) -> Sequence[int]:
        return self.facts.running

    def start(self, slot: int, info: RendezvousInfo) -> None:
        self.channel.send("start", slot=slot, rendezvous=_without_key(info.to_dict()))

    def send_message(self, slot: int, message: dict[str, Any]) -> None:
        if "rendezvous" in message:
            message = {**message, "rendezvous": _without_key(message["rendezvous"])}
        self.channel.send("tell", slot=slot, message=message)

    def kill(self, slot: int | None = None) -> None:
        self.channel.send("kill", slot=slot)


class JoinListener:
    """Accepts hosts until as many have joined as the job needs."""

    def __init__(
        self,
        listener: socket.socket,
        token: JoinToken,
        own_facts: Callable[[], HostFacts],
        num_hosts: int,
        notify: Callable[[str], None],
        timeout: float,
        tls: NoTls | None = None,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        self._limits, self._tls = JoinTimeouts(timeout), tls or NoTls()
        self.selector = selector or selectors.DefaultSelector()
        self._listener, self.token, self._own_facts, self._num_hosts, self._notify = (
            listener,
            token,
            own_facts,
            num_hosts,
            notify,
        )
        self.present: list[RemoteHost] = []
        self.welcome_messages: list[tuple[str, dict[str, Any]]] = []
        self._is_closed = False
        self._passes: dict[str, JoinToken] = {}
        """Passes of hosts that joined before: they rejoin with these, also after the token has expired."""
        self.on_arrival: Callable[[RemoteHost], None] = lambda place: None
        self._proved: queue.SimpleQueue[HostVerifier] = queue.SimpleQueue()
        self._woken, self._wakes = socket.socketpair()
        self._unproved = Unproved()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self._woken, selectors.EVENT_READ, self._admit_proved)

    def gather(self) -> None:
        """Wait until all hosts have joined, and report the wait; raise SettingsError after the time limit."""
        seconds = self._limits.timeout
        wait = Wait(self._missing, seconds, self._notify, NOTIFY_SECONDS)
        while len(self.present) < self._num_hosts - 1:
            turn(self.selector, min(0.5, seconds))
            if wait.is_over:
                raise SettingsError(
                    f"{self._num_hosts} hosts must join within {seconds:.0f} s",
                    got=f"{len(self.present) + 1} ({self._names()})",
                    remedy="run the same command on the other hosts, or use a smaller --hosts",
                )
            wait.report()

    def _names(self) -> str:
        return ", ".join([self._own_facts().host, *(place.host for place in self.present)])

    def _missing(self) -> str:
        where = ":".join(map(str, self._listener.getsockname()))
        missing = self._num_hosts - 1 - len(self.present)
        return (
            f"waiting at {where} for {missing} more of {self._num_hosts} hosts; joined so far: {self._names()}; run "
            "the same command on the others"
        )

    def send_to_all(self, kind: str, **values: Any) -> None:
        """Send a message to every host that has joined, and to hosts that join later when they do."""
        self.welcome_messages.append((kind, values))
        self.send_now(kind, **values)

    def send_now(self, kind: str, **values: Any) -> None:
        """Send a message to the hosts that are present."""
        for place in self.present:
            place.channel.send(kind, **values)

    def close(self, reason: str) -> None:
        """Notify every host that the job is over, and close all sockets; `reason` is empty unless the job failed."""
        if self._is_closed:
            return
        self.send_now("over", reason=reason)
        self.abandon()
        self.selector.close()

    def abandon(self) -> None:
        """Close all sockets without notifying the hosts, which then look for another coordinator."""
        self._is_closed = True
        for place in list(self.present):
            self.forget(place)
        self._unproved.close()
        for sock in (self._listener, self._woken):
            self.selector.unregister(sock)
        for sock in (self._listener, self._woken, self._wakes):
            sock.close()

    def forget(self, place: RemoteHost) -> None:
        """Remove a host whose connection has ended; it may rejoin."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(place.channel)
        place.channel.close()
        self.present.remove(place)

    def _accept(self) -> None:
        try:
            sock, (address, _) = self._listener.accept()
        except OSError:
            # The peer closed the connection before it was accepted.
            return
        self._unproved.add(sock, address)
        threading.Thread(target=self._prove, args=(sock,), name="manyhands-handshake", daemon=True).start()

    def _prove(self, sock: socket.socket) -> None:
        """Run the handshake in its own thread, so that a silent peer blocks no other host."""
        try:
            challenge = HostVerifier(self._channel(sock), self.token, self._passes, self._own_facts)
            if self._unproved.remove(sock):
                self._proved.put(challenge)
                self._wakes.send(b"!")
            else:
                challenge.channel.close()
        except Exception as error:
            # An invalid peer only ends its own connection. Connections dropped to make room for others are not
            # reported: there may be any number of them.
            if self._unproved.remove(sock):
                self._notify(str(error) or type(error).__name__)
            sock.close()

    def _channel(self, sock: socket.socket) -> Channel:
        try:
            return Channel(sock, self._limits, self._tls.cover(sock, self._limits, is_first=True))
        except NotTls:
            reason = "this job uses TLS: give this host a certificate too, with --tls"
            Channel(sock, self._limits).send("refused", code="tls", reason=reason)
            raise

    def _admit_proved(self) -> None:
        self._woken.recv(4096)
        while not self._proved.empty():
            self._decide(self._proved.get())

    def _decide(self, challenge: HostVerifier) -> None:
        facts = challenge.facts
        names = [self._own_facts().host, *(place.host for place in self.present)]
        if facts.host in names:
            refused = challenge.refuse(
                "present",
                f"a host called {facts.host} has already joined: run one command per host, under different names",
            )
        elif len(names) >= self._num_hosts:
            reason = f"all {self._num_hosts} hosts have already joined: start all of them with a larger --hosts"
            refused = challenge.refuse("full", reason)
        else:
            self._passes[facts.host] = challenge.accept()
            place = RemoteHost(challenge.channel, facts)
            self.present.append(place)
            self._notify(f"{facts.host} has joined, {len(names) + 1} of {self._num_hosts} hosts are connected")
            for kind, values in self.welcome_messages:
                place.channel.send(kind, **values)
            self.on_arrival(place)
            return
        self._notify(str(refused))
        challenge.channel.close()


def _without_key(info: dict[str, Any]) -> dict[str, Any]:
    """Return rendezvous info without the key for sending between hosts: the other host derives it from the token."""
    return {**info, "key": ""}


class HostsCoordinator(Coordinator):
    """The coordinator of ranks on this host and on the hosts that have joined."""

    def __init__(
        self,
        here: LocalHost,
        join_listener: JoinListener,
        address: str,
        *,
        after_loss: AfterLoss,
        timeout: float,
        unit: int,
    ) -> None:
        rendezvous = Rendezvous(address)
        super().__init__(
            here, rendezvous, after_loss=after_loss, timeout=timeout, unit=unit, selector=join_listener.selector
        )
        self._join_listener = join_listener
        self._patience = JoinTimeouts(timeout).silence
        self._ports: dict[str, int] = {}
        self._salt = secrets.token_hex(16)
        self._unheard: dict[str, set[str]] = {}
        """By name of a host: the hosts from which it receives no datagrams any more."""
        self._excluded: set[str] = set()
        """Hosts whose ranks wait, because they cannot reach another host."""
        for place in join_listener.present:
            self._watch_channel(place)
        join_listener.on_arrival = self._arrive

    def tick(self) -> None:
        super().tick()
        now = time.monotonic()
        for place in list(self._join_listener.present):
            if now - place.channel.received_at > self._patience:
                self._on_host_lost(place, f"has sent nothing for {self._patience:.0f} s")
        self._exclude_unreachable()
        if self._has_begun and self._ranks.is_complete:
            self._kill_excluded()

    def kill(self) -> None:
        super().kill()
        self._kill_excluded()

    def _kill_excluded(self) -> None:
        for place in self._join_listener.present:
            if place.host in self._excluded:
                place.kill()

    def _exclude_unreachable(self) -> None:
        """Exclude hosts so that the remaining ones reach each other; admit them when they reach all others again."""
        places = {place.host: place for place in self._join_listener.present}
        # A host that no other host hears has failed, which its silence on this channel will show.
        fresh = time.monotonic() - self._patience / 2
        here = {name for name, place in places.items() if place.channel.received_at > fresh or name in self._excluded}
        found = {(host, other) for host, others in self._unheard.items() for other in others}
        pairs = {tuple(sorted(pair)) for pair in found if here.issuperset(pair)}
        ranks = {name: len(place.devices) for name, place in places.items()}
        wanted = excluded_hosts(pairs, ranks)
        for name in sorted(wanted - self._excluded):
            self._excluded.add(name)
            place = places[name]
            others = sorted({one for pair in pairs if name in pair for one in pair} - {name})
            own = [member for member in (*self._ranks.members, *self._ranks.newcomers) if member.place is place]
            place.facts = replace(place.facts, running=[member.slot for member in own if member.is_running])
            for slot in place.facts.running:
                place.send_message(slot, {"lost": "hosts do not reach each other", "generation": self._generation})
            self.dismiss(place, f"and {', '.join(others)} do not reach each other; {name} waits until they do")
        for name in sorted(self._excluded - wanted):
            self._excluded.discard(name)
            if name in places:
                self._notify(event("notice", text=f"{name} reaches the other hosts again"))
                self.admit(places[name])

    def _new_key(self) -> tuple[str, str]:
        salt = secrets.token_hex(16)
        return self._join_listener.token.rank_key(salt, self._generation), salt

    def finish(self) -> None:
        failed = self._failed
        self.kill()
        self._here.processes.finish()
        reason = "" if failed is None and self._ranks.is_complete else str(failed or "the first host has ended the job")
        self._join_listener.close(reason.splitlines()[0] if reason else "")
        self._rendezvous.close()

    def _arrive(self, place: RemoteHost) -> None:
        self._notify(event("notice", text=f"{place.host} has joined the job"))
        self._watch_channel(place)

    def _watch_channel(self, place: RemoteHost) -> None:
        self.selector.register(place.channel, selectors.EVENT_READ, lambda: self._receive(place))
        # The channel was not read between joining and now.
        place.channel.received_at = time.monotonic()
        # Ranks that outlived a connection know of earlier generations, whose numbers must not be reused.
        self._generation = max(self._generation, place.facts.generation)
        self.admit(place)

    def _receive(self, place: RemoteHost) -> None:
        try:
            for message in place.channel.receive():
                self._handle(place, message)
        except ProtocolError as error:
            self._on_host_lost(place, f"violated the protocol: {error}")
        except OSError as error:
            self._on_host_lost(place, f"has closed the connection ({error.strerror or error})")

    def _handle(self, place: RemoteHost, message: Message) -> None:
        kind = message.pop("kind")
        if kind == "event":
            self.handle_event(place, message["slot"], message["entry"])
        elif kind == "output":
            self.handle_output(place, message["slot"], message["text"], message["stream"])
        elif kind == "lost_world":
            self.handle_lost_world(place, message["slot"], message["told"])
        elif kind == "failure":
            self.handle_failure(place, message.pop("slot"), message)
        elif kind == "peer":
            self._ports[place.host] = message["port"]
            self._introduce()
        elif kind == "unheard":
            self._unheard[place.host] = set(map(str, message["hosts"]))
        elif kind == "end":
            running = [slot for slot in place.facts.running if slot != message["slot"]]
            place.facts = replace(place.facts, running=running)
            self.handle_exit(place, message["slot"], ProcessExit(message["done"], message["text"]))
        elif kind == "stop":
            self.stop()
        elif kind == "leave":
            self._on_host_lost(place, f"has left: {message['reason']}")
        # A busy host may answer the measurement of links only after it is over.
        elif kind not in ("beat", "links"):
            raise ProtocolError(f"a joined host sent the unexpected message {kind}")

    def _introduce(self) -> None:
        """Send every joined host the addresses of all of them, to which it sends datagrams.

        The first host needs none: its channels show whether a host is silent.
        """
        hosts = {
            place.host: (place.channel.peer, self._ports[place.host])
            for place in self._join_listener.present
            if place.host in self._ports
        }
        for place in self._join_listener.present:
            place.channel.send("peers", hosts=hosts, salt=self._salt)

    def _on_host_lost(self, place: RemoteHost, reason: str) -> None:
        self._unheard.pop(place.host, None)
        self._excluded.discard(place.host)
        self._ports.pop(place.host, None)
        if place in self._join_listener.present:
            self._join_listener.forget(place)
            self.dismiss(place, reason)
            self._introduce()


def all_devices(here: Sequence[Device], join_listener: JoinListener) -> list[Device]:
    """Return the devices of all hosts, in rank order."""
    return [*here, *(device for place in join_listener.present for device in place.devices)]
