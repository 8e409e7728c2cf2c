"""The batcher by itself: replicas are scripted, time stands still unless it is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import RequestRefused, SettingsError, Signature, TensorSpec
from manyhands.serving.batch_timing import BatchTimeModel
from manyhands.serving.batcher import ATTEMPTS, Batcher, BatchSettings, RequestBatch, Ticket
from manyhands.serving.slots import FREE_BYTES, SlotLayout


class Desk:
    """A batcher with a hand on its clock and its loop."""

    def __init__(self, num_workers: int = 1, **values: Any) -> None:
        self.time = 0.0
        self.tasks: list[Callable[[], None]] = []
        self.batcher = Batcher(BatchSettings(**values), ["x"], self.tasks.append, lambda: self.time)
        self.workers = [ScriptedWorker() for _ in range(num_workers)]
        self.batcher.workers.extend(self.workers)
        self.done: list[Ticket] = []

    def submit(self, values: list[float] | np.ndarray, *, within: float = 10.0, priority: int = 0) -> Ticket:
        rows = np.asarray(values, np.float32).reshape(len(values), -1)
        deadline = self.time + within
        return self.batcher.submit({"x": rows}, len(rows), deadline=deadline, priority=priority, done=self.done.append)

    def turn(self) -> None:
        """One turn of the loop."""
        tasks, self.tasks[:] = list(self.tasks), []
        for task in tasks:
            task()

    def compute(self, worker: int = 0) -> RequestBatch:
        """A replica finishes its oldest batch: each row is answered with twice itself."""
        view = self.workers[worker].written()
        batch = self.workers[worker].take()
        self.batcher.answered(batch, {"y": 2 * view}, 0.001)
        view[:] = np.nan  # the memory is used again
        self.turn()
        return batch


class ScriptedWorker:
    def __init__(self) -> None:
        self.batches: list[RequestBatch] = []
        self.views: list[np.ndarray] = []
        self.writes: list[Callable[[], None]] = []

    @property
    def num_free(self) -> int:
        return 2 - len(self.batches)

    @property
    def num_rows(self) -> int:
        return sum(batch.rows for batch in self.batches)

    def send(self, batch: RequestBatch) -> None:
        assert self.num_free
        self.batches.append(batch)
        self.views.append(np.empty((batch.size, *batch.shapes[0]), np.float32))
        self.writes.append(batch.writing({"x": self.views[-1]}))

    def written(self) -> np.ndarray:
        """The oldest batch; it is written late, as on a thread of its own."""
        self.writes[0]()
        return self.views[0]

    def take(self) -> RequestBatch:
        self.views.pop(0)
        self.writes.pop(0)
        return self.batches.pop(0)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_answer_goes_only_to_its_asker(data: st.DataObject) -> None:
    """Whatever comes, in whatever order replicas answer, fail, die or askers leave."""
    max_rows = data.draw(st.integers(1, 8))
    sizes = data.draw(st.sampled_from([(), tuple(sorted({1, max_rows}))]))
    desk = Desk(data.draw(st.integers(1, 3)), max_rows=max_rows, sizes=sizes, queue_rows=10_000)
    asked: dict[int, np.ndarray] = {}
    gone: set[int] = set()
    tickets: list[Ticket] = []
    value = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(["ask", "ask", "turn", "compute", "fail", "die", "leave"]))
        busy = [index for index, worker in enumerate(desk.workers) if worker.batches]
        if act == "ask":
            rows, width = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([1, 1, 1, 3]))
            values = np.arange(value, value + rows * width, dtype=np.float32).reshape(rows, width)
            value += rows * width
            ticket = desk.submit(values, within=1e9, priority=data.draw(st.sampled_from([0, 0, 1])))
            asked[id(ticket)] = values
            tickets.append(ticket)
        elif act == "leave" and tickets:
            ticket = data.draw(st.sampled_from(tickets))
            if not ticket.over:
                gone.add(id(ticket))
            desk.batcher.cancel(ticket)
        elif act == "turn":
            desk.turn()
        elif busy:
            worker = data.draw(st.sampled_from(busy))
            if act == "compute":
                desk.compute(worker)
            elif act == "fail":
                desk.batcher.failed(desk.workers[worker].take(), "it raised")
            else:
                desk.batcher.lost(desk.workers[worker].take())
    for _ in range(10_000):
        desk.turn()
        busy = [index for index, worker in enumerate(desk.workers) if worker.batches]
        if not busy and not desk.tasks:
            break
        for worker in busy:
            desk.compute(worker)
    assert desk.batcher.num_queued == desk.batcher.num_live == 0
    assert len({id(ticket) for ticket in desk.done}) == len(desk.done)
    assert {id(ticket) for ticket in desk.done} == {id(ticket) for ticket in tickets} - gone
    for ticket in desk.done:
        if ticket.refusal is None:
            np.testing.assert_array_equal(ticket.outputs["y"], 2 * asked[id(ticket)])
        else:
            assert ticket.refusal.code == "INTERNAL"


def test_what_arrives_together_is_computed_together_and_an_idle_replica_waits_for_nothing() -> None:
    desk = Desk()
    desk.submit([1.0])
    desk.submit([2.0])
    desk.turn()
    assert [batch.rows for batch in desk.workers[0].batches] == [2]


def test_a_big_request_is_computed_in_parts_and_small_ones_are_never_cut() -> None:
    desk = Desk(max_rows=4)
    big, small = desk.submit(list(range(10))), desk.submit([100, 101])
    desk.turn()
    sizes = []
    while desk.workers[0].batches:
        sizes.append(desk.compute().rows)
    assert sizes == [4, 4, 4]
    np.testing.assert_array_equal(big.outputs["y"][:, 0], 2 * np.arange(10))
    np.testing.assert_array_equal(small.outputs["y"][:, 0], [200, 202])


def test_batches_are_padded_with_a_row_that_exists() -> None:
    desk = Desk(max_rows=8, sizes=(1, 4, 8))
    desk.submit([5, 6, 7])
    desk.turn()
    assert desk.workers[0].written()[:, 0].tolist() == [5, 6, 7, 7]


def test_rows_of_another_shape_are_another_batch() -> None:
    desk = Desk()
    desk.submit(np.ones((1, 2)))
    desk.submit(np.ones((1, 3)))
    desk.submit(np.ones((1, 2)))
    desk.turn()
    assert [(batch.rows, batch.shapes) for batch in desk.workers[0].batches] == [(2, ((2,),)), (1, ((3,),))]


def test_what_is_too_late_or_given_up_is_never_computed() -> None:
    desk = Desk(max_rows=1)
    for value in range(5):
        desk.submit([value], within=100)
    desk.turn()  # two slots are taken
    late, gone = desk.submit([10], within=1), desk.submit([11])
    desk.batcher.cancel(gone)
    desk.time = 2.0
    desk.batcher.expire()
    assert late.refusal is not None
    assert late.refusal.code == "DEADLINE_EXCEEDED"
    computed = []
    while desk.workers[0].batches:
        computed += [part.start for part in desk.compute().parts]
    assert len(computed) == 5
    assert gone not in desk.done


def test_one_that_is_late_at_its_turn_is_refused_without_a_sweep() -> None:
    desk = Desk(max_rows=1)
    for value in range(3):
        desk.submit([value], within=100)
    desk.turn()
    late = desk.submit([10], within=1)
    desk.time = 2.0
    while desk.workers[0].batches:
        desk.compute()
    assert late.refusal is not None


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    desk = Desk(max_rows=1, queue_rows=4)
    for value in range(6):
        desk.submit([value])
        desk.turn()
    with pytest.raises(RequestRefused) as caught:
        desk.submit([7])
    assert (caught.value.code, caught.value.retry_after) == ("UNAVAILABLE", 1.0)
    desk.compute()
    desk.submit([8])


def test_the_rows_of_all_requests_together_do_not_exceed_the_queue() -> None:
    desk = Desk(max_rows=1, queue_rows=4)
    large = desk.submit([float(value) for value in range(16)])
    assert desk.batcher.num_queued == 16
    desk.batcher.cancel(large)
    desk.submit([1.0, 2.0])
    with pytest.raises(RequestRefused, match="2 rows are waiting, and 3 more would be too many") as caught:
        desk.submit([1.0, 2.0, 3.0])
    assert caught.value.code == "UNAVAILABLE"
    desk.submit([3.0, 4.0])
    assert desk.batcher.num_queued == 4


def test_what_would_be_too_late_is_refused_before_it_waits() -> None:
    desk = Desk(max_rows=1, queue_rows=10_000)
    desk.submit([0])
    desk.turn()
    desk.compute()  # one row in a millisecond
    for value in range(2000):
        desk.submit([value])
    with pytest.raises(RequestRefused, match="overloaded"):
        desk.submit([0], within=1.0)
    desk.submit([0], within=3.0)


def test_a_burst_after_lone_requests_is_not_taken_for_as_many_of_them() -> None:
    desk = Desk(max_rows=64, queue_rows=10_000)
    for _ in range(50):
        desk.batcher.pace.learn(1, 0.005)
    for value in range(640):
        desk.submit([value], within=0.2)  # ten batches, as far as is known


def test_after_a_slow_burst_short_deadlines_are_taken_again() -> None:
    desk = Desk(max_rows=64, queue_rows=10_000)
    desk.submit([0] * 64)
    desk.submit([0] * 64)
    desk.turn()
    desk.batcher.pace.learn(1, 0.001)
    for _ in range(3):
        desk.batcher.pace.learn(64, 2.0)
    desk.submit([0] * 64)
    with pytest.raises(RequestRefused, match="overloaded"):
        desk.submit([0], within=1.0)
    for _ in range(16):
        desk.batcher.pace.learn(1, 0.001)
    desk.submit([0], within=0.01)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 100)), min_size=1, max_size=40), st.integers(1, 64))
def test_a_pace_lies_between_what_any_batch_took_and_what_rows_took(
    batches: list[tuple[int, float]], rows: int
) -> None:
    pace = BatchTimeModel()
    for batch in batches:
        pace.learn(*batch)
    last = batches[-16:]
    mean = sum(seconds for _, seconds in last) / len(last)
    ratio = rows * len(last) / sum(num for num, _ in last)
    assert min(1, ratio) * mean * 0.999 - 1e-6 <= pace.seconds(rows) <= max(1, ratio) * mean * 1.001 + 1e-6


def test_of_a_batch_that_fails_only_the_guilty_hears() -> None:
    desk = Desk()
    good, bad = desk.submit([1]), desk.submit([2])
    desk.turn()
    desk.batcher.failed(desk.workers[0].take(), "ValueError: no")
    desk.turn()
    desk.compute()
    desk.batcher.failed(desk.workers[0].take(), "ValueError: no")
    assert good.outputs["y"].tolist() == [[2]]
    assert bad.refusal is not None
    assert (bad.refusal.code, str(bad.refusal)) == ("INTERNAL", "the model failed: ValueError: no")


def test_a_request_that_kills_replicas_is_given_up_after_some() -> None:
    desk = Desk()
    ticket = desk.submit([1])
    for _ in range(ATTEMPTS):
        desk.turn()
        desk.batcher.lost(desk.workers[0].take())
    desk.turn()
    assert not desk.workers[0].batches
    assert ticket.refusal is not None
    assert ticket.refusal.code == "INTERNAL"


def test_the_less_loaded_replica_is_chosen() -> None:
    desk = Desk(2, max_rows=8)
    desk.submit([1] * 6)
    desk.turn()
    desk.submit([2])
    desk.turn()
    assert sorted(worker.num_rows for worker in desk.workers) == [1, 6]


def test_a_lower_priority_goes_first() -> None:
    desk = Desk(max_rows=1)
    for value in range(2):
        desk.submit([value])
        desk.turn()
    desk.submit([3], priority=1)
    desk.submit([4], priority=0)
    desk.turn()
    desk.compute()
    desk.compute()
    assert desk.compute().parts[0].ticket.priority == 0


@pytest.mark.parametrize(
    "wrong", [{"max_rows": 0}, {"queue_rows": 0}, {"sizes": (4, 2)}, {"max_rows": 8, "sizes": (1, 4)}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        BatchSettings(**wrong)


def test_a_batch_holds_no_more_than_a_replicas_memory() -> None:
    desk = Desk(max_rows=8, sizes=(1, 4, 8))
    desk.batcher.rows_fitting = lambda shapes: 40 // shapes[0][0]
    wide = desk.submit(np.ones((6, 10)))  # four of these rows fit
    desk.turn()
    assert [(batch.rows, batch.size) for batch in desk.workers[0].batches] == [(4, 4), (2, 4)]
    desk.compute()
    desk.compute()
    assert wide.outputs["y"].shape == (6, 10)
    with pytest.raises(RequestRefused, match="rows of 164 bytes are more than a batch can hold"):
        desk.submit(np.ones((1, 41)))
    assert desk.batcher.num_live == desk.batcher.num_queued == 0


def test_rows_that_fit_into_a_slot() -> None:
    free = SlotLayout(Signature({"x": TensorSpec("float32", (None, None)), "n": TensorSpec("int64", (None,))}, {}), 64)
    for width in (1, 1 << 20, (1 << 20) + 1, 1 << 25):
        rows = free.rows_fitting([(width,), ()])
        assert 1 <= rows <= 64
        assert rows * (4 * width + 8) <= FREE_BYTES
        assert rows == 64 or (rows + 1) * (4 * width + 8) + 128 > FREE_BYTES
    assert free.rows_fitting([(1 << 26,), ()]) == 0
    fixed = SlotLayout(Signature({"x": TensorSpec("float32", (None, 1 << 25))}, {}), 64)
    assert fixed.rows_fitting([(1 << 25,)]) == 64


@pytest.mark.parametrize("shape", [(549_755_813_888, 0), (0, 3), (3, 0, 2), (4097,), (5000, 3)])
def test_empty_rows_and_more_rows_than_many_queues_are_not_taken(shape: tuple[int, ...]) -> None:
    desk = Desk()
    with pytest.raises(RequestRefused, match=r"must not be empty|may have \d+ rows") as caught:
        desk.batcher.submit({"x": np.empty(shape, np.float32)}, shape[0], deadline=1e9, done=desk.done.append)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert desk.batcher.num_queued == desk.batcher.num_live == 0
