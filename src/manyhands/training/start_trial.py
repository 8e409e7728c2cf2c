"""StartTrial: what is tried before the first step of a run, on a few samples and on copies of the network."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..core import StrategySpec, counted, evaluating
from ..data import Feed, check_source, first_dim, source_of
from .hand import Hand
from .job import Job
from .restored_objects import left_alone
from .sample_randomness import learn_draws
from .trial import NUM_SAMPLES, try_halves, try_loss, try_metrics
from .verdict import Verdict
from .verify import is_split, refuse, require_whole_statistics, verify, why_not


class StartTrial:
    """Tries the loss and the metrics of a run, and compares its first steps with those of one device."""

    def __init__(self, hand: Hand, job: Job) -> None:
        self.hand, self.job, self.task = hand, job, job.task
        self.verdict: Verdict | None = None
        """The result of comparing the first steps with those of one device; None before `run`."""
        self._has_tried_losses = False
        self._not_verified = ""
        self._seconds_per_row = self._seconds_to_build = 0.0

    @property
    def split(self) -> StrategySpec:
        """The strategy by which the work is split."""
        return self.hand.spec

    def why_not_verified(self, model: nn.Module) -> str:
        """Return why the first steps are not compared with those of one device, where that is known beforehand."""
        if not self.job.verify:
            return "verify=False was passed"
        if self.job.memory is not None:
            return "memory= is too small for a copy of the network; mh.check compares it"
        return why_not(self.task, self.split, model, self.hand.device)

    def timed_build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build the network and measure how long that takes."""
        began = time.perf_counter()
        try:
            return make()
        finally:
            self._seconds_to_build = time.perf_counter() - began

    def try_losses(self, model: nn.Module, batch: Any = None) -> None:
        """Try the loss and the metrics on a network that is not split, by default on a few of the first samples."""
        self._has_tried_losses = True
        hand, task = self.hand, self.task
        if batch is None:
            source = source_of(task)
            batch = hand.reader.peek(source, check_source(source, task.batch_size), NUM_SAMPLES)
        with evaluating(model):
            if task.loss is not None:
                clock = time.thread_time if hand.device.type == "cpu" else time.perf_counter
                began = clock()
                notices = [try_loss(task, model, batch)]
                first = clock() - began
                try_loss(task, model, batch)
                # The first call may include torch's one-time initialization.
                self._seconds_per_row = min(first, clock() - began - first) / first_dim(batch)
                self._not_verified = self.why_not_verified(model)
                splits = is_split(self.split)
                if self.job.verify and (self._not_verified or not splits):
                    notices.append(try_halves(task, model, batch, refuses=splits))
                for notice in filter(None, notices):
                    hand.notice(notice)
            for notice in try_metrics(task, model, batch, hand.replicas):
                hand.notice(notice)

    def run(self, feed: Feed) -> None:
        """Try the run on its first samples: raise where the strategy changes the result, and report notices."""
        hand, task, model = self.hand, self.task, self.hand.model
        require_whole_statistics(model, self.split)
        batch = feed.peek(NUM_SAMPLES)
        if not self._has_tried_losses:
            with left_alone(task.loss, task.model), hand.replica.scope():
                self.try_losses(model, batch)
        learn_draws(hand, task, feed, batch)
        self.verdict = self._verify()
        if task.metrics and task.valid is None:
            hand.notice("metrics are not computed, because the task has no valid=")
        if crowding := feed.crowding():
            hand.notice(crowding)
        if hand.size > feed.batch_size:
            samples = counted(feed.batch_size, "sample")
            hand.notice(f"a batch has {samples} for {hand.size} replicas: some of them are idle")
        if (
            hand.size > 1
            and not hand.spec.deterministic
            and any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in model.modules())
        ):
            hand.notice(
                "dropout draws different numbers on every replica, so losses differ slightly from those of one device"
            )

    def _verify(self) -> Verdict:
        """Compare the first steps with those of one device; raise on a difference, otherwise return the verdict."""
        spec, why = self.split, self._not_verified or self.why_not_verified(self.hand.model)
        if not is_split(spec):
            verdict = Verdict("equal", spec, why="nothing is split")
        elif why:
            verdict = Verdict("not verified", spec, why=why)
        else:
            seconds = self._seconds_per_row, self._seconds_to_build
            verdict = verify(self.hand, self.task, spec, self.job.layout, *seconds)
        refuse(verdict)
        return verdict
