"""The training step of a replica, as one chain: data → forward → backward → reduce → clip → update.

`take_step` takes a whole step: `compute` runs forward and backward of every micro-batch, and the last backward starts
to reduce the gradients; `ReplicaStep.update` completes them, clips them, and updates the parameters. Custom steps call
`ReplicaStep.backward` and `ReplicaStep.finish` through their hand. `Tally` sums the losses on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import Mean, Task, TaskError, each_of, mix, seeded
from ..data import Batch, map_leaves, split
from ..distributed import Pending, World
from ..strategies import MAIN, PipelineReplica, Replica, keep_where
from .batch_reader import BatchShare
from .unsynchronized_steps import UnsynchronizedSteps

if TYPE_CHECKING:
    from .hand import Hand
    from .sync_selection import Choosing

Key = str
Loss = Callable[[Any, Any], Any]
OPTIMIZER_DRAWS = 0x0971
"""Salt that keeps the seeds of optimizers apart from those of networks."""
_AS_IT_IS = contextlib.nullcontext()


def take_step(hand: Hand, task: Task, batch: Batch, loss: Loss | None = None) -> None:
    """Take one step of a task on a batch: its custom step, or its loss over the micro-batches and one update."""
    step = hand.current
    before = step.begin()
    if task.step is not None:
        _run_custom(hand, task.step, batch)
    else:
        assert task.loss is not None
        compute(hand, loss or task.loss, batch)
        step.finish()
    step.end(before)
    step.meet()


def compute(hand: Hand, loss: Loss, batch: Batch) -> None:
    """Compute the loss and gradients of every micro-batch; the last backward starts to reduce the gradients."""
    for index, data in enumerate(hand.reader.accumulate(batch.data)):
        if len(batch.sizes) > 1:
            hand.counters.again() if index else hand.counters.begin(hand.model, loss)
        if hand.replica.pipeline is not None:
            _compute_in_stages(hand, hand.replica.pipeline, loss, data)
            continue
        with hand.times.during("forward"), hand.current.scope():
            value = hand.replica.loss(loss, data)
        hand.current.backward(value)


def _run_custom(hand: Hand, step: Callable[[Hand, Any], Any], batch: Batch) -> None:
    try:
        with hand.times.during("forward"), hand.reader.drawing():
            step(hand, batch.data)
    except RuntimeError as error:
        explained = hand.replica.explained(error)
        if explained is error:
            raise
        raise explained from error
    if MAIN not in hand.optimizers:
        hand.num_steps += 1


class ReplicaStep:
    """Accumulates gradients and losses of a replica's current step, updates the parameters, and keeps the results."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self.choosing: Choosing | None = None
        """Chooses the sync policy during the first steps, where the strategy leaves it open."""
        self.clip: float | None = None
        """The norm to which gradients are clipped."""
        self.skips = False
        """Whether a step with a gradient that is not finite is skipped."""
        self.look_every = 1 if hand.device.type == "cpu" else 50
        """Steps between two reads of losses and votes: on a GPU a read waits for the device."""
        self.good: Tensor | None = None
        """A flag on the device: whether the last step was applied; None where no step is skipped."""
        self.losses: dict[Key, Tensor] = {}
        """The last step's losses over all replicas; under local SGD, this replica's until the next synchronization."""
        self.norms: dict[Key, Tensor] = {}
        """The norms of the last step's gradients before clipping, of optimizers whose gradients are clipped."""
        self.votes = True
        """Whether stop requests are answered; not in trials, which are no steps of the run."""
        self.is_midway = False
        """Whether parameters were updated since the last step that is known to be complete."""
        self._tallies: dict[Key, Tally] = {}
        self._last_tally: Tally | None = None
        self._vote = torch.zeros((), device=hand.device)
        self._has_voted = False
        self.unsynchronized = UnsynchronizedSteps(hand)
        """The local SGD steps since the replicas last synchronized."""

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which network and loss are computed: the strategy's precision and randomness."""
        scope = self._hand.replica.scope()
        return scope if self._hand.randomness is None else _within(self._hand.reader.drawing(), scope)

    def backward(self, loss: Tensor | Mean, key: Key = MAIN) -> None:
        """Accumulate a loss's gradients, weighted by the share of the batch; the last one starts the all-reduce."""
        hand, tally = self._hand, self.open_tally(key)
        replica, part = hand.replica, hand.reader.part
        objective = tally.add(whole_loss(replica, loss), part)
        if part.last:
            self.send(tally, key)
        # Recomputed activations must draw the same random numbers as the first forward pass.
        with hand.times.during("backward"), hand.reader.drawing():
            replica.backward(objective, key, last=part.last)
        if replica.buffers.rules and key == next(iter(replica.groups)):
            replica.buffers.end(part.size, last=part.last)

    def open_tally(self, key: Key = MAIN) -> Tally:
        """Return the loss totals of the current step, creating them for its first micro-batch."""
        tally = self._tallies.get(key)
        if tally is None:
            replica = self._hand.replica
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
        tally.send(self._vote, self._hand.replica.piggybacked(key))

    def respond_to_stop(self) -> None:
        """Turn a stop request into a vote that is sent with the next step."""
        if self.votes and self._hand.world.channel.stopping and not self._has_voted:
            self._vote.fill_(1)
            self._has_voted = True

    def begin(self) -> list[Tensor]:
        """Return copies of the buffers, to restore them if the step is skipped."""
        self.good = None
        return [buffer.clone() for buffer in self._hand.model.buffers()] if self.skips else []

    def end(self, before: list[Tensor]) -> None:
        """Restore the buffers if the step was skipped."""
        if self.good is not None and (self._hand.device.type != "cpu" or not self.good):
            keep_where(self.good, list(self._hand.model.buffers()), before)

    def update(self, key: Key = MAIN) -> None:
        """Reduce the gradients, clip them, and update the parameters and weight averages of one optimizer."""
        hand, tally = self._hand, self._tallies.pop(key, None)
        if tally is None:
            raise TaskError(
                "hand.step must follow hand.backward",
                got="no backward before it",
                remedy="call hand.backward(loss) first",
            )
        tally.receive()
        hand.replica.finish(key, tally.count)
        hand.replica.hooks.call(hand.replica, key)
        tally.settle()
        with hand.times.timed("optimizer"):
            norm = hand.replica.clip(key, self.clip) if self.clip is not None else None
            flag = self._flag(key, norm, tally)
            self.is_midway = True
            with self._drawing_alike(key):
                hand.replica.update(key, flag)
            if hand.averages is not None:
                hand.averages.update(key, flag)
        self.losses[key] = tally.loss
        if norm is not None:
            self.norms[key] = norm
        self._last_tally = tally
        if key == MAIN:
            hand.num_steps += 1

    def _drawing_alike(self, key: Key) -> contextlib.AbstractContextManager[None]:
        """Return a context in which user-defined optimizers draw the same random numbers on every replica."""
        if all(type(one).__module__.startswith("torch.optim.") for one in each_of(self._hand.optimizers[key])):
            return _AS_IT_IS  # torch's own optimizers draw nothing, and their updates may be part of a CUDA graph
        seed = mix(self._hand.reader.random_seed, self._hand.num_steps, *key.encode(), OPTIMIZER_DRAWS)
        return seeded(seed, self._hand.device)

    def finish(self, key: Key = MAIN) -> None:
        """Take the step of one optimizer, after the last backward."""
        with self._hand.times.during("optimizer"):
            self.update(key)
            self.note(key)

    def note(self, key: Key = MAIN) -> None:
        """Account for a completed step: under local SGD, store its totals and synchronize if that is due."""
        if self._hand.replica.is_local_sgd:
            assert self._last_tally is not None
            self.unsynchronized.add(key, self._last_tally.row, self.losses[key], self.good)
            if not self.skips:
                self.meet()
        if self.choosing is not None and key == next(iter(self._hand.replica.groups)):
            self.choosing.tick()
            self.choosing = None if self.choosing.is_done else self.choosing

    def meet(self) -> None:
        """Synchronize local SGD replicas if that is due, and average their losses since the last time."""
        if self.unsynchronized.due:
            self.unsynchronized.meet()

    def _flag(self, key: Key, norm: Tensor | None, tally: Tally) -> Tensor | None:
        """Return a flag on the device: whether to apply this update; None where no step is skipped."""
        if not self.skips:
            return None
        flag = (self._hand.replica.is_finite(key) if norm is None else norm.isfinite()) & tally.is_finite
        self.good = flag if self.good is None else flag & self.good
        return flag

    def forget(self) -> None:
        """Discard the current step's losses and gradients."""
        self._tallies.clear()
        self._hand.replica.forget()
        self._hand.replica.buffers.reset()

    def captured_tally(self) -> Tally:
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

    @property
    def is_look(self) -> bool:
        """Whether losses and stop votes are read after this step; equal on all replicas."""
        if self._hand.has_replica and self._hand.replica.is_local_sgd:
            return self._hand.replica.agrees
        return self._hand.num_steps % self.look_every == 0

    @property
    def part_loss(self) -> Tensor | None:
        """The last step's loss over this replica's own samples, NaN where it had none; None with a single replica."""
        return None if self._hand.size == 1 or self._last_tally is None else self._last_tally.local_loss

    @property
    def finite_parts(self) -> list[bool]:
        """Whether the loss of each micro-batch of this replica's last step is finite."""
        return [] if self._last_tally is None else self._last_tally.finite_parts

    def voted_to_stop(self) -> bool:
        """Return whether a replica requested a stop in the last step; equal on all replicas."""
        if self._hand.world.size == 1:
            return self._hand.world.channel.stopping
        if self.unsynchronized.has_stop_vote:
            return True
        return self._last_tally is not None and self._last_tally.stopping


def whole_loss(replica: Replica, loss: Tensor | Mean) -> Tensor | Mean:
    """Return a loss as on one device, where its tensors are distributed over ranks."""
    return Mean(*replica.plain((loss.total, loss.count))) if isinstance(loss, Mean) else replica.plain(loss)


@contextlib.contextmanager
def _within(
    drawing: contextlib.AbstractContextManager[None], scope: contextlib.AbstractContextManager[object]
) -> Iterator[None]:
    with drawing, scope:
        yield


class Tally:
    """Sums losses over micro-batches; one all-reduce sums them, their count and the stop vote over the replicas."""

    def __init__(self, world: World, *, reports_loss: bool = True, is_local_sgd: bool = False) -> None:
        self._world, self._reports_loss, self._is_local_sgd = world, reports_loss, is_local_sgd
        self._num_samples = 1
        self._totals: list[Tensor] = []
        self._sizes: list[int] = []
        self._plain_counts: list[float] = []
        self._token_counts: list[Tensor] = []
        self._pending = Pending()
        self._travelling: Tensor | None = None
        self._sums: Tensor | None = None
        self.is_sent = False
        self.counts_tokens = False
        """Whether the loss has its own count (`mh.mean`), by which gradients must be divided at the end."""

    def add(self, loss: Tensor | Mean, part: BatchShare) -> Tensor:
        """Add a micro-batch's loss; return the tensor that backward starts from."""
        self._sizes.append(part.size)
        if isinstance(loss, Mean):
            self.counts_tokens = True
            weight = 0.0 if part.is_padding else 1.0
            self._totals.append(loss.total.detach() * weight)
            self._token_counts.append(loss.count * weight)
            return loss.total * weight if part.is_padding else loss.total
        _require_scalar(loss)
        self._num_samples = part.total
        is_whole = part.size == part.total and not self._is_local_sgd
        self._totals.append(loss.detach() if is_whole else loss.detach() * part.size)
        self._plain_counts.append(1.0 if is_whole else part.size)
        return loss if is_whole else loss * (part.size / part.total)

    def send(self, vote: Tensor, piggybacked: Tensor | None) -> None:
        """Copy the numbers into the gradients' bucket (`piggybacked`), or start a separate all-reduce."""
        self.is_sent = True
        if self._world.size == 1 and not self._is_local_sgd:
            return
        if piggybacked is not None:
            piggybacked.copy_(self._numbers(vote, piggybacked.dtype))
            self._travelling = piggybacked
            return
        self._travelling = self._numbers(vote, torch.float64)
        self._pending = self._world.start_all_reduce(self._travelling)

    def receive(self) -> None:
        """Wait for the all-reduce, where the numbers have their own."""
        self._pending.wait()

    def settle(self) -> None:
        """Copy the sums; the next step reuses the buffer they were reduced in."""
        if self._travelling is not None:
            self._sums = self._travelling.clone()

    def _numbers(self, vote: Tensor, dtype: torch.dtype) -> Tensor:
        """Return total, count and stop vote; total and count are 0 where another rank reports the same samples."""
        total, count = self._local()
        if not self._reports_loss:
            total, count = torch.zeros_like(total), 0.0
        if not isinstance(count, Tensor):
            count = torch.full((), count, dtype=dtype, device=total.device)
        return torch.stack([total.to(dtype), count.to(dtype), vote.to(dtype)])

    def _local(self) -> tuple[Tensor, Tensor | float]:
        total = self._totals[0] if len(self._totals) == 1 else torch.stack(self._totals).sum()
        return total, torch.stack(self._token_counts).sum() if self.counts_tokens else sum(self._plain_counts)

    @property
    def local_loss(self) -> Tensor:
        """The mean loss over this replica's own samples."""
        total, count = self._local()
        return total / count

    @property
    def count(self) -> Tensor | None:
        """The divisor of the gradients; None where the loss already is a mean over samples.

        Under local SGD a replica's gradient is the mean over its own samples.
        """
        if self._is_local_sgd:
            assert self._travelling is not None
            learnt = self._travelling[1] / (1 if self.counts_tokens else self._num_samples)
            return torch.where(learnt > 0, learnt, torch.ones_like(learnt))
        if not self.counts_tokens:
            return None
        return self._travelling[1] if self._travelling is not None else torch.stack(self._token_counts).sum()

    @property
    def row(self) -> Tensor:
        """A copy of total, count and vote as far as they are reduced."""
        assert self._sums is not None
        return self._sums.clone()

    @property
    def loss(self) -> Tensor:
        """The mean loss over the whole step."""
        if self._sums is not None:
            return self._sums[0] / self._sums[1]
        return self._totals[0] if len(self._totals) == 1 and not self.counts_tokens else self.local_loss

    @property
    def finite_parts(self) -> list[bool]:
        """Whether the loss of each micro-batch with samples is finite, on this replica alone."""
        return [bool(total.isfinite()) for total, size in zip(self._totals, self._sizes, strict=True) if size]

    @property
    def is_finite(self) -> Tensor:
        """Whether the step's loss is finite, as a flag on the device: it may overflow where no gradient does."""
        return (self._local()[0] if self._sums is None else self._sums[0]).isfinite()

    @property
    def stopping(self) -> bool:
        """Whether any replica voted to stop; the same answer on every replica."""
        return self._sums is not None and bool(self._sums[2] > 0)


def _require_scalar(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise TaskError(
            "a loss must return a scalar tensor or mh.mean(total, count)",
            got=type(loss).__name__,
            remedy="return the loss tensor",
        )
    if loss.dim() != 0:
        raise TaskError(
            "a loss must be a scalar, the mean over the samples of the batch",
            got=f"a tensor of shape {tuple(loss.shape)}",
            remedy="end it with .mean(), or return mh.mean(losses.sum(), count)",
        )


def _compute_in_stages(hand: Hand, pipeline: PipelineReplica, loss: Loss, data: Any) -> None:
    """Compute the losses of all pipeline micro-batches, weighted by their samples, and their gradients."""
    whole = hand.reader.part
    micros = _PipelineMicros(hand, pipeline, loss, data)
    pipeline.run(len(micros.sizes), micros)
    if whole.last:
        hand.replica.buffers.combine()
        hand.current.send(micros.tally)


class _PipelineMicros:
    """The pipeline micro-batches of the data that a replica computes at a time."""

    def __init__(self, hand: Hand, pipeline: PipelineReplica, loss: Loss, data: Any) -> None:
        self._hand, self._loss, self._total = hand, loss, hand.reader.part.total
        self.sizes = pipeline.sizes(hand.reader.part.size)
        self._parts = split(data, self.sizes) if len(self.sizes) > 1 else [data]
        self._starts = [hand.reader.start + before for before in accumulate(self.sizes, initial=0)]
        self.tally = hand.current.open_tally()
        if not pipeline.has_answer:
            self.tally.add(pipeline.nothing(), BatchShare(0, self._total))

    def loss(self, micro: int) -> Any:
        self._hand.reader.select(self._starts[micro], self.sizes[micro])
        with self._hand.times.during("forward"), self._hand.current.scope():
            # The loss runs once per stage, and may take things out of the containers that it gets.
            return self._hand.replica.loss(self._loss, map_leaves(lambda leaf: leaf, self._parts[micro]))

    def weigh(self, micro: int, loss: Any) -> Tensor:
        return self.tally.add(loss, BatchShare(self.sizes[micro], self._total))

    @contextlib.contextmanager
    def scope(self, micro: int) -> Iterator[None]:
        self._hand.reader.select(self._starts[micro], self.sizes[micro])
        # Recomputed activations must draw the same random numbers as the first forward pass.
        with self._hand.times.during("backward"), self._hand.reader.drawing():
            yield
