"""The handshake: both sides prove that they know the token, over numbers used once; then facts are compared."""

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
"""Why a host is not taken in: it has another token, it is not like the others, its name is taken, all places are, its
connection is not under TLS as those of the others are."""
MAX_SKEW = 60.0
"""Seconds by which clocks may differ: events of all hosts stand in one log."""


class JoinRefused(SettingsError):
    """The first host does not take this one in."""

    code: str = ""


@dataclass(frozen=True)
class HostFacts:
    """What a host says of itself when it joins."""

    host: str
    manyhands: str
    torch: str
    python: str
    time: float
    devices: list[dict[str, Any]]
    running: list[int]
    """Slots whose ranks are alive already and wait to be called together, after the connection was lost."""
    generation: int
    """The last one that these have heard of."""
    work: str
    """A digest of what is to be run, which must be the same everywhere."""

    @classmethod
    def here(
        cls,
        devices: Sequence[Device],
        work: str,
        running: Sequence[int] = (),
        generation: int = -1,
        host: str | None = None,
    ) -> HostFacts:
        """Of this host, now."""
        said = [{"kind": d.kind, "index": d.index, "share": d.share, "slot": d.slot} for d in devices]
        return cls(
            host=host or this_host(),
            manyhands=version("manyhands"),
            torch=torch.__version__.split("+")[0],
            python=platform.python_version(),
            time=time.time(),
            devices=said,
            running=list(running),
            generation=generation,
            work=work,
        )

    @classmethod
    def read(cls, values: dict[str, Any]) -> HostFacts:
        """Checked data of another host."""
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
            raise SettingsError("a host says its name, versions, clock and devices", got="something else", remedy="")
        return facts

    def placed(self) -> list[Device]:
        """The devices, with the host that has them."""
        return [
            Device(str(d["kind"]), int(d["index"]), self.host, float(d["share"]), int(d["slot"])) for d in self.devices
        ]

    def differences(self, other: HostFacts) -> str:
        """What keeps two hosts from working together, with the remedy; empty where nothing does."""
        for name in ("manyhands", "torch", "python"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "python":
                mine, theirs = mine.rpartition(".")[0], theirs.rpartition(".")[0]
            if mine != theirs:
                return f"{other.host} has {name} {theirs} and {self.host} has {mine}: install the same on both"
        skew = other.time - self.time
        if abs(skew) > MAX_SKEW:
            side = "ahead of" if skew > 0 else "behind"
            return f"the clock of {other.host} is {abs(skew):.0f} s {side} that of {self.host}: set it by NTP"
        if self.work != other.work:
            return (
                f"{other.host} was started to do something else than {self.host}: give both the same command and files"
            )
        return ""


class HostVerifier:
    """The conducting side: lets a host prove itself, hears what it is, and takes it in or not."""

    def __init__(
        self, channel: Channel, token: JoinToken, passes: Mapping[str, JoinToken], mine: Callable[[], HostFacts]
    ) -> None:
        """`passes` are those of hosts that were in before, which need no token any more."""
        self.channel = channel
        self._nonce = secrets.token_hex(16)
        channel.send("hello", nonce=self._nonce)
        answer = channel.wait_for("join", seconds=channel.limits.answer, first=FIRST_SECONDS)
        said = json.dumps(answer["facts"], sort_keys=True)
        self._theirs = str(answer["nonce"])
        # The number is this connection's own: what somebody overheard on another one proves nothing here.
        parts = "join", self._nonce, self._theirs, said, *channel.binding
        self._pass = passes.get(str(answer["facts"].get("host")))
        if self._pass is not None and self._pass.accepts(answer["again"], *parts):
            self._key = self._pass
        elif not token.is_expired and token.accepts(answer["proof"], *parts):
            self._key = token
        else:
            raise self.refuse("token", "its token is not that of this job, or is expired: copy the first host's file")
        self.facts = HostFacts.read(answer["facts"])
        if told := mine().differences(self.facts):
            raise self.refuse("differs", told)

    def refuse(self, code: Refusal, reason: str) -> SettingsError:
        """Says why it is not taken in."""
        self.channel.send("refused", code=code, reason=reason)
        return SettingsError(f"{self.channel.peer} was not taken in: {reason}")

    def accept(self) -> JoinToken:
        """Takes it in, and proves that this is not somebody who only listens at the address; its pass from now on."""
        self.channel.send("welcome", proof=self._key.prove("welcome", self._theirs, self._nonce, *self.channel.binding))
        _seal(self.channel, self._key, self._nonce, self._theirs, is_first=True)
        self.channel.start_beating()
        return self._key if self._key is self._pass else _pass(self._key, self._nonce, self._theirs)


def introduce(channel: Channel, token: JoinToken, mine: HostFacts, known: JoinToken | None = None) -> JoinToken:
    """The joining side: proves itself, and hears that it is in; the pass by which it may come again.

    A token may expire while a job runs, and a host of that job must still be able to come back. `known` is its pass.
    The token is proved beside it, because a first host that was started again has given nobody a pass.
    """
    hello = _heard(channel, "hello")
    nonce = secrets.token_hex(16)
    facts = asdict(mine)
    parts = "join", hello["nonce"], nonce, json.dumps(facts, sort_keys=True), *channel.binding
    again = "" if known is None else known.prove(*parts)
    channel.send("join", nonce=nonce, facts=facts, proof=token.prove(*parts), again=again)
    answer = _heard(channel, "welcome")
    parts = "welcome", nonce, hello["nonce"], *channel.binding
    keys = (key for key in (known, token) if key is not None)
    key = next((key for key in keys if key.accepts(answer["proof"], *parts)), None)
    if key is None:
        raise SettingsError(
            "the first host must know the token too", got="one that does not", remedy="look who listens there"
        )
    _seal(channel, key, hello["nonce"], nonce, is_first=False)
    channel.start_beating()
    return key if key is known else _pass(key, hello["nonce"], nonce)


def _heard(channel: Channel, kind: str) -> Message:
    """What the first host says; raises where it does not take this one in."""
    answer = channel.wait_for(kind, "refused", seconds=channel.limits.answer)
    if answer["kind"] == "refused":
        refused = JoinRefused(f"{channel.peer} does not take this host in: {answer['reason']}")
        refused.code = answer["code"]
        raise refused
    return answer


def _pass(token: JoinToken, first: str, second: str) -> JoinToken:
    """What only the two hosts of a connection can make, for as long as their programs run."""
    return JoinToken(bytes.fromhex(token.prove("pass", first, second)))


def _seal(channel: Channel, token: JoinToken, first: str, second: str, *, is_first: bool) -> None:
    keys = [bytes.fromhex(token.prove("key", side, first, second)) for side in ("first", "second")]
    channel.seal(*(keys if is_first else reversed(keys)))
