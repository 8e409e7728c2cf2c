"""Under sync="auto" the first steps are measured, a policy is chosen, and given up again if it is slower."""

from __future__ import annotations

import math
import time
from statistics import mean, median
from typing import TYPE_CHECKING

import torch

from ..core import event
from ..strategies import choice_for

if TYPE_CHECKING:
    from .hand import Hand

SKIPPED, MEASURED = 1, 3
"""Exact steps that are not looked at, and those that are; one is enough where the waiting is CLEAR."""
CLEAR = 0.25
"""The part of a step without waiting below which no noise can deceive."""
WINDOW = 5
"""Steps of a policy on trial, at the least, in each of two windows of which the faster one counts."""


class Choosing:
    """Finds the policy of a hand while it trains."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._mark: tuple[float, float] | None = None
        self._steps: list[tuple[float, float]] = []
        """Of each step its seconds, and those of them without waiting for the network."""
        self._exact = math.inf
        self._wanted = SKIPPED + 1
        self._warmup, self._window = 0, WINDOW
        self._is_trying = False
        self.is_done = False

    def tick(self) -> None:
        """A step was taken."""
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
        # What was done just now is no part of a step.
        self._steps, self._mark = [], None

    def _choose(self) -> bool:
        """Chooses, if enough steps were measured."""
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
            hand.world.line.report(event("chosen", sync=choice.sync, **choice.figures))
        self.is_done = not choice.changes
        if choice.changes:
            hand.follow_policy(choice.sync)
            self._is_trying, self._warmup, self._window = True, choice.warmup, max(WINDOW, choice.every)
            self._wanted = self._warmup + 2 * self._window
        return True

    def _judge(self) -> None:
        """Goes back if a step takes longer than an exact one did."""
        self.is_done = True
        hand, steps = self._hand, [seconds for seconds, _ in self._steps[self._warmup :]]
        windows = steps[: self._window], steps[self._window : 2 * self._window]
        taken = max(hand.world.gather_objects(min(map(mean, windows))))
        if taken > self._exact:
            told = f"a step took {1000 * taken:.3g} ms, an exact one {1000 * self._exact:.3g} ms"
            hand.notice(f"sync={hand.spec.sync} is no faster here: {told}; the run goes on with exact sums")
            hand.follow_policy("allreduce")
