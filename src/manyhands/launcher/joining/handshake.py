"""The join handshake: both sides prove with nonces that they know the token, then the hosts' versions are compared."""

from __future__ import annotations

import json
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch

from ...core import SettingsError
from ...distributed import FIRST_SECONDS, Device, this_host
from .channel import Channel, Message
from .token import JoinToken

Refusal = Literal["token", "differs", "present", "full", "tls"]
"""Why the first host refuses a host.

The host has another token, differs in versions, clock or work, has the name of a joined host, comes after all hosts
have joined, or does not use TLS.
"""
MAX_SKEW = 60.0
"""Maximum difference of clocks in seconds: events of all hosts are written to one log."""


class JoinRefused(SettingsError):
    """Raised on a joining host that the first host refuses; `code` is the `Refusal`."""

    code: str = ""


@dataclass(frozen=True)
class HostFacts:
    """What a host reports about itself when it joins."""

    host: str
    manyhands: str
    torch: str
    python: str
    time: float
    devices: list[dict[str, Any]]
    running: list[int]
    """Slots of ranks that are still running and wait for a rendezvous, if the host rejoins after a lost connection."""
    generation: int
    """The last generation (rendezvous number) of these ranks; -1 if there are none."""
    work: str
    """A digest of the work to run, which must be the same on all hosts."""

    @classmethod
    def here(
        cls,
        devices: Sequence[Device],
        work: str,
        running: Sequence[int] = (),
        generation: int = -1,
        host: str | None = None,
    ) -> HostFacts:
        """Return the facts of this host now."""
        facts_text = [{"kind": d.kind, "index": d.index, "share": d.share, "slot": d.slot} for d in devices]
        return cls(
            host=host or this_host(),
            manyhands=version("manyhands"),
            torch=torch.__version__.split("+")[0],
            python=platform.python_version(),
            time=time.time(),
            devices=facts_text,
            running=list(running),
            generation=generation,
            work=work,
        )

    @classmethod
    def read(cls, values: dict[str, Any]) -> HostFacts:
        """Return the facts of another host; raise SettingsError if the received data is invalid."""
        try:
            facts = cls(**values)
            good = (
                all(isinstance(text, str) for text in (facts.host, facts.manyhands, facts.torch, facts.python))
                and 0 < len(facts.host) <= 255
                and 0 < len(facts.devices) <= 1024
                and all(isinstance(slot, int) and 0 <= slot < len(facts.devices) for slot in facts.running)
                and isinstance(facts.generation, int)
                and isinstance(facts.time, float)
                and isinstance(facts.work, str)
            )
            facts.placed()
        except (TypeError, ValueError, KeyError, OverflowError):
            good = False
        if not good:
            raise SettingsError(
                "a joining host must send its name, versions, clock and devices",
                got="an invalid message",
                remedy="install the same version of manyhands on every host",
            )
        return facts

    def placed(self) -> list[Device]:
        """Return the devices, each with the name of its host."""
        return [
            Device(str(d["kind"]), int(d["index"]), self.host, float(d["share"]), int(d["slot"])) for d in self.devices
        ]

    def differences(self, other: HostFacts) -> str:
        """Return why this host and another one cannot work together, with a remedy; empty if they can."""
        for name in ("manyhands", "torch", "python"):
            own, peer = getattr(self, name), getattr(other, name)
            if name == "python":
                own, peer = own.rpartition(".")[0], peer.rpartition(".")[0]
            if own != peer:
                return f"{other.host} has {name} {peer} and {self.host} has {own}: install the same version on both"
        skew = other.time - self.time
        if abs(skew) > MAX_SKEW:
            side = "ahead of" if skew > 0 else "behind"
            return f"the clock of {other.host} is {abs(skew):.0f} s {side} that of {self.host}: run an NTP service"
        if self.work != other.work:
            return (
                f"{other.host} and {self.host} were started with different work: use the same command and files on both"
            )
        return ""


class HostVerifier:
    """The first host's side of the handshake: verifies a joining host, then accepts or refuses it."""

    def __init__(
        self, channel: Channel, token: JoinToken, passes: Mapping[str, JoinToken], own_facts: Callable[[], HostFacts]
    ) -> None:
        """Run the handshake up to the decision; raise SettingsError after refusing the host.

        `passes` are secrets, by name, of hosts that have joined before; these need no valid token any more.
        """
        self.channel = channel
        self._nonce = secrets.token_hex(16)
        channel.send("hello", nonce=self._nonce)
        answer = channel.wait_for("join", seconds=channel.limits.answer, first=FIRST_SECONDS)
        facts_text = json.dumps(answer["facts"], sort_keys=True)
        self._peer_nonce = str(answer["nonce"])
        # The nonce belongs to this connection, so a proof from another connection cannot be replayed.
        parts = "join", self._nonce, self._peer_nonce, facts_text, *channel.binding
        self._pass = passes.get(str(answer["facts"].get("host")))
        if self._pass is not None and self._pass.accepts(answer["again"], *parts):
            self._key = self._pass
        elif not token.is_expired and token.accepts(answer["proof"], *parts):
            self._key = token
        else:
            raise self.refuse(
                "token", "its token is not that of this job, or is expired: copy the token file of the first host"
            )
        self.facts = HostFacts.read(answer["facts"])
        if difference := own_facts().differences(self.facts):
            raise self.refuse("differs", difference)

    def refuse(self, code: Refusal, reason: str) -> SettingsError:
        """Send the host the code and reason of the refusal, and return the error to raise or report."""
        self.channel.send("refused", code=code, reason=reason)
        return SettingsError(f"{self.channel.peer} was not admitted to the job: {reason}")

    def accept(self) -> JoinToken:
        """Accept the host, prove that this side knows the token too, and return the host's pass for rejoining."""
        self.channel.send(
            "welcome", proof=self._key.prove("welcome", self._peer_nonce, self._nonce, *self.channel.binding)
        )
        _seal(self.channel, self._key, self._nonce, self._peer_nonce, is_first=True)
        self.channel.start_beating()
        return self._key if self._key is self._pass else _pass(self._key, self._nonce, self._peer_nonce)


def introduce(channel: Channel, token: JoinToken, own_facts: HostFacts, known: JoinToken | None = None) -> JoinToken:
    """Run the joining host's side of the handshake; return the pass with which it may rejoin.

    A token may expire while a job runs, but a host of that job must still be able to rejoin: `known` is the pass of
    such a host. It proves the token as well, because a restarted first host has issued no passes.
    """
    hello = _receive(channel, "hello")
    nonce = secrets.token_hex(16)
    facts = asdict(own_facts)
    parts = "join", hello["nonce"], nonce, json.dumps(facts, sort_keys=True), *channel.binding
    again = "" if known is None else known.prove(*parts)
    channel.send("join", nonce=nonce, facts=facts, proof=token.prove(*parts), again=again)
    answer = _receive(channel, "welcome")
    parts = "welcome", nonce, hello["nonce"], *channel.binding
    keys = (key for key in (known, token) if key is not None)
    key = next((key for key in keys if key.accepts(answer["proof"], *parts)), None)
    if key is None:
        raise SettingsError(
            "the first host must prove that it has the same token",
            got="a wrong proof",
            remedy="check which program listens at this address",
        )
    _seal(channel, key, hello["nonce"], nonce, is_first=False)
    channel.start_beating()
    return key if key is known else _pass(key, hello["nonce"], nonce)


def _receive(channel: Channel, kind: str) -> Message:
    """Return the first host's next message, which must be of this kind; raise JoinRefused if it refuses this host."""
    answer = channel.wait_for(kind, "refused", seconds=channel.limits.answer)
    if answer["kind"] == "refused":
        refused = JoinRefused(f"{channel.peer} refuses this host: {answer['reason']}")
        refused.code = answer["code"]
        raise refused
    return answer


def _pass(token: JoinToken, first: str, second: str) -> JoinToken:
    """Return a secret that only the two hosts of a connection can derive, valid while their programs run."""
    return JoinToken(bytes.fromhex(token.prove("pass", first, second)))


def _seal(channel: Channel, token: JoinToken, first: str, second: str, *, is_first: bool) -> None:
    keys = [bytes.fromhex(token.prove("key", side, first, second)) for side in ("first", "second")]
    channel.seal(*(keys if is_first else reversed(keys)))
