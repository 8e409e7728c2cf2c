"""Take training steps, plainly or from CUDA graphs, in the variant that is fastest here."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from ..core import Task
from ..data import Batch
from ..strategies import MAIN
from .hand import Hand
from .step_capture import StepCapture, compute, shape_of_batch
from .step_variants import Ways

RECORDING = ("cuda",)
"""Types of devices on which steps can be captured."""


def take_step(hand: Hand, task: Task, batch: Batch, loss: Callable[[Any, Any], Any] | None = None) -> None:
    """Take one step of a task on a batch: its custom step, or its loss over the micro-batches and one update."""
    before = hand.begin_step()
    if task.step is not None:
        with hand.during("forward"), hand.drawing():
            task.step(hand, batch.data)
        if MAIN not in hand.optimizers:
            hand.num_steps += 1
    else:
        assert task.loss is not None
        compute(hand, loss or task.loss, batch)
        hand.step()
    hand.end_step(before)
    hand.meet()


class Stepper:
    """Takes a task's steps, captured or compiled where that is faster."""

    def __init__(self, hand: Hand, task: Task, total: int | None) -> None:
        self._hand, self._task = hand, task
        self._ways: Ways | None = None
        self._recorder: StepCapture | None = None
        records = hand.device.type in RECORDING and hand.spec.capture != "off" and not hand.spec.offload
        if task.loss is not None:
            self._ways = Ways(hand, task.loss, total)
            self._recorder = StepCapture(hand, task.loss, self._ways, total) if records else None
        elif records:
            hand.notice("a task with a step of its own is run as it is written, not from a recording")

    def take(self, batch: Batch) -> None:
        """Take one step."""
        if self._ways is None:
            take_step(self._hand, self._task, batch)
            return
        began, waited = time.perf_counter(), self._hand.world.waited
        shape = shape_of_batch(batch)
        try:
            taken = self._take(batch, shape, self._ways)
        except Exception as error:
            if not self._ways.gave_up_compiling(error):
                raise
            self._hand.forget_step()
            self._hand.take(batch)
            taken = self._take(batch, shape, self._ways)
        # Without the time spent waiting for other ranks, which no variant changes.
        seconds = time.perf_counter() - began - (self._hand.world.waited - waited)
        if self._ways.tick(shape, taken == "replayed", seconds) and self._recorder is not None:
            self._recorder.forget()

    def _take(self, batch: Batch, shape: Hashable, ways: Ways) -> str:
        taken = self._recorder.take(batch, shape) if self._recorder is not None else ""
        if not taken:
            take_step(self._hand, self._task, batch, ways.loss_for(shape))
        return taken

    def look_again(self) -> None:
        """Check for changed constants of captured steps, after user code ran between two steps."""
        if self._recorder is not None:
            self._recorder.look_again()

    def close(self) -> None:
        """Free captured steps, and stop what other variants left running."""
        if self._recorder is not None:
            self._recorder.forget()
        if self._ways is not None:
            self._ways.close()
