"""Hand: what one replica holds. `fit` drives it; whoever writes the whole loop uses it directly."""

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
    each_of,
    event,
    mix,
    seed_all,
    seeded,
)
from ..data import Batch, Cursor, Feed, Source, as_source, check_source
from ..distributed import DEFAULT_TIMEOUT, DirectChannel, NullWorld, World, current_world, resolve
from ..launcher import TRAINERS, join_launched
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
    realise,
    under,
)
from .gather_rows import gather_rows
from .loss_totals import BatchShare, Tally
from .progress import make_view
from .snapshot import restore_snapshot, share, take_snapshot
from .spans import Spans
from .sync_selection import Choosing
from .weight_averages import Averages

if TYPE_CHECKING:
    from ..strategies import Layout

Key = str
NUM_FOLLOWED, MAX_FOLLOWED, NUM_TRIED = 4, 64, 6
"""Samples that are followed through a network to find out how to split it; more where stages are measured."""
OPTIMIZER_DRAWS = 0x0971
"""Tells the seeds of optimizers from those of networks."""
TELL_SECONDS = 0.5
_AS_IT_IS = contextlib.nullcontext()
_built: WeakSet[nn.Module] = WeakSet()
"""Networks that this process has built for tasks: one that comes again would go on from where it was left."""


@dataclass(frozen=True)
class _Noted:
    """A step of a replica that drifts: its total, count and vote, which become those of all, and what they decide."""

    row: Tensor
    loss: Tensor
    good: Tensor | None


class Hand:
    """One replica's view of the work: who it is, its part of the data, and collectives with the others."""

    def __init__(self, world: World, spec: StrategySpec) -> None:
        self.world, self.spec = world, spec
        self.replicas = world.along(spec.axes, *DATA_AXES)
        """The ranks that take other samples than this one, as a world; ranks along other axes work on the same ones."""
        self.rank, self.size, self.device = self.replicas.rank, self.replicas.size, world.device
        self.is_first = world.is_first
        self.cursors: list[Cursor] = []
        """Where each dataset stands, in the order of their first use; the first is the one that is trained on."""
        self._datasets: dict[Any, tuple[Any, int]] = {}
        self.num_steps = 0
        self.num_restores = 0
        self.clip: float | None = None
        self.averages: Averages | None = None
        """The moving average of the weights, where the task has `ema`."""
        self.seconds = {"optimizer": 0.0, "save": 0.0, "validation": 0.0}
        """Where this replica's time went, besides input, sync and compute."""
        self.spans: Spans | None = None
        """Where this replica notes what it does, while a step is timed."""
        self._replica: Replica | None = None
        self._choosing: Choosing | None = None
        self.batch: Batch | None = None
        """The batch that `batches` gave last: its samples, their ids, their place in the global batch."""
        self.randomness = LayoutFree(self.device) if spec.deterministic else None
        """What draws random numbers that do not depend on the layout; None where torch's own generators do."""
        self._seed = 0
        self._covers: list[RemovableHandle] = []
        self.layout: Layout | None = None
        """How layers are cut, where that is known before the network is built."""
        self.part = BatchShare(1, self.size)
        """How much of the step's global batch the current micro-batch is."""
        self.start = 0
        """Where the current micro-batch begins among this replica's samples."""
        self._tallies: dict[Key, Tally] = {}
        self._last_tally: Tally | None = None
        self._vote = torch.zeros((), device=self.device)
        self._has_voted = False
        self._noted: dict[Key, list[_Noted]] = {}
        """Steps since the replicas last agreed, where they drift apart."""
        self._due: list[Key] = []
        self._heard_stop = False
        self._joined_at = -1
        self.is_midway = False
        """Whether something was updated since a step was last known to be whole."""
        self.skips = False
        """Whether a step whose gradient is not finite is left out."""
        self.good: Tensor | None = None
        """A flag on the device: whether the last step was taken; None where every step is."""
        self.look_every = 1 if self.device.type == "cpu" else 50
        """Steps between two looks at losses and votes: on a GPU a look waits for the device."""
        self.losses: dict[Key, Tensor] = {}
        """The losses of the last step, over all replicas; where they drift, of this one until they agree."""
        self._stores: dict[Path, CheckpointStore] = {}
        self.tells_steps = False
        """Whether somebody wants to know how far a loop of a person's own has come."""
        self._told_at = 0.0

    # -- setting up -----------------------------------------------------------------------------------------------

    def setup(
        self, model: nn.Module, optimizer: Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer]
    ) -> tuple[nn.Module, Any]:
        """Puts a network and its optimizer under the strategy; returns both, ready to use.

        A list of optimizers takes its steps together; those of a dict are named by their keys.

        >>> hand = Hand(NullWorld(), StrategySpec())
        >>> net = nn.Linear(2, 1)
        >>> model, optimizer = hand.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        """
        self.realise(model, lambda _: optimizer)
        return self.model, optimizer

    def build(self, task: Task, look: Callable[[nn.Module], None] | None = None) -> None:
        """Builds a task's network and optimizer, with the same first values on every replica.

        `look` sees a network that is going to be cut in pieces while it is whole.
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
        source = as_source(task.data, collate=task.collate)
        probe = self.probe(task.loss, source, check_source(source, task.batch_size))
        self.realise(model, task.make_optimizer, probe, look, None if deferred is None else deferred.fill)
        _built.add(model)
        self.clip = task.clip
        self.skips = task.not_finite == "skip"
        if task.ema is not None:
            self.averages = Averages(self.model, self.replica.groups, task.ema)
        if task.weights is not None:
            # Both build on hands.
            from .initial_weights import start_from
            from .run import as_weights

            start_from(self, as_weights(task.weights))

    def _deferred(self, task: Task) -> Deferred | None:
        """The network without its values, where ranks hold parts of each of them; None where it must be made whole."""
        spec = self.spec
        if spec.axes.keys() - {"replicas"} != {"shards"} or spec.sharding == "optimizer" or self.world.size == 1:
            return None
        try:
            return defer(task.model)
        except CannotDefer as reason:
            self.notice(f"every rank makes the whole network before it is cut, because {reason}")
            return None

    def probe(self, compute: Callable[[nn.Module, Any], Any] | None, source: Source, batch_size: int) -> Probe | None:
        """What is computed of a few samples, for strategies that follow them through the network."""
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
            # They are followed through the network on tensors without values, where none can be read any more.
            few()
        return lambda model, fake: compute(model, fake(few()))

    def peek(self, source: Source, batch_size: int, num_samples: int) -> Any:
        """Some of the first samples."""
        with contextlib.closing(self.make_feed(source, batch_size, shuffle=False)) as feed:
            return feed.peek(num_samples)

    def realise(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], Any],
        probe: Probe | None = None,
        look: Callable[[nn.Module], None] | None = None,
        fill: Callable[[Take], None] | None = None,
    ) -> None:
        """Puts a network under the strategy, and makes its optimizer there; `fill` brings values that it lacks."""
        self._replica = realise(self.spec, self.world, model, make_optimizer, probe, look, self.layout, fill)
        self.spec = self._replica.spec
        for text in self._replica.notes:
            self.notice(text)
        self._choosing = Choosing(self) if is_undecided(self._replica) else None
        if self.randomness is not None:
            self._covers += self.randomness.cover(self.model)

    def follow_policy(self, sync: str) -> None:
        """Lets the replicas agree in another way from here on; all of them must do so together."""
        if sync == self.spec.sync:
            return
        self.agree()
        self._replica = under(self.replica, sync)
        self.spec = self._replica.spec
        # Recordings of a step stand for the way it was.
        self.num_restores += 1

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Counts the time of what runs inside; waiting for other replicas is counted as sync instead."""
        start, waited = time.perf_counter(), self.world.waited
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start - (self.world.waited - waited)

    def during(self, what: str) -> contextlib.AbstractContextManager[None]:
        """What runs inside belongs to this phase of a step, where one is timed."""
        return _AS_IT_IS if self.spans is None else self.spans.during(what)

    @property
    def replica(self) -> Replica:
        """The network as this rank holds it."""
        if self._replica is None:
            raise TaskError("a hand needs a network first", got="none", remedy="call hand.setup(model, optimizer)")
        return self._replica

    @property
    def is_apart(self) -> bool:
        """Whether this replica has taken steps that the others do not know of."""
        return self._replica is not None and not self._replica.agrees

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self.replica.model

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name; the only one is under the empty name."""
        return self.replica.optimizers

    @property
    def epoch(self) -> int:
        """The pass over the training data that is under way."""
        return self.cursors[0].epoch if self.cursors else 0

    def seed(self, seed: int) -> None:
        """Seeds every generator, differently on each replica."""
        seed_all(mix(seed, self.rank))
        self._seed = seed

    def draw_for(self, batch: Batch, salt: int = 0) -> None:
        """Makes layout-free numbers those of a batch's samples in this step; `salt` makes others of them."""
        if self.randomness is not None:
            self.randomness.load(mix(self._seed, salt), self.num_steps, batch.ids)

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Where layout-free numbers are drawn, if they are asked for."""
        return _AS_IT_IS if self.randomness is None else self.randomness.drawing()

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Where the network and its loss are computed: the strategy's precision and randomness."""
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
        """This replica's part of every global batch: one pass over the data, or on until `epochs` passes are done.

        Every call goes on where the last one over the same data ended, also after `restore`.

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
        """A feed of this replica's part."""
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
        """Batches of a dataset from where its cursor stands to the end of its epoch."""
        while len(self.cursors) <= which:
            self.cursors.append(Cursor())
        epoch = self.cursors[which].epoch
        for batch in feed.epoch(self.cursors[which]):
            self.take(batch)
            self.cursors[which] = batch.cursor
            yield batch
        self.cursors[which] = Cursor(epoch=epoch + 1)

    def _which(self, data: Any) -> int:
        """The number of a dataset, by its first use; a tuple of the same arrays is the same data."""
        parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
        _, which = self._datasets.setdefault(tuple(map(id, parts)), (data, len(self._datasets)))
        while len(self.cursors) <= which:
            self.cursors.append(Cursor())
        return which

    def take(self, batch: Batch) -> None:
        """Makes this the batch that losses are weighed by."""
        self.batch = batch
        self.part = BatchShare(batch.num_samples, batch.global_samples)
        self.draw_for(batch)
        if self._replica is not None:
            self._begin_part()

    def _begin_part(self) -> None:
        """Say what the next micro-batch is before it is computed."""
        self.replica.ghost(self.part.is_ghost)
        if self.replica.buffers:
            self.replica.buffers.begin()

    def accumulate(self, batch: Any = None) -> Iterator[Any]:
        """The micro-batches of the current batch; `backward` on each gives the mathematics of the whole."""
        current = self.batch
        if current is None or (batch is not None and batch is not current.data):
            raise TaskError(
                "hand.accumulate takes what hand.batches gave last",
                got=type(batch).__name__,
                remedy="pass that batch",
            )
        # `take` has weighed a batch of one part already.
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
        """Makes layout-free numbers those of some of the batch's samples."""
        if self.randomness is not None:
            self.randomness.select(start, size)

    # -- a step ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | Mean, key: Key = MAIN) -> None:
        """Adds a loss's gradients, weighed by this replica's share of the batch; the last one starts the sums."""
        tally = self.open_tally(key)
        objective = tally.add(whole_loss(self.replica, loss), self.part)
        if self.part.last:
            self.send(tally, key)
        # A forward that is computed again must draw the same numbers again.
        with self.during("backward"), self.drawing():
            self.replica.backward(objective, key, last=self.part.last)
        if self.replica.buffers and key == next(iter(self.replica.groups)):
            self.replica.buffers.end(self.part.size, last=self.part.last)

    def open_tally(self, key: Key = MAIN) -> Tally:
        """The tally of the step under way."""
        tally = self._tallies.get(key)
        if tally is None:
            replica = self.replica
            tally = self._tallies[key] = Tally(replica.group, speaks=replica.speaks, drifts=replica.drifts)
        elif tally.is_sent:
            raise TaskError(
                "a step has one backward per micro-batch",
                got="a second one before hand.step()",
                remedy="add the losses, or cut the batch with hand.accumulate",
            )
        return tally

    def send(self, tally: Tally, key: Key = MAIN) -> None:
        """All losses of the step are in its tally, so it can go to the other replicas."""
        self.heed()
        tally.send(self._vote, self.replica.riders(key))

    def heed(self) -> None:
        """Puts a wish to stop where it travels with the next step."""
        if self.world.line.stopping and not self._has_voted:
            self._vote.fill_(1)
            self._has_voted = True

    def begin_step(self) -> list[Tensor]:
        """What a step that is left out must not have changed."""
        self.good = None
        return [buffer.clone() for buffer in self.model.buffers()] if self.skips else []

    def end_step(self, before: list[Tensor]) -> None:
        """Puts buffers back if the step was left out."""
        if self.good is not None and (self.device.type != "cpu" or not self.good):
            keep_where(self.good, list(self.model.buffers()), before)

    def step(self, key: Key = MAIN) -> None:
        """Finishes the gradients over all replicas, clips them, and updates the parameters."""
        with self.during("optimizer"):
            self.update(key)
            self.note(key)
        self.tell_step(lambda: self.num_steps)

    def tell_step(self, step: Callable[[], int]) -> None:
        """Lets whoever started this loop know now and then how far it has come, where they want to."""
        if self.tells_steps and self.is_first and time.monotonic() > self._told_at + TELL_SECONDS:
            self._told_at = time.monotonic()
            self.world.line.report(event("step", step=step()))

    def update(self, key: Key = MAIN) -> None:
        """What a step does within this replica and with its gradients."""
        tally = self._tallies.pop(key, None)
        if tally is None:
            raise TaskError(
                "hand.step follows hand.backward",
                got="no backward before it",
                remedy="call hand.backward(loss)",
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
        self._last_tally = tally
        if key == MAIN:
            self.num_steps += 1

    def _drawing_alike(self, key: Key) -> contextlib.AbstractContextManager[None]:
        """Where an optimizer of the user's own takes its step: what it draws is the same on every replica."""
        if all(type(one).__module__.startswith("torch.optim.") for one in each_of(self.optimizers[key])):
            return _AS_IT_IS  # none of torch's own draws, and their updates may be part of a CUDA graph
        return seeded(mix(self._seed, self.num_steps, *key.encode(), OPTIMIZER_DRAWS), self.device)

    def note(self, key: Key = MAIN) -> None:
        """A step was taken: where replicas drift, what it learnt from is kept until they agree, which may be now."""
        if self.replica.drifts:
            self._keep(key)
        if self._choosing is not None and key == next(iter(self.replica.groups)):
            self._choosing.tick()
            self._choosing = None if self._choosing.is_done else self._choosing

    def _keep(self, key: Key) -> None:
        assert self._last_tally is not None
        row, good = self._last_tally.row, self.good
        if good is not None:
            # A replica that left the step out has learnt nothing from it; its vote counts all the same.
            row[:2] = torch.where(good, row[:2], torch.zeros_like(row[:2]))
        self._noted.setdefault(key, []).append(_Noted(row, self.losses[key], good))
        if self.replica.note(key, row):
            self._due.append(key)
        if not self.skips:
            self.meet()

    def meet(self) -> None:
        """Agrees with the other replicas where it is time; the losses since then become those of all."""
        due, self._due = self._due, []
        for key in due:
            self.replica.meet(key)
            noted = self._noted.pop(key, [])
            for step in noted:
                step.loss.copy_(step.row[0] / step.row[1])
                if step.good is not None:
                    step.good.copy_(step.row[1] > 0)
            self._heard_stop = self._heard_stop or (bool(noted) and bool(noted[-1].row[2] > 0))

    def agree(self) -> None:
        """Makes all replicas one network with one optimizer's state, where a policy lets them go apart.

        Validation, checkpoints and the end of `fit` do so; a loop of one's own must, before it evaluates.
        """
        if not self.replica.drifts or (self.replica.agrees and self._joined_at == self.num_steps):
            return
        self._due = list(self.replica.groups)
        self.meet()
        self.replica.join(() if self.averages is None else self.averages.tensors.values())
        self._joined_at = self.num_steps

    def _flag(self, key: Key, norm: Tensor | None, tally: Tally) -> Tensor | None:
        """Whether this update is to be taken, where some may be left out."""
        if not self.skips:
            return None
        flag = (self.replica.is_finite(key) if norm is None else norm.isfinite()) & tally.is_finite
        self.good = flag if self.good is None else flag & self.good
        return flag

    def forget_step(self) -> None:
        """Gives up the step under way: its losses and gradients."""
        self._tallies.clear()
        self.replica.forget()
        self.replica.buffers.reset()

    def recorded_tally(self) -> Tally:
        """The tally of the step that was just recorded, open or closed."""
        tally = self._tallies.pop(MAIN, None) or self._last_tally
        assert tally is not None
        return tally

    def reopen(self, tally: Tally) -> None:
        """Makes this the tally of the step that is being taken."""
        self._tallies[MAIN] = tally

    def follow(self, tally: Tally, losses: Mapping[Key, Tensor], good: Tensor | None) -> None:
        """Takes over what a recorded step left behind; copies, since the next one writes to the same place."""
        self._last_tally = tally
        self.losses = {key: loss.clone() for key, loss in losses.items()}
        self.good = None if good is None else good.clone()

    def minimize(self, loss: Tensor | Mean | Callable[[Any], Tensor | Mean], key: Key = MAIN) -> Tensor:
        """Backward and step in one, for one of several optimizers; returns the loss over all replicas.

        Under accumulation pass a function of the micro-batch instead of a loss.
        """
        if key not in self.replica.groups:
            known = ", ".join(map(repr, self.replica.groups))
            raise TaskError(f"the optimizers are {known}", got=repr(key), remedy="name one of these")
        if callable(loss):
            for data in self.accumulate():
                with self.scope():
                    part = loss(data)
                self.backward(part, key)
        else:
            if self.batch is not None and len(self.batch.sizes) > 1:
                raise StrategyError(
                    "under accumulate a step's losses are computed per micro-batch",
                    got="a loss that is computed already",
                    remedy="pass a function: hand.minimize(lambda part: loss(hand.model, part), key)",
                )
            self.backward(loss, key)
        self.step(key)
        return self.losses[key]

    @property
    def is_look(self) -> bool:
        """Whether it is time to look at losses and votes; all replicas do so together."""
        if self._replica is not None and self._replica.drifts:
            return self._replica.agrees
        return self.num_steps % self.look_every == 0

    @property
    def loss(self) -> float:
        """The last step's loss over all replicas; where they drift, of this one until they agree."""
        return float(next(iter(self.losses.values())))

    @property
    def part_loss(self) -> Tensor | None:
        """The last step's loss over this replica's own samples, NaN where it had none; None where it is alone."""
        return None if self.size == 1 or self._last_tally is None else self._last_tally.local_loss

    @property
    def finite_parts(self) -> list[bool]:
        """Whether the loss of each part of this replica's last batch is finite."""
        return [] if self._last_tally is None else self._last_tally.finite_parts

    def stop(self) -> None:
        """Asks all replicas to end after a step that they agree on."""
        self.world.line.stopping = True

    def voted_to_stop(self) -> bool:
        """Whether the last step carried such a wish; the same answer on every replica."""
        if self.world.size == 1:
            return self.world.line.stopping
        if self._heard_stop:
            return True
        return self._last_tally is not None and self._last_tally.stopping

    # -- collectives ----------------------------------------------------------------------------------------------

    def sum(self, value: Tensor | float) -> Tensor:
        """The sum over the replicas."""
        tensor = torch.as_tensor(value, device=self.device).detach().clone()
        self.replicas.all_reduce(tensor)
        return tensor

    def mean(self, value: Tensor | float) -> Tensor:
        """The mean over the replicas.

        >>> Hand(NullWorld(), StrategySpec()).mean(3.0)
        tensor(3.)
        """
        return self.sum(torch.as_tensor(value, device=self.device) * 1.0) / self.size

    def gather(self, value: Tensor | float) -> Tensor:
        """The rows of all replicas one after another, in rank order; single numbers are stacked. Gradients flow back.

        >>> Hand(NullWorld(), StrategySpec()).gather(3.0)
        tensor([3.])
        """
        tensor = torch.as_tensor(value, device=self.device)
        return gather_rows(self.replicas, tensor.unsqueeze(0) if tensor.dim() == 0 else tensor)

    def broadcast(self, value: Tensor, source: int = 0) -> Tensor:
        """The value of one replica, on all."""
        tensor = torch.as_tensor(value, device=self.device).detach().clone()
        self.replicas.broadcast(tensor, source)
        return tensor

    def barrier(self) -> None:
        """Returns when every replica has come here."""
        self.world.barrier()

    def log(self, **values: Any) -> None:
        """Reports values of the first replica to the event log and the screen."""
        if self.is_first:
            plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
            self.world.line.report(event("log", step=self.num_steps, values=plain))

    def notice(self, text: str) -> None:
        """Tells the person something, once for all replicas."""
        if self.is_first:
            self.world.line.report(event("notice", text=text))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, score: float | None = None, **state: Any) -> None:
        """Writes a checkpoint in the background: network, optimizers, place in the data, random states, and `state`."""
        with self.timed("save"):
            self.agree()
            checkpoint = take_snapshot(self, state)
            if self.is_first:
                self.store(path).save(checkpoint, score=score)

    def restore(self, path: str | Path, *, before: int | None = None) -> dict[str, Any] | None:
        """Continues from the newest good checkpoint, of those before a step where one is given.

        Returns the `state` that was saved, None if there is none.
        """
        store = self.store(path)
        seen = self.world.gather_objects([step for step in store.steps() if before is None or step < before])
        if not seen[0]:
            return None
        self.num_restores += 1
        self._noted.clear()
        if all(steps == seen[0] for steps in seen):
            return restore_snapshot(self, store.load(before=before))
        # The run lies on the disk of the first rank's host.
        return restore_snapshot(self, share(self.world, store.load(before=before) if self.is_first else None, 0))

    def store(self, path: str | Path, *, keep: int = 2) -> CheckpointStore:
        """The folder of checkpoints at this path."""
        root = Path(path)
        if root not in self._stores:
            self._stores[root] = CheckpointStore(
                root,
                keep=keep,
                on_error=lambda error: self.notice(f"a checkpoint could not be written, training goes on: {error}"),
                on_notice=self.notice,
            )
        return self._stores[root]

    def close(self) -> None:
        """Waits for what is being written and takes the strategy off the network."""
        for store in self._stores.values():
            store.close()
        for cover in self._covers:
            cover.remove()
        if self._replica is not None:
            self._replica.close()
            keep_all(self._replica.model)


def whole_loss(replica: Replica, loss: Tensor | Mean) -> Tensor | Mean:
    """A loss as on one device, where ranks computed it together."""
    return Mean(*replica.plain((loss.total, loss.count))) if isinstance(loss, Mean) else replica.plain(loss)


_held: list[Hand] = []


SCRIPT_END = "the first replica has come to the end"
"""The mark for whoever waits for something that it has not done."""


@contextlib.contextmanager
def holding(hand: Hand) -> Iterator[None]:
    """Makes a hand the one that `mh.hand()` gives in this process."""
    _held.append(hand)
    try:
        yield
        if hand.is_first:
            hand.world.mark(SCRIPT_END)
    finally:
        _held.pop()


def hand(on: str | None = None) -> Hand:
    """The hand of this process: one of many under `manyhands launch`, the only one otherwise, on the first of `on`.

    >>> hand().size
    1
    """
    if _held:
        return _held[-1]
    world = joined_world(on) or _world_of_a_plain_program(on)
    return Hand(world, StrategySpec(replicas=world.size))


def joined_world(on: Any = None, timeout: float = DEFAULT_TIMEOUT, *, roles: Sequence[str] = TRAINERS) -> World | None:
    """The world that this process is a rank of, also where torchrun has launched it; what it reports is then shown.

    `roles` are the parts of a described cluster whose processes are ranks.
    """
    known = current_world()
    world = known or join_launched(on, timeout, roles=roles)
    if world is not None and known is None and world.is_first:
        assert isinstance(world.line, DirectChannel)
        view = make_view(f"{world.size} ranks", None, live=False)
        world.line.handler = lambda entry: view.show(0, entry)
    return world


def _world_of_a_plain_program(on: str | None) -> World:
    """The first device there is; what the hand logs is shown."""
    device = resolve(on, 1)[0][0]
    view = make_view(f"replicas=1 on {device}", None, live=False)
    return NullWorld(device, DirectChannel(lambda entry: view.show(0, entry)))
