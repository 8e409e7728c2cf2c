"""ReplicaStep: the step that a replica is taking, from the first backward to the update, and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import Mean, TaskError, each_of, mix, seeded
from ..strategies import MAIN, Replica, keep_where
from .loss_totals import Tally

if TYPE_CHECKING:
    from .hand import Hand
    from .sync_selection import Choosing

Key = str
OPTIMIZER_DRAWS = 0x0971
"""Salt that keeps the seeds of optimizers apart from those of networks."""
_AS_IT_IS = contextlib.nullcontext()


@dataclass(frozen=True)
class _Noted:
    """A local SGD step: its loss total, count and stop vote, and the tensors to correct once replicas synchronize."""

    row: Tensor
    loss: Tensor
    good: Tensor | None


class ReplicaStep:
    """Accumulates the gradients and losses of a replica's current step, updates the parameters, and keeps the results.

    Under local SGD it also keeps the steps that the replicas have taken since they last synchronized.
    """

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
        self._noted: dict[Key, list[_Noted]] = {}
        """Local SGD steps by optimizer since the replicas last synchronized."""
        self._due: list[Key] = []
        self._has_stop_vote = False
        self._joined_at = -1

    @property
    def is_apart(self) -> bool:
        """Whether this replica has taken local SGD steps that are not synchronized yet."""
        return self._hand.has_replica and not self._hand.replica.agrees

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
        if replica.buffers and key == next(iter(replica.groups)):
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
        """Finish the gradients, clip them, and update the parameters and weight averages of one optimizer."""
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

    def forget_unsynchronized(self) -> None:
        """Discard local SGD steps since the last synchronization, because an earlier state is restored."""
        self._noted.clear()

    def note(self, key: Key = MAIN) -> None:
        """Account for a completed step: under local SGD, store its totals and synchronize if that is due."""
        if self._hand.replica.is_local_sgd:
            self._keep(key)
        if self.choosing is not None and key == next(iter(self._hand.replica.groups)):
            self.choosing.tick()
            self.choosing = None if self.choosing.is_done else self.choosing

    def _keep(self, key: Key) -> None:
        assert self._last_tally is not None
        row, good = self._last_tally.row, self.good
        if good is not None:
            # A replica that skipped the step adds no samples to the mean; its stop vote still counts.
            row[:2] = torch.where(good, row[:2], torch.zeros_like(row[:2]))
        self._noted.setdefault(key, []).append(_Noted(row, self.losses[key], good))
        if self._hand.replica.note(key, row):
            self._due.append(key)
        if not self.skips:
            self.meet()

    def meet(self) -> None:
        """Synchronize local SGD replicas if that is due, and average their losses since the last time."""
        due, self._due = self._due, []
        for key in due:
            self._hand.replica.meet(key)
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
        hand = self._hand
        if not hand.replica.is_local_sgd or (hand.replica.agrees and self._joined_at == hand.num_steps):
            return
        self._due = list(hand.replica.groups)
        self.meet()
        hand.replica.join(() if hand.averages is None else hand.averages.tensors.values())
        self._joined_at = hand.num_steps

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
        if self._has_stop_vote:
            return True
        return self._last_tally is not None and self._last_tally.stopping


def whole_loss(replica: Replica, loss: Tensor | Mean) -> Tensor | Mean:
    """Return a loss as on one device, where its tensors are distributed over ranks."""
    return Mean(*replica.plain((loss.total, loss.count))) if isinstance(loss, Mean) else replica.plain(loss)
