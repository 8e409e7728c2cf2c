"""A step as CUDA graphs. Rehearsed for what waits, watched for what changes in Python, audited now and then.

Whatever cannot be recorded makes the recorder give up; a notice says which line it was, and steps go on plainly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import random_state, remember_buffers, restore_random_state
from ..data import Batch, ResidentBatch, map_leaves, tensors
from ..graph import CannotRecord, Phase, Recording, Statics, ValueWatch, make_capturable, rehearsing, shape_of
from ..strategies import MAIN, PipelineReplica
from .hand import Hand
from .loss_totals import Tally
from .pipeline_step import compute_in_stages
from .step_variants import Loss, Ways

NUM_PLAIN = 2
"""Plain steps on batches of one shape before the rehearsal: lazy parts of a network are made in the first."""
MAX_RECORDINGS = 4
MAX_SHAPES = 8
MAX_CHANGES = 4
LOOK_EVERY = 50
"""Replays between two close looks at values in Python that a recording does not follow."""
CLOSE = {"fp32": 1e-4, "fp64": 1e-8, "bf16": 2e-2}
"""How close a recorded step's loss must be to the plain one's, by precision."""


def compute(hand: Hand, loss: Loss, batch: Batch) -> None:
    """The loss of every micro-batch, and its gradients."""
    for data in hand.accumulate(batch.data):
        if isinstance(hand.replica, PipelineReplica):
            compute_in_stages(hand, hand.replica, loss, data)
            continue
        with hand.during("forward"), hand.scope():
            value = hand.replica.loss(loss, data)
        hand.backward(value)


@dataclass
class _Made:
    """A recording of the step on batches of one shape, and what it leaves behind."""

    statics: Statics
    recording: Recording
    tally: Tally
    losses: dict[str, Tensor]
    good: Tensor | None
    is_compiled: bool
    usage: Any
    """Which parameters it uses."""


class StepCapture:
    """Takes steps from recordings, one for each shape of batch that comes often enough."""

    def __init__(self, hand: Hand, loss: Loss, ways: Ways, total: int | None) -> None:
        self._hand, self._task_loss, self._ways, self._total = hand, loss, ways, total
        self._made: dict[Hashable, _Made] = {}
        self._seen: dict[Hashable, int] = {}
        self._watch: ValueWatch | None = None
        self._num_replays = self._num_changes = 0
        self._num_restores = hand.num_restores
        self._has_given_up = False
        self._pool = _pool()
        reasons = [make_capturable(optimizer) for optimizer in hand.optimizers.values()]
        self._rates = [group["lr"] for group in self._groups()]
        """The tensors that recordings read learning rates from."""
        self._usage: dict[Hashable, Any] = {}
        """Which parameters a shape of batch uses, by its rehearsal."""
        self._is_whole = not any(reasons)
        """Whether the update stands in the recording too."""
        if not hand.replica.is_recordable:
            self._give_up("batch statistics are exchanged over gloo inside the network")
        elif hand.replica.buffers:
            self._give_up("forward updates buffers, whose values come from all parts of a batch")
        elif not self._is_whole:
            hand.notice(f"the update runs by itself, outside of the recording: {next(filter(None, reasons))}")

    def take(self, batch: Batch, shape: Hashable) -> str:
        """Takes a step, "replayed" or "rehearsed"; "" says that it must be taken plainly."""
        if self._has_given_up:
            return ""
        if isinstance(shape, str):
            self._give_up(shape)
            return ""
        if self._num_restores != self._hand.num_restores:
            self._num_restores = self._hand.num_restores
            self.forget()
        if shape in self._made:
            self._replay(self._made[shape], batch)
            return "replayed"
        return self._approach(shape, batch)

    def look_again(self) -> None:
        """A quick look whether what the recordings took for constant still is."""
        if self._made and self._watch is not None and not self._watch.is_same():
            self._record_anew(self._watch.changed() or "something in the network")

    def forget(self) -> None:
        """Lets go of the recordings, and of the memory that they hold."""
        self._made.clear()
        self._seen.clear()
        self._num_replays = 0
        self._pool = _pool()

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._hand.optimizers.values():
            yield from optimizer.param_groups

    # -- on the way to a recording --------------------------------------------------------------------------------

    def _approach(self, shape: Hashable, batch: Batch) -> str:
        """Plain steps, then one under the conditions of a recording, then the recording."""
        if shape not in self._seen and len(self._seen) > 2 * MAX_SHAPES:
            return ""
        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if len(self._seen) > MAX_SHAPES and not self._made:
            self._give_up(f"batches come in more than {MAX_SHAPES} shapes")
            return ""
        if seen <= NUM_PLAIN or len(self._made) >= MAX_RECORDINGS or not self._pays():
            return ""
        return self._rehearse(batch, shape) if seen == NUM_PLAIN + 1 else self._record(shape, batch)

    def _pays(self) -> bool:
        """A recording costs about as much as a few steps."""
        return self._total is None or self._total - self._hand.num_steps > NUM_PLAIN

    def _rehearse(self, batch: Batch, shape: Hashable) -> str:
        """A real step under the conditions of a recording; "" if it breaks one, with nothing changed."""
        hand = self._hand
        self._hold_rates()
        watch = self._watch = ValueWatch(hand.model, self._task_loss, hand.optimizers.values(), self._settings)
        hooked = watch.hooked() or next(iter(hand.replica.hooks.names), "")
        if hooked:
            self._give_up(f"{hooked} has hooks, which only run when a step is run as it is written")
            return ""
        state = _Keepsake(hand)
        try:
            # Sums wait for the end here, because a rehearsal that breaks off must not have begun some; where layers
            # have collectives of their own it does not break off, and only the recording, which runs none, may fail.
            with self._in_parts(is_deferred=hand.world.size > 1):
                phases = self._phases(batch, shape, is_deferred=hand.world.size > 1)
                is_strict = not self._ways.compiles(shape) and (hand.world.size == 1 or hand.replica.is_local)
                with rehearsing() if is_strict else nullcontext():
                    phases[0].run()
                for phase in phases[1:]:
                    phase.run()
                hand.note()
                hand.meet()
        except CannotRecord as reason:
            state.restore()
            hand.take(batch)
            self._give_up(str(reason))
            return ""
        self._usage[shape] = hand.replica.usage(MAIN)
        changed = watch.changed()
        drew = watch.drew() if hand.randomness is None else hand.randomness.drew_on_host()
        if changed:
            self._give_up(f"{changed} changes with every step, in Python")
        elif drew:
            self._give_up(f"the step draws from {drew}, on the host")
        return "rehearsed"

    # -- recording and replaying ----------------------------------------------------------------------------------

    def _phases(self, batch: Batch, shape: Hashable, *, is_deferred: bool) -> list[Phase]:
        """The step in parts: all in one graph; where the exchange or the update must run by itself, around those."""
        hand, loss = self._hand, self._ways.loss_for(shape)
        gradients: list[tuple[Tensor, Tensor | None]] = []
        before: list[list[Tensor]] = []

        def forth_and_back() -> None:
            before[:] = [hand.begin_step()]
            compute(hand, loss, batch)
            if is_deferred:
                hand.replica.pack(MAIN)
            if not self._is_whole:
                gradients[:] = [(p, p.grad) for p in hand.model.parameters()]

        def exchange() -> None:
            hand.replica.exchange(MAIN)

        def update() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            hand.good = None
            hand.update()
            hand.end_step(before[0])

        middle = [Phase(exchange, recorded=False)] if is_deferred else []
        return [Phase(forth_and_back), *middle, Phase(update, recorded=self._is_whole)]

    @contextmanager
    def _in_parts(self, *, is_deferred: bool, usage: Any = None) -> Iterator[None]:
        replica = self._hand.replica
        replica.defer(is_deferred)
        replica.settle(MAIN, usage)
        try:
            yield
        finally:
            replica.defer(False)
            replica.settle(MAIN, None)

    def _settings(self) -> dict[str, Any]:
        """Settings of the hand that a recording takes for constant."""
        hand = self._hand
        decay = None if hand.averages is None else hand.averages.decay
        return {"hand.clip": hand.clip, "hand.skips": hand.skips, "the decay of the average": decay}

    def _record(self, shape: Hashable, batch: Batch) -> str:
        hand, statics = self._hand, Statics(_input(batch), map_leaves, tensors)
        self._hold_rates()
        standing = _standing(batch, statics)
        hand.take(standing)
        num_steps, state = hand.num_steps, _Keepsake(hand)
        is_deferred = not hand.replica.records_exchange
        try:
            with self._in_parts(is_deferred=is_deferred, usage=self._usage.get(shape)):
                recording = Recording(self._phases(standing, shape, is_deferred=is_deferred), self._pool)
        except CannotRecord as reason:
            hand.num_steps = num_steps
            state.restore()
            hand.take(batch)
            self._give_up(str(reason))
            return ""
        hand.num_steps = num_steps
        if not self._made:
            self._announce(recording, self._ways.compiles(shape))
        made = _Made(
            statics=statics,
            recording=recording,
            tally=hand.recorded_tally(),
            losses=dict(hand.losses),
            good=hand.good,
            is_compiled=self._ways.compiles(shape),
            usage=self._usage.get(shape),
        )
        self._made[shape] = made
        hand.take(batch)
        self._replay(made, batch)
        return "replayed"

    def _replay(self, made: _Made, batch: Batch) -> None:
        hand, count = self._hand, self._num_replays
        self._num_replays += 1
        self._hold_rates()
        expected = self._plain_loss(batch, made.is_compiled) if _is_audit(count) else None
        hand.heed()
        made.statics.load(_input(batch))
        num_steps = hand.num_steps
        if self._is_whole:
            with hand.during("recorded"):
                made.recording.replay()
        else:
            hand.reopen(made.tally)
            with (
                hand.during("recorded"),
                self._in_parts(is_deferred=not hand.replica.records_exchange, usage=made.usage),
            ):
                made.recording.replay()
            made.losses, made.good = dict(hand.losses), hand.good
        hand.num_steps = num_steps + 1
        hand.follow(made.tally, made.losses, made.good)
        hand.note()
        hand.meet()
        if expected is not None:
            self._audit(expected, float(made.tally.local_loss), made.is_compiled)
        if count % LOOK_EVERY == LOOK_EVERY - 1:
            self._look_closely()

    def _hold_rates(self) -> None:
        """A recording reads these very tensors; a person may have put a number in their place."""
        for group, rate in zip(self._groups(), self._rates, strict=False):
            if group["lr"] is not rate and isinstance(rate, Tensor):
                rate.fill_(float(group["lr"]))
                group["lr"] = rate

    # -- whether a recording still says what the program says -----------------------------------------------------

    def _look_closely(self) -> None:
        changed = self._watch.changed() if self._made and self._watch is not None else ""
        if changed:
            self._record_anew(changed)

    def _record_anew(self, changed: str) -> None:
        self._num_changes += 1
        self.forget()
        if self._num_changes > MAX_CHANGES:
            self._give_up(f"{changed} changes again and again, in Python")
        else:
            self._hand.notice(f"{changed} has changed: the step is recorded anew")

    def _plain_loss(self, batch: Batch, is_compiled: bool) -> float | None:
        """This replica's loss on a batch as the program says it, without a trace; None where that cannot be asked."""
        hand = self._hand
        if hand.world.size > 1 and not hand.replica.is_local:
            return None
        state, tally = _Keepsake(hand), Tally(hand.replica.group)
        with torch.no_grad():
            for data in hand.accumulate():
                with hand.scope():
                    tally.add(self._task_loss(hand.model, data), hand.part)
        draws = state.drew()
        state.restore()
        hand.take(batch)
        # A compiled network draws other numbers than the plain one.
        return None if draws and is_compiled else float(tally.local_loss)

    def _audit(self, expected: float, found: float, is_compiled: bool) -> None:
        close = CLOSE[self._hand.spec.precision] * (10 if is_compiled else 1)
        if math.isfinite(expected) and not math.isclose(expected, found, rel_tol=close, abs_tol=close):
            self._give_up(
                f"the recorded step gave a loss of {found:.6g} where the program gives {expected:.6g}: "
                "something in it changes from step to step, in Python"
            )

    def _give_up(self, reason: str) -> None:
        self._has_given_up = True
        self.forget()
        self._hand.notice(f"the step runs as it is written, not from a recording: {reason}")

    def _announce(self, recording: Recording, is_compiled: bool) -> None:
        compiled = "compiled, and " if is_compiled else ""
        aside = "over gloo" if not self._hand.world.is_recordable else f"by sync={self._hand.spec.sync}"
        graphs = {1: "recorded as one CUDA graph", 2: f"recorded as two CUDA graphs around the exchange {aside}"}
        around = graphs[recording.num_graphs] if self._is_whole else "recorded up to its update"
        self._hand.notice(f"the step is {compiled}{around}")


class _Keepsake:
    """What a trial of a step must put back: buffers, and where the generators stand."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._put_back = remember_buffers(hand.model)
        self._random = random_state(hand.device)

    def drew(self) -> bool:
        """Whether numbers were drawn since."""
        now = random_state(self._hand.device)
        return any(not torch.equal(value, now[name]) for name, value in self._random.items())

    def restore(self) -> None:
        self._put_back()
        restore_random_state(self._random, self._hand.device)
        self._hand.forget_step()


def shape_of_batch(batch: Batch) -> Hashable:
    """What must be equal for two batches to be run by one recording; a text says why there can be none."""
    shape = shape_of(_input(batch))
    return shape if isinstance(shape, str) else (shape, batch.sizes, batch.global_sizes)


def _input(batch: Batch) -> Any:
    """What changes from step to step: the batch's tensors, or the index of its rows where arrays are resident."""
    return batch.index if isinstance(batch, ResidentBatch) else batch.data


def _standing(batch: Batch, statics: Statics) -> Batch:
    """The batch as a recording reads it: from tensors that stay; resident arrays are gathered inside of it."""
    if isinstance(batch, ResidentBatch):
        return ResidentBatch(batch.resident, statics.data, batch.sizes, batch.global_sizes, batch.ids, batch.cursor)
    return dataclasses.replace(batch, data=statics.data)


def _is_audit(count: int) -> bool:
    """Replays that are compared with the plain program: 0, 10, 100, 1000, ..."""
    return count == 0 or (count >= 10 and 10 ** round(math.log10(count)) == count)


def _pool() -> Any:
    """Memory that recordings share; none where there is no GPU, and the parts of a step are run one by one."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
