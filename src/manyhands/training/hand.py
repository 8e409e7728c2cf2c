"""`Hand`: the handle of one replica. `fit` drives it; custom training loops use it directly."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

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
    event,
    mix,
    require_tensor_state,
    seed_all,
    set_training,
)
from ..data import Batch, Source, check_source, copied, source_of
from ..distributed import DEFAULT_TIMEOUT, DirectChannel, NullWorld, World, current_world, resolve
from ..launcher import TRAINERS, join_launched
from ..monitoring import PhaseTimes, make_view
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
    make_replica,
    under,
)
from .batch_reader import BatchReader
from .carried_numbers import Counters
from .checkpointer import Checkpointer
from .collectives import Collectives
from .restored_objects import left_alone
from .step import ReplicaStep
from .sync_selection import Choosing
from .weight_averages import Averages

if TYPE_CHECKING:
    from ..strategies import Layout

NUM_FOLLOWED, MAX_FOLLOWED, NUM_TRIED = 4, 64, 6
"""Samples traced through a network to find how to split it; up to `MAX_FOLLOWED` where pipeline stages are timed."""
REPORT_STEP_SECONDS = 0.5
_built: WeakSet[nn.Module] = WeakSet()
"""Networks this process has already built for tasks: reusing one would start from its trained weights."""


class StepProgress:
    """Reports the progress of a custom training loop, where it was asked for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_on = False
        self._reported_at = 0.0

    def report(self, step: Callable[[], int]) -> None:
        """Report the step number from the first rank, at most every `REPORT_STEP_SECONDS`."""
        if self.is_on and self._world.is_first and time.monotonic() > self._reported_at + REPORT_STEP_SECONDS:
            self._reported_at = time.monotonic()
            self._world.channel.report(event("step", step=step()))


class Hand(Collectives):
    """The handle of one replica: its rank and device, its share of the data, the step, collectives and checkpoints."""

    replica: Replica
    """The network and optimizers as this rank holds them; `TaskError` is raised before `setup`."""
    model: nn.Module
    """The network under the strategy."""
    optimizers: dict[str, Optimizer]
    """The optimizers by name; a single one has the empty name."""

    def __init__(self, world: World, spec: StrategySpec) -> None:
        super().__init__(world, world.along(spec.axes, *DATA_AXES))
        self.spec = spec
        self.num_steps = 0
        self.num_restores = 0
        """How often state was restored or the policy changed, which invalidates captured steps."""
        self.averages: Averages | None = None
        """The moving average of the weights, where the task has `ema`."""
        self.layout: Layout | None = None
        """How layers are sharded, where that is known before the network is built."""
        self.randomness = LayoutFree(self.device) if spec.deterministic else None
        """Generates random numbers that do not depend on the layout; None where torch's own generators are used."""
        self.counters = Counters()
        """Whole numbers in attributes that a forward changes, followed over the micro-batches of a step."""
        self.has_replica = False
        self._covers: list[RemovableHandle] = []
        self.times = PhaseTimes(world)
        self.reader = BatchReader(self)
        self.current = ReplicaStep(self)
        self.checkpoints = Checkpointer(self)
        self.progress = StepProgress(world)

    # -- setting up -----------------------------------------------------------------------------------------------

    def setup(
        self, model: nn.Module, optimizer: Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer]
    ) -> tuple[nn.Module, Any]:
        """Apply the strategy to a network and its optimizer; return both, ready to use.

        Optimizers in a list step together; those in a dict are named by their keys.

        >>> import torch
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
        deferred = _deferred(self, task)
        model = task.model() if deferred is None else deferred.model
        if model in _built:
            raise TaskError(
                "the model function must build a new network each time",
                got=f"{type(model).__name__} that was trained before",
                remedy=f"write model=lambda: {type(model).__name__}(...)",
            )
        if isinstance(model, nn.Module):
            require_tensor_state(model)
            set_training(model)
        source = source_of(task)
        probe = probe_of(self, task.loss, source, check_source(source, task.batch_size))
        with left_alone(task.loss, task.model):
            self.make_replica(model, task.make_optimizer, probe, look, None if deferred is None else deferred.fill)
        _built.add(model)
        self.current.clip = task.clip
        self.current.skips = task.not_finite == "skip"
        if task.ema is not None:
            self.averages = Averages(self.model, self.replica.groups, task.ema)
        if task.weights is not None:
            # Both modules import this one.
            from .initial_weights import start_from
            from .run import as_weights

            start_from(self, as_weights(task.weights))

    def make_replica(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], Any],
        probe: Probe | None = None,
        look: Callable[[nn.Module], None] | None = None,
        fill: Callable[[Take], None] | None = None,
    ) -> None:
        """Build the replica: apply the strategy to a network and create its optimizer; `fill` loads missing values."""
        self.adopt(make_replica(self.spec, self.world, model, make_optimizer, probe, look, self.layout, fill))
        for text in self.replica.notes:
            self.notice(text)
        self.current.choosing = Choosing(self) if is_undecided(self.replica) else None
        if self.randomness is not None:
            self._covers += self.randomness.cover(self.model)

    def follow_policy(self, sync: str) -> None:
        """Switch to another sync policy; all replicas must call this together."""
        if sync == self.spec.sync:
            return
        self.current.unsynchronized.agree()
        self.adopt(under(self.replica, sync))
        # Invalidates captured steps: they contain the old policy.
        self.num_restores += 1

    def adopt(self, replica: Replica) -> None:
        """Take over a replica that was built for this hand."""
        self.replica, self.model, self.optimizers = replica, replica.model, replica.optimizers
        self.spec, self.has_replica = replica.spec, True

    @property
    def epoch(self) -> int:
        """The current epoch of the training data."""
        return self.reader.epoch

    @property
    def batch(self) -> Batch | None:
        """The batch that `batches` yielded last: its samples, their ids and their place in the global batch."""
        return self.reader.batch

    @property
    def losses(self) -> dict[str, Tensor]:
        """The last step's losses over all replicas; under local SGD, this replica's until the next synchronization."""
        return self.current.losses

    @property
    def loss(self) -> float:
        """The last step's loss over all replicas; under local SGD, this replica's until the next synchronization."""
        return float(next(iter(self.current.losses.values())))

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which network and loss are computed: the strategy's precision and randomness."""
        return self.current.scope()

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

        >>> import torch
        >>> hand = Hand(NullWorld(), StrategySpec())
        >>> [batch.tolist() for batch in hand.batches(torch.arange(5), 2, shuffle=False)]
        [[0, 1], [2, 3], [4]]
        """
        return self.reader.batches(data, batch_size, epochs=epochs, shuffle=shuffle, seed=seed, collate=collate)

    def accumulate(self, batch: Any = None) -> Iterator[Any]:
        """Iterate over the current batch's micro-batches; `backward` on each gives the gradient of the whole batch."""
        return self.reader.accumulate(batch)

    # -- a step ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | Mean, key: str = MAIN) -> None:
        """Accumulate a loss's gradients, weighted by the share of the batch; the last one starts the all-reduce."""
        self.current.backward(loss, key)

    def step(self, key: str = MAIN) -> None:
        """Reduce the gradients over all replicas, clip them, and update the parameters."""
        self.current.finish(key)
        self.progress.report(lambda: self.num_steps)

    def minimize(self, loss: Tensor | Mean | Callable[[Any], Tensor | Mean], key: str = MAIN) -> Tensor:
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
        return self.current.losses[key]

    def agree(self) -> None:
        """Synchronize parameters and optimizer state over all replicas, under policies where they diverge.

        Validation, checkpoints and the end of `fit` do so; a custom training loop must call it before it evaluates.
        """
        self.current.unsynchronized.agree()

    def stop(self) -> None:
        """Request a stop; all replicas end after the same step."""
        self.world.channel.stopping = True

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
        self.checkpoints.save(path, score=score, **state)

    def restore(self, path: str | Path, *, before: int | None = None) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint, if given of a step before `before`.

        Returns the `state` that was saved; None if there is no checkpoint.
        """
        return self.checkpoints.restore(path, before=before)

    def close(self) -> None:
        """Wait for pending checkpoint writes and remove the strategy's hooks from the network."""
        self.checkpoints.close()
        for cover in self._covers:
            cover.remove()
        if self.has_replica:
            self.replica.close()
            keep_all(self.model)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise `TaskError` where a step is taken before there is a network."""
            if name in ("replica", "model", "optimizers"):
                raise TaskError("the hand has no network yet", remedy="call hand.setup(model, optimizer) first")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _deferred(hand: Hand, task: Task) -> Deferred | None:
    """Return the network without values where its parameters are sharded; None where it must be built whole."""
    spec = hand.spec
    if spec.axes.keys() - {"replicas"} != {"shards"} or spec.sharding == "optimizer" or hand.world.size == 1:
        return None
    try:
        return defer(task.model)
    except CannotDefer as reason:
        hand.notice(f"every rank builds the whole network before it is sharded, because {reason}")
        return None


def probe_of(
    hand: Hand, compute: Callable[[nn.Module, Any], Any] | None, source: Source, batch_size: int
) -> Probe | None:
    """Return a function that computes the loss of a few samples, for strategies that trace the network with it.

    None where no strategy needs it.
    """
    is_known = hand.layout is not None and hand.spec.stages == 1 and hand.size * hand.spec.accumulate == 1
    is_split = hand.spec.accumulate > 1 or hand.world.size > 1 or hand.spec.servers > 0
    if compute is None or is_known or not is_split:
        return None
    at_a_time = batch_size // (hand.size * hand.spec.accumulate * hand.spec.microbatches)
    rows = (
        (NUM_FOLLOWED if hand.spec.tensor > 1 else NUM_TRIED)
        if hand.spec.stages == 1
        else max(NUM_FOLLOWED, min(MAX_FOLLOWED, at_a_time))
    )
    few = functools.cache(lambda: hand.reader.peek(source, batch_size, rows))
    if hand.spec.axes.keys() - {"replicas"}:
        # The trace runs on tensors without values, where samples can no longer be read.
        few()
    return lambda model, fake: compute(model, fake(copied(few())))


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
