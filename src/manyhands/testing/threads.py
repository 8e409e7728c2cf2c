"""World whose ranks are threads of one process, with scripted faults, for tests of control flow and collectives."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import PeerLost, UsageError
from ..distributed import DirectChannel, ObjectGather, Pending, RankInfo, RankKey, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


class ThreadRendezvous:
    """The object through which the ranks of a thread world exchange values; if one fails, the others get PeerLost."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.key = size, RankKey.random()
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._slots: list[Any] = [None] * size
        self._timeout = timeout
        self._messages: defaultdict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self.marks: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.lost = ""

    def messages(self, source: int, to: int, tag: int) -> queue.SimpleQueue[Tensor]:
        """Return the queue of the tensors that rank `source` sends to rank `to` under a tag."""
        return self._messages[source, to, tag]

    def take(self, source: int, to: int, tag: int) -> Tensor:
        """Wait for the next tensor from rank `source` to rank `to` under a tag; raise PeerLost at a timeout."""
        try:
            return self.messages(source, to, tag).get(timeout=self._timeout)
        except queue.Empty:
            raise PeerLost("receive", f"rank {to}", self.lost or "a peer did not send") from None

    def exchange(self, rank: int, value: Any, operation: str) -> list[Any]:
        """Wait until every rank has called this, and return the values of all ranks in rank order.

        Raises:
            PeerLost: A rank has failed, or has not called this before the timeout.
        """
        try:
            self._slots[rank] = value
            self._barrier.wait()
            values = list(self._slots)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost(operation, f"rank {rank}", self.lost or "a peer did not arrive") from None
        return values

    def leave(self, rank: int, why: str) -> None:
        """Mark a rank as failed, and raise PeerLost in all waiting ranks."""
        self.lost = self.lost or f"rank {rank} {why}"
        self._barrier.abort()


class Faults:
    """A script of faults for `run_threads`: which rank fails before which of its collectives.

    >>> Faults().fail_at(rank=0, operation=2).strikes(0, 2)
    True
    """

    def __init__(self) -> None:
        self._script: set[tuple[int, int]] = set()

    def fail_at(self, rank: int, operation: int) -> Faults:
        """Let a rank fail just before its collective number `operation`, counted from 0; return this script."""
        self._script.add((rank, operation))
        return self

    def strikes(self, rank: int, operation: int) -> bool:
        """Return whether the script lets a rank fail before its collective number `operation`."""
        return (rank, operation) in self._script


class InjectedFault(RuntimeError):
    """Raised in a rank at which a script of faults lets it fail."""


class _PendingMessage(Pending):
    """A started receive: `wait` blocks until the other thread has sent the tensor."""

    def __init__(self, rendezvous: ThreadRendezvous, into: Tensor, source: int, to: int, tag: int) -> None:
        self._rendezvous, self._into, self._way = rendezvous, into, (source, to, tag)

    def wait(self) -> None:
        self._into.copy_(self._rendezvous.take(*self._way))


class ThreadWorld(World):
    """World of a rank that is a thread: its peers are other threads of this process."""

    def __init__(self, rank: int, rendezvous: ThreadRendezvous, faults: Faults) -> None:
        super().__init__(RankInfo(rank=rank, size=rendezvous.size, host="threads"), DirectChannel())
        self._rendezvous, self._faults = rendezvous, faults
        self._objects = ObjectGather(rendezvous.key, "threads", rank)
        self._operations = 0

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        tensor.copy_(_REDUCE[op](torch.stack(self._exchange(tensor.clone(), "all_reduce"))))
        return Pending()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor.clone(), "all_gather"))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._exchange(tensor.clone(), "broadcast")[source])

    def start_send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        self._rendezvous.messages(self.rank, to, tag).put(tensor.clone())
        return Pending()

    def start_receive(self, into: Tensor, source: int, tag: int) -> Pending:
        return _PendingMessage(self._rendezvous, into, source, self.rank, tag)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._objects(value, lambda data: torch.stack(self._exchange(data, "gather")))

    def mark(self, name: str) -> None:
        self._rendezvous.marks[name].set()

    def wait_for(self, *names: str) -> None:
        deadline, marks = time.monotonic() + self.rank_info.timeout, self._rendezvous.marks
        while not any(marks[name].wait(0.01) for name in names):
            if time.monotonic() > deadline:
                raise PeerLost("waiting", f"rank {self.rank}", self._rendezvous.lost or "no rank reported a reason")

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        raise UsageError(
            "a mesh can only be created from processes", got="a world of threads", remedy="test meshes with LocalEngine"
        )

    def close(self) -> None:
        pass

    def _exchange(self, value: Any, operation: str) -> list[Any]:
        number, self._operations = self._operations, self._operations + 1
        if self._faults.strikes(self.rank, number):
            raise InjectedFault(f"rank {self.rank} fails before its collective {number}, as the test requests")
        return self._rendezvous.exchange(self.rank, value, operation)


def run_threads(
    fn: Callable[[World], Any], size: int, *, faults: Faults | None = None, timeout: float = 10.0
) -> list[Any]:
    """Run `fn(world)` on `size` ranks, each a thread; return the results in rank order.

    Args:
        fn: The function to run on every rank.
        size: Number of ranks.
        faults: A script of faults. If it is given, exceptions of ranks are returned in place of results, otherwise
            raised.
        timeout: Seconds that a rank waits for others in a collective.
    """
    rendezvous = ThreadRendezvous(size, timeout)
    outcomes: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            outcomes[rank] = fn(ThreadWorld(rank, rendezvous, faults or Faults()))
        except BaseException as error:
            outcomes[rank] = error
            rendezvous.leave(rank, f"raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures and faults is None:
        raise next((f for f in failures if not isinstance(f, PeerLost)), failures[0])
    return outcomes
