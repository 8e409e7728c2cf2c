"""Parts of parameter servers by themselves: layout, updates, tables, the ledger, the post, and the agenda."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
import zmq
from torch import nn
from torch.optim import Optimizer

import manyhands as mh
from manyhands.core import RunError, StrategyError, TaskError
from manyhands.strategies import served
from manyhands.strategies.embedding import first_rows
from manyhands.strategies.served import sockets as post
from manyhands.strategies.served.applied_pushes import Ledger
from manyhands.strategies.served.authentication import knock
from manyhands.strategies.served.layout import buffers_of
from manyhands.strategies.served.messages import Ask, Attached, Push, ServerState, Shaped, encode
from manyhands.strategies.served.shared_memory import SharedSlots
from manyhands.strategies.served.sockets import REFUSED
from manyhands.strategies.served.table import ServerTable
from manyhands.training.work_schedule import Agenda, FirstCome, Free, InOrder


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 1))


def test_servers_hold_even_shares_and_all_of_it() -> None:
    model = network()
    shares = served.cut(model, 3, whole=False)
    trained = [sum(slab.num_bytes for slab in share if slab.dtype == torch.float32) for share in shares]
    assert max(trained) - min(trained) <= 4
    seen: Counter[tuple[str, int]] = Counter()
    for share in shares:
        for slab in share:
            assert slab.length == max((piece.place.stop for piece in slab.pieces), default=0)
            for piece in slab.pieces:
                seen.update((piece.name, at) for at in range(piece.start, piece.stop))
    assert seen == Counter((name, at) for name, t in model.state_dict().items() for at in range(t.numel()))


def test_whole_tensors_go_where_least_is() -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100), nn.Linear(100, 100))
    shares = served.cut(model, 2, whole=True)
    assert all(
        p.start == 0 and p.stop == model.state_dict()[p.name].numel() for s in shares for b in s for p in b.pieces
    )
    loads = sorted(sum(slab.length for slab in share) for share in shares)
    assert loads[1] - loads[0] <= 60_000 - 30_000


def test_more_servers_than_a_network_is_worth_are_refused() -> None:
    with pytest.raises(
        StrategyError, match="2 tensors and 20 bytes is worth at most 2 servers, but got 3; pass servers=2"
    ):
        served.cut(nn.Linear(4, 1), 3, whole=False)


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), False),
        (lambda p: torch.optim.SGD(p, lr=0.0), False),
        (lambda p: torch.optim.AdamW(p), False),
        (lambda p: torch.optim.Adagrad(p), False),
        (lambda p: torch.optim.RMSprop(p, centered=True), False),
        (lambda p: torch.optim.Adafactor(p), True),
        (lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]), True),
    ],
)
def test_what_an_optimizer_looks_at_is_seen_by_trying_it(make: Callable[[Any], Optimizer], whole: bool) -> None:
    assert served.needs_whole(make(list(nn.Linear(4, 3).parameters()))) is whole


class NormOfAll(torch.optim.SGD):
    """Its update of one tensor depends on all others."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        super().step()


def test_an_optimizer_that_needs_all_tensors_at_once_is_refused() -> None:
    with pytest.raises(TaskError, match="updates every tensor by itself, but got NormOfAll"):
        served.needs_whole(NormOfAll(nn.Linear(4, 3).parameters(), lr=0.1))


def test_rows_are_made_when_they_are_asked_for() -> None:
    with served_tables():
        declared = mh.Embedding(1 << 40, 4, seed=5)
    assert declared.weight.numel() == 0
    table = ServerTable(declared, "sgd", {}, torch.float32)
    ids = torch.tensor([3, 1 << 39, 3])
    assert torch.equal(table.rows(ids), first_rows(ids.numpy(), 4, 5))
    assert len(table.state()[0]) == 2
    plain = mh.Embedding(100, 4, seed=5)
    assert torch.equal(plain.weight[3], table.rows(torch.tensor([3]))[0])
    values = first_rows(np.arange(20_000), 8, seed=1)
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1) < 0.01


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("SGD", {"momentum": 0.9}, r"with momentum=0.9, which moves all rows; put 0.weight into a parameter group"),
        ("SGD", {"weight_decay": 0.1}, r'with weight_decay=0.1.*optimizer="sgd"'),
        ("Adagrad", {"weight_decay": 0.1}, "with weight_decay=0.1"),
        ("Adam", {"amsgrad": True}, "with amsgrad=True"),
        ("Adagrad", {"maximize": True, "lr_decay": 0.1, "initial_accumulator_value": 0.2}, ""),
        ("SGD", {"maximize": True}, ""),
        ("AdamW", {"weight_decay": 0.3}, ""),
        ("Adam", {"weight_decay": 0.3, "maximize": True}, ""),
    ],
)
def test_rows_are_trained_as_torch_does_or_refused(kind: str, settings: dict[str, Any], says: str) -> None:
    """All rows are touched in every step, so even Adam must give the same."""
    plain = nn.Sequential(mh.Embedding(6, 4, seed=5)).double()
    with served_tables():
        declared = nn.Sequential(mh.Embedding(6, 4, seed=5)).double()
    make = getattr(torch.optim, kind)
    optimizer, theirs = (make(model.parameters(), lr=0.1, **settings) for model in (plain, declared))
    if says:
        with pytest.raises(TaskError, match=says):
            served.settings_of("0", declared[0], theirs, declared)
        return
    kind_here = served.kind_of(declared[0], theirs)
    table = ServerTable(declared[0], kind_here, served.settings_of("0", declared[0], theirs, declared), torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        plain[0].weight.grad = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        optimizer.step()
        table.update(torch.arange(6), plain[0].weight.grad, 0.1)
    torch.testing.assert_close(table.rows(torch.arange(6)), plain[0].weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_workers", [1, 20])
def test_statistics_of_many_asynchronous_workers_stay_near_the_truth(num_workers: int) -> None:
    layer = nn.BatchNorm1d(4)
    share = served.cut(layer, 1, whole=False)[0]
    shard = served.ServerShard(0, share, layer, torch.optim.SGD(layer.parameters(), lr=0.0))
    first = layer.state_dict()
    where = {piece.name: (index, piece.place) for index, slab in enumerate(share) for piece in slab.pieces}
    for name, (index, place) in where.items():
        shard.values[index][place] = first[name].flatten()
    pulled = [(0, [values.clone() for values in shard.values]) for _ in range(num_workers)]
    generator, seen = torch.Generator().manual_seed(0), []
    for ticket in range(400):
        version, old = pulled[ticket % num_workers]
        mine = nn.BatchNorm1d(4)
        for name, (index, place) in where.items():
            mine.state_dict()[name].view(-1).copy_(old[index][place])
        mine(4 * torch.randn(64, 4, generator=generator))
        added = [torch.zeros_like(values) for values in shard.values]
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            index, place = where[name]
            added[index][place] = mine.state_dict()[name].view(-1) - old[index][place]
        shard.apply_now(Push(0, ticket, version, False, [], 1.0, [0.0]), added, [], False)
        pulled[ticket % num_workers] = shard.version, [values.clone() for values in shard.values]
        index, place = where["running_var"]
        seen.append(shard.values[index][place].clone())
    last = torch.stack(seen[-100:])
    assert 12 < float(last.min()) < float(last.max()) < 21
    index, place = where["num_batches_tracked"]
    assert int(shard.values[index][place]) == 400


def served_tables() -> Any:
    from manyhands.strategies import declaring

    return declaring()


def test_a_push_is_entered_once() -> None:
    ledger = Ledger()
    ledger.add(1)
    assert 1 in ledger
    assert 0 not in ledger
    with pytest.raises(AssertionError, match="push 1 was applied before"):
        ledger.add(1)


# -- the post -------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[served.MessageListener]:
    context = served.new_context()
    listener = served.MessageListener(context, b"right" * 8, 60.0)
    done = threading.Event()
    heard: list[Any] = []
    peers: list[bytes] = []

    def serve() -> None:
        while not done.is_set():
            if listener.socket.poll(20):
                got = listener.receive()
                if got is not None:
                    heard.append(got[1])
                    peers.append(got[0])
                    if isinstance(got[1], Ask):
                        listener.send(got[0], served.EndOfWork())

    thread = threading.Thread(target=serve)
    thread.start()
    listener.heard, listener.peers = heard, peers  # type: ignore[attr-defined]
    yield listener
    done.set()
    thread.join()
    listener.close()
    context.term()


def test_only_who_knows_the_token_is_heard(listener: served.MessageListener) -> None:
    assert listener.address.startswith("tcp://127.0.0.1:")
    context = served.new_context()
    with pytest.raises(served.LinkLost, match="does not know this job's token"):
        served.Caller(context, b"wrong" * 8, listener.address, 5.0)
    caller = served.Caller(context, b"right" * 8, listener.address, 5.0)
    caller.send(Ask(1))
    assert isinstance(caller.expect(5.0)[0], served.EndOfWork)
    caller.close()
    context.term()
    assert [type(message).__name__ for message in listener.heard] == ["Ask"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["no name", "a wrong password", "a name that was used", "another's address"])
def test_strangers_are_not_heard_and_take_no_memory(listener: served.MessageListener, how: str) -> None:
    context, token = served.new_context(), b"right" * 8
    raw = context.socket(zmq.DEALER)
    if how == "a wrong password":
        knock(raw, b"wrong" * 8)
    elif how != "no name":
        caller = served.Caller(context, token, listener.address, 5.0)
        caller.send(Ask(1))
        caller.expect(5.0)
        if how == "a name that was used":
            raw.plain_username, raw.plain_password = caller.socket.plain_username, caller.socket.plain_password
        else:
            caller.close()
            raw.routing_id = listener.peers[0]  # type: ignore[attr-defined]
    monitor = raw.get_monitor_socket(REFUSED | zmq.EVENT_DISCONNECTED)
    before, blob = psutil.Process().memory_info().rss, bytes(8 << 20)
    listener.heard.clear()  # type: ignore[attr-defined]
    raw.connect(listener.address)
    with contextlib.suppress(zmq.Again):
        for part in (encode(Ask(1)), *[blob] * 50):
            raw.send(part, zmq.NOBLOCK, copy=False)
    assert monitor.poll(5000)
    assert not raw.poll(200)
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert listener.heard == []  # type: ignore[attr-defined]
    raw.disable_monitor()
    monitor.close(linger=0)
    raw.close(linger=0)
    if how == "a name that was used":
        caller.close()
    context.term()


def test_nonsense_of_a_member_is_not_heard(listener: served.MessageListener) -> None:
    context = served.new_context()
    caller = served.Caller(context, b"right" * 8, listener.address, 5.0)
    for frames in ([b"\x80nonsense"], [b"x" * (2 << 20)], [b""]):
        caller.socket.send_multipart(frames)
    caller.send(Ask(2))
    assert isinstance(caller.expect(5.0)[0], served.EndOfWork)
    caller.close()
    context.term()
    assert listener.heard == [Ask(2)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 1000])
def test_tensors_of_any_length_travel_in_parts(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(post, "MAX_FRAME", 64)
    sent = [bytes(range(7)), bytes(i % 251 for i in range(length)), b"", b"last"]
    parts = post._cut(sent)
    assert max(len(part) for part in parts) <= 64
    assert [bytes(frame) for frame in post._joined(parts)] == sent


def test_a_message_that_is_too_long_is_an_error_where_it_is_made() -> None:
    slots = [{"step": 1.0, "exp_avg": Shaped([3, 3, 256], "float32")}] * 400_000
    with pytest.raises(RunError, match="a ServerState of .* bytes is too long, .* use more servers"):
        encode(ServerState(1, slots, [], 0, 0))


def test_shared_memory_is_taken_only_if_both_ends_see_it() -> None:
    share = served.cut(network(), 2, whole=False)[0]
    ours = SharedSlots(share)
    theirs = SharedSlots.attached(share, ours.offer(0))
    assert theirs is not None
    ours.pushed[0].fill_(2.0)
    theirs.pulled[0].fill_(3.0)
    assert float(theirs.pushed[0].sum()) == 2 * len(buffers_of(share)[0])
    assert float(ours.pulled[0][0]) == 3.0
    offer = ours.offer(0)
    assert SharedSlots.attached(share, msgspec.structs.replace(offer, cookie=b"other" * 13)) is None
    assert SharedSlots.attached(share, msgspec.structs.replace(offer, fd=9999)) is None
    theirs.close()
    ours.close()


@pytest.fixture
def server(listener: served.MessageListener) -> Iterator[served.ParameterShardServer]:
    """A server that serves in a thread; its chief says nothing."""
    model = network()
    shard = served.ServerShard(
        0, served.cut(model, 1, whole=False)[0], model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    server = served.ParameterShardServer(shard, mh.ParameterServer(workers=1), listener.address, b"right" * 8, 8.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server._is_over = True
    context = served.new_context()
    with contextlib.suppress(served.LinkLost):
        served.Caller(context, b"right" * 8, server._listener.address, 8.0).close()
    context.term()
    thread.join()


def test_a_server_keeps_no_memory_of_workers_that_are_gone(server: served.ParameterShardServer) -> None:
    context = served.new_context()
    for worker in (0, 0, 1, 0):
        caller = served.Caller(context, b"right" * 8, server._listener.address, 8.0)
        ours = SharedSlots(server.shard.share)
        caller.send(ours.offer(worker))
        assert caller.expect(8.0)[0] == Attached(True)
        ours.close()
        caller.close()
    context.term()
    assert sorted(server._slots) == [0, 1]
    server._drop(0)
    server._begin_term(7)
    assert not server._slots


def test_who_waits_for_a_server_that_is_gone_hears_the_news() -> None:
    model = network()
    client = served.ParameterClient(model, served.cut(model, 1, whole=False), -1, None, b"right" * 8, 8.0)

    def news() -> None:
        raise KeyError("the server was lost")

    client.on_wait = news
    with pytest.raises(KeyError, match="the server was lost"):
        client.connect(served.ServerList(1, ["tcp://127.0.0.1:9"]))
    client.close()


# -- the agenda -----------------------------------------------------------------------------------------------------


def windows(num_samples: int, batch_size: int) -> Iterator[Any]:
    return iter([np.arange(s, min(s + batch_size, num_samples)) for s in range(0, num_samples, batch_size)])


AGENDAS: dict[str, Callable[[Iterator[Any]], Agenda]] = {
    "in order": lambda w: InOrder(w, 0, 0, 3, 0),
    "bounded": lambda w: InOrder(w, 0, 0, 3, 2),
    "first come": lambda w: FirstCome(w, 0, 0, 3, 1),
    "free": lambda w: Free(w, 0, 0, 1),
}


@pytest.mark.parametrize("kind", AGENDAS)
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_in_exactly_one_step(kind: str, seed: int) -> None:
    """Workers of any speed that die now and then, and a border in the middle that everything must respect."""
    draw = random.Random(seed)
    agenda = AGENDAS[kind](windows(50, 8))
    steps: list[list[int]] = []
    for limit in (3, 7):
        while len(steps) < limit:
            while len(agenda.out) < 4 and (ticket := agenda.take(limit)) is not None:
                assert ticket.step <= agenda.step + (2 if kind == "bounded" else 0) or kind == "free"
            number = draw.choice(list(agenda.out))
            if draw.random() < 0.2:
                agenda.give_back(number)
            else:
                agenda.deliver(number)
            while (closed := agenda.complete()) is not None:
                steps.append([int(i) for ticket in closed for i in ticket.ids])
        if kind in ("first come", "free") and limit == 3:
            for number in list(agenda.out):
                agenda.give_back(number)
        if limit == 3 and kind != "bounded":
            assert sorted(i for step in steps for i in step) == list(range(24))
    assert len(steps) == 7
    assert sorted(i for step in steps for i in step) == list(range(50))
    if kind in ("in order", "bounded"):
        assert [sorted(step) for step in steps] == [w.tolist() for w in windows(50, 8)]


def test_the_slowest_is_not_waited_for_and_its_samples_come_again() -> None:
    agenda = FirstCome(windows(12, 6), 0, 0, 2, 1)
    first, second, slow = (agenda.take(2) for _ in range(3))
    assert first is not None
    assert second is not None
    assert slow is not None
    assert agenda.take(2) is None
    agenda.deliver(first.number)
    assert agenda.complete() is None
    agenda.deliver(second.number)
    assert agenda.complete() == [first, second]
    assert agenda.deliver(slow.number) is None
    assert agenda.late == 1
    again = agenda.take(2)
    assert again is slow
    assert again.step == 1


def test_a_lost_link_is_an_error_of_the_run() -> None:
    assert issubclass(served.LinkLost, RunError)
