"""LoadBalance: divides every global batch over the replicas so that unequal devices finish their parts together."""

from __future__ import annotations

import statistics
import time
from functools import cache
from pathlib import Path

import torch

from ..data import Batch, Feed, IndexedSource, sizes_by
from .hand import Hand

NUM_SKIPPED = 2
"""Steps that are not measured after the shares changed: a step with another number of rows may be compiled first."""
NUM_MEASURED = 8
"""Steps of a measurement."""
FIRST_CHECK, MOST_STEPS = 1, 16
"""Measurements between two comparisons of the replicas: the first and the largest number; it doubles while the shares
stay the same."""
WORTHWHILE = 0.05
"""The fraction of a step's time that new shares must save."""
UNITS = 10_000
"""The sum of the weights by which batches are divided."""


def balances(hand: Hand, feed: Feed, wanted: bool | None, *, is_limited: bool) -> bool:
    """Return whether batches are divided by measured speed: if wanted and possible, by default on unequal devices.

    `is_limited` says that a replica's memory is limited, so that a larger share might not fit.
    """
    if wanted is False or not 1 < hand.size <= feed.batch_size:
        return False
    why = ""
    if set(hand.spec.axes) != {"replicas"} or hand.replica.is_local_sgd:
        why = "only replicas that synchronize in every step can have unequal shares"
    elif hand.world.is_capturable:
        why = "over NCCL a replica's own work cannot be measured apart from its waiting"
    elif not isinstance(feed.source, IndexedSource):
        why = "a stream is divided before it is known how fast the replicas are"
    elif hand.spec.batch_stats == "local":
        why = "each replica's batch statistics would depend on its speed"
    elif hand.spec.deterministic:
        why = "measured times differ from run to run, and with them rounding"
    elif hand.current.choosing is not None:
        why = "the sync policy is being chosen by measured times"
    elif is_limited:
        why = "a larger share might not fit into the memory limit"
    if wanted is None:
        return not why and len(set(hand.replicas.gather_objects(_kind(hand.device)))) > 1
    if why:
        hand.notice(f"the replicas get equal shares of a batch: {why}")
    return not why


class LoadBalance:
    """Measures the replicas' own work per row, and gives each of them a share of the batch that follows its speed.

    All replicas must call `step` after every step, because some calls exchange the measurements.
    """

    def __init__(self, hand: Hand, feed: Feed) -> None:
        self._hand, self._feed = hand, feed
        self._mark: tuple[float, float] | None = None
        self._per_row: list[float] = []
        self._num_seen = 0
        self._wait = FIRST_CHECK
        self._check_at = NUM_SKIPPED + NUM_MEASURED

    def step(self, batch: Batch) -> None:
        """Account for a step on a batch; change the shares of the following batches if that saves enough time."""
        now, waited = time.perf_counter(), self._hand.world.waited
        if self._mark is not None and self._num_seen >= NUM_SKIPPED and batch.num_samples:
            busy = now - self._mark[0] - (waited - self._mark[1])
            self._per_row.append(max(busy, 1e-9) / batch.num_samples)
        self._num_seen += 1
        if self._num_seen >= self._check_at:
            self._divide()
            now, waited = time.perf_counter(), self._hand.world.waited
        self._mark = now, waited

    def _divide(self) -> None:
        hand = self._hand
        measured = statistics.median(self._per_row) if self._per_row else 0.0
        seconds = hand.replicas.gather_objects(measured)
        self._per_row.clear()
        self._num_seen = 0
        if min(seconds) > 0:
            weights = weights_of(seconds)
            # The current batch may be a smaller last one, and whole rows are divided, so full batches are compared.
            now, balanced = (self._step_seconds(seconds, by) for by in (self._feed.weights, weights))
            if balanced < (1 - WORTHWHILE) * now:
                self._feed.divide_by(weights)
                shares = ", ".join(f"{weight / UNITS:.0%}" for weight in weights)
                hand.notice(
                    f"the shares of a batch follow the speed of the replicas: {shares}; a step takes about "
                    f"{balanced / now:.0%} of the time"
                )
                self._wait = FIRST_CHECK
                self._check_at = NUM_SKIPPED + NUM_MEASURED
                return
        self._wait = min(2 * self._wait, MOST_STEPS)
        self._check_at = NUM_SKIPPED + NUM_MEASURED * self._wait

    def _step_seconds(self, seconds: list[float], weights: tuple[int, ...] | None) -> float:
        """Return the time of the slowest replica on a full batch, by its seconds per row."""
        hand = self._hand
        sizes = sizes_by(weights, self._feed.batch_size, hand.spec.accumulate, hand.size)
        return max(each * rows for each, rows in zip(seconds, sizes, strict=True))


def weights_of(seconds: list[float]) -> tuple[int, ...]:
    """Return whole weights in proportion to the speed of replicas, given their seconds per row.

    >>> weights_of([0.1, 0.3])
    (7500, 2500)
    """
    speeds = [1 / each for each in seconds]
    return tuple(max(1, round(UNITS * speed / sum(speeds))) for speed in speeds)


@cache
def _kind(device: torch.device) -> str:
    """Return the name of a device's hardware, and for a CPU the number of threads that compute on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return f"{device.type} {model} {torch.get_num_threads()}"
