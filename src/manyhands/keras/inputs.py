"""Distributed inputs: any input that Keras accepts, of which every replica gets its rows of each global batch.

All replicas iterate over the same global batches in the same order. From a DataLoader with an indexed dataset, which
Keras also makes of arrays, a replica reads only its own samples. From iterable data every replica reads all samples and
keeps its rows.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from keras import tree
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
from keras.utils import PyDataset
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset, default_collate

from ..core import DataError, StrategyError
from ..training import Hand
from .batch_share import KerasShare, hand_out, num_rows, without_rows
from .step import current_step

if TYPE_CHECKING:
    from .strategy import Strategy


class DistributedInput(DataAdapter):  # type: ignore[misc]
    """A replica's share of an input: iterate over it, or pass it to `fit`, `evaluate` or `predict`."""

    def __init__(self, adapter: Any, strategy: Strategy, micros: int = 1) -> None:
        self._adapter, self._strategy, self._micros = adapter, strategy, micros

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over this replica's rows of each batch, for a custom training loop.

        For a batch in which this replica has no rows it gets arrays with zero rows, as in TensorFlow. A process that
        never has rows, such as a parameter server, gets a borrowed row instead.
        """
        return self._handed_out(self._strategy.worker is None)

    def _handed_out(self, borrows: bool) -> Iterator[Any]:
        # Begun immediately, as in Keras: the random order must not depend on when the first batch is requested.
        batches = self._begun()

        def handed_out() -> Iterator[Any]:
            for share, own in batches:
                moved = _moved(own if borrows or not share.is_empty else without_rows(own), self._strategy.hand.device)
                hand_out(share, moved)
                step = current_step()
                if step is not None and step.is_plain_sum:
                    # The batch was requested inside the step, so the step now counts these rows.
                    step.rows = share.rows[0]
                yield moved

        return handed_out()

    def _begun(self) -> Iterator[tuple[KerasShare, Any]]:
        """Return an iterator over this replica's share and rows of each batch; in a callback, over whole batches."""
        if not self._strategy.joint.is_alone:
            share_randomness(self._strategy.hand, "iterate over a distributed dataset")
        loader = self._adapter.get_torch_dataloader()
        return (
            _indexed(loader, self._share, self._require_one_order) if _is_indexed(loader) else self._split(iter(loader))
        )

    def _require_one_order(self, ids: list[Any]) -> None:
        hand = self._strategy.hand
        if not self._strategy.joint.is_alone and hand.size > 1 and _differs(hand, [repr(ids)]):
            raise DataError(
                "every replica must read the samples in the same order, and keeps its rows of each batch",
                got="first batches with different samples",
                remedy="seed the sampler, as in DataLoader(..., generator=torch.Generator().manual_seed(0)), or "
                "omit the generator",
            )

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("the distributed dataset has no length: its number of batches is not known")
        return int(self.num_batches)

    def _share(self, total: int) -> KerasShare:
        if self._strategy.joint.is_alone:
            return KerasShare.of(total, rank=0, size=1)
        return self._strategy.share(total, self._micros)

    def _split(self, batches: Any) -> Iterator[tuple[KerasShare, Any]]:
        for number, batch in enumerate(batches):
            if number == 0 and not self._strategy.joint.is_alone:
                _require_same(self._strategy.hand, batch)
            share = self._share(num_rows(batch))
            yield share, share.taken(batch)

    def get_torch_dataloader(self) -> Iterator[Any]:
        return self._handed_out(borrows=True)

    def of(self, strategy: Strategy, micros: int) -> DistributedInput:
        """Return this input with `micros` micro-batches per step; raise DataError if `strategy` has other replicas."""
        self.require_replicas_of(strategy)
        if micros == self._micros:
            return self
        split = copy.copy(self)
        split._micros = micros
        return split

    def require_replicas_of(self, strategy: Strategy | None) -> None:
        """Raise DataError if a model with this strategy (None: without one) would train on one replica's rows only."""
        own = self._strategy
        if own.joint.is_alone or own.hand.size == 1:
            return
        if strategy is None or (strategy.worker, strategy.hand.size) != (own.worker, own.hand.size):
            raise DataError(
                "a distributed dataset can only train a model that all replicas share",
                got="a model that was created outside of the strategy's scope",
                remedy="create and compile the model in `with strategy.scope():`, or pass it the dataset itself "
                "instead of the distributed one",
            )

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches  # type: ignore[no-any-return]

    @property
    def batch_size(self) -> int | None:
        return self._adapter.batch_size  # type: ignore[no-any-return]

    @property
    def has_partial_batch(self) -> bool | None:
        return self._adapter.has_partial_batch  # type: ignore[no-any-return]

    @property
    def partial_batch_size(self) -> int | None:
        return self._adapter.partial_batch_size  # type: ignore[no-any-return]

    def on_epoch_begin(self) -> None:
        dataset = getattr(self._adapter, "py_dataset", None)
        if isinstance(dataset, _InOneOrder):
            share_randomness(self._strategy.hand, "begin an epoch")
            dataset.draw()
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._adapter.on_epoch_end()


def distributed(strategy: Strategy, x: Any, *args: Any, micros: int = 1) -> Any:
    """Return an input of `fit` and similar methods, split over the replicas of `strategy`; None if `x` is None."""
    if x is None:
        return None
    if isinstance(x, DistributedInput):
        return x.of(strategy, micros)
    if isinstance(x, DatasetCreator):
        return strategy.distribute_datasets_from_function(x.dataset_fn)
    with warnings.catch_warnings():
        # Keras warns of shuffle=True, the default of `fit`, for every input but arrays; each replica would repeat it.
        warnings.filterwarnings("ignore", message="`shuffle=True` was passed, but will be ignored")
        adapter = data_adapters.get_data_adapter(x, *args)
    if isinstance(adapter, (ArrayDataAdapter, TorchDataLoaderAdapter)) and not strategy.joint.is_alone:
        _require_same_samples(strategy.hand, adapter)
    if isinstance(adapter, PyDatasetAdapter) and _is_mixed_by_workers(adapter) and strategy.hand.size > 1:
        adapter = PyDatasetAdapter(_InOneOrder(adapter.py_dataset), adapter.class_weight)
    return DistributedInput(adapter, strategy, micros)


def _is_mixed_by_workers(adapter: Any) -> bool:
    # Keras does not shuffle inputs of unknown length.
    return bool(adapter.shuffle and adapter.enqueuer) and adapter.num_batches is not None


class _InOneOrder(PyDataset):  # type: ignore[misc]
    """PyDataset whose order all replicas draw at the same point; Keras would draw it in a worker thread at any time."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self._inner, self._order = inner, list(range(inner.num_batches))

    def draw(self) -> None:
        """Draw the order of the batches of an epoch."""
        self._order = list(range(self._inner.num_batches))
        random.shuffle(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._inner[self._order[index]]

    @property
    def num_batches(self) -> int:
        return len(self._order)

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._inner.on_epoch_end()


def require_by_itself(x: Any, **beside: Any) -> None:
    """Raise DataError for arguments beside a distributed dataset that Keras would ignore, such as `y`."""
    given = [name for name, value in beside.items() if value is not None]
    if given and isinstance(x, (DistributedInput, DatasetCreator)):
        raise DataError(
            "targets and weights of a distributed dataset must be in its batches, as (x, y) or (x, y, sample_weight)",
            got=" and ".join(given),
            remedy="add them to the dataset before it is distributed",
        )


@dataclass(frozen=True)
class InputContext:
    """Argument of a dataset function: the replica for which it creates an input, and the number of replicas."""

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of each replica; raise DataError if the replicas cannot have equal batch sizes.

        >>> InputContext(2, 0, 2).get_per_replica_batch_size(64)
        32
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise DataError(
                "the global batch size must be divisible by the number of replicas if each replica creates its "
                "own batches",
                got=f"{global_batch_size} for {self.num_replicas_in_sync} replicas",
                remedy="use experimental_distribute_dataset, which splits any batch",
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class DatasetCreator:
    """Wrapper of a function that creates each worker's input, to be passed to `fit` or `evaluate` as `x`.

    A step consists of one batch of every worker.

    Args:
        dataset_fn: Called in each process with an InputContext; returns any input that Keras accepts.
        input_options: Accepted and ignored.
    """

    dataset_fn: Callable[[InputContext], Any]
    input_options: Any = None


def opened(x: Any) -> Any:
    """Return `x`, or a DatasetCreator's dataset, for a model on one replica; raise DataError if `x` is distributed."""
    if isinstance(x, DistributedInput):
        x.require_replicas_of(None)
    return x.dataset_fn(InputContext(1, 0, 1)) if isinstance(x, DatasetCreator) else x


class OwnInput(DistributedInput):
    """Input whose batches each replica creates; one whose batches have ended borrows rows until all have ended."""

    def __init__(self, adapter: Any, strategy: Strategy) -> None:
        super().__init__(adapter, strategy)
        counts = strategy.hand.world.gather_objects(adapter.num_batches)
        self._most = None if None in counts else max(counts)

    def of(self, strategy: Strategy, micros: int) -> DistributedInput:
        self.require_replicas_of(strategy)
        return self

    @property
    def num_batches(self) -> int | None:
        return self._most

    def _begun(self) -> Iterator[tuple[KerasShare, Any]]:
        hand, last = self._strategy.hand, None
        self._strategy.joint.require_all("iterate over batches that each replica makes for itself")
        batches = iter(self._adapter.get_torch_dataloader())
        while True:
            own = next(batches, None)
            count = 0 if own is None or self._strategy.worker is None else num_rows(own)
            counts = torch.tensor([count], dtype=torch.int64, device=hand.device)
            every = hand.replicas.all_gather(counts).flatten().tolist()
            if not any(every):
                return
            last = own if own is not None else last
            if last is None:
                raise DataError(
                    "every replica must have at least one batch",
                    got="no batch on this replica",
                    remedy="use fewer replicas",
                )
            yield KerasShare.among(every, hand.rank), own if count else tree.map_structure(lambda leaf: leaf[:1], last)


def _moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the replica's device, for a custom training loop."""
    return tree.map_structure(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def share_randomness(hand: Hand, doing: str) -> None:
    """Copy the first replica's random state to all replicas, so that initial weights and data orders are equal."""
    if hand.size == 1:
        return
    own = (random.getstate(), np.random.get_state(), torch.default_generator.get_state().numpy())
    python, numpy, state = brought_by_all(hand, doing, own if hand.is_first else None)[0]
    random.setstate(python)
    np.random.set_state(numpy)
    torch.default_generator.set_state(torch.from_numpy(state.copy()))
    _seed_tensorflow(zlib.crc32(state.tobytes()))


def brought_by_all(hand: Hand, doing: str, value: Any = None) -> list[Any]:
    """Return the values that the replicas pass, by rank; raise StrategyError unless all are in the call `doing`."""
    mark_call(hand)
    gathered = hand.world.gather_objects((doing, value))
    every = [_doing(each) for each in gathered]
    if len(set(every)) > 1:
        raise StrategyError(
            "all replicas must make the same calls, each with its own rows",
            got=", ".join(f"replica {rank}: {what}" for rank, what in enumerate(every)),
            remedy="make this call on every replica; use `if strategy.hand.is_first:` only for code that prints "
            "or writes",
        )
    return [each[1] for each in gathered]


def mark_call(hand: Hand) -> None:
    """Count a synchronization point; on the first replica, also set the flag that it was reached."""
    _num_calls[0] += 1
    if hand.is_first:
        hand.world.mark(_call_name(_num_calls[0]))


def next_call_name() -> str:
    """Return the name of the flag that the first replica sets at the next synchronization point."""
    return _call_name(_num_calls[0] + 1)


def _call_name(number: int) -> str:
    return f"the first replica comes to meeting {number}"


_num_calls = [0]


def _doing(gathered: Any) -> str:
    is_ours = isinstance(gathered, tuple) and len(gathered) == 2 and isinstance(gathered[0], str)
    return gathered[0] if is_ours else "something else"


def _seed_tensorflow(seed: int) -> None:
    """Seed TensorFlow's global generator, from which tf.data draws the seeds of its shuffles, if it has no seed."""
    context, tensorflow = (sys.modules.get(name) for name in ("tensorflow.python.eager.context", "tensorflow"))
    if context is not None and tensorflow is not None and context.global_seed() is None:
        tensorflow.random.set_seed(seed)


def _require_same(hand: Hand, batch: Any) -> None:
    """Raise DataError if the first batches of the replicas have different rows: some rows would never be trained.

    Batches may differ in some arrays, such as randomly augmented images, if another array, such as the labels, is equal
    and has enough distinct values to show that the rows are in the same order.
    """
    if hand.size == 1:
        return
    own = [(_digest(leaf), _shows_order(leaf)) for leaf in _leaves(batch)]
    every = brought_by_all(hand, "take batches of data", own)
    is_equal = len({tuple(each) for each in every}) == 1
    is_one_order = len({len(each) for each in every}) == 1 and any(
        len(set(column)) == 1 and column[0][1] for column in zip(*every, strict=True)
    )
    if not (is_equal or is_one_order):
        raise DataError(
            "an iterable input must produce the same batches on every replica, of which each keeps its rows",
            got="first batches that differ",
            remedy="create a tf.data dataset after the strategy, or seed its shuffling, such as "
            "dataset.shuffle(1000, seed=0), or let each replica create its own dataset with "
            "distribute_datasets_from_function",
        )


NUM_COMPARED = 16
"""Number of samples that replicas compare if samples can be read by index."""


def _require_same_samples(hand: Hand, adapter: Any) -> None:
    """Raise DataError if arrays or datasets differ between replicas, judged by their length and some of their samples.

    Of a custom dataset only the length is compared: reading a sample may be slow or draw random numbers.
    """
    loader = adapter.get_torch_dataloader()
    if hand.size == 1 or not _is_indexed(loader):
        return
    dataset, is_array = loader.dataset, isinstance(adapter, ArrayDataAdapter)
    length = adapter._num_samples if is_array else len(dataset) if hasattr(dataset, "__len__") else 0
    facts: list[Any] = [length]
    if length and (is_array or type(dataset) is TensorDataset):
        ids = np.linspace(0, length - 1, min(NUM_COMPARED, length)).astype(int).tolist()
        facts += map(_digest, _leaves(dataset.__getitems__(ids) if is_array else [dataset[each] for each in ids]))
    if _differs(hand, facts):
        raise DataError(
            "every replica must have the same data, of which it takes its rows of each batch",
            got=f"{length} samples here, and other samples or another number on other replicas",
            remedy="seed the code that draws or splits the data, such as np.random.default_rng(0), or draw it "
            "after the strategy is created, or let each replica create its own dataset with "
            "distribute_datasets_from_function",
        )


def _leaves(batch: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(leaf).cpu().contiguous() for leaf in tree.flatten(batch) if leaf is not None]


def _digest(leaf: torch.Tensor) -> tuple[Any, ...]:
    return str(leaf.dtype), tuple(leaf.shape), zlib.crc32(leaf.reshape(-1).view(torch.uint8).numpy().data)


def _shows_order(leaf: torch.Tensor) -> bool:
    """Return whether a batch's rows have more than a million distinct orders, so that equality is no coincidence.

    >>> _shows_order(torch.arange(10)), _shows_order(torch.arange(100) % 2), _shows_order(torch.arange(8) % 2)
    (True, True, False)
    """
    if not leaf.ndim or not leaf.numel():
        return False
    rows = Counter(map(zlib.crc32, leaf.reshape(len(leaf), -1).view(torch.uint8).numpy()))
    orders = math.lgamma(len(leaf) + 1) - sum(math.lgamma(count + 1) for count in rows.values())
    return orders > math.log(1e6)


def _differs(hand: Hand, facts: list[Any]) -> bool:
    return len({tuple(each) for each in brought_by_all(hand, "take batches of data", facts)}) > 1


def _is_indexed(loader: Any) -> bool:
    """Return whether a replica may read only its samples; a custom collate function may depend on the whole batch."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and (loader.collate_fn is default_collate or loader.collate_fn.__module__.startswith("keras."))
    )


class _OwnSamples(Sampler[list[Any]]):
    """Batch sampler that yields the ids of this replica's samples of each global batch, and queues their shares."""

    def __init__(self, batches: Any, share: Callable[[int], KerasShare], require: Callable[[list[Any]], None]) -> None:
        self._batches, self._share, self._require = batches, share, require
        self.shares: deque[KerasShare] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        for number, batch in enumerate(self._batches):
            ids = list(batch)
            if number == 0:
                self._require(ids)
            share = self._share(len(ids))
            self.shares.append(share)
            yield share.ids(ids)


def _indexed(
    loader: DataLoader[Any], share: Callable[[int], KerasShare], require: Callable[[list[Any]], None]
) -> Iterator[tuple[KerasShare, Any]]:
    """Iterate over a DataLoader reading only this replica's samples; `require` checks the first batch's sample ids."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(inner, DistributedSampler) or isinstance(loader.batch_sampler, DistributedSampler):
        raise DataError(
            "a DataLoader must return global batches, which are then split over the replicas",
            got="a DistributedSampler",
            remedy="omit it: DataLoader(dataset, batch_size=GLOBAL, shuffle=True)",
        )
    samples = _OwnSamples(loader.batch_sampler, share, require)
    own: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=samples,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
    return ((samples.shares.popleft(), batch) for batch in iter(own))
