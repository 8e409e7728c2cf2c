"""Units of parameter servers: layout, updates, tables, pushes, sockets, and the schedule."""

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
from manyhands.parameter_server import sockets
from manyhands.parameter_server.authentication import set_credentials
from manyhands.parameter_server.client import ParameterClient
from manyhands.parameter_server.layout import buffers_of, cut
from manyhands.parameter_server.messages import (
    Attached,
    EndOfWork,
    Push,
    ServerList,
    ServerState,
    SlotTensor,
    WorkRequest,
    encode,
)
from manyhands.parameter_server.server import ParameterShardServer
from manyhands.parameter_server.shard import ServerShard
from manyhands.parameter_server.shared_memory import SharedSlots
from manyhands.parameter_server.sockets import REFUSED, Caller, ConnectionLost, MessageListener, new_context
from manyhands.parameter_server.table import ServerTable, kind_of, settings_of
from manyhands.parameter_server.update import AppliedPushes, needs_whole
from manyhands.parameter_server.work_schedule import (
    AsynchronousSchedule,
    FirstArrivalSchedule,
    InOrderSchedule,
    WorkSchedule,
)
from manyhands.strategies.embedding import first_rows


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 1))


def test_partition_gives_servers_even_shares_that_cover_all_tensors() -> None:
    model = network()
    shares = cut(model, 3, whole=False)
    trained = [
        sum(flat_buffer.num_bytes for flat_buffer in share if flat_buffer.dtype == torch.float32) for share in shares
    ]
    assert max(trained) - min(trained) <= 4
    seen: Counter[tuple[str, int]] = Counter()
    for share in shares:
        for flat_buffer in share:
            assert flat_buffer.length == max((piece.place.stop for piece in flat_buffer.pieces), default=0)
            for piece in flat_buffer.pieces:
                seen.update((piece.name, at) for at in range(piece.start, piece.stop))
    assert seen == Counter((name, at) for name, t in model.state_dict().items() for at in range(t.numel()))


def test_whole_tensors_are_assigned_to_least_loaded_server() -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100), nn.Linear(100, 100))
    shares = cut(model, 2, whole=True)
    assert all(
        p.start == 0 and p.stop == model.state_dict()[p.name].numel() for s in shares for b in s for p in b.pieces
    )
    loads = sorted(sum(flat_buffer.length for flat_buffer in share) for share in shares)
    assert loads[1] - loads[0] <= 60_000 - 30_000


def test_more_servers_than_the_network_can_use_are_rejected() -> None:
    with pytest.raises(
        StrategyError, match="2 tensors and 20 bytes can be split over at most 2 servers, but got 3. Pass servers=2"
    ):
        cut(nn.Linear(4, 1), 3, whole=False)


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
def test_needs_whole_detects_optimizers_that_need_unsplit_tensors(
    make: Callable[[Any], Optimizer], whole: bool
) -> None:
    assert needs_whole(make(list(nn.Linear(4, 3).parameters()))) is whole


class NormOfAll(torch.optim.SGD):
    """Its update of one tensor depends on all others."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        super().step()


def test_an_optimizer_that_needs_all_tensors_at_once_is_refused() -> None:
    with pytest.raises(TaskError, match="update every tensor independently, but got NormOfAll"):
        needs_whole(NormOfAll(nn.Linear(4, 3).parameters(), lr=0.1))


def test_embedding_rows_are_initialized_on_first_access() -> None:
    with served_tables():
        declared = mh.strategies.Embedding(1 << 40, 4, seed=5)
    assert declared.weight.numel() == 0
    table = ServerTable(declared, "sgd", {}, torch.float32)
    ids = torch.tensor([3, 1 << 39, 3])
    assert torch.equal(table.rows(ids), first_rows(ids.numpy(), 4, 5))
    assert len(table.state()[0]) == 2
    plain = mh.strategies.Embedding(100, 4, seed=5)
    assert torch.equal(plain.weight[3], table.rows(torch.tensor([3]))[0])
    values = first_rows(np.arange(20_000), 8, seed=1)
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1) < 0.01


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("SGD", {"momentum": 0.9}, r"with momentum=0.9, which changes all rows\. Put 0.weight into a parameter group"),
        ("SGD", {"weight_decay": 0.1}, r'with weight_decay=0.1.*optimizer="sgd"'),
        ("Adagrad", {"weight_decay": 0.1}, "with weight_decay=0.1"),
        ("Adam", {"amsgrad": True}, "with amsgrad=True"),
        ("Adagrad", {"maximize": True, "lr_decay": 0.1, "initial_accumulator_value": 0.2}, ""),
        ("SGD", {"maximize": True}, ""),
        ("AdamW", {"weight_decay": 0.3}, ""),
        ("Adam", {"weight_decay": 0.3, "maximize": True}, ""),
    ],
)
def test_server_table_update_equals_torch_optimizer_or_is_rejected(
    kind: str, settings: dict[str, Any], says: str
) -> None:
    """All rows are touched in every step, so even Adam must give the same."""
    plain = nn.Sequential(mh.strategies.Embedding(6, 4, seed=5)).double()
    with served_tables():
        declared = nn.Sequential(mh.strategies.Embedding(6, 4, seed=5)).double()
    make = getattr(torch.optim, kind)
    optimizer, theirs = (make(model.parameters(), lr=0.1, **settings) for model in (plain, declared))
    if says:
        with pytest.raises(TaskError, match=says):
            settings_of("0", declared[0], theirs, declared)
        return
    kind_here = kind_of(declared[0], theirs)
    table = ServerTable(declared[0], kind_here, settings_of("0", declared[0], theirs, declared), torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        plain[0].weight.grad = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        optimizer.step()
        table.update(torch.arange(6), plain[0].weight.grad, 0.1)
    torch.testing.assert_close(table.rows(torch.arange(6)), plain[0].weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_workers", [1, 20])
def test_asynchronous_batch_statistics_stay_near_true_variance(num_workers: int) -> None:
    layer = nn.BatchNorm1d(4)
    share = cut(layer, 1, whole=False)[0]
    shard = ServerShard(0, share, layer, torch.optim.SGD(layer.parameters(), lr=0.0))
    first = layer.state_dict()
    where = {
        piece.name: (index, piece.place) for index, flat_buffer in enumerate(share) for piece in flat_buffer.pieces
    }
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


def test_applying_the_same_push_twice_raises() -> None:
    pushes = AppliedPushes()
    pushes.add(1)
    assert 1 in pushes
    assert 0 not in pushes
    with pytest.raises(AssertionError, match="push 1 was applied before"):
        pushes.add(1)


# -- the post -------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[MessageListener]:
    context = new_context()
    listener = MessageListener(context, b"right" * 8, 60.0)
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
                    if isinstance(got[1], WorkRequest):
                        listener.send(got[0], EndOfWork())

    thread = threading.Thread(target=serve)
    thread.start()
    listener.heard, listener.peers = heard, peers  # type: ignore[attr-defined]
    yield listener
    done.set()
    thread.join()
    listener.close()
    context.term()


def test_listener_accepts_only_callers_with_the_job_token(listener: MessageListener) -> None:
    assert listener.address.startswith("tcp://127.0.0.1:")
    context = new_context()
    with pytest.raises(ConnectionLost, match="does not have this job's token"):
        Caller(context, b"wrong" * 8, listener.address, 5.0)
    caller = Caller(context, b"right" * 8, listener.address, 5.0)
    caller.send(WorkRequest(1))
    assert isinstance(caller.expect(5.0)[0], EndOfWork)
    caller.close()
    context.term()
    assert [type(message).__name__ for message in listener.heard] == ["WorkRequest"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["no name", "a wrong password", "a name that was used", "another's address"])
def test_unauthenticated_connections_are_rejected_without_using_memory(listener: MessageListener, how: str) -> None:
    context, token = new_context(), b"right" * 8
    raw = context.socket(zmq.DEALER)
    if how == "a wrong password":
        set_credentials(raw, b"wrong" * 8)
    elif how != "no name":
        caller = Caller(context, token, listener.address, 5.0)
        caller.send(WorkRequest(1))
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
        for part in (encode(WorkRequest(1)), *[blob] * 50):
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


def test_malformed_messages_of_authenticated_peer_are_ignored(listener: MessageListener) -> None:
    context = new_context()
    caller = Caller(context, b"right" * 8, listener.address, 5.0)
    for frames in ([b"\x80nonsense"], [b"x" * (2 << 20)], [b""]):
        caller.socket.send_multipart(frames)
    caller.send(WorkRequest(2))
    assert isinstance(caller.expect(5.0)[0], EndOfWork)
    caller.close()
    context.term()
    assert listener.heard == [WorkRequest(2)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 1000])
def test_messages_are_split_into_frames_and_joined_again(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(sockets, "MAX_FRAME", 64)
    sent = [bytes(range(7)), bytes(i % 251 for i in range(length)), b"", b"last"]
    parts = sockets._cut(sent)
    assert max(len(part) for part in parts) <= 64
    assert [bytes(frame) for frame in sockets._joined(parts)] == sent


def test_encoding_an_oversized_message_raises_on_the_sender() -> None:
    slots = [{"step": 1.0, "exp_avg": SlotTensor([3, 3, 256], "float32")}] * 400_000
    with pytest.raises(RunError, match="message ServerState must have at most .* bytes, but got .* use more servers"):
        encode(ServerState(1, slots, [], 0, 0))


def test_shared_memory_is_attached_only_if_both_processes_see_it() -> None:
    share = cut(network(), 2, whole=False)[0]
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
def server(listener: MessageListener) -> Iterator[ParameterShardServer]:
    """A server that serves in a thread; its chief says nothing."""
    model = network()
    shard = ServerShard(0, cut(model, 1, whole=False)[0], model, torch.optim.SGD(model.parameters(), lr=0.1))
    server = ParameterShardServer(shard, mh.ParameterServer(workers=1), listener.address, b"right" * 8, 8.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server._is_over = True
    context = new_context()
    with contextlib.suppress(ConnectionLost):
        Caller(context, b"right" * 8, server._listener.address, 8.0).close()
    context.term()
    thread.join()


def test_server_releases_shared_memory_of_disconnected_workers(server: ParameterShardServer) -> None:
    context = new_context()
    for worker in (0, 0, 1, 0):
        caller = Caller(context, b"right" * 8, server._listener.address, 8.0)
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


def test_client_waiting_for_failed_server_runs_on_wait_callback() -> None:
    model = network()
    client = ParameterClient(model, cut(model, 1, whole=False), -1, None, b"right" * 8, 8.0)

    def news() -> None:
        raise KeyError("the server was lost")

    client.on_wait = news
    with pytest.raises(KeyError, match="the server was lost"):
        client.connect(ServerList(1, ["tcp://127.0.0.1:9"]))
    client.close()


# -- the schedule -----------------------------------------------------------------------------------------------------


def windows(num_samples: int, batch_size: int) -> Iterator[Any]:
    return iter([np.arange(s, min(s + batch_size, num_samples)) for s in range(0, num_samples, batch_size)])


SCHEDULES: dict[str, Callable[[Iterator[Any]], WorkSchedule]] = {
    "in order": lambda w: InOrderSchedule(w, 0, 0, 3, 0),
    "bounded": lambda w: InOrderSchedule(w, 0, 0, 3, 2),
    "first come": lambda w: FirstArrivalSchedule(w, 0, 0, 3, 1),
    "free": lambda w: AsynchronousSchedule(w, 0, 0, 1),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_in_exactly_one_step(kind: str, seed: int) -> None:
    """Workers of any speed that die now and then, and a border in the middle that everything must respect."""
    draw = random.Random(seed)
    schedule = SCHEDULES[kind](windows(50, 8))
    steps: list[list[int]] = []
    for limit in (3, 7):
        while len(steps) < limit:
            while len(schedule.out) < 4 and (ticket := schedule.take(limit)) is not None:
                assert ticket.step <= schedule.step + (2 if kind == "bounded" else 0) or kind == "free"
            number = draw.choice(list(schedule.out))
            if draw.random() < 0.2:
                schedule.give_back(number)
            else:
                schedule.deliver(number)
            while (closed := schedule.complete()) is not None:
                steps.append([int(i) for ticket in closed for i in ticket.ids])
        if kind in ("first come", "free") and limit == 3:
            for number in list(schedule.out):
                schedule.give_back(number)
        if limit == 3 and kind != "bounded":
            assert sorted(i for step in steps for i in step) == list(range(24))
    assert len(steps) == 7
    assert sorted(i for step in steps for i in step) == list(range(50))
    if kind in ("in order", "bounded"):
        assert [sorted(step) for step in steps] == [w.tolist() for w in windows(50, 8)]


def test_first_arrival_schedule_reissues_samples_of_straggler() -> None:
    schedule = FirstArrivalSchedule(windows(12, 6), 0, 0, 2, 1)
    first, second, slow = (schedule.take(2) for _ in range(3))
    assert first is not None
    assert second is not None
    assert slow is not None
    assert schedule.take(2) is None
    schedule.deliver(first.number)
    assert schedule.complete() is None
    schedule.deliver(second.number)
    assert schedule.complete() == [first, second]
    assert schedule.deliver(slow.number) is None
    assert schedule.late == 1
    again = schedule.take(2)
    assert again is slow
    assert again.step == 1


def test_connection_lost_is_a_run_error() -> None:
    assert issubclass(ConnectionLost, RunError)
