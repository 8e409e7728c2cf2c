"""Heartbeats between joined hosts: which hosts are reported, before and after a rejoin."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterator

import pytest

from manyhands.launcher.joining import reachability
from manyhands.launcher.joining.reachability import ROUND_SECONDS, SILENT_SECONDS, PeerBeats
from manyhands.launcher.joining.token import JoinToken


class Pair:
    """Two hosts, a clock that the test moves, and a direction in which datagrams can be lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token: JoinToken) -> None:
        self.now = 1000.0
        monkeypatch.setattr(reachability.time, "monotonic", lambda: self.now)
        self.selectors = {name: selectors.DefaultSelector() for name in "bc"}
        self.beats = {name: PeerBeats(name, "127.0.0.1", token, self.selectors[name]) for name in "bc"}
        self.lost: set[str] = set()
        """Hosts that receive nothing."""

    def introduce(self, salt: str = "one") -> None:
        peers = {name: ("127.0.0.1", beats.port) for name, beats in self.beats.items()}
        for beats in self.beats.values():
            beats.introduce(peers, salt)

    def forget(self) -> None:
        for beats in self.beats.values():
            beats.introduce({}, "")

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds / ROUND_SECONDS)):
            self.now += ROUND_SECONDS
            for beats in self.beats.values():
                beats.tick()
            for name, selector in self.selectors.items():
                for key, _ in selector.select(0.05):
                    if name in self.lost:
                        key.fileobj.recv(4096)
                    else:
                        key.data()

    def unheard(self) -> dict[str, list[str]]:
        return {name: beats.unheard() for name, beats in self.beats.items()}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    pair = Pair(monkeypatch, JoinToken(b"a-token-of-sufficient-length-for-tests"))
    with contextlib.ExitStack() as stack:
        for beats in pair.beats.values():
            stack.callback(beats.close)
        yield pair


def test_host_that_falls_silent_is_reported_until_it_is_heard_again(pair: Pair) -> None:
    pair.introduce()
    pair.passes(5)
    assert pair.unheard() == {"b": [], "c": []}
    pair.lost = {"c"}
    pair.passes(SILENT_SECONDS + 1)
    assert pair.unheard() == {"b": [], "c": ["b"]}
    pair.lost = set()
    pair.passes(1)
    assert pair.unheard() == {"b": [], "c": []}


def test_host_that_was_never_heard_is_not_reported(pair: Pair) -> None:
    pair.lost = {"c"}
    pair.introduce()
    pair.passes(10)
    assert pair.unheard() == {"b": [], "c": []}


def test_silence_that_begins_before_the_first_datagram_after_joining_again_is_reported(pair: Pair) -> None:
    pair.introduce()
    pair.passes(2)
    pair.forget()
    pair.passes(20)
    assert pair.unheard() == {"b": [], "c": []}, "hosts that have not joined again are not reported"
    pair.lost = {"c"}
    pair.introduce("two")
    pair.passes(1)
    assert pair.unheard() == {"b": [], "c": []}, "every host has some seconds"
    pair.passes(SILENT_SECONDS)
    assert pair.unheard() == {"b": [], "c": ["b"]}


def test_datagrams_without_the_token_or_sent_again_do_not_count(pair: Pair) -> None:
    """An attacker that hears all datagrams cannot make a host that has failed appear to be alive."""
    seen: list[bytes] = []
    receive = pair.beats["c"]._receive
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tap,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out,
    ):
        tap.bind(("127.0.0.1", 0))
        port = pair.beats["c"].port
        pair.beats["b"].introduce({"c": ("127.0.0.1", tap.getsockname()[1])}, "one")
        pair.beats["c"].introduce({"b": ("127.0.0.1", 70_000)}, "one")
        pair.beats["b"].tick()
        pair.beats["c"].tick()
        seen.append(tap.recv(1024))
        name, number, proof = seen[0].split(b"\0")
        newer = b"%d" % (int(number) + 1)
        other = JoinToken(b"another-token-of-the-same-length-here!")
        forged = [
            b"\0".join([name, newer, proof]),
            b"\0".join([b"c", number, proof]),
            b"\0".join([name, newer, other.prove("peer", "one", "b", "c", newer.decode()).encode()]),
            b"\0".join([name, newer, "\u00e9".encode()]),
            b"\0\0", b"", b"\xff" * 1024, name + b"\0x\0" + proof,
        ]  # fmt: skip
        for data in forged:
            out.sendto(data, ("127.0.0.1", port))
            receive()
        assert pair.beats["c"]._heard == {}
        out.sendto(seen[0], ("127.0.0.1", port))
        receive()
        heard = pair.beats["c"]._heard["b"]
        pair.now += SILENT_SECONDS + 1
        out.sendto(seen[0], ("127.0.0.1", port))
        receive()
        assert pair.beats["c"]._heard["b"] == heard
        assert pair.unheard()["c"] == ["b"]
