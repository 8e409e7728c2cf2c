"""The handshake: both sides prove that they know the token, over numbers used once; then facts are compared."""

from __future__ import annotations

import json
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch

from ...core import SettingsError
from ..devices import Device, this_host
from .channel import Channel, Message
from .token import Token

ANSWER_SECONDS = 10.0
"""How long a challenge is good for."""
MAX_SKEW = 60.0
"""Seconds by which clocks may differ: events of all hosts stand in one log."""


@dataclass(frozen=True)
class Facts:
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
    def here(cls, devices: Sequence[Device], work: str, running: Sequence[int] = (), generation: int = -1) -> Facts:
        """Of this host, now."""
        said = [{"kind": d.kind, "index": d.index, "share": d.share, "slot": d.slot} for d in devices]
        return cls(
            host=this_host(),
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
    def read(cls, values: dict[str, Any]) -> Facts:
        """Checked data of another host."""
        try:
            facts = cls(**values)
            good = (
                all(isinstance(text, str) for text in (facts.host, facts.manyhands, facts.torch, facts.python))
                and 0 < len(facts.host) <= 255
                and 0 < len(facts.devices) <= 1024
                and all(isinstance(slot, int) and 0 <= slot < len(facts.devices) for slot in facts.running)
                and isinstance(facts.generation, int)
                and isinstance(facts.work, str)
            )
            float(facts.time)
            facts.placed()
        except (TypeError, ValueError, KeyError):
            good = False
        if not good:
            raise SettingsError("a host says its name, versions, clock and devices", got="something else", remedy="")
        return facts

    def placed(self) -> list[Device]:
        """The devices, with the host that has them."""
        return [
            Device(str(d["kind"]), int(d["index"]), self.host, float(d["share"]), int(d["slot"])) for d in self.devices
        ]

    def differences(self, other: Facts) -> str:
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


class Challenge:
    """The conducting side: lets a host prove itself, hears what it is, and takes it in or not."""

    def __init__(self, channel: Channel, token: Token, mine: Callable[[], Facts]) -> None:
        self.channel = channel
        self._token = token
        self._nonce = secrets.token_hex(16)
        channel.send("hello", nonce=self._nonce)
        answer = channel.wait_for("join", seconds=ANSWER_SECONDS)
        said = json.dumps(answer["facts"], sort_keys=True)
        self._theirs = str(answer["nonce"])
        # The number is this connection's own: what somebody overheard on another one proves nothing here.
        if token.is_expired or not token.accepts(answer["proof"], "join", self._nonce, self._theirs, said):
            raise self.refuse("its token is not that of this job, or is expired: copy the first host's file")
        self.facts = Facts.read(answer["facts"])
        if told := mine().differences(self.facts):
            raise self.refuse(told)

    def refuse(self, reason: str) -> SettingsError:
        """Says why it is not taken in."""
        self.channel.send("refused", reason=reason)
        return SettingsError(f"{self.channel.peer} was not taken in: {reason}")

    def accept(self, number: int, of: int) -> None:
        """Takes it in, and proves that this is not somebody who only listens at the address."""
        proof = self._token.prove("welcome", self._theirs, self._nonce)
        self.channel.send("welcome", nonce=self._nonce, proof=proof, number=number, of=of)
        _seal(self.channel, self._token, self._nonce, self._theirs, is_first=True)
        self.channel.start_beating()


def introduce(channel: Channel, token: Token, mine: Facts) -> Message:
    """The joining side: proves itself, and hears that it is in."""
    hello = channel.wait_for("hello", seconds=ANSWER_SECONDS)
    nonce = secrets.token_hex(16)
    facts = asdict(mine)
    said = json.dumps(facts, sort_keys=True)
    channel.send("join", nonce=nonce, facts=facts, proof=token.prove("join", hello["nonce"], nonce, said))
    answer = channel.wait_for("welcome", "refused", seconds=ANSWER_SECONDS)
    if answer["kind"] == "refused":
        raise SettingsError(f"{channel.peer} does not take this host in: {answer['reason']}")
    if not token.accepts(answer["proof"], "welcome", nonce, hello["nonce"]):
        raise SettingsError(
            "the first host must know the token too", got="one that does not", remedy="look who listens there"
        )
    _seal(channel, token, hello["nonce"], nonce, is_first=False)
    channel.start_beating()
    return answer


def _seal(channel: Channel, token: Token, first: str, second: str, *, is_first: bool) -> None:
    keys = [bytes.fromhex(token.prove("key", side, first, second)) for side in ("first", "second")]
    channel.seal(*(keys if is_first else reversed(keys)))
