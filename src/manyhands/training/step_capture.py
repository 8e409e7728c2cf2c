"""Capture of a training step as CUDA graphs.

A step is first rehearsed to find host synchronization; afterwards Python values that changed are detected, and replays
are compared with plain steps from time to time. If a step cannot be captured, a notice names the line and steps run
uncaptured. A compiled step gets its own attempt: tracing may remove the line that waits for the GPU.
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

from ..capture import (
    CapturedGraphs,
    CaptureError,
    Phase,
    StaticInputs,
    ValueWatch,
    make_capturable,
    rehearsing,
    shape_of,
)
from ..core import random_state, remember_state, restore_random_state
from ..data import Batch, ResidentBatch, map_leaves, tensors
from ..strategies import MAIN
from .hand import Hand
from .step import Loss, Tally, compute
from .step_variants import StepVariants

NUM_PLAIN = 2
"""Plain steps per batch shape before the rehearsal: lazy modules are initialized in the first."""
MAX_RECORDINGS = 4
MAX_SHAPES = 8
MAX_CHANGES = 4
LOOK_EVERY = 50
"""Replays between two full checks of Python values that a CUDA graph does not follow."""
CLOSE = {"fp32": 1e-4, "fp64": 1e-8, "bf16": 2e-2}
"""By precision: tolerance between the losses of a captured step and of the plain one."""


@dataclass
class _CapturedShape:
    """A captured step for one batch shape, and the tensors it writes its results to."""

    statics: StaticInputs
    captured: CapturedGraphs
    tally: Tally
    losses: dict[str, Tensor]
    norms: dict[str, Tensor]
    good: Tensor | None
    is_compiled: bool
    usage: Any
    """Which parameters the step uses."""


class StepCapture:
    """Runs steps from CUDA graphs, one for each batch shape that occurs often enough."""

    def __init__(self, hand: Hand, loss: Loss, variants: StepVariants, total: int | None) -> None:
        self._hand, self._task_loss, self._variants, self._total = hand, loss, variants, total
        self._made: dict[Hashable, _CapturedShape] = {}
        self._seen: dict[Hashable, int] = {}
        self._watch: ValueWatch | None = None
        self._num_replays = self._num_changes = 0
        self._num_restores = hand.num_restores
        self.has_given_up = False
        """Whether no step can be captured, compiled or not."""
        self._uncapturable: set[bool] = set()
        """The kinds of steps whose capture failed, compiled (True) or not (False): they are not tried again."""
        self._pool = _pool()
        reasons = [make_capturable(optimizer) for optimizer in hand.optimizers.values()]
        self._rates = [group["lr"] for group in self._groups()]
        """The tensors from which CUDA graphs read learning rates."""
        self._usage: dict[Hashable, Any] = {}
        """By batch shape: the parameters that its rehearsal used."""
        self._is_whole = not any(reasons)
        """Whether the optimizer's update is captured too."""
        if not hand.replica.is_capturable:
            self._give_up("batch statistics are exchanged over gloo inside the network")
        elif hand.replica.buffers.rules:
            self._give_up("forward updates buffers, whose values come from all parts of a batch")
        elif not self._is_whole:
            hand.notice(f"the update runs by itself, outside of the captured graph: {next(filter(None, reasons))}")

    def take(self, batch: Batch, shape: Hashable) -> str:
        """Take a step; return "replayed" or "rehearsed", or "" if the caller must take it uncaptured."""
        if self.has_given_up:
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
        return "" if self._variants.compiles(shape) in self._uncapturable else self._approach(shape, batch)

    def look_again(self) -> None:
        """Check quickly whether values that the CUDA graphs treat as constant have changed; if so, capture again."""
        if self._made and self._watch is not None and not self._watch.is_same():
            self._capture_again(self._watch.changed() or "something in the network")

    def forget(self) -> None:
        """Free the CUDA graphs and their memory."""
        self._made.clear()
        self._seen.clear()
        self._num_replays = 0
        self._pool = _pool()

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._hand.optimizers.values():
            yield from optimizer.param_groups

    # -- before a capture -----------------------------------------------------------------------------------------

    def _approach(self, shape: Hashable, batch: Batch) -> str:
        """Advance towards a capture: plain steps, then a rehearsal, then the capture."""
        if shape not in self._seen and len(self._seen) > 2 * MAX_SHAPES:
            return ""
        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if len(self._seen) > MAX_SHAPES and not self._made:
            self._give_up(f"batches come in more than {MAX_SHAPES} shapes")
            return ""
        if seen <= NUM_PLAIN or len(self._made) >= MAX_RECORDINGS or not self._pays():
            return ""
        return self._rehearse(batch, shape) if seen == NUM_PLAIN + 1 else self._capture_graph(shape, batch)

    def _pays(self) -> bool:
        """Return whether enough steps are left, as a capture costs about as much as a few steps."""
        return self._total is None or self._total - self._hand.num_steps > NUM_PLAIN

    def _rehearse(self, batch: Batch, shape: Hashable) -> str:
        """Take a real step under capture rules; return "" with nothing changed if it breaks one."""
        hand = self._hand
        self._hold_rates()
        watch = self._watch = ValueWatch(hand.model, self._task_loss, hand.optimizers.values(), self._settings)
        hooked = watch.hooked() or next(iter(hand.replica.hooks.names), "")
        if hooked:
            self._give_up(f"{hooked} has hooks, which only run in eager steps")
            return ""
        state = _StateBeforeTrial(hand)
        try:
            # All-reduces are deferred to the end, because an aborted rehearsal must not have started any. Where layers
            # have their own collectives the rehearsal is not strict; then only the capture, which runs none, may fail.
            with self._in_parts(is_deferred=hand.world.size > 1):
                phases = self._phases(batch, shape, is_deferred=hand.world.size > 1)
                is_strict = not self._variants.compiles(shape) and (hand.world.size == 1 or hand.replica.is_local)
                with rehearsing() if is_strict else nullcontext():
                    phases[0].run()
                for phase in phases[1:]:
                    phase.run()
                hand.current.note()
                hand.current.meet()
        except CaptureError as reason:
            state.restore()
            hand.reader.take(batch)
            self._leave_uncaptured(self._variants.compiles(shape), str(reason))
            return ""
        self._usage[shape] = hand.replica.usage(MAIN)
        changed = watch.changed()
        drew = watch.drew() if hand.randomness is None else hand.randomness.drew_on_host()
        if changed:
            self._give_up(f"{changed} changes with every step, in Python")
        elif drew:
            self._give_up(f"the step draws from {drew}, on the host")
        return "rehearsed"

    # -- capturing and replaying ----------------------------------------------------------------------------------

    def _phases(self, batch: Batch, shape: Hashable, *, is_deferred: bool) -> list[Phase]:
        """Split the step into phases: one graph, or several around an exchange or update that cannot be captured."""
        hand, loss = self._hand, self._variants.loss_for(shape)
        gradients: list[tuple[Tensor, Tensor | None]] = []
        before: list[list[Tensor]] = []

        def forth_and_back() -> None:
            before[:] = [hand.current.begin()]
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
            hand.current.good = None
            hand.current.update()
            hand.current.end(before[0])

        middle = [Phase(exchange, captured=False)] if is_deferred else []
        return [Phase(forth_and_back), *middle, Phase(update, captured=self._is_whole)]

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
        """Return settings of the hand that a CUDA graph treats as constant."""
        hand = self._hand
        decay = None if hand.averages is None else hand.averages.decay
        return {
            "hand.current.clip": hand.current.clip,
            "hand.current.skips": hand.current.skips,
            "the decay of the average": decay,
        }

    def _capture_graph(self, shape: Hashable, batch: Batch) -> str:
        hand, statics = self._hand, StaticInputs(_input(batch), map_leaves, tensors)
        self._hold_rates()
        standing = _standing(batch, statics)
        hand.reader.take(standing)
        num_steps, state = hand.num_steps, _StateBeforeTrial(hand)
        is_deferred = not hand.replica.records_exchange
        try:
            with self._in_parts(is_deferred=is_deferred, usage=self._usage.get(shape)):
                captured = CapturedGraphs(self._phases(standing, shape, is_deferred=is_deferred), self._pool)
        except CaptureError as reason:
            hand.num_steps = num_steps
            state.restore()
            hand.reader.take(batch)
            self._leave_uncaptured(self._variants.compiles(shape), str(reason))
            return ""
        hand.num_steps = num_steps
        if not self._made:
            self._announce(captured, self._variants.compiles(shape))
        made = _CapturedShape(
            statics=statics,
            captured=captured,
            tally=hand.current.captured_tally(),
            losses=dict(hand.losses),
            norms=dict(hand.current.norms),
            good=hand.current.good,
            is_compiled=self._variants.compiles(shape),
            usage=self._usage.get(shape),
        )
        self._made[shape] = made
        hand.reader.take(batch)
        self._replay(made, batch)
        return "replayed"

    def _replay(self, made: _CapturedShape, batch: Batch) -> None:
        hand, count = self._hand, self._num_replays
        self._num_replays += 1
        self._hold_rates()
        expected = self._plain_loss(batch, made.is_compiled) if _is_audit(count) else None
        hand.current.respond_to_stop()
        made.statics.load(_input(batch))
        num_steps = hand.num_steps
        if self._is_whole:
            with hand.times.during("captured"):
                made.captured.replay()
        else:
            hand.current.reopen(made.tally)
            with (
                hand.times.during("captured"),
                self._in_parts(is_deferred=not hand.replica.records_exchange, usage=made.usage),
            ):
                made.captured.replay()
            made.losses, made.norms, made.good = dict(hand.losses), dict(hand.current.norms), hand.current.good
        hand.num_steps = num_steps + 1
        hand.current.follow(made.tally, made.losses, made.norms, made.good)
        hand.current.note()
        hand.current.meet()
        if expected is not None:
            self._audit(expected, float(made.tally.local_loss), made.is_compiled)
        if count % LOOK_EVERY == LOOK_EVERY - 1:
            self._look_closely()

    def _hold_rates(self) -> None:
        """Restore the learning-rate tensors that the graphs read, where the user has replaced one by a number."""
        for group, rate in zip(self._groups(), self._rates, strict=False):
            if group["lr"] is not rate and isinstance(rate, Tensor):
                rate.fill_(float(group["lr"]))
                group["lr"] = rate

    # -- checking that a captured step is still valid -------------------------------------------------------------

    def _look_closely(self) -> None:
        changed = self._watch.changed() if self._made and self._watch is not None else ""
        if changed:
            self._capture_again(changed)

    def _capture_again(self, changed: str) -> None:
        self._num_changes += 1
        self.forget()
        if self._num_changes > MAX_CHANGES:
            self._give_up(f"{changed} changes again and again, in Python")
        else:
            self._hand.notice(f"{changed} has changed: the step is captured again")

    def _plain_loss(self, batch: Batch, is_compiled: bool) -> float | None:
        """Return the uncaptured loss of a batch without side effects; None where it cannot be computed or compared."""
        hand = self._hand
        if hand.world.size > 1 and not hand.replica.is_local:
            return None
        state, tally = _StateBeforeTrial(hand), Tally(hand.replica.group)
        with torch.no_grad():
            for data in hand.accumulate():
                with hand.scope():
                    tally.add(self._task_loss(hand.model, data), hand.reader.part)
        draws = state.drew()
        state.restore()
        hand.reader.take(batch)
        # A compiled network draws other random numbers than the plain one.
        return None if draws and is_compiled else float(tally.local_loss)

    def _audit(self, expected: float, found: float, is_compiled: bool) -> None:
        close = CLOSE[self._hand.spec.precision] * (10 if is_compiled else 1)
        if math.isfinite(expected) and not math.isclose(expected, found, rel_tol=close, abs_tol=close):
            self._give_up(
                f"the captured step gave a loss of {found:.6g} where the program gives {expected:.6g}: "
                "something in it changes from step to step, in Python"
            )

    def _give_up(self, reason: str) -> None:
        self.has_given_up = True
        self.forget()
        self._hand.notice(f"the step runs eagerly, not as a CUDA graph: {reason}")

    def _leave_uncaptured(self, is_compiled: bool, reason: str) -> None:
        """Run the steps of this kind uncaptured; graphs of the other kind stay."""
        self._uncapturable.add(is_compiled)
        for shape in [shape for shape, made in self._made.items() if made.is_compiled == is_compiled]:
            del self._made[shape]
        which = "compiled step runs uncaptured," if is_compiled else "step runs eagerly,"
        self._hand.notice(f"the {which} not as a CUDA graph: {reason}")

    def _announce(self, captured: CapturedGraphs, is_compiled: bool) -> None:
        compiled = "compiled, and " if is_compiled else ""
        aside = "over gloo" if not self._hand.world.is_capturable else f"by sync={self._hand.spec.sync}"
        graphs = {1: "captured as one CUDA graph", 2: f"captured as two CUDA graphs around the exchange {aside}"}
        around = graphs[captured.num_graphs] if self._is_whole else "captured up to its update"
        self._hand.notice(f"the step is {compiled}{around}")


class _StateBeforeTrial:
    """Saves buffers and random states before a trial of a step, to restore them afterwards."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._put_back = remember_state(hand.model)
        self._random = random_state(hand.device)

    def drew(self) -> bool:
        """Return whether random numbers were drawn since."""
        now = random_state(self._hand.device)
        return any(not torch.equal(value, now[name]) for name, value in self._random.items())

    def restore(self) -> None:
        self._put_back()
        restore_random_state(self._random, self._hand.device)
        self._hand.current.forget()


def shape_of_batch(batch: Batch) -> Hashable:
    """Return the key by which batches share a CUDA graph; a string is the reason why there can be none."""
    shape = shape_of(_input(batch))
    return shape if isinstance(shape, str) else (shape, batch.sizes, batch.global_sizes)


def _input(batch: Batch) -> Any:
    """Return what changes from step to step: the batch's tensors, or the row index where arrays are on the device."""
    return batch.index if isinstance(batch, ResidentBatch) else batch.data


def _standing(batch: Batch, statics: StaticInputs) -> Batch:
    """Return the batch backed by static input tensors; device-resident arrays are indexed inside the graph."""
    if isinstance(batch, ResidentBatch):
        return ResidentBatch(batch.resident, statics.data, batch.sizes, batch.global_sizes, batch.ids, batch.cursor)
    return dataclasses.replace(batch, data=statics.data)


def _is_audit(count: int) -> bool:
    """Return whether replay number `count` is compared with the plain step: 0, 10, 100, 1000, ..."""
    return count == 0 or (count >= 10 and 10 ** round(math.log10(count)) == count)


def _pool() -> Any:
    """Return a memory pool that CUDA graphs share; None without a GPU, where phases are run directly."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
