"""Stepper: takes training steps plainly or from CUDA graphs, in the fastest variant."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable

from ..core import Task
from ..data import Batch
from .hand import Hand
from .step import take_step
from .step_capture import StepCapture, shape_of_batch
from .step_variants import StepVariants

CAPTURE_DEVICES = ("cuda",)
"""Types of devices on which steps can be captured."""


class Stepper:
    """Takes a task's steps, captured or compiled where that is faster."""

    def __init__(self, hand: Hand, task: Task, total: int | None) -> None:
        self._hand, self._task = hand, task
        self._variants: StepVariants | None = None
        self._capture: StepCapture | None = None
        captures = hand.device.type in CAPTURE_DEVICES and hand.spec.capture != "off" and not hand.spec.offload
        if task.loss is not None:
            self._variants = StepVariants(hand, task.loss, total)
            self._capture = StepCapture(hand, task.loss, self._variants, total) if captures else None
        elif captures:
            hand.notice("a task with step= is executed eagerly, and not captured")
        self.captures = self._capture is not None
        """Whether steps may be captured."""
        self._take_plainly = functools.partial(take_step, hand, task)
        self.take: Callable[[Batch], None] = self._take_plainly if self._variants is None else self._take_varied
        """Takes one step."""

    def _take_varied(self, batch: Batch) -> None:
        assert self._variants is not None
        began, waited = time.perf_counter(), self._hand.world.waited
        shape = shape_of_batch(batch)
        try:
            taken = self._take(batch, shape, self._variants)
        except Exception as error:
            if not self._variants.gave_up_compiling(error):
                raise
            self._hand.current.forget()
            self._hand.reader.take(batch)
            taken = self._take(batch, shape, self._variants)
        # Without the time spent waiting for other ranks, which no variant changes.
        seconds = time.perf_counter() - began - (self._hand.world.waited - waited)
        is_switched = self._variants.tick(shape, taken == "replayed", seconds, counts=self._may_vary)
        if is_switched and self._capture is not None:
            self._capture.forget()
        if self._variants.is_plain and not self.captures:
            self.take = self._take_plainly

    @property
    def _may_vary(self) -> bool:
        """Whether other variants of the step may be tried; on a GPU only those that are candidates for a capture."""
        if self._hand.device.type not in CAPTURE_DEVICES:
            return True
        return self._capture is not None and not self._capture.has_given_up

    def _take(self, batch: Batch, shape: Hashable, variants: StepVariants) -> str:
        taken = self._capture.take(batch, shape) if self._capture is not None else ""
        if not taken:
            take_step(self._hand, self._task, batch, variants.loss_for(shape))
        return taken

    def look_again(self) -> None:
        """Check for changed constants of captured steps, after user code ran between two steps."""
        if self._capture is not None:
            self._capture.look_again()

    def close(self) -> None:
        """Free captured steps, and stop what other variants left running."""
        if self._capture is not None:
            self._capture.forget()
        if self._variants is not None:
            self._variants.close()
