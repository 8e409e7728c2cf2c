"""Joining under TLS: certificates of one signer are accepted; for all others both sides get the reason."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.core import RunError, SettingsError
from manyhands.distributed.network import listen
from manyhands.launcher import Join, JoinedHosts, tls_here, write_token
from manyhands.launcher.joining.channel import MAX_MESSAGE, Bare, Channel, JoinTimeouts, ProtocolError
from manyhands.launcher.joining.handshake import JoinRefused, introduce
from manyhands.launcher.joining.listener import JoinListener
from manyhands.launcher.joining.tls import JoinTls, NoTls, Tunnel
from tests.launcher.test_joining import SECRET, _read, facts

LIMITS = JoinTimeouts(4)


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


class Signer:
    """Signs certificates of hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._make(folder / "ca.key", "-x509", "-subj", "/CN=signer", "-out", folder / "ca.crt")

    def host(self, name: str, *, expired: bool = False, use: str = "serverAuth,clientAuth") -> str:
        """A folder as a host needs it."""
        folder = self.folder / name
        folder.mkdir()
        self._make(folder / "tls.key", "-subj", f"/CN={name}", "-out", folder / "asked")
        (folder / "more").write_text(f"extendedKeyUsage={use}\n")
        if expired:
            # Only `openssl ca` writes certificates of the past in every version that is about.
            (folder / "index").touch()
            (folder / "serial").write_text("01\n")
            (folder / "settings").write_text(
                f"[ca]\ndefault_ca=a\n[a]\ndatabase={folder}/index\nserial={folder}/serial\nnew_certs_dir={folder}\n"
                "default_md=sha256\npolicy=b\nunique_subject=no\n[b]\ncommonName=supplied\n"
            )
            openssl(
                "ca", "-batch", "-config", folder / "settings", "-in", folder / "asked", "-out", folder / "tls.crt",
                "-cert", self.folder / "ca.crt", "-keyfile", self.folder / "ca.key", "-extfile", folder / "more",
                "-startdate", "20200101000000Z", "-enddate", "20200102000000Z",
            )  # fmt: skip
        else:
            openssl(
                "x509", "-req", "-in", folder / "asked", "-out", folder / "tls.crt", "-CA", self.folder / "ca.crt",
                "-CAkey", self.folder / "ca.key", "-CAcreateserial", "-extfile", folder / "more", "-days", "2",
            )  # fmt: skip
        shutil.copy(self.folder / "ca.crt", folder / "ca.crt")
        return str(folder)

    @staticmethod
    def _make(key: Path, *words: object) -> None:
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, *words)
        key.chmod(0o600)


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("tls") / "one")


@pytest.fixture(scope="module")
def host1(signer: Signer) -> str:
    return signer.host("host1")


@pytest.fixture(scope="module")
def host2(signer: Signer) -> str:
    return signer.host("host2")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Signer(tmp_path_factory.mktemp("tls") / "another").host("host2")


@pytest.fixture(scope="module")
def expired(signer: Signer) -> str:
    return signer.host("old", expired=True)


class Door:
    """A desk's door that one host comes to at a time."""

    def __init__(self, tls: NoTls) -> None:
        self.said: list[str] = []
        listener = listen("127.0.0.1")
        self.address = listener.getsockname()
        self.desk = JoinListener(listener, SECRET, lambda: facts("host1"), 4, self.said.append, 4, tls)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._attend)
        self._thread.start()

    def _attend(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self.desk.selector.select(0.05):
                key.data()

    def join(self, tls: NoTls, host: str = "host2") -> Channel:
        sock = socket.create_connection(self.address, timeout=5)
        try:
            channel = Channel(sock, LIMITS, tls.cover(sock, LIMITS, is_first=False))
            introduce(channel, SECRET, facts(host))
        except BaseException:
            sock.close()
            raise
        return channel

    def first(self) -> Channel:
        """Its end of the connection to who came first."""
        while not self.desk.present:
            threading.Event().wait(0.01)
        return self.desk.present[0].channel

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.desk.close("")
        while any(thread.name == "manyhands-handshake" for thread in threading.enumerate()):
            time.sleep(0.01)


@pytest.fixture
def door() -> Iterator[Callable[[NoTls], Door]]:
    made: list[Door] = []

    def make(tls: NoTls) -> Door:
        made.append(Door(tls))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_concurrent_large_messages_are_encrypted_and_delivered(
    door: Callable[[NoTls], Door], host1: str, host2: str
) -> None:
    here = door(tls_here(host1))
    channel = here.join(tls_here(host2))
    there = here.first()
    frames: list[bytes] = []
    sendall = channel._cover.wrapped
    channel._cover.wrapped = lambda data: frames.append(sendall(data)) or frames[-1]  # type: ignore[method-assign]
    many, text = 20, "a loss of 0.5 " * (MAX_MESSAGE // 20)
    threads = [
        threading.Thread(target=channel.send, args=("output",), kwargs={"slot": n, "text": text, "stream": "stdout"})
        for n in range(many)
    ]
    for thread in threads:
        thread.start()
    heard: list[int] = []
    while len(heard) < many:
        there.send("beat")
        heard += [message["slot"] for message in there.receive() if message["kind"] == "output"]
    assert sorted(heard) == list(range(many))
    assert b"a loss of" not in b"".join(frames)
    assert sum(map(len, frames)) > many * len(text)
    for thread in threads:
        thread.join()
    channel.close()


@pytest.mark.parametrize(
    ("which", "ours", "theirs"),
    [
        (
            "stranger",
            "certificate of 127.0.0.1 must be valid now, and signed by .*ca.crt, but got .*certificate",
            "unknown ca",
        ),
        ("expired", "127.0.0.1 must accept this host's certificate, but got '.*expired", "certificate has expired"),
        ("plain", "refuses this host: this job uses TLS: .*--tls", "it does not use TLS"),
    ],
)
def test_tls_mismatch_is_reported_on_both_sides(
    door: Callable[[NoTls], Door], request: pytest.FixtureRequest, host1: str, which: str, ours: str, theirs: str
) -> None:
    here = door(tls_here(host1))
    given = NoTls() if which == "plain" else tls_here(request.getfixturevalue(which))
    with pytest.raises(JoinRefused, match=ours) as refused:
        here.join(given)
    assert refused.value.code == "tls"
    while not here.said:
        threading.Event().wait(0.01)
    assert theirs in here.said[0]
    assert not here.desk.present


def test_tls_client_on_a_plain_listener_is_rejected_immediately(door: Callable[[NoTls], Door], host2: str) -> None:
    here = door(NoTls())
    with pytest.raises(
        JoinRefused, match="must use TLS, or none of them, but got 127.0.0.1 without TLS. Start the first host"
    ):
        here.join(tls_here(host2))
    while not here.said:
        threading.Event().wait(0.01)
    assert "127.0.0.1 was not admitted: it uses TLS, but this job does not" in here.said[0]


def test_token_proof_is_bound_to_the_tls_connection(
    door: Callable[[NoTls], Door], signer: Signer, host1: str, host2: str
) -> None:
    """A man in the middle with a certificate of the same signer relays all messages."""
    here = door(tls_here(host1))
    between, joining = listen("127.0.0.1"), tls_here(host2)

    def pass_on() -> None:
        first = socket.create_connection(here.address)
        first_channel = Channel(first, LIMITS, joining.cover(first, LIMITS, is_first=False))
        victim, _ = between.accept()
        victim_channel = Channel(victim, LIMITS, tls_here(host2).cover(victim, LIMITS, is_first=True))
        for source, target, kind in (
            (first_channel, victim_channel, "hello"),
            (victim_channel, first_channel, "join"),
            (first_channel, victim_channel, "refused"),
        ):
            message = source.wait_for(kind, seconds=5)
            target.send(message.pop("kind"), **message)
        first_channel.close()
        victim_channel.close()

    thread = threading.Thread(target=pass_on)
    thread.start()
    sock = socket.create_connection(between.getsockname())
    channel = Channel(sock, LIMITS, joining.cover(sock, LIMITS, is_first=False))
    with pytest.raises(JoinRefused, match="its token is not that of this job") as refused:
        introduce(channel, SECRET, facts())
    assert refused.value.code == "token"
    thread.join()
    channel.close()
    between.close()


def test_invalid_tls_folder_raises_before_joining(
    signer: Signer, stranger: str, expired: str, host1: str, tmp_path: Path
) -> None:
    write_token(tmp_path / "token")
    join: Callable[[str], Any] = lambda tls: Join(  # noqa: E731
        address="127.0.0.1:7", hosts=2, token_file=str(tmp_path / "token"), tls=tls
    ).gather(None, 1.0, print)
    with pytest.raises(SettingsError, match="TLS needs a folder with tls.crt, tls.key and ca.crt.*No such file"):
        join(str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match="must be valid now.*certificate has expired. Create or renew it"):
        join(expired)
    mixed = tmp_path / "mixed"
    shutil.copytree(host1, mixed)
    shutil.copy(Path(stranger) / "ca.crt", mixed / "ca.crt")
    with pytest.raises(SettingsError, match="signed by ca.crt, but got unable to get local issuer"):
        join(str(mixed))
    shutil.copy(Path(stranger) / "tls.key", mixed / "tls.key")
    with pytest.raises(SettingsError, match="TLS needs.*key values mismatch"):
        join(str(mixed))
    with pytest.raises(SettingsError, match="for both sides.*purpose"):
        join(signer.host("served", use="serverAuth"))
    (mixed / "tls.key").chmod(0o640)
    with pytest.raises(SettingsError, match="key must be readable by its owner only.*Run chmod 600"):
        join(str(mixed))
    (mixed / "tls.key").chmod(0o600)
    (mixed / "ca.crt").write_text("nothing\n")
    with pytest.raises(SettingsError, match="in PEM"):
        join(str(mixed))


def test_self_signed_certificate_is_accepted(door: Callable[[NoTls], Door], tmp_path: Path) -> None:
    """As the documents show it: one command, and the folder is copied like the token."""
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
        "-subj", "/CN=manyhands", "-keyout", tmp_path / "tls.key", "-out", tmp_path / "tls.crt",
    )  # fmt: skip
    shutil.copy(tmp_path / "tls.crt", tmp_path / "ca.crt")
    tls_here(str(tmp_path)).check()
    channel = door(tls_here(str(tmp_path))).join(tls_here(str(tmp_path)))
    channel.close()


def test_corrupt_tls_records_and_plain_http_are_rejected(door: Callable[[NoTls], Door], host1: str, host2: str) -> None:
    here = door(tls_here(host1))
    channel = here.join(tls_here(host2))
    there = here.first()
    channel._socket.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(ProtocolError, match="TLS connection to .* is broken"):
        _read(there)
    channel.close()
    rude = socket.create_connection(here.address)
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert b"refused" in rude.recv(4096)
    rude.close()


def test_partial_tls_record_does_not_block_receive(host1: str, host2: str) -> None:
    with listen("127.0.0.1") as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    covers: list[Bare] = []
    first = threading.Thread(target=lambda: covers.append(JoinTls(Path(host1)).cover(theirs, LIMITS, is_first=True)))
    first.start()
    mine = JoinTls(Path(host2)).cover(ours, LIMITS, is_first=False)
    first.join()
    assert isinstance(mine, Tunnel)
    assert mine.binding == covers[0].binding
    here, there = Channel(ours, LIMITS, mine), Channel(theirs, LIMITS, covers[0])
    half = mine.wrapped(b"\0" * 1000)
    ours.sendall(half[:500])
    assert list(there.receive()) == []
    here.close()
    there.close()


def test_hosts_join_and_share_settings_over_tls(tmp_path: Path, host1: str, host2: str) -> None:
    """The whole way of joining: begin, what is agreed on, the measured ways."""
    write_token(tmp_path / "token")
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    gathered: list[JoinedHosts] = []

    def gather(tls: str) -> None:
        join = Join(address=f"127.0.0.1:{port}", hosts=2, token_file=str(tmp_path / "token"), tls=tls, on="cpu")
        gathered.append(join.gather(None, 20.0, lambda text: None))

    threads = [threading.Thread(target=gather, args=(tls,)) for tls in (host1, host2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, other = sorted(gathered, key=lambda hosts: not hosts.is_first)
    assert [device.host for device in first.devices] == [device.host for device in other.devices]
    assert first.agree(lambda: "runs/digits") == other.agree(lambda: "")
    first.close("enough")
    with pytest.raises(RunError, match="enough"):
        other.agree(lambda: "")
    other.close("")
