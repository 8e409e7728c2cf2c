"""Joining: token files, the handshake against unauthorized hosts, and malformed messages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.core import RunError, SettingsError
from manyhands.distributed import resolve, this_host
from manyhands.distributed.network import MAX_UNPROVED, listen
from manyhands.launcher import Join, JoinedHosts, write_token
from manyhands.launcher.joining.channel import MAX_MESSAGE, MAX_TEXT, Channel, JoinTimeouts, ProtocolError, checked
from manyhands.launcher.joining.handshake import HostFacts, JoinRefused, introduce
from manyhands.launcher.joining.hosts import FactsOf, FirstHostAddress, Other
from manyhands.launcher.joining.listener import HostsCoordinator, JoinListener
from manyhands.launcher.joining.tls import NoTls
from manyhands.launcher.joining.token import JoinToken, read_token
from manyhands.launcher.processes import turn

SECRET = JoinToken(b"a" * 40)


def facts(host: str = "host2", **changes: Any) -> HostFacts:
    return replace(HostFacts.here(resolve("cpu")[0], "work"), host=host, **changes)


class Waiting:
    """A join listener that is served by a thread."""

    def __init__(self, token: JoinToken = SECRET, num_hosts: int = 2, seconds: float = 20.0) -> None:
        self.said: list[str] = []
        listener = listen("127.0.0.1")
        self.port = listener.getsockname()[1]
        self.desk = JoinListener(listener, token, lambda: facts("host1"), num_hosts, self.said.append, seconds)
        self._thread = threading.Thread(target=self._attend)
        self._thread.start()

    def _attend(self) -> None:
        with contextlib.suppress(SettingsError):
            self.desk.gather()

    def connect(self) -> Channel:
        return Channel(socket.create_connection(("127.0.0.1", self.port), timeout=5), JoinTimeouts(20))

    def join(self, mine: HostFacts, token: JoinToken = SECRET) -> Channel:
        channel = self.connect()
        try:
            introduce(channel, token, mine)
        except BaseException:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        channels = []
        self._thread.join(0.5)  # the thread may be about to end, and then nothing answers
        while self._thread.is_alive():
            channels.append(self.join(facts(f"last{len(channels)}")))
            self._thread.join(0.2)
        self.desk.close("")
        for channel in channels:
            channel.close()


@pytest.fixture
def waiting() -> Iterator[Callable[..., Waiting]]:
    made: list[Waiting] = []

    def make(**options: Any) -> Waiting:
        made.append(Waiting(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_token_file_must_be_private_long_enough_and_not_expired(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_token(path).secret) == 64
    assert "a" * 10 not in repr(read_token(path))
    with pytest.raises(SettingsError, match="new file"):
        write_token(path)
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="mode 640. Run chmod 600"):
        read_token(path)
    with pytest.raises(SettingsError, match="manyhands token"):
        read_token(tmp_path / "missing")
    short = tmp_path / "short"
    short.write_text("1234\n")
    short.chmod(0o600)
    with pytest.raises(SettingsError, match="at least 32 characters"):
        read_token(short)
    old = tmp_path / "old"
    write_token(old, hours=-1)
    with pytest.raises(SettingsError, match="must not be expired"):
        read_token(old)


@pytest.mark.timeout(20)
def test_token_file_is_checked_and_read_by_the_same_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of the folder must not be able to exchange the file between the check of its mode and the read."""
    path, real = tmp_path / "token", os.fstat
    write_token(path)
    ours = read_token(path).secret

    def exchange(file: int) -> os.stat_result:
        path.unlink(missing_ok=True)
        path.write_text("known to the attacker " * 4)
        return real(file)

    monkeypatch.setattr(os, "fstat", exchange)
    assert read_token(path).secret == ours
    monkeypatch.undo()
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(SettingsError, match="a token file must be readable.* a FIFO"):
        read_token(path)


def test_host_with_token_joins_and_forged_messages_are_rejected(waiting: Callable[..., Waiting]) -> None:
    desk = waiting()
    channel = desk.join(facts())
    while not desk.desk.present:
        time.sleep(0.01)
    there = desk.desk.present[0]
    there.channel.send("begin", devices=[])
    assert channel.wait_for("begin", seconds=5)["devices"] == []
    channel._socket.sendall(channel._socket.getsockname()[0].encode() * 20)
    with pytest.raises(ProtocolError, match="bytes"):
        _read(there.channel)
    channel.close()


@pytest.mark.parametrize("kind", ["without a code", "of another key", "replayed"])
def test_messages_of_a_man_in_the_middle_are_rejected(waiting: Callable[..., Waiting], kind: str) -> None:
    desk = waiting()
    channel = desk.join(facts())
    while not desk.desk.present:
        time.sleep(0.01)
    body = b'{"kind": "stop"}'
    with channel._sending:
        codes = {
            "without a code": bytes(32),
            "of another key": channel._proof(b"another key", channel._sent, body),
            "replayed": channel._proof(channel._keys[0], channel._sent, body),
        }
        frame = struct.pack("!I", len(body)) + codes[kind] + body
        channel._socket.sendall(2 * frame if kind == "replayed" else frame)
    with pytest.raises(ProtocolError, match="no valid authentication code"):
        _read(desk.desk.present[0].channel)
    channel.close()


def _read(channel: Channel) -> None:
    for _ in range(20):
        list(channel.receive())


@pytest.mark.parametrize("kind", ["wrong", "none", "expired"])
def test_wrong_missing_or_expired_token_is_rejected(waiting: Callable[..., Waiting], kind: str) -> None:
    token = JoinToken(SECRET.secret, time.time() - 1) if kind == "expired" else SECRET
    desk = Waiting(token=token, seconds=1.0) if kind == "expired" else waiting()
    try:
        given = {"wrong": JoinToken(b"b" * 40), "none": JoinToken(b""), "expired": SECRET}[kind]
        with pytest.raises(SettingsError, match="its token is not that of this job, or is expired"):
            desk.join(facts(), given)
        assert not desk.desk.present
    finally:
        if kind == "expired":
            desk._thread.join()
            desk.desk.close("")


def test_replayed_join_proof_is_rejected(waiting: Callable[..., Waiting]) -> None:
    desk = waiting(num_hosts=3)
    first = desk.connect()
    nonce = first.wait_for("hello", seconds=5)["nonce"]
    said = asdict(facts())
    proof = SECRET.prove("join", nonce, "ab", json.dumps(said, sort_keys=True))
    first.send("join", nonce="ab", facts=said, proof=proof, again="")
    assert first.wait_for("welcome", "refused", seconds=5)["kind"] == "welcome"
    again = desk.connect()
    assert again.wait_for("hello", seconds=5)["nonce"] != nonce
    again.send("join", nonce="ab", facts=said, proof=proof, again=proof)
    # Its name is taken too, so only the code tells that the proof was rejected.
    assert again.wait_for("welcome", "refused", seconds=5).get("code") == "token"
    first.close()
    again.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "1.0"}, "host2 has torch 1.0 and host1 has .*: install the same version on both"),
        ({"manyhands": "9.9"}, "host2 has manyhands 9.9"),
        ({"python": "3.9.1"}, "host2 has python 3.9"),
        ({"time": time.time() + 36_000}, "the clock of host2 is 3.... s ahead of that of host1: run an NTP service"),
        ({"work": "another"}, "host2 and host1 were started with different work"),
        ({"host": "host1"}, "a host called host1 has already joined"),
    ],
)
def test_incompatible_host_is_rejected_with_the_reason(
    waiting: Callable[..., Waiting], changes: Any, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        waiting().join(replace(facts(), **changes))


def test_hosts_beyond_the_expected_number_are_rejected(waiting: Callable[..., Waiting]) -> None:
    desk = waiting()
    channel = desk.join(facts())
    desk._thread.join()
    # The listener's thread has ended, so its answer is read directly.
    taker = threading.Thread(
        target=lambda: [desk.desk.selector.select(5), desk.desk._accept(), desk.desk._admit_proved()]
    )
    taker.start()
    with pytest.raises(SettingsError, match="all 2 hosts have already joined"):
        desk.join(facts("host3"))
    taker.join()
    channel.close()


def test_silent_or_malformed_connections_do_not_block_joining(waiting: Callable[..., Waiting]) -> None:
    desk = waiting()
    silent = desk.connect()
    rude = socket.create_connection(("127.0.0.1", desk.port))
    rude.sendall(b"\xff" * 100)
    channel = desk.join(facts())
    channel.close()
    silent.close()
    rude.close()


@pytest.mark.parametrize(
    "body",
    [
        b"[]", b"{", b'{"kind": "unknown"}', b'{"kind": "start"}', b'{"kind": "beat", "more": 1}', b"[" * 100_000,
        b'{"kind": "start", "slot": true, "rendezvous": {}}', b'{"kind": "end", "slot": 0, "done": 1, "text": ""}',
    ],
)  # fmt: skip
def test_malformed_message_raises_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        checked(body)


def test_authenticated_host_that_disconnects_does_not_end_the_job() -> None:
    with listen("127.0.0.1") as listener:
        said: list[str] = []
        desk = JoinListener(listener, SECRET, lambda: facts("host1"), 2, said.append, 20)
        channel = Channel(socket.create_connection(listener.getsockname()), JoinTimeouts(20))
        turn(desk.selector, 5)
        threading.Thread(target=_try, args=(channel, facts("host1"))).start()
        while desk._proved.empty():
            time.sleep(0.01)
        # It is killed, so that the system resets its connection, before the desk gets to say that its name is taken.
        channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        channel.close()
        time.sleep(0.1)
        turn(desk.selector, 5)
        assert "127.0.0.1 was not admitted to the job: a host called host1 has already joined" in said[-1]
        desk.close("")


def _try(channel: Channel, mine: HostFacts) -> None:
    with contextlib.suppress(OSError, RunError, SettingsError):
        introduce(channel, SECRET, mine)


def test_slow_senders_do_not_block_other_hosts_from_joining(waiting: Callable[..., Waiting]) -> None:
    desk = waiting(seconds=4)
    slow = [socket.create_connection(("127.0.0.1", desk.port)) for _ in range(MAX_UNPROVED)]
    for one in slow:
        one.sendall(struct.pack("!I", MAX_MESSAGE))
    is_enough = threading.Event()

    def trickle() -> None:
        while not is_enough.wait(0.001):
            for one in slow:
                with contextlib.suppress(OSError):
                    one.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        channel = None
        while channel is None and desk._thread.is_alive():
            with contextlib.suppress(OSError):
                channel = desk.join(facts())
        assert channel is not None, "no host could join during other handshakes"
        channel.close()
    finally:
        is_enough.set()
        thread.join()
        for one in slow:
            one.close()


def test_unfinished_join_message_times_out(waiting: Callable[..., Waiting]) -> None:
    desk = waiting(seconds=4)
    where = "127.0.0.1", desk.port
    with socket.create_connection(where) as idle, socket.create_connection(where) as slow:
        slow.sendall(struct.pack("!I", MAX_MESSAGE))
        is_closed = False
        while not is_closed:
            time.sleep(0.05)
            try:
                slow.send(b"x")
            except OSError:
                is_closed = True
        assert idle.recv(4096), "it was greeted"
    assert desk.said.count("the peer sent no message join within 1 s") == 2


def test_invalid_nonce_is_rejected(waiting: Callable[..., Waiting]) -> None:
    desk = waiting()
    channel = desk.connect()
    channel.wait_for("hello", seconds=5)
    channel.send("join", nonce="\ud800", facts=asdict(facts()), proof="00", again="")
    with pytest.raises(OSError):  # noqa: PT011
        channel.wait_for("refused", seconds=5)
    assert "the field nonce of the message join is not a hexadecimal number" in desk.said[-1]
    channel.close()


def test_sender_does_not_block_on_a_frozen_host() -> None:
    ours, theirs = _pair()
    here = Channel(ours, JoinTimeouts(2))

    def print_much() -> None:
        while here.send("output", slot=0, text="x" * 10_000, stream="stdout"):
            pass

    printing = threading.Thread(target=print_much, daemon=True)
    printing.start()
    printing.join(120)
    assert not printing.is_alive()
    with pytest.raises(ConnectionError):
        list(here.receive())
    here.close()
    theirs.close()


def test_long_texts_are_truncated_in_the_middle() -> None:
    ours, theirs = _pair()
    here, there = Channel(ours, JoinTimeouts(20)), Channel(theirs, JoinTimeouts(20))
    text = "first " + "x" * 2 * MAX_MESSAGE + " last"
    assert here.send("failure", slot=1, reason="it broke", traceback=text, echo=False, is_ours=False)
    assert here.send("event", slot=1, entry={"kind": "notice", "lines": [text]})
    told = there.wait_for("failure", seconds=5)["traceback"]
    assert told.startswith("first x")
    assert told.endswith("x last")
    assert len(told) < 2 * MAX_TEXT
    assert there.wait_for("event", seconds=5)["entry"]["lines"][0] == told
    with pytest.raises(RunError, match="at most .* bytes, but begin has"):
        here.send("begin", devices=list(range(MAX_MESSAGE)))
    here.close()
    there.close()


def test_known_host_rejoins_after_token_expiry_and_new_hosts_cannot(waiting: Callable[..., Waiting]) -> None:
    desk = waiting(num_hosts=4)
    first = desk.connect()
    known = introduce(first, SECRET, facts())
    desk.desk.token = JoinToken(SECRET.secret, time.time() - 1)
    again = desk.connect()
    with pytest.raises(JoinRefused, match="has already joined") as refused:
        introduce(again, SECRET, facts(), known)
    assert refused.value.code == "present"
    first.close()
    desk.desk.forget(desk.desk.present[0])
    back = desk.connect()
    assert introduce(back, SECRET, facts(), known) == known
    for name, token in (("host3", known), ("host2", SECRET), ("host3", None)):
        stranger = desk.connect()
        with pytest.raises(JoinRefused, match="or is expired") as refused:
            introduce(stranger, SECRET, facts(name), token)
        assert refused.value.code == "token"
        stranger.close()
    desk.desk.token = SECRET
    # A restarted first host knows no members, so it asks for the token.
    desk.desk._passes.clear()
    other = desk.connect()
    assert introduce(other, SECRET, facts("host5"), known) != known
    for channel in (again, back, other):
        channel.close()


def test_hosts_on_one_machine_join_over_loopback_with_unique_names(tmp_path: Path) -> None:
    write_token(tmp_path / "token")
    write_token(tmp_path / "another")
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    join = Join(address=f"127.0.0.1:{port}", hosts=3, token_file=str(tmp_path / "token"), on="cpu")
    said: list[str] = []
    gathered: list[JoinedHosts] = []

    def gather() -> None:
        gathered.append(join.gather(None, 20.0, said.append))

    def until_said(what: str) -> None:
        while not any(what in text for text in said):
            assert any(thread.is_alive() for thread in threads), said
            time.sleep(0.02)

    threads = [threading.Thread(target=gather) for _ in range(2)]
    for thread in threads:
        thread.start()
    me, beside = this_host(), f"{this_host()}-{os.getpid()}"
    until_said(f"waiting at 127.0.0.1:{port} for ")
    until_said(f"port {port} of 127.0.0.1 is taken: joining the job there, as host {beside}")
    until_said(f"{beside} has joined, and waits for 127.0.0.1:{port} to start")
    with pytest.raises(SettingsError, match=f"port {port} of .* a job with another token.*same --token-file"):
        replace(join, token_file=str(tmp_path / "another")).gather(None, 20.0, print)
    # The two share a name here, because both are threads of one program: a third one is of another.
    code = (
        f"from manyhands.launcher import Join; Join(address={join.address!r}, hosts=3, token_file={join.token_file!r},"
    )
    code += "on='cpu').gather(None, 20.0, print).close('')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    for thread in threads:
        thread.join()
    names = [[device.host for device in hosts.devices] for hosts in gathered]
    assert names[0] == names[1]
    assert names[0][:2] == [me, beside]
    assert names[0][2].startswith(f"{me}-")
    for hosts in gathered:
        hosts.close("")


def test_waiting_host_reports_for_whom_why_and_until_when_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.launcher.joining.waiting.AGAIN_SECONDS", 0.2)
    write_token(tmp_path / "token")
    said: list[str] = []
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    first = FirstHostAddress("127.0.0.1", port, read_token(tmp_path / "token"), NoTls())
    with pytest.raises(SettingsError, match="first host must be reachable"):
        Other(first, FactsOf("host2", resolve("cpu")[0], ""), 1.0, said.append)
    report = rf"waiting for the first host, 127.0.0.1:{port}: .*refused; gives up at \d\d:\d\d:\d\d, in [01] s"
    assert len(said) >= 3
    assert all(re.fullmatch(report, text) for text in said), said


def test_oversized_message_raises_protocol_error() -> None:
    ours, theirs = _pair()
    there = Channel(theirs, JoinTimeouts(20))
    ours.sendall((MAX_MESSAGE + 1).to_bytes(4, "big") + bytes(64))
    with pytest.raises(ProtocolError, match="must have at most"):
        list(there.receive())
    ours.close()
    there.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    with listen("127.0.0.1") as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def test_invalid_join_settings_raise_settings_error(tmp_path: Path) -> None:
    write_token(tmp_path / "token")
    for address in ("host1", "host1:x", ":7777", "host1:99999"):
        with pytest.raises(SettingsError, match="HOST:PORT"):
            Join(address=address, hosts=2, token_file="token")
    with pytest.raises(SettingsError, match="at least 1"):
        Join(address="host1:7777", hosts=0, token_file="token")
    nowhere = Join(address="no-such-host.invalid:7777", hosts=2, token_file=str(tmp_path / "token"))
    with pytest.raises(SettingsError, match="must resolve to an address"):
        nowhere.gather(None, 1.0, print)
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        held = Join(address=f"127.0.0.1:{port}", hosts=2, token_file=str(tmp_path / "token"))
        with pytest.raises(SettingsError, match=f"port {port} of 127.0.0.1 must be free"):
            held.gather(None, 1.0, print)
    alone = Join(address=f"127.0.0.1:{port}", hosts=2, token_file=str(tmp_path / "token"))
    with pytest.raises(SettingsError, match="2 hosts must join within 0 s, but got 1"):
        alone.gather(None, 0.1, print)
    assert os.environ.get("MANYHANDS_TOKEN") is None


def test_unknown_field_names_are_escaped_and_truncated_in_errors() -> None:
    body = json.dumps({"kind": "start", "\x1b[2J\nowned": 1, "x" * 10_000: 2}).encode()
    with pytest.raises(ProtocolError) as caught:
        checked(body)
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_late_answer_to_a_measurement_of_links_does_not_remove_the_host() -> None:
    """A coordinator that was restarted on a busy machine does not wait for it."""
    coordinator: Any = HostsCoordinator.__new__(HostsCoordinator)
    assert coordinator._handle(None, {"kind": "links", "found": []}) is None
    with pytest.raises(ProtocolError, match="unexpected message welcome"):
        coordinator._handle(None, {"kind": "welcome"})
