"""Stepping: one step after another, plainly at first, then recorded and compiled where device and step allow it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import Task, random_state, restore_random_state
from ..data import Batch
from ..graph import CannotRecord, Phase, Recording, Statics, Watch, make_capturable, rehearsing, shape_of
from ..strategies import MAIN
from .hand import Hand
from .tally import Part, Tally

NUM_PLAIN = 2
"""Plain steps on batches of one shape before the rehearsal: lazy parts of a network are made in the first."""
MAX_RECORDINGS = 4
MAX_SHAPES = 8
MAX_CHANGES = 4
LOOK_EVERY = 50
"""Replays between two looks at values in Python that a recording does not follow."""
CLOSE = {"fp32": 1e-4, "fp64": 1e-8, "bf16": 2e-2}
"""How close a recorded step's loss must be to the plain one's, by precision."""
COMPILE_GAIN, COMPILE_MARGIN = 0.2, 2.0
"""The share of a step that compiling usually saves, and how many times its cost it must be worth."""
MEASURED = (10, 40)
"""The replays between which the time of a recorded step is taken."""


def take_step(hand: Hand, task: Task, batch: Batch) -> None:
    """One step of a task on a batch: its own, or its loss over the micro-batches and one update."""
    hand.begin_step()
    if task.step is not None:
        task.step(hand, batch.data)
        if MAIN not in hand.optimizers:
            hand.num_steps += 1
    else:
        assert task.loss is not None
        _compute(hand, task.loss, batch)
        hand.step()
    hand.end_step()


def _compute(hand: Hand, loss: Callable[[Any, Any], Any], batch: Batch) -> None:
    """The loss of every micro-batch, and its gradients."""
    for data in hand.accumulate(batch.data):
        with hand.replica.scope():
            value = loss(hand.model, data)
        hand.backward(value)


@dataclass
class _Made:
    """A recording of the step on batches of one shape, and what it leaves behind."""

    statics: Statics
    recording: Recording
    tally: Tally
    losses: dict[str, Tensor]
    good: Tensor | None


class Stepper:
    """Takes a task's steps, as fast as this device can.

    On a GPU a step whose shapes stay the same is recorded as CUDA graphs after a few plain ones. Whatever cannot be
    recorded makes it go on plainly, and a notice says which line it was.
    """

    def __init__(self, hand: Hand, task: Task, total: int | None) -> None:
        self._hand, self._task, self._total = hand, task, total
        self._mode = hand.spec.capture
        self._loss = task.loss
        self._made: dict[Hashable, _Made] = {}
        self._seen: dict[Hashable, int] = {}
        self._watch: Watch | None = None
        self._num_replays = self._num_changes = 0
        self._seconds: dict[str, float] = {}
        """Seconds of a step by how it is executed."""
        self._marks: list[torch.cuda.Event] = []
        self._records = hand.device.type == "cuda" and self._mode != "off"
        self._whole = True
        self._pool = torch.cuda.graph_pool_handle() if self._records else None
        if self._records:
            self._prepare()
        if self._mode == "compile" and task.loss is not None:
            self._compile()

    # -- taking steps ---------------------------------------------------------------------------------------------

    def take(self, batch: Batch) -> None:
        """Takes one step."""
        if not self._records:
            self._plain(batch)
            return
        key = self._key(batch)
        if isinstance(key, str):
            self._give_up(key)
            self._plain(batch)
        elif key in self._made:
            self._replay(self._made[key], batch)
        else:
            self._approach(key, batch)

    def look_again(self) -> None:
        """Somebody's code has run between two steps: what a recording took for constant may have changed."""
        if self._made and self._watch is not None:
            changed = self._watch.changed()
            if changed:
                self._record_anew(changed)

    def _plain(self, batch: Batch) -> None:
        task = self._task if self._loss is self._task.loss else self._task.replace(loss=self._loss)
        take_step(self._hand, task, batch)

    def _approach(self, key: Hashable, batch: Batch) -> None:
        """Plain steps, then one under the conditions of a recording, then the recording."""
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if len(self._seen) > MAX_SHAPES and not self._made:
            self._give_up(f"batches come in more than {MAX_SHAPES} shapes")
        if not self._records or seen <= NUM_PLAIN or len(self._made) >= MAX_RECORDINGS or not self._pays(seen):
            self._plain(batch)
        elif seen == NUM_PLAIN + 1:
            self._rehearse(batch)
        else:
            self._record(key, batch)

    def _pays(self, seen: int) -> bool:
        """A recording costs about as much as a few steps."""
        return self._total is None or self._total - self._hand.num_steps > 5 or seen > NUM_PLAIN + 1

    # -- recording ------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Decides what can be recorded at all, and makes the optimizers fit for it."""
        hand = self._hand
        reasons = [make_capturable(optimizer) for optimizer in hand.optimizers.values()]
        self._rates = [(group, group["lr"]) for o in hand.optimizers.values() for group in o.param_groups]
        self._whole = not any(reasons)
        if self._task.loss is None:
            self._give_up("a task with a step of its own is run as it is written")
        elif not hand.replica.is_recordable:
            self._give_up("batch statistics are exchanged over gloo inside the network")
        elif not self._whole:
            hand.notice(f"the update runs by itself, outside of the recording: {next(filter(None, reasons))}")

    def _key(self, batch: Batch) -> Hashable | str:
        shape = shape_of(batch.data)
        return shape if isinstance(shape, str) else (shape, batch.sizes, batch.global_sizes, self._hand.num_restores)

    def _phases(self, batch: Batch) -> list[Phase]:
        """The step in parts: all in one graph; where the exchange or the update must run by itself, around those."""
        hand, loss = self._hand, self._loss
        assert loss is not None
        gradients: list[tuple[Tensor, Tensor | None]] = []

        def compute() -> None:
            hand.begin_step()
            _compute(hand, loss, batch)
            if not hand.world.is_recordable:
                hand.replica.pack(MAIN)
            if not self._whole:
                gradients[:] = [(p, p.grad) for p in hand.model.parameters()]

        def exchange() -> None:
            hand.replica.exchange(MAIN)

        def update() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            hand.step()
            hand.end_step()

        middle = [] if hand.world.is_recordable else [Phase(exchange, recorded=False)]
        return [Phase(compute), *middle, Phase(update, recorded=self._whole)]

    def _rehearse(self, batch: Batch) -> None:
        """A real step under the conditions of a recording; if it breaks one, the step is taken again plainly."""
        hand = self._hand
        assert self._loss is not None
        self._watch = Watch(hand.model, self._task.loss or self._loss, hand.optimizers.values())
        hooked = self._watch.hooked()
        if hooked:
            self._give_up(f"{hooked} has hooks, which only run when a step is run as it is written")
            self._plain(batch)
            return
        state = _Keepsake(hand)
        compute, *others = self._phases(batch)
        hand.replica.defer(not hand.world.is_recordable)
        try:
            with rehearsing() if self._mode != "compile" else nullcontext():
                compute.run()
            for phase in others:
                phase.run()
        except CannotRecord as reason:
            state.restore()
            self._give_up(str(reason))
            self._plain(batch)
            return
        finally:
            hand.replica.defer(False)
        changed, drew = self._watch.changed(), self._watch.drew()
        if changed:
            self._give_up(f"{changed} changes with every step, in Python")
        elif drew:
            self._give_up(f"the step draws from {drew}, on the host")

    def _record(self, key: Hashable, batch: Batch) -> None:
        hand = self._hand
        statics = Statics(batch.data)
        hand.take(dataclasses.replace(batch, data=statics.data))
        num_steps, state = hand.num_steps, _Keepsake(hand)
        hand.replica.defer(not hand.world.is_recordable)
        hand.replica.settle(True)
        assert hand.batch is not None
        try:
            recording = Recording(self._phases(hand.batch), self._pool)
        except CannotRecord as reason:
            hand.num_steps = num_steps
            hand.replica.defer(False)
            hand.replica.settle(False)
            state.restore()
            hand.take(batch)
            self._give_up(str(reason))
            self._plain(batch)
            return
        tally = hand.recorded_tally()
        hand.num_steps = num_steps
        made = _Made(statics, recording, tally, dict(hand.losses), hand.good)
        if not self._made:
            self._announce(recording)
        self._made[key] = made
        hand.replica.defer(False)
        hand.replica.settle(False)
        self._replay(made, batch)

    def _replay(self, made: _Made, batch: Batch) -> None:
        hand, count = self._hand, self._num_replays
        self._num_replays += 1
        self._hold_rates()
        expected = self._plain_loss(batch) if _is_audit(count) else None
        hand.heed()
        made.statics.load(batch.data)
        num_steps = hand.num_steps
        if self._whole:
            made.recording.replay()
        else:
            hand.replica.defer(not hand.world.is_recordable)
            hand.replica.settle(True)
            hand.reopen(made.tally)
            made.recording.replay()
            hand.replica.defer(False)
            hand.replica.settle(False)
            made.losses, made.good = dict(hand.losses), hand.good
        hand.num_steps = num_steps + 1
        hand.follow(made.tally, made.losses, made.good)
        if expected is not None:
            self._audit(expected, float(made.tally.local_loss))
        self._measure(count)
        if count % LOOK_EVERY == LOOK_EVERY - 1:
            self.look_again()

    def _hold_rates(self) -> None:
        """A recording reads these very tensors; a person may have put a number in their place."""
        for group, rate in self._rates:
            if group["lr"] is not rate and isinstance(rate, Tensor):
                rate.fill_(float(group["lr"]))
                group["lr"] = rate

    def _record_anew(self, changed: str) -> None:
        self._num_changes += 1
        self._forget()
        if self._num_changes > MAX_CHANGES:
            self._give_up(f"{changed} changes again and again, in Python")
        else:
            self._hand.notice(f"{changed} has changed: the step is recorded anew")

    def _forget(self) -> None:
        """Lets go of the recordings, and of the memory that they hold."""
        self._made.clear()
        self._seen.clear()
        self._marks.clear()
        self._num_replays = 0
        self._pool = torch.cuda.graph_pool_handle() if self._records else None

    def _give_up(self, reason: str) -> None:
        self._records = False
        self._forget()
        self._hand.notice(f"the step runs as it is written, not from a recording: {reason}")

    def _announce(self, recording: Recording) -> None:
        compiled = "compiled, and " if self._loss is not self._task.loss else ""
        graphs = {1: "recorded as one CUDA graph", 2: "recorded as two CUDA graphs around the exchange over gloo"}
        around = graphs[recording.num_graphs] if self._whole else "recorded up to its update"
        self._hand.notice(f"the step is {compiled}{around}")

    # -- looking whether a recording still says what the program says ----------------------------------------------

    def _plain_loss(self, batch: Batch) -> float | None:
        """This replica's loss on a batch as the program says it, without a trace; None where that cannot be asked."""
        hand = self._hand
        assert self._task.loss is not None
        if hand.size > 1 and not hand.replica.is_local:
            return None
        state, tally = _Keepsake(hand), Tally(hand.world)
        with torch.no_grad():
            for data, size, _ in batch.micros():
                with hand.replica.scope():
                    tally.add(self._task.loss(hand.model, data), Part(size, batch.global_samples))
        draws = state.drew()
        state.restore()
        # A compiled network draws other numbers than the plain one.
        return None if draws and self._loss is not self._task.loss else float(tally.local_loss)

    def _audit(self, expected: float, found: float) -> None:
        close = CLOSE[self._hand.spec.precision] * (1 if self._loss is self._task.loss else 100)
        if math.isclose(expected, found, rel_tol=close, abs_tol=close) or not math.isfinite(expected):
            return
        self._give_up(
            f"the recorded step gave a loss of {found:.6g} where the program gives {expected:.6g}: "
            "something in it changes from step to step, in Python"
        )

    # -- compiling ------------------------------------------------------------------------------------------------

    def _measure(self, count: int) -> None:
        """Takes the time of a recorded step, and decides whether compiling pays."""
        if count not in (*MEASURED, MEASURED[1] + 1):
            return
        if count in MEASURED:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
            return
        self._marks[1].synchronize()
        seconds = self._marks[0].elapsed_time(self._marks[1]) / 1000 / (MEASURED[1] - MEASURED[0])
        is_compiled = self._loss is not self._task.loss
        self._seconds["compiled" if is_compiled else "recorded"] = seconds
        if is_compiled:
            self._judge()
        elif self._mode == "auto" and self._compiling_pays(seconds):
            self._hand.notice(f"a recorded step takes {1000 * seconds:.3g} ms; compiling it for this long run")
            self._compile()

    def _compiling_pays(self, seconds: float) -> bool:
        """Whether the steps to come save more than compiling costs, by a margin."""
        if "compiled" in self._seconds or self._total is None:
            return False
        num_layers = sum(not list(module.children()) for module in self._hand.model.modules())
        cost = 10.0 + 0.3 * num_layers
        left = self._total - self._hand.num_steps
        return left * seconds * COMPILE_GAIN > COMPILE_MARGIN * cost

    def _compile(self) -> None:
        self._forget()
        task_loss = self._task.loss
        assert task_loss is not None

        def loss(model: Any, batch: Any) -> Any:
            return task_loss(model, batch)

        compiled = torch.compile(loss, dynamic=False)

        def guarded(model: Any, batch: Any) -> Any:
            try:
                return compiled(model, batch)
            except Exception as error:
                if not _is_of_the_compiler(error):
                    raise
                self._hand.notice(f"the step could not be compiled ({_first_line(error)})")
                self._seconds["compiled"] = math.inf
                self._loss = task_loss
                return task_loss(model, batch)

        self._loss = guarded

    def _judge(self) -> None:
        """Keeps the compiled step only if it is faster."""
        _stop_compilers()
        before, after = self._seconds.get("recorded"), self._seconds["compiled"]
        if before is None:
            return
        told = f"{1000 * after:.3g} ms compiled, {1000 * before:.3g} ms as written"
        if after < before:
            self._hand.notice(f"a recorded step takes {told}")
        else:
            self._hand.notice(f"a recorded step takes {told}: going on as written")
            self._loss = self._task.loss
            self._forget()


class _Keepsake:
    """What a trial of a step must put back: buffers, and where the generators stand."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._buffers = [(buffer, buffer.clone()) for buffer in hand.model.buffers()]
        self._random = random_state(hand.device)

    def drew(self) -> bool:
        """Whether numbers were drawn on the device since."""
        now = random_state(self._hand.device)
        return any(not torch.equal(value, now[name]) for name, value in self._random.items())

    def restore(self) -> None:
        for buffer, value in self._buffers:
            buffer.copy_(value)
        restore_random_state(self._random, self._hand.device)
        self._hand.drop_step()


def _is_audit(count: int) -> bool:
    """Replays that are compared with the plain program: 0, 10, 100, 1000, ..."""
    return count == 0 or (count >= 10 and 10 ** round(math.log10(count)) == count)


def _is_of_the_compiler(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch.fx"))


def _first_line(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else type(error).__name__
    )


def _stop_compilers() -> None:
    """Ends the processes that torch keeps for compiling more."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
