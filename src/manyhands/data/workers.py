"""Worker processes that read batches, and send batches and errors to the training process."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..core import DataError, DataWorkerLost
from .batch import Batch
from .line_samples import Line, LineSampler, sampled
from .source import Source
from .worker_memory import PackedBatch, WorkerSlots

Read = Callable[[int, int], Iterator[Batch]]
"""`read(first, step)` yields the batches number first, first + step, ... of an epoch."""


@dataclass(frozen=True)
class _Failure:
    """An error of a worker and its cause, sent to the training process."""

    error: DataError
    cause: BaseException
    trace: str


class _InWorker(IterableDataset[Any]):
    """Dataset of batches for a DataLoader with n workers: each worker reads every n-th batch.

    The DataLoader takes batches from the workers in turn, which keeps their order.
    """

    def __init__(self, read: Read, slots: WorkerSlots | None, counts_lines: bool) -> None:
        self._read, self._slots, self._counts_lines, self._collects = read, slots, counts_lines, gc.isenabled()

    def __iter__(self) -> Iterator[Batch | PackedBatch | _Failure | Counter[Line]]:
        # Whatever the trainer has left to its garbage collector stays untouched here: the destructor of an earlier
        # process group waits for threads that a fork does not have.
        gc.freeze()
        if self._collects:
            gc.enable()
        info = get_worker_info()
        assert info is not None, "made to run in a worker"
        # A terminal sends Ctrl-C to workers too, which inherit the trainer's handler; they end with the trainer.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        lines = LineSampler()
        try:
            batches = self._read(info.id, info.num_workers)
            for batch in sampled(batches, lines) if self._counts_lines else batches:
                yield batch if self._slots is None else self._slots.put(batch, info.id)
                if self._counts_lines:
                    yield lines.take()
        except DataError as error:
            yield _Failure(error, _sendable(error.__cause__ or error), traceback.format_exc())


def read_in_workers(
    read: Read, num_workers: int, source: Source, lines: Counter[Line] | None = None
) -> Iterator[Batch]:
    """Return an iterator of the batches of an epoch in order, which `num_workers` processes read.

    `lines` counts the lines of user code that these processes were running when they were sampled.
    """
    context = _context()
    slots = _slots(num_workers) if context == "fork" else None
    with _quiet_children(), _no_collection(), warnings.catch_warnings():
        # torch would warn in every epoch and rank; the run reports once that there are more workers than cores.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[Any] = DataLoader(
            _InWorker(read, slots, lines is not None),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            worker_init_fn=source.worker_init,
            # Without its own generator a DataLoader draws from the global one, which the network's dropout uses.
            generator=torch.Generator(),
            multiprocessing_context=context,
        )
        # Fork the processes here and not at the first batch, which a background thread may request.
        return _received(iter(loader), source.name, slots, lines)


def _received(
    items: Iterator[Any], name: str, slots: WorkerSlots | None, lines: Counter[Line] | None
) -> Iterator[Batch]:
    position = 0
    try:
        for item in items:
            if isinstance(item, _Failure):
                item.cause.add_note(f"in a worker process:\n{item.trace}")
                raise item.error from item.cause
            if isinstance(item, Counter):
                assert lines is not None
                lines.update(item)
                continue
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
    """Remove the SIGCHLD handler that a DataLoader has installed in the context, at the end of the context.

    The handler would raise the error of a dead worker anywhere in the training process. Without it, the error is raised
    some seconds later, when the next batch is requested.
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
    """Return "fork" where it is available, so that datasets need no pickling and may have functions and open files."""
    return "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
