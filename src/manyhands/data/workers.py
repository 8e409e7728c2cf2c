"""Worker processes that read batches, and the transfer of their errors to the consumer."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..core import DataError, DataWorkerLost
from .batch import Batch
from .source import Source
from .worker_memory import PackedBatch, WorkerSlots

Read = Callable[[int, int], Iterator[Batch]]
"""`read(first, step)` yields batches number first, first + step, ... of an epoch."""


@dataclass(frozen=True)
class _Failure:
    """An error of a worker and its cause, sent to the consumer."""

    error: DataError
    cause: BaseException
    trace: str


class _InWorker(IterableDataset[Any]):
    """Lets each worker read every n-th batch; the DataLoader takes from the workers in turn, which keeps the order."""

    def __init__(self, read: Read, slots: WorkerSlots | None) -> None:
        self._read, self._slots, self._collects = read, slots, gc.isenabled()

    def __iter__(self) -> Iterator[Batch | PackedBatch | _Failure]:
        # Whatever the trainer has left to its garbage collector stays untouched here: the destructor of an earlier
        # process group waits for threads that a fork does not have.
        gc.freeze()
        if self._collects:
            gc.enable()
        info = get_worker_info()
        assert info is not None, "made to run in a worker"
        # A terminal sends Ctrl-C to workers too, which inherit the trainer's handler; they end with the trainer.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for batch in self._read(info.id, info.num_workers):
                yield batch if self._slots is None else self._slots.put(batch, info.id)
        except DataError as error:
            yield _Failure(error, _sendable(error.__cause__ or error), traceback.format_exc())


def read_in_workers(read: Read, num_workers: int, source: Source) -> Iterator[Batch]:
    """Yield the batches of an epoch in order, read by worker processes."""
    context = _context()
    slots = _slots(num_workers) if context == "fork" else None
    loader: DataLoader[Any] = DataLoader(
        _InWorker(read, slots),
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        worker_init_fn=source.worker_init,
        # Without its own generator a DataLoader draws from the global one, which the network's dropout uses.
        generator=torch.Generator(),
        multiprocessing_context=context,
    )
    # Fork the processes here and not at the first batch, which a background thread may request.
    with _quiet_children(), _no_collection():
        return _received(iter(loader), source.name, slots)


def _received(items: Iterator[Any], name: str, slots: WorkerSlots | None) -> Iterator[Batch]:
    position = 0
    try:
        for item in items:
            if isinstance(item, _Failure):
                item.cause.add_note(f"in a worker process:\n{item.trace}")
                raise item.error from item.cause
            batch: Batch = item if slots is None else slots.take(item)
            position = batch.cursor.position
            yield batch
    except (RuntimeError, OSError, EOFError) as error:
        raise DataWorkerLost(
            f"the worker processes that read {name} must not exit",
            got=f"{error} (shortly after position {position} of the epoch)",
            remedy="check for lack of memory or a crash in native code, or read in this process with workers=0",
        ) from error
    finally:
        # The workers end when the last reference to their iterator is dropped, and a traceback would hold one.
        del items


@contextmanager
def _quiet_children() -> Iterator[None]:
    """Remove DataLoader's signal handler, which raises the error of a dead worker anywhere in the consumer's code.

    Without the handler the error is raised when the next batch is requested, some seconds later.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    yield
    if handler is not None and signal.getsignal(signal.SIGCHLD) is not handler:
        signal.signal(signal.SIGCHLD, handler)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage be collected, so that a process that is forked here has it disabled too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _slots(num_workers: int) -> WorkerSlots | None:
    try:
        return WorkerSlots(num_workers)
    except OSError:
        # A limit on the address space leaves no room for the slots; PyTorch's own transfer needs less at once.
        return None


def _as_it_is(batch: Any) -> Any:
    return batch


def _context() -> str:
    """Return fork if available, which needs no pickling, so datasets may hold functions and open files."""
    return "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
