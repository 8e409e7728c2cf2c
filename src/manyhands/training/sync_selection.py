"""sync="auto": measure the first steps, choose a sync policy, and revert it if it is slower."""

from __future__ import annotations

import math
import time
from statistics import mean, median
from typing import TYPE_CHECKING

import torch

from ..core import event, format_duration
from ..strategies import choice_for

if TYPE_CHECKING:
    from .hand import Hand

SKIPPED, MEASURED = 1, 3
"""Exact steps that are ignored, and that are measured; one is enough where waiting clearly dominates (`CLEAR`)."""
CLEAR = 0.25
"""Share of a step without waiting below which noise cannot change the choice."""
WINDOW = 5
"""Minimum steps of each of two windows in which a policy is tried; the faster one counts."""


class Choosing:
    """Chooses the sync policy of a hand during training."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._mark: tuple[float, float] | None = None
        self._steps: list[tuple[float, float]] = []
        """By step: its seconds, and its seconds without waiting for communication."""
        self._exact = math.inf
        self._wanted = SKIPPED + 1
        self._warmup, self._window = 0, WINDOW
        self._is_trying = False
        self.is_done = False

    def tick(self) -> None:
        """Account for a step; choose a policy or judge the one on trial where enough steps were measured."""
        if self._hand.device.type == "cuda":
            torch.cuda.synchronize()
        now, waited = time.perf_counter(), self._hand.world.waited
        if self._mark is not None:
            taken = now - self._mark[0]
            self._steps.append((taken, taken - (waited - self._mark[1])))
        self._mark = (now, waited)
        if len(self._steps) < self._wanted or not self._hand.replica.agrees:
            return
        if self._is_trying:
            self._judge()
        elif not self._choose():
            return
        # The time of this decision does not belong to a step.
        self._steps, self._mark = [], None

    def _choose(self) -> bool:
        """Choose a policy; return False if more steps must be measured first."""
        hand, steps = self._hand, self._steps[SKIPPED:]
        measured = median(taken for taken, _ in steps), median(alone for _, alone in steps)
        every = hand.world.gather_objects(measured)
        self._exact, alone = (max(values) for values in zip(*every, strict=True))
        if len(steps) < MEASURED and alone > CLEAR * self._exact:
            self._wanted = SKIPPED + MEASURED
            return False
        choice = choice_for(hand.replica, exact=self._exact, alone=alone)
        hand.notice(choice.reason)
        if hand.is_first:
            hand.world.channel.report(event("chosen", sync=choice.sync, **choice.figures))
        self.is_done = not choice.changes
        if choice.changes:
            hand.follow_policy(choice.sync)
            self._is_trying, self._warmup, self._window = True, choice.warmup, max(WINDOW, choice.every)
            self._wanted = self._warmup + 2 * self._window
        return True

    def _judge(self) -> None:
        """Revert to exact all-reduce if a step takes longer than an exact one did."""
        self.is_done = True
        hand, steps = self._hand, [seconds for seconds, _ in self._steps[self._warmup :]]
        windows = steps[: self._window], steps[self._window : 2 * self._window]
        taken = max(hand.world.gather_objects(min(map(mean, windows))))
        if taken > self._exact:
            comparison = f"a step took {format_duration(taken)}, an exact one {format_duration(self._exact)}"
            hand.notice(
                f"sync={hand.spec.sync} is not faster here: {comparison}; the run continues with exact all-reduce"
            )
            hand.follow_policy("allreduce")
