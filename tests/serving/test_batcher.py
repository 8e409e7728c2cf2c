"""The batcher with scripted replicas and a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import RequestRefused, SettingsError, Signature, TensorSpec
from manyhands.serving import Batching
from manyhands.serving.batcher import ATTEMPTS, Batcher, BatchTimeModel, RequestBatch, Ticket
from manyhands.serving.slots import FREE_BYTES, SlotLayout


class ScriptedBatcher:
    """A batcher with a hand on its clock and its loop."""

    def __init__(self, num_workers: int = 1, **values: Any) -> None:
        self.time = 0.0
        self.tasks: list[Callable[[], None]] = []
        self.batcher = Batcher(Batching(**values), ["x"], self.tasks.append, lambda: self.time)
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
def test_every_request_gets_only_its_own_outputs(data: st.DataObject) -> None:
    """Whatever comes, in whatever order replicas answer, fail, die or askers leave."""
    max_rows = data.draw(st.integers(1, 8))
    sizes = data.draw(st.sampled_from([(), tuple(sorted({1, max_rows}))]))
    scripted = ScriptedBatcher(data.draw(st.integers(1, 3)), max_rows=max_rows, sizes=sizes, queue_rows=10_000)
    asked: dict[int, np.ndarray] = {}
    gone: set[int] = set()
    hung: set[int] = set()
    tickets: list[Ticket] = []
    value = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(["ask", "ask", "turn", "compute", "fail", "die", "hang", "leave"]))
        busy = [index for index, worker in enumerate(scripted.workers) if worker.batches]
        if act == "ask":
            rows, width = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([1, 1, 1, 3]))
            values = np.arange(value, value + rows * width, dtype=np.float32).reshape(rows, width)
            value += rows * width
            ticket = scripted.submit(values, within=1e9, priority=data.draw(st.sampled_from([0, 0, 1])))
            asked[id(ticket)] = values
            tickets.append(ticket)
        elif act == "leave" and tickets:
            ticket = data.draw(st.sampled_from(tickets))
            if not ticket.over:
                gone.add(id(ticket))
            scripted.batcher.cancel(ticket)
        elif act == "turn":
            scripted.turn()
        elif busy:
            worker = data.draw(st.sampled_from(busy))
            if act == "compute":
                scripted.compute(worker)
            elif act == "fail":
                scripted.batcher.failed(scripted.workers[worker].take(), "it raised")
            else:
                # A replica that dies takes the batch along that it had not begun.
                batches = [scripted.workers[worker].take() for _ in list(scripted.workers[worker].batches)]
                for batch in batches[1:]:
                    scripted.batcher.unsent(batch)
                if act == "hang":
                    hung.update(map(id, batches[0].tickets))
                    scripted.batcher.hung(batches[0])
                else:
                    scripted.batcher.lost(batches[0])
    for _ in range(10_000):
        scripted.turn()
        busy = [index for index, worker in enumerate(scripted.workers) if worker.batches]
        if not busy and not scripted.tasks:
            break
        for worker in busy:
            scripted.compute(worker)
    assert scripted.batcher.num_queued == scripted.batcher.num_live == 0
    assert len({id(ticket) for ticket in scripted.done}) == len(scripted.done)
    assert {id(ticket) for ticket in scripted.done} == {id(ticket) for ticket in tickets} - gone
    for ticket in scripted.done:
        if ticket.refusal is None:
            np.testing.assert_array_equal(ticket.outputs["y"], 2 * asked[id(ticket)])
        elif ticket.refusal.code != "INTERNAL":
            # Only requests that blocked a replica are refused for their time.
            assert (ticket.refusal.code, id(ticket) in hung) == ("DEADLINE_EXCEEDED", True)


def test_concurrent_requests_are_batched_and_idle_replica_starts_immediately() -> None:
    scripted = ScriptedBatcher()
    scripted.submit([1.0])
    scripted.submit([2.0])
    scripted.turn()
    assert [batch.rows for batch in scripted.workers[0].batches] == [2]


def test_large_request_is_split_into_batches_and_small_requests_are_not() -> None:
    scripted = ScriptedBatcher(max_rows=4)
    big, small = scripted.submit(list(range(10))), scripted.submit([100, 101])
    scripted.turn()
    sizes = []
    while scripted.workers[0].batches:
        sizes.append(scripted.compute().rows)
    assert sizes == [4, 4, 4]
    np.testing.assert_array_equal(big.outputs["y"][:, 0], 2 * np.arange(10))
    np.testing.assert_array_equal(small.outputs["y"][:, 0], [200, 202])


def test_batches_are_padded_with_a_copy_of_an_existing_row() -> None:
    scripted = ScriptedBatcher(max_rows=8, sizes=(1, 4, 8))
    scripted.submit([5, 6, 7])
    scripted.turn()
    assert scripted.workers[0].written()[:, 0].tolist() == [5, 6, 7, 7]


def test_rows_of_different_shapes_go_into_separate_batches() -> None:
    scripted = ScriptedBatcher()
    scripted.submit(np.ones((1, 2)))
    scripted.submit(np.ones((1, 3)))
    scripted.submit(np.ones((1, 2)))
    scripted.turn()
    assert [(batch.rows, batch.shapes) for batch in scripted.workers[0].batches] == [(2, ((2,),)), (1, ((3,),))]


def test_expired_and_cancelled_requests_are_not_computed() -> None:
    scripted = ScriptedBatcher(max_rows=1)
    for value in range(5):
        scripted.submit([value], within=100)
    scripted.turn()  # two slots are taken
    late, gone = scripted.submit([10], within=1), scripted.submit([11])
    scripted.batcher.cancel(gone)
    scripted.time = 2.0
    scripted.batcher.expire()
    assert late.refusal is not None
    assert late.refusal.code == "DEADLINE_EXCEEDED"
    computed = []
    while scripted.workers[0].batches:
        computed += [part.start for part in scripted.compute().parts]
    assert len(computed) == 5
    assert gone not in scripted.done


def test_expired_request_is_rejected_when_dequeued_without_calling_expire() -> None:
    scripted = ScriptedBatcher(max_rows=1)
    for value in range(3):
        scripted.submit([value], within=100)
    scripted.turn()
    late = scripted.submit([10], within=1)
    scripted.time = 2.0
    while scripted.workers[0].batches:
        scripted.compute()
    assert late.refusal is not None


def test_full_queue_rejects_immediately_with_retry_after() -> None:
    scripted = ScriptedBatcher(max_rows=1, queue_rows=4)
    for value in range(6):
        scripted.submit([value])
        scripted.turn()
    with pytest.raises(RequestRefused) as caught:
        scripted.submit([7])
    assert (caught.value.code, caught.value.retry_after) == ("UNAVAILABLE", 1.0)
    scripted.compute()
    scripted.submit([8])


def test_total_queued_rows_of_all_requests_are_limited() -> None:
    scripted = ScriptedBatcher(max_rows=1, queue_rows=4)
    large = scripted.submit([float(value) for value in range(16)])
    assert scripted.batcher.num_queued == 16
    scripted.batcher.cancel(large)
    scripted.submit([1.0, 2.0])
    with pytest.raises(RequestRefused, match="2 rows are waiting, and 3 more would be too many") as caught:
        scripted.submit([1.0, 2.0, 3.0])
    assert caught.value.code == "UNAVAILABLE"
    scripted.submit([3.0, 4.0])
    assert scripted.batcher.num_queued == 4


def test_request_that_would_miss_its_deadline_is_rejected_on_submit() -> None:
    scripted = ScriptedBatcher(max_rows=1, queue_rows=10_000)
    scripted.submit([0])
    scripted.turn()
    scripted.compute()  # one row in a millisecond
    for value in range(2000):
        scripted.submit([value])
    with pytest.raises(RequestRefused, match="overloaded"):
        scripted.submit([0], within=1.0)
    scripted.submit([0], within=3.0)


def test_burst_after_single_row_requests_is_estimated_per_batch() -> None:
    scripted = ScriptedBatcher(max_rows=64, queue_rows=10_000)
    for _ in range(50):
        scripted.batcher.pace.learn(1, 0.005)
    for value in range(640):
        scripted.submit([value], within=0.2)  # ten batches, as far as is known


def test_short_deadlines_are_accepted_again_after_a_slow_burst() -> None:
    scripted = ScriptedBatcher(max_rows=64, queue_rows=10_000)
    scripted.submit([0] * 64)
    scripted.submit([0] * 64)
    scripted.turn()
    scripted.batcher.pace.learn(1, 0.001)
    for _ in range(3):
        scripted.batcher.pace.learn(64, 2.0)
    scripted.submit([0] * 64)
    with pytest.raises(RequestRefused, match="overloaded"):
        scripted.submit([0], within=1.0)
    for _ in range(16):
        scripted.batcher.pace.learn(1, 0.001)
    scripted.submit([0], within=0.01)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 100)), min_size=1, max_size=40), st.integers(1, 64))
def test_batch_time_estimate_lies_between_per_batch_and_per_row_time(
    batches: list[tuple[int, float]], rows: int
) -> None:
    pace = BatchTimeModel()
    for batch in batches:
        pace.learn(*batch)
    last = batches[-16:]
    mean = sum(seconds for _, seconds in last) / len(last)
    ratio = rows * len(last) / sum(num for num, _ in last)
    assert min(1, ratio) * mean * 0.999 - 1e-6 <= pace.seconds(rows) <= max(1, ratio) * mean * 1.001 + 1e-6


def test_failed_batch_is_retried_and_only_the_faulty_request_fails() -> None:
    scripted = ScriptedBatcher()
    good, bad = scripted.submit([1]), scripted.submit([2])
    scripted.turn()
    scripted.batcher.failed(scripted.workers[0].take(), "ValueError: no")
    scripted.turn()
    scripted.compute()
    scripted.batcher.failed(scripted.workers[0].take(), "ValueError: no")
    assert good.outputs["y"].tolist() == [[2]]
    assert bad.refusal is not None
    assert (bad.refusal.code, str(bad.refusal)) == ("INTERNAL", "the model failed: ValueError: no")


def test_request_that_crashes_replicas_fails_after_max_attempts() -> None:
    scripted = ScriptedBatcher()
    ticket = scripted.submit([1])
    for _ in range(ATTEMPTS):
        scripted.turn()
        scripted.batcher.lost(scripted.workers[0].take())
    scripted.turn()
    assert not scripted.workers[0].batches
    assert ticket.refusal is not None
    assert ticket.refusal.code == "INTERNAL"


def test_batches_behind_a_request_that_crashes_replicas_are_computed() -> None:
    scripted = ScriptedBatcher(max_rows=1)
    cause, behind = scripted.submit([1]), scripted.submit([2])
    for _ in range(ATTEMPTS):
        scripted.turn()
        computing, waiting = (scripted.workers[0].take() for _ in range(2))
        assert [batch.parts[0].ticket for batch in (computing, waiting)] == [cause, behind]
        scripted.batcher.unsent(waiting)
        scripted.batcher.lost(computing)
    scripted.turn()
    scripted.compute()
    assert cause.refusal is not None
    assert behind.outputs["y"].tolist() == [[4]]


def test_hung_batch_is_retried_alone_and_only_the_request_that_hangs_is_refused() -> None:
    scripted = ScriptedBatcher(max_rows=2)
    batcher, (worker,) = scripted.batcher, scripted.workers
    cause, beside, later = (scripted.submit([value], within=30) for value in (1, 2, 3))
    scripted.turn()

    def is_hung(after: float, batch: RequestBatch, *others: RequestBatch, restart: float = 2.0) -> bool:
        scripted.time = after
        return batcher.is_hung(batch, others, after, restart)

    # There is time for two restarts before the deadlines of the others: a slow request may continue.
    assert [is_hung(seconds, *worker.batches) for seconds in (6.0, 19.0, 21.0, 27.0)] == [False, False, True, True]
    # It is too late for the others, or a replica takes too long to start.
    assert not is_hung(29.0, *worker.batches)
    assert not is_hung(20.0, *worker.batches, restart=12.0)
    batcher.pace.learn(2, 1.5)
    assert not is_hung(27.0, *worker.batches)
    computing, waiting = worker.take(), worker.take()
    batcher.unsent(waiting)
    batcher.hung(computing)
    scripted.turn()
    assert [[part.ticket for part in batch.parts] for batch in worker.batches] == [[later], [cause]]
    scripted.compute()
    batches = list(worker.batches)
    assert [[part.ticket for part in batch.parts] for batch in batches] == [[cause], [beside]]
    assert is_hung(22.0, *batches)
    # If no other request waits, it may be computed until its deadline.
    assert not is_hung(22.0, batches[0])
    worker.take()
    batcher.hung(batches[0])
    scripted.compute()
    assert cause.refusal is not None
    assert cause.refusal.code == "DEADLINE_EXCEEDED"
    assert [ticket.outputs["y"].tolist() for ticket in (beside, later)] == [[[4]], [[6]]]


def test_batch_goes_to_the_least_loaded_replica() -> None:
    scripted = ScriptedBatcher(2, max_rows=8)
    scripted.submit([1] * 6)
    scripted.turn()
    scripted.submit([2])
    scripted.turn()
    assert sorted(worker.num_rows for worker in scripted.workers) == [1, 6]


def test_lower_priority_number_is_computed_first() -> None:
    scripted = ScriptedBatcher(max_rows=1)
    for value in range(2):
        scripted.submit([value])
        scripted.turn()
    scripted.submit([3], priority=1)
    scripted.submit([4], priority=0)
    scripted.turn()
    scripted.compute()
    scripted.compute()
    assert scripted.compute().parts[0].ticket.priority == 0


@pytest.mark.parametrize(
    "wrong", [{"max_rows": 0}, {"queue_rows": 0}, {"sizes": (4, 2)}, {"max_rows": 8, "sizes": (1, 4)}]
)
def test_invalid_batch_settings_raise_settings_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Batching(**wrong)


def test_batch_size_is_limited_by_the_replica_memory_slot() -> None:
    scripted = ScriptedBatcher(max_rows=8, sizes=(1, 4, 8))
    scripted.batcher.sizes.rows_fitting = lambda shapes: 40 // shapes[0][0]
    wide = scripted.submit(np.ones((6, 10)))  # four of these rows fit
    scripted.turn()
    assert [(batch.rows, batch.size) for batch in scripted.workers[0].batches] == [(4, 4), (2, 4)]
    scripted.compute()
    scripted.compute()
    assert wide.outputs["y"].shape == (6, 10)
    with pytest.raises(RequestRefused, match="must fit into a batch, but got a row of 164 bytes"):
        scripted.submit(np.ones((1, 41)))
    assert scripted.batcher.num_live == scripted.batcher.num_queued == 0


def test_rows_fitting_never_exceeds_the_slot_size() -> None:
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
def test_empty_and_oversized_requests_are_rejected(shape: tuple[int, ...]) -> None:
    scripted = ScriptedBatcher()
    with pytest.raises(RequestRefused, match=r"must not be empty|may have \d+ rows") as caught:
        scripted.batcher.submit({"x": np.empty(shape, np.float32)}, shape[0], deadline=1e9, done=scripted.done.append)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert scripted.batcher.num_queued == scripted.batcher.num_live == 0


def bulk(num_workers: int = 1, fitting: int = 1000, **values: Any) -> ScriptedBatcher:
    """A batcher whose model has computed a full batch in a millisecond, and whose slots hold more rows than one."""
    scripted = ScriptedBatcher(num_workers, max_rows=4, queue_rows=10_000, **values)
    scripted.batcher.sizes.bulk_fitting = lambda shapes: fitting
    scripted.batcher.pace.learn(4, 0.001)
    return scripted


def sizes_of(scripted: ScriptedBatcher) -> list[int]:
    sizes = []
    scripted.turn()
    while any(worker.batches for worker in scripted.workers):
        sizes += [scripted.compute(index).rows for index, worker in enumerate(scripted.workers) if worker.batches]
    return sizes


def test_large_request_alone_is_computed_in_batches_that_grow() -> None:
    scripted = bulk()
    large = scripted.submit(list(range(5000)))
    sizes = sizes_of(scripted)
    assert sizes[:2] == [16, 16]
    assert max(sizes) == 1000
    assert len(sizes) < 20
    np.testing.assert_array_equal(large.outputs["y"][:, 0], 2 * np.arange(5000))


def test_large_batches_end_when_another_request_waits() -> None:
    scripted = bulk()
    scripted.submit(list(range(100)))
    other = scripted.submit([7])
    assert set(sizes_of(scripted)) <= {1, 2, 3, 4}
    assert other.outputs["y"].tolist() == [[14]]


def test_large_batches_take_no_longer_than_a_new_request_may_wait() -> None:
    scripted = bulk()
    scripted.batcher.pace.learn(4, 0.063)
    scripted.submit(list(range(64)))
    scripted.turn()
    # At 8 ms per row.
    assert [batch.rows for batch in scripted.workers[0].batches] == [6, 6]


def test_large_request_is_shared_by_all_replicas() -> None:
    scripted = bulk(num_workers=4)
    scripted.submit(list(range(40)))
    scripted.turn()
    assert sum(batch.rows for worker in scripted.workers for batch in worker.batches) == 40
    assert all(0 < worker.batches[0].rows <= 10 for worker in scripted.workers)


@pytest.mark.parametrize("values", [{"sizes": (1, 4)}, {"fitting": 4}])
def test_batches_stay_small_with_fixed_sizes_or_large_rows(values: dict[str, Any]) -> None:
    scripted = bulk(**values)
    scripted.submit(list(range(100)))
    assert set(sizes_of(scripted)) == {4}


@pytest.mark.parametrize("act", ["failed", "lost"])
def test_large_batch_that_fails_is_computed_again_in_small_ones(act: str) -> None:
    scripted = bulk()
    large = scripted.submit(list(range(100)))
    scripted.turn()
    batch = scripted.workers[0].take()
    assert batch.rows == 16
    if act == "failed":
        scripted.batcher.failed(batch, "out of memory")
    else:
        scripted.batcher.lost(batch)
    # The second batch was in flight.
    assert sizes_of(scripted)[1:5] == [4, 4, 4, 4]
    np.testing.assert_array_equal(large.outputs["y"][:, 0], 2 * np.arange(100))
