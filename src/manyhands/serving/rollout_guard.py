"""Rollout guard: decides when a new version is rolled back, and separates slow versions from busy machines."""

from __future__ import annotations

import contextlib
import time

from ..core import RequestRefused, format_duration
from .batcher import Arrays, Ticket
from .metrics import BOUNDS, Histogram
from .options import Rollout
from .version import Version

_SHARE = 0.9


class ShadowComparison:
    """Shadow traffic: the old version computes the same requests at the same time, and its answers are discarded.

    Earlier latencies prove nothing: a busy machine makes any version slow.
    """

    def __init__(self, current: Version, before: Version, num_requests: int) -> None:
        self._current, self._before, self._num = current, before, num_requests
        self._since = current.metrics.latency.copy()
        self._latency = Histogram(BOUNDS)
        self._num_asked = 0
        current.shadow = self._ask

    def end(self) -> None:
        """Stop sending shadow traffic to the old version."""
        self._current.shadow = None

    @property
    def is_over(self) -> bool:
        """Whether both versions have answered enough requests."""
        num = self._current.metrics.latency.num - sum(self._since)
        return min(num, self._latency.num) >= self._num

    @property
    def seconds(self) -> tuple[float, float]:
        """90th percentile latency of the new version and of the old one."""
        return self._current.metrics.latency.percentile(_SHARE, self._since), self._latency.percentile(_SHARE)

    def _ask(self, inputs: Arrays, rows: int, deadline: float) -> None:
        if self._num_asked == 3 * self._num:
            return
        self._num_asked += 1
        began = time.perf_counter()

        def done(ticket: Ticket) -> None:
            if ticket.refusal is None:
                self._latency.add(time.perf_counter() - began)

        with contextlib.suppress(RequestRefused):
            self._before.submit(inputs, rows, deadline=deadline, priority=0, done=done)


class Judge:
    """Decide about the rollback of one new version."""

    def __init__(self) -> None:
        self._trial: ShadowComparison | None = None

    def dismiss(self) -> None:
        """End a running comparison."""
        if self._trial is not None:
            self._trial.end()
            self._trial = None

    def verdict(self, rule: Rollout, current: Version, before: Version) -> str:
        """Return why a version should be rolled back; empty if it should not."""
        metrics, older = current.metrics, before.metrics
        num, failed = metrics.num_requests, metrics.codes["INTERNAL"]
        if num < rule.num_requests:
            return ""
        if failed / num > rule.max_failed and failed / num > 2 * older.codes["INTERNAL"] / max(1, older.num_requests):
            return f"{failed} of {num} requests failed"
        if self._trial is None:
            if self._is_suspicious(rule, current, before):
                self._trial = ShadowComparison(current, before, rule.num_requests)
            return ""
        if not self._trial.is_over:
            return ""
        now, then = self._trial.seconds
        self.dismiss()
        if now > rule.max_slowdown * then:
            old = f"that of version {before.number}, measured at the same time, {format_duration(then)}"
            return f"p90 is {format_duration(now)}, {old}"
        return ""

    def _is_suspicious(self, rule: Rollout, current: Version, before: Version) -> bool:
        """Return whether the version is slower than the old one was, and has the same inputs."""
        latency, older = current.metrics.latency, before.metrics.latency
        return (
            min(latency.num, older.num) >= rule.num_requests
            and latency.percentile(_SHARE) > rule.max_slowdown * older.percentile(_SHARE)
            and current.signature.inputs == before.signature.inputs
        )
