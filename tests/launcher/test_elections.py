"""Elections by a real etcd: one host at a time, terms that grow, leases that end, entries that are signed."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyhands.core import RunError, SettingsError
from manyhands.distributed.network import listen
from manyhands.launcher import Join, write_token
from manyhands.launcher.elections import Election, ElectionUnreachable, Leader, election_at
from manyhands.launcher.joining.token import JoinToken
from tests.etcd import Etcd, until_it_answers

SECRET = JoinToken(b"a" * 40)
ETCD = "manyhands.launcher.elections.etcd"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    one = Etcd(tmp_path_factory.mktemp("etcd") / "data", "127.0.0.1", port)
    until_it_answers(election_at(f"etcd://{one.endpoint}", SECRET))
    yield one
    one.close()


@pytest.fixture
def elections(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Election]]:
    monkeypatch.setattr(f"{ETCD}.LEASE_SECONDS", 3)
    monkeypatch.setattr(f"{ETCD}.RENEW_SECONDS", 0.3)
    made: list[Election] = []

    def make(token: JoinToken = SECRET) -> Election:
        made.append(election_at(f"etcd://{etcd.endpoint}", token))
        return made[-1]

    yield make
    for one in made:
        one.resign(is_over=False)


def candidate(host: str) -> Leader:
    return Leader(host, "10.0.0.1", 7777)


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_one_host_is_elected_and_the_next_one_has_a_higher_term(elections: Callable[..., Election]) -> None:
    first, second = elections(), elections()
    assert first.leader() is None
    elected = first.campaign(candidate("host1"))
    assert elected is not None
    assert second.campaign(candidate("host2")) is None
    assert (first.holds, second.holds) == (True, False)
    assert second.leader() == elected
    assert first.renew()
    assert not second.is_over(elected.term)
    first.resign(is_over=False)
    assert not first.holds
    assert not first.renew()
    following = second.campaign(candidate("host2"))
    assert following is not None
    assert following.term > elected.term
    second.resign(is_over=True)
    assert second.leader() is None
    assert first.is_over(elected.term)
    assert not first.is_over(following.term + 1000)


def test_lease_that_is_not_renewed_ends_before_another_host_is_elected(
    elections: Callable[..., Election], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = elections(), elections()
    assert first.campaign(candidate("host1")) is not None
    monkeypatch.setattr(first, "_endpoints", [("127.0.0.1", 1)])

    def is_elected() -> bool:
        holds = first.holds
        elected = second.campaign(candidate("host2")) is not None
        assert not (holds and elected)
        return elected

    until(is_elected)
    assert not first.holds
    with pytest.raises(ElectionUnreachable, match=r"etcd does not answer \(127.0.0.1:1: .*refused"):
        first.leader()


def test_lease_is_renewed_for_as_long_as_it_is_held(elections: Callable[..., Election]) -> None:
    first, second = elections(), elections()
    assert first.campaign(candidate("host1")) is not None
    until_time = time.monotonic() + 4.5
    until(lambda: time.monotonic() > until_time)
    assert first.holds
    assert second.leader() is not None


def test_entry_of_another_token_is_refused(elections: Callable[..., Election], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without the token cannot send hosts to an address of its own."""
    forger, reader = elections(JoinToken(b"b" * 40)), elections()
    monkeypatch.setattr(forger, "_key", reader._key)  # type: ignore[attr-defined]
    assert forger.campaign(candidate("host9")) is not None
    with pytest.raises(RunError, match="not signed with its token"):
        reader.leader()


def test_answers_that_are_no_json_objects_are_no_leader(
    elections: Callable[..., Election], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = elections()
    for value in (b"[1]", b"{", b'{"host": 1}', b"\xff", json.dumps({"host": "a", "port": "x"}).encode()):
        entry = {"create_revision": "1", "value": base64.b64encode(value).decode()}
        monkeypatch.setattr(reader, "_call", lambda path, entry=entry, **values: {"kvs": [entry]})
        with pytest.raises(RunError, match="not signed"):
            reader.leader()


def test_address_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(SettingsError, match="etcd://HOST:PORT"):
        election_at("zookeeper://host1:2181", SECRET)
    with pytest.raises(SettingsError, match="HOST:PORT"):
        election_at("etcd://host1", SECRET)


def test_coordination_needs_a_token_that_does_not_expire(tmp_path: Path) -> None:
    write_token(tmp_path / "token", hours=1)
    token = str(tmp_path / "token")
    join = Join(address="127.0.0.1:7777", hosts=2, token_file=token, coordination="etcd://127.0.0.1:1", on="cpu")
    with pytest.raises(SettingsError, match="must not expire"):
        join.gather(None, 5, print)


def test_host_reports_that_etcd_does_not_answer(tmp_path: Path) -> None:
    write_token(tmp_path / "token")
    token = str(tmp_path / "token")
    join = Join(address="127.0.0.1:7777", hosts=2, token_file=token, coordination="etcd://127.0.0.1:1", on="cpu")
    with pytest.raises(ElectionUnreachable, match=r"etcd does not answer \(127.0.0.1:1: "):
        join.gather(None, 0.5, print)
