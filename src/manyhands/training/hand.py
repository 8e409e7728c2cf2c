"""`Hand`: the handle of one replica. `fit` drives it; custom training loops use it directly."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core import (
    DATA_AXES,
    LayoutFree,
    Mean,
    StrategyError,
    StrategySpec,
    Task,
    TaskError,
    counted,
    each_of,
    event,
    mix,
    require_tensor_state,
    seed_all,
    seeded,
    set_training,
)
from ..data import Batch, Cursor, Feed, Source, as_source, check_source, copied, source_of
from ..distributed import DEFAULT_TIMEOUT, DirectChannel, NullWorld, World, current_world, resolve
from ..launcher import TRAINERS, join_launched
from ..monitoring import Spans, make_view
from ..storage import CheckpointStore
from ..strategies import (
    MAIN,
    CannotDefer,
    Deferred,
    Probe,
    Replica,
    Take,
    defer,
    is_undecided,
    keep_all,
    keep_where,
    make_replica,
    under,
)
from .carried_numbers import Counters
from .loss_totals import BatchShare, Tally, gather_rows
from .restored_objects import left_alone
from .snapshot import restore_snapshot, share, take_snapshot
from .sync_selection import Choosing
from .weight_averages import Averages

if TYPE_CHECKING:
    from ..strategies import Layout

Key = str
NUM_FOLLOWED, MAX_FOLLOWED, NUM_TRIED = 4, 64, 6
"""Samples traced through a network to find how to split it; up to `MAX_FOLLOWED` where pipeline stages are timed."""
OPTIMIZER_DRAWS = 0x0971
"""Salt that keeps the seeds of optimizers apart from those of networks."""
REPORT_STEP_SECONDS = 0.5
_AS_IT_IS = contextlib.nullcontext()
_built: WeakSet[nn.Module] = WeakSet()
"""Networks this process has already built for tasks: reusing one would start from its trained weights."""


@dataclass(frozen=True)
class _Noted:
    """A local SGD step: its loss total, count and stop vote, and the tensors to correct once replicas synchronize."""

    row: Tensor
    loss: Tensor
    good: Tensor | None


class Hand:
    """The handle of one replica: its rank and device, its share of the data, the step, collectives and checkpoints."""

    def __init__(self, world: World, spec: StrategySpec) -> None:
        self.world, self.spec = world, spec
        self.replicas = world.along(spec.axes, *DATA_AXES)
        """The data-parallel ranks as a world: each takes other samples; ranks along other axes share the same ones."""
        self.rank, self.size, self.device = self.replicas.rank, self.replicas.size, world.device
        self.is_first = world.is_first
        self.cursors: list[Cursor] = []
        """The read position of each dataset, in order of first use; the first is the training data."""
        self._datasets: dict[Any, tuple[Any, int]] = {}
        self.num_steps = 0
        self.num_restores = 0
        self.clip: float | None = None
        self.averages: Averages | None = None
        """The moving average of the weights, where the task has `ema`."""
        self.seconds = {"optimizer": 0.0, "save": 0.0, "validation": 0.0}
        """Seconds this replica spent on work other than input, sync and compute."""
        self.spans: Spans | None = None
        """Records the phases of a step while that step is timed."""
        self._replica: Replica | None = None
        self._choosing: Choosing | None = None
        self.batch: Batch | None = None
        """The batch that `batches` yielded last: its samples, their ids and their place in the global batch."""
        self.randomness = LayoutFree(self.device) if spec.deterministic else None
        """Generates random numbers that do not depend on the layout; None where torch's own generators are used."""
        self.counters = Counters()
        """Whole numbers in attributes that a forward changes, followed over the micro-batches of a step."""
        self._seed = 0
        self._covers: list[RemovableHandle] = []
        self.layout: Layout | None = None
        """How layers are sharded, where that is known before the network is built."""
        self.part = BatchShare(1, self.size)
        """The share of the step's global batch that the current micro-batch is."""
        self.start = 0
        """The index of the current micro-batch's first sample among this replica's samples."""
        self._tallies: dict[Key, Tally] = {}
        self._last_tally: Tally | None = None
        self._vote = torch.zeros((), device=self.device)
        self._has_voted = False
        self._noted: dict[Key, list[_Noted]] = {}
        """Local SGD steps by optimizer since the replicas last synchronized."""
        self._due: list[Key] = []
        self._has_stop_vote = False
        self._joined_at = -1
        self.is_midway = False
        """Whether parameters were updated since the last step that is known to be complete."""
        self.skips = False
        """Whether a step with a gradient that is not finite is skipped."""
        self.good: Tensor | None = None
        """A flag on the device: whether the last step was applied; None where no step is skipped."""
        self.look_every = 1 if self.device.type == "cpu" else 50
        """Steps between two reads of losses and votes: on a GPU a read waits for the device."""
        self.losses: dict[Key, Tensor] = {}
        """The last step's losses over all replicas; under local SGD, this replica's until the next synchronization."""
        self.norms: dict[Key, Tensor] = {}
        """The norms of the last step's gradients before clipping, of optimizers whose gradients are clipped."""
        self._stores: dict[Path, CheckpointStore] = {}
        self.reports_steps = False
        """Whether to report the progress of a custom training loop."""
        self._reported_at = 0.0

    # -- setting up -----------------------------------------------------------------------------------------------

    def setup(
        self, model: nn.Module, optimizer: Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer]
    ) -> tuple[nn.Module, Any]:
        """Apply the strategy to a network and its optimizer; return both, ready to use.

        Optimizers in a list step together; those in a dict are named by their keys.

        >>> hand = Hand(NullWorld(), StrategySpec())
        >>> net = nn.Linear(2, 1)
        >>> model, optimizer = hand.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        """
        self.make_replica(model, lambda _: optimizer)
        return self.model, optimizer

    def build(self, task: Task, look: Callable[[nn.Module], None] | None = None) -> None:
        """Build a task's network and optimizer, with the same initial values on every replica.

        `look` is called with the whole network before it is split into pieces.
        """
        seed_all(mix(task.seed, 0))
        deferred = self._deferred(task)
        model = task.model() if deferred is None else deferred.model
        if model in _built:
            raise TaskError(
                "the model function must build a new network each time",
                got=f"a {type(model).__name__} that was trained before",
                remedy=f"write model=lambda: {type(model).__name__}(...)",
            )
        if isinstance(model, nn.Module):
            require_tensor_state(model)
            set_training(model)
        source = source_of(task)
        probe = self.probe(task.loss, source, check_source(source, task.batch_size))
        with left_alone(task.loss):
            self.make_replica(model, task.make_optimizer, probe, look, None if deferred is None else deferred.fill)
        _built.add(model)
        self.clip = task.clip
        self.skips = task.not_finite == "skip"
        if task.ema is not None:
            self.averages = Averages(self.model, self.replica.groups, task.ema)
        if task.weights is not None:
            # Both modules import this one.
            from .initial_weights import start_from
            from .run import as_weights

            start_from(self, as_weights(task.weights))

    def _deferred(self, task: Task) -> Deferred | None:
        """Return the network without values where its parameters are sharded; None where it must be built whole."""
        spec = self.spec
        if spec.axes.keys() - {"replicas"} != {"shards"} or spec.sharding == "optimizer" or self.world.size == 1:
            return None
        try:
            return defer(task.model)
        except CannotDefer as reason:
            self.notice(f"every rank builds the whole network before it is sharded, because {reason}")
            return None

    def probe(self, compute: Callable[[nn.Module, Any], Any] | None, source: Source, batch_size: int) -> Probe | None:
        """Return a function that computes the loss of a few samples, for strategies that trace the network with it.

        None where no strategy needs it.
        """
        is_known = self.layout is not None and self.spec.stages == 1 and self.size * self.spec.accumulate == 1
        is_split = self.spec.accumulate > 1 or self.world.size > 1 or self.spec.servers > 0
        if compute is None or is_known or not is_split:
            return None
        at_a_time = batch_size // (self.size * self.spec.accumulate * self.spec.microbatches)
        rows = (
            (NUM_FOLLOWED if self.spec.tensor > 1 else NUM_TRIED)
            if self.spec.stages == 1
            else max(NUM_FOLLOWED, min(MAX_FOLLOWED, at_a_time))
        )
        few = functools.cache(lambda: self.peek(source, batch_size, rows))
        if self.spec.axes.keys() - {"replicas"}:
            # The trace runs on tensors without values, where samples can no longer be read.
            few()
        return lambda model, fake: compute(model, fake(copied(few())))

    def peek(self, source: Source, batch_size: int, num_samples: int) -> Any:
        """Return a few of the first samples, without shuffling."""
        with contextlib.closing(self.make_feed(source, batch_size, shuffle=False)) as feed:
            return feed.peek(num_samples)

    def make_replica(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], Any],
        probe: Probe | None = None,
        look: Callable[[nn.Module], None] | None = None,
        fill: Callable[[Take], None] | None = None,
    ) -> None:
        """Build the replica: apply the strategy to a network and create its optimizer; `fill` loads missing values."""
        self._replica = make_replica(self.spec, self.world, model, make_optimizer, probe, look, self.layout, fill)
        self.spec = self._replica.spec
        for text in self._replica.notes:
            self.notice(text)
        self._choosing = Choosing(self) if is_undecided(self._replica) else None
        if self.randomness is not None:
            self._covers += self.randomness.cover(self.model)

    def follow_policy(self, sync: str) -> None:
        """Switch to another sync policy; all replicas must call this together."""
        if sync == self.spec.sync:
            return
        self.agree()
        self._replica = under(self.replica, sync)
        self.spec = self._replica.spec
        # Invalidates captured steps: they contain the old policy.
        self.num_restores += 1

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of the enclosed block to `seconds`; waiting for other replicas counts as sync instead."""
        start, waited = time.perf_counter(), self.world.waited
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start - (self.world.waited - waited)

    def during(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Attribute the enclosed block to this phase of the step, where the step is timed."""
        return _AS_IT_IS if self.spans is None else self.spans.during(what)

    @property
    def replica(self) -> Replica:
        """The network and optimizers as this rank holds them; raises `TaskError` before `setup`."""
        if self._replica is None:
            raise TaskError("the hand has no network yet", remedy="call hand.setup(model, optimizer) first")
        return self._replica

    @property
    def is_apart(self) -> bool:
        """Whether this replica has taken local SGD steps that are not synchronized yet."""
        return self._replica is not None and not self._replica.agrees

    @property
    def model(self) -> nn.Module:
        """The network under the strategy."""
        return self.replica.model

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name; a single one has the empty name."""
        return self.replica.optimizers

    @property
    def epoch(self) -> int:
        """The current epoch of the training data."""
        return self.cursors[0].epoch if self.cursors else 0

    def seed(self, seed: int) -> None:
        """Seed every generator, differently on each replica."""
        seed_all(mix(seed, self.rank))
        self._seed = seed

    def draw_for(self, batch: Batch, salt: int = 0) -> None:
        """Seed the layout-free random numbers by a batch's samples and the step; `salt` selects another stream."""
        if self.randomness is not None:
            self.randomness.load(mix(self._seed, salt), self.num_steps, batch.ids)

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which layout-free random numbers are drawn, where the strategy is deterministic."""
        return _AS_IT_IS if self.randomness is None else self.randomness.drawing()

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which network and loss are computed: the strategy's precision and randomness."""
        return self.replica.scope() if self.randomness is None else self._drawing_in(self.replica.scope())

    @contextlib.contextmanager
    def _drawing_in(self, scope: contextlib.AbstractContextManager[object]) -> Iterator[None]:
        with self.drawing(), scope:
            yield

    # -- data -----------------------------------------------------------------------------------------------------

    def batches(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        epochs: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        collate: Any = None,
    ) -> Iterator[Any]:
        """Iterate over this replica's share of every global batch: one epoch, or until `epochs` epochs are complete.

        Each call continues where the last one over the same data ended, also after `restore`.

        >>> hand = Hand(NullWorld(), StrategySpec())
        >>> [batch.tolist() for batch in hand.batches(torch.arange(5), 2, shuffle=False)]
        [[0, 1], [2, 3], [4]]
        """
        source = as_source(data, collate=collate)
        feed = self.make_feed(source, check_source(source, batch_size), shuffle=shuffle, seed=seed)
        try:
            which = self._which(data)
            last = epochs if epochs is not None else self.cursors[which].epoch + 1
            while self.cursors[which].epoch < last:
                for batch in self.one_epoch(feed, which):
                    yield batch.data
                    if self.is_look and self.voted_to_stop():
                        return
        finally:
            feed.close()

    def make_feed(
        self, source: Any, batch_size: int, *, shuffle: bool, seed: int = 0, workers: int | None = None
    ) -> Feed:
        """Return a feed of this replica's share of the data."""
        return Feed(
            source,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            replica=self.rank,
            num_replicas=self.size,
            accumulate=self.spec.accumulate,
            device=self.device,
            workers=workers,
            dtype=torch.float64 if self.spec.precision == "fp64" else None,
        )

    def one_epoch(self, feed: Feed, which: int = 0) -> Iterator[Batch]:
        """Yield the batches of a dataset from its cursor to the end of the epoch, and advance the cursor."""
        while len(self.cursors) <= which:
            self.cursors.append(Cursor())
        epoch = self.cursors[which].epoch
        for batch in feed.epoch(self.cursors[which]):
            self.take(batch)
            self.cursors[which] = batch.cursor
            yield batch
        self.cursors[which] = Cursor(epoch=epoch + 1)

    def _which(self, data: Any) -> int:
        """Return a dataset's index in order of first use; a tuple of the same arrays counts as the same dataset."""
        parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
        _, which = self._datasets.setdefault(tuple(map(id, parts)), (data, len(self._datasets)))
        while len(self.cursors) <= which:
            self.cursors.append(Cursor())
        return which

    def take(self, batch: Batch) -> None:
        """Make this the current batch, by which losses are weighted."""
        self.batch = batch
        self.part = BatchShare(batch.num_samples, batch.global_samples)
        self.draw_for(batch)
        if self._replica is not None:
            self._begin_part()

    def _begin_part(self) -> None:
        """Prepare the replica and its buffers for the next micro-batch; must run before its forward pass."""
        self.replica.set_padding(self.part.is_padding)
        if self.replica.buffers:
            self.replica.buffers.begin()

    def accumulate(self, batch: Any = None) -> Iterator[Any]:
        """Iterate over the current batch's micro-batches; `backward` on each gives the gradient of the whole batch."""
        current = self.batch
        if current is None or (batch is not None and batch is not current.data):
            raise TaskError(
                "hand.accumulate needs the batch that hand.batches returned last",
                got=type(batch).__name__,
                remedy="pass that batch",
            )
        # `take` has already set the weight of a batch with a single micro-batch.
        is_whole = len(current.sizes) == 1 and self.randomness is None
        return iter((current.data,)) if is_whole else self._micros(current)

    def _micros(self, current: Batch) -> Iterator[Any]:
        num_micros = len(current.sizes)
        self._draw_next()
        for index, (data, size, _) in enumerate(current.micros()):
            self.part = BatchShare(size, current.global_samples, last=index == num_micros - 1)
            self.start = sum(current.sizes[:index])
            self.select(self.start, size)
            self._begin_part()
            yield data
        self.part = BatchShare(current.num_samples, current.global_samples)
        self._draw_next()
        self.start = 0
        self.select(0, current.num_samples)

    def _draw_next(self) -> None:
        if self.randomness is not None:
            self.randomness.begin()

    def select(self, start: int, size: int) -> None:
        """Restrict the layout-free random numbers to a range of the batch's samples."""
        if self.randomness is not None:
            self.randomness.select(start, size)

    # -- a step ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | Mean, key: Key = MAIN) -> None:
        """Accumulate a loss's gradients, weighted by the share of the batch; the last one starts the all-reduce."""
        tally = self.open_tally(key)
        objective = tally.add(whole_loss(self.replica, loss), self.part)
        if self.part.last:
            self.send(tally, key)
        # Recomputed activations must draw the same random numbers as the first forward pass.
        with self.during("backward"), self.drawing():
            self.replica.backward(objective, key, last=self.part.last)
        if self.replica.buffers and key == next(iter(self.replica.groups)):
            self.replica.buffers.end(self.part.size, last=self.part.last)

    def open_tally(self, key: Key = MAIN) -> Tally:
        """Return the loss totals of the current step, creating them for its first micro-batch."""
        tally = self._tallies.get(key)
        if tally is None:
            replica = self.replica
            tally = self._tallies[key] = Tally(
                replica.group, reports_loss=replica.reports_loss, is_local_sgd=replica.is_local_sgd
            )
        elif tally.is_sent:
            raise TaskError(
                "a step can have only one backward per micro-batch",
                got="a second one before hand.step()",
                remedy="add the losses, or split the batch with hand.accumulate",
            )
        return tally

    def send(self, tally: Tally, key: Key = MAIN) -> None:
        """Send the step's loss totals to the other replicas, once all its micro-batches are added."""
        self.respond_to_stop()
        tally.send(self._vote, self.replica.piggybacked(key))

    def respond_to_stop(self) -> None:
        """Turn a stop request into a vote that is sent with the next step."""
        if self.world.channel.stopping and not self._has_voted:
            self._vote.fill_(1)
            self._has_voted = True

    def begin_step(self) -> list[Tensor]:
        """Return copies of the buffers, to restore them if the step is skipped."""
        self.good = None
        return [buffer.clone() for buffer in self.model.buffers()] if self.skips else []

    def end_step(self, before: list[Tensor]) -> None:
        """Restore the buffers if the step was skipped."""
        if self.good is not None and (self.device.type != "cpu" or not self.good):
            keep_where(self.good, list(self.model.buffers()), before)

    def step(self, key: Key = MAIN) -> None:
        """Reduce the gradients over all replicas, clip them, and update the parameters."""
        with self.during("optimizer"):
            self.update(key)
            self.note(key)
        self.report_step(lambda: self.num_steps)

    def report_step(self, step: Callable[[], int]) -> None:
        """Report the step number of a custom loop at most every `REPORT_STEP_SECONDS`, where progress was asked for."""
        if self.reports_steps and self.is_first and time.monotonic() > self._reported_at + REPORT_STEP_SECONDS:
            self._reported_at = time.monotonic()
            self.world.channel.report(event("step", step=step()))

    def update(self, key: Key = MAIN) -> None:
        """Finish the gradients, clip them, and update the parameters and weight averages of one optimizer."""
        tally = self._tallies.pop(key, None)
        if tally is None:
            raise TaskError(
                "hand.step must follow hand.backward",
                got="no backward before it",
                remedy="call hand.backward(loss) first",
            )
        tally.receive()
        self.replica.finish(key, tally.count)
        self.replica.hooks.call(self.replica, key)
        tally.settle()
        with self.timed("optimizer"):
            norm = self.replica.clip(key, self.clip) if self.clip is not None else None
            flag = self._flag(key, norm, tally)
            self.is_midway = True
            with self._drawing_alike(key):
                self.replica.update(key, flag)
            if self.averages is not None:
                self.averages.update(key, flag)
        self.losses[key] = tally.loss
        if norm is not None:
            self.norms[key] = norm
        self._last_tally = tally
        if key == MAIN:
            self.num_steps += 1

    def _drawing_alike(self, key: Key) -> contextlib.AbstractContextManager[None]:
        """Return a context in which user-defined optimizers draw the same random numbers on every replica."""
        if all(type(one).__module__.startswith("torch.optim.") for one in each_of(self.optimizers[key])):
            return _AS_IT_IS  # torch's own optimizers draw nothing, and their updates may be part of a CUDA graph
        return seeded(mix(self._seed, self.num_steps, *key.encode(), OPTIMIZER_DRAWS), self.device)

    def note(self, key: Key = MAIN) -> None:
        """Account for a completed step: under local SGD, store its totals and synchronize if that is due."""
        if self.replica.is_local_sgd:
            self._keep(key)
        if self._choosing is not None and key == next(iter(self.replica.groups)):
            self._choosing.tick()
            self._choosing = None if self._choosing.is_done else self._choosing

    def _keep(self, key: Key) -> None:
        assert self._last_tally is not None
        row, good = self._last_tally.row, self.good
        if good is not None:
            # A replica that skipped the step adds no samples to the mean; its stop vote still counts.
            row[:2] = torch.where(good, row[:2], torch.zeros_like(row[:2]))
        self._noted.setdefault(key, []).append(_Noted(row, self.losses[key], good))
        if self.replica.note(key, row):
            self._due.append(key)
        if not self.skips:
            self.meet()

    def meet(self) -> None:
        """Synchronize local SGD replicas if that is due, and average their losses since the last time."""
        due, self._due = self._due, []
        for key in due:
            self.replica.meet(key)
            noted = self._noted.pop(key, [])
            for step in noted:
                step.loss.copy_(step.row[0] / step.row[1])
                if step.good is not None:
                    step.good.copy_(step.row[1] > 0)
            self._has_stop_vote = self._has_stop_vote or (bool(noted) and bool(noted[-1].row[2] > 0))

    def agree(self) -> None:
        """Synchronize parameters and optimizer state over all replicas, under policies where they diverge.

        Validation, checkpoints and the end of `fit` do so; a custom training loop must call it before it evaluates.
        """
        if not self.replica.is_local_sgd or (self.replica.agrees and self._joined_at == self.num_steps):
            return
        self._due = list(self.replica.groups)
        self.meet()
        self.replica.join(() if self.averages is None else self.averages.tensors.values())
        self._joined_at = self.num_steps

    def _flag(self, key: Key, norm: Tensor | None, tally: Tally) -> Tensor | None:
        """Return a flag on the device: whether to apply this update; None where no step is skipped."""
        if not self.skips:
            return None
        flag = (self.replica.is_finite(key) if norm is None else norm.isfinite()) & tally.is_finite
        self.good = flag if self.good is None else flag & self.good
        return flag

    def forget_step(self) -> None:
        """Discard the current step's losses and gradients."""
        self._tallies.clear()
        self.replica.forget()
        self.replica.buffers.reset()

    def recorded_tally(self) -> Tally:
        """Return the loss totals of the step that was just captured, sent or not."""
        tally = self._tallies.pop(MAIN, None) or self._last_tally
        assert tally is not None
        return tally

    def reopen(self, tally: Tally) -> None:
        """Make these the loss totals of the current step."""
        self._tallies[MAIN] = tally

    def follow(
        self, tally: Tally, losses: Mapping[Key, Tensor], norms: Mapping[Key, Tensor], good: Tensor | None
    ) -> None:
        """Adopt the results of a captured step; they are copied, since its next replay overwrites them."""
        self._last_tally = tally
        self.losses = {key: loss.clone() for key, loss in losses.items()}
        self.norms = {key: norm.clone() for key, norm in norms.items()}
        self.good = None if good is None else good.clone()

    def minimize(self, loss: Tensor | Mean | Callable[[Any], Tensor | Mean], key: Key = MAIN) -> Tensor:
        """Run backward and step of one of several optimizers; return the loss over all replicas.

        Under gradient accumulation pass a function of the micro-batch instead of a loss.
        """
        if key not in self.replica.groups:
            known = ", ".join(map(repr, self.replica.groups))
            raise TaskError(f"the optimizer must be one of {known}", got=repr(key), remedy="choose one of them")
        if callable(loss):
            for data in self.accumulate():
                with self.scope():
                    part = loss(data)
                self.backward(part, key)
        else:
            if self.batch is not None and len(self.batch.sizes) > 1:
                raise StrategyError(
                    "with accumulate, a loss must be computed per micro-batch",
                    got="a loss that is already computed",
                    remedy="pass a function: hand.minimize(lambda part: loss(hand.model, part), key)",
                )
            self.backward(loss, key)
        self.step(key)
        return self.losses[key]

    @property
    def is_look(self) -> bool:
        """Whether losses and votes are read after this step; the same answer on every replica."""
        if self._replica is not None and self._replica.is_local_sgd:
            return self._replica.agrees
        return self.num_steps % self.look_every == 0

    @property
    def loss(self) -> float:
        """The last step's loss over all replicas; under local SGD, this replica's until the next synchronization."""
        return float(next(iter(self.losses.values())))

    @property
    def part_loss(self) -> Tensor | None:
        """The last step's loss over this replica's own samples, NaN where it had none; None with a single replica."""
        return None if self.size == 1 or self._last_tally is None else self._last_tally.local_loss

    @property
    def finite_parts(self) -> list[bool]:
        """Whether the loss of each micro-batch of this replica's last step is finite."""
        return [] if self._last_tally is None else self._last_tally.finite_parts

    def stop(self) -> None:
        """Request a stop; all replicas end after the same step."""
        self.world.channel.stopping = True

    def voted_to_stop(self) -> bool:
        """Return whether a replica requested a stop in the last step; equal on all replicas."""
        if self.world.size == 1:
            return self.world.channel.stopping
        if self._has_stop_vote:
            return True
        return self._last_tally is not None and self._last_tally.stopping

    # -- collectives ----------------------------------------------------------------------------------------------

    def sum(self, value: Tensor | float) -> Tensor:
        """Return the sum over the replicas."""
        tensor = torch.as_tensor(value, device=self.device).detach().clone()
        self.replicas.all_reduce(tensor)
        return tensor

    def mean(self, value: Tensor | float) -> Tensor:
        """Return the mean over the replicas.

        >>> Hand(NullWorld(), StrategySpec()).mean(3.0)
        tensor(3.)
        """
        return self.sum(torch.as_tensor(value, device=self.device) * 1.0) / self.size

    def gather(self, value: Tensor | float) -> Tensor:
        """Concatenate the rows of all replicas in rank order; scalars are stacked. Gradients flow back.

        >>> Hand(NullWorld(), StrategySpec()).gather(3.0)
        tensor([3.])
        """
        tensor = torch.as_tensor(value, device=self.device)
        return gather_rows(self.replicas, tensor.unsqueeze(0) if tensor.dim() == 0 else tensor)

    def broadcast(self, value: Tensor, source: int = 0) -> Tensor:
        """Return the value of replica `source` on all replicas."""
        tensor = torch.as_tensor(value, device=self.device).detach().clone()
        self.replicas.broadcast(tensor, source)
        return tensor

    def barrier(self) -> None:
        """Block until every rank has called this."""
        self.world.barrier()

    def log(self, **values: Any) -> None:
        """Report values of the first replica to the event log and the screen."""
        if self.is_first:
            plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
            self.world.channel.report(event("log", step=self.num_steps, values=plain))

    def notice(self, text: str) -> None:
        """Report a text to the user, from the first rank only."""
        if self.is_first:
            self.world.channel.report(event("notice", text=text))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, score: float | None = None, **state: Any) -> None:
        """Write a checkpoint in the background: network, optimizers, data position, random states, and `state`.

        `state` are values of JSON types. A scheduler of a custom loop is not part of a checkpoint by itself: pass its
        state, `hand.save(path, scheduler=scheduler.state_dict())`, and load it from what `restore` returns.
        """
        with self.timed("save"):
            self.agree()
            checkpoint = take_snapshot(self, state)
            if self.is_first:
                self.store(path).save(checkpoint, score=score)

    def restore(self, path: str | Path, *, before: int | None = None) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint, if given of a step before `before`.

        Returns the `state` that was saved; None if there is no checkpoint.
        """
        store = self.store(path)
        seen = self.world.gather_objects([step for step in store.steps() if before is None or step < before])
        if not seen[0]:
            return None
        self.num_restores += 1
        self._noted.clear()
        if all(steps == seen[0] for steps in seen):
            return restore_snapshot(self, store.load(before=before))
        # The checkpoints are on the disk of the first rank's host.
        return restore_snapshot(self, share(self.world, store.load(before=before) if self.is_first else None, 0))

    def store(self, path: str | Path, *, keep: int = 2) -> CheckpointStore:
        """Return the checkpoint store at this path, opened once."""
        root = Path(path)
        if root not in self._stores:
            self._stores[root] = CheckpointStore(
                root,
                keep=keep,
                on_error=lambda error: self.notice(
                    f"a checkpoint could not be written, but training continues: {error}"
                ),
                on_notice=self.notice,
            )
        return self._stores[root]

    def close(self) -> None:
        """Wait for pending checkpoint writes and remove the strategy's hooks from the network."""
        for store in self._stores.values():
            store.close()
        for cover in self._covers:
            cover.remove()
        if self._replica is not None:
            self._replica.close()
            keep_all(self._replica.model)


def whole_loss(replica: Replica, loss: Tensor | Mean) -> Tensor | Mean:
    """Return a loss as on one device, where its tensors are distributed over ranks."""
    return Mean(*replica.plain((loss.total, loss.count))) if isinstance(loss, Mean) else replica.plain(loss)


_held: list[Hand] = []


SCRIPT_END = "the first replica has come to the end"
"""The mark that the first rank sets when its script has ended, so that other ranks stop waiting for it."""


@contextlib.contextmanager
def holding(hand: Hand) -> Iterator[None]:
    """Make `hand` the one that `mh.hand()` returns in this process."""
    _held.append(hand)
    try:
        yield
        if hand.is_first:
            hand.world.mark(SCRIPT_END)
    finally:
        _held.pop()


def hand(on: str | None = None) -> Hand:
    """Return this process's hand: one rank of many under `manyhands launch`, else the only one, on the first of `on`.

    >>> hand().size
    1
    """
    if _held:
        return _held[-1]
    world = joined_world(on) or _world_of_a_plain_program(on)
    return Hand(world, StrategySpec(replicas=world.size))


def joined_world(on: Any = None, timeout: float = DEFAULT_TIMEOUT, *, roles: Sequence[str] = TRAINERS) -> World | None:
    """Return the world this process is a rank of, also under torchrun; the first rank then displays its events.

    `roles` are the roles of a described cluster whose processes are ranks.
    """
    known = current_world()
    world = known or join_launched(on, timeout, roles=roles)
    if world is not None and known is None and world.is_first:
        assert isinstance(world.channel, DirectChannel)
        view = make_view(counted(world.size, "rank"), None, live=False)
        world.channel.handler = lambda entry: view.show(0, entry)
    return world


def _world_of_a_plain_program(on: str | None) -> World:
    """Return a world of one rank on the first available device, whose log is displayed."""
    device = resolve(on, 1)[0][0]
    view = make_view(f"replicas=1 on {device}", None, live=False)
    return NullWorld(device, DirectChannel(lambda entry: view.show(0, entry)))
