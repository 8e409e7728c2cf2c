"""StepReporter: reports losses and times of a replica's steps, and which samples make a loss that is not finite."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import LossNotFinite, event
from ..data import Batch, tensors
from ..distributed import held_now
from ..monitoring import Stopwatch
from .verify import verdict_event

if TYPE_CHECKING:
    from ..data import Feed
    from .hand import Hand
    from .verdict import Verdict

INPUT_WAIT_WARNING_SECONDS = 1.0
"""Seconds of waiting for data above which the user gets a notice."""
REPORT_SECONDS = 0.5
MAX_RECENT = 10_000
_GOOD, _PART, _NORM = "\0good", "\0part", "\0norm "
MANY = 8
"""Up to this many replicas, every step's per-replica losses are reported; with more, only those of some steps."""


def _learning_rates(hand: Hand) -> dict[str, float]:
    """Return the learning rate by optimizer; optimizers without one are left out."""
    rates = {name: optimizer.param_groups[0].get("lr") for name, optimizer in hand.optimizers.items()}
    return {name: float(rate) for name, rate in rates.items() if rate is not None}


class StepReporter:
    """Buffers losses until they are read from the device, and sends events over the control channel in batches."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._unread: list[tuple[int, dict[str, Tensor], Tensor | None]] = []
        self._unsent: list[tuple[int, dict[str, float]]] = []
        self._norms: dict[str, float] = {}
        """The norms of the gradients in the latest step that was read."""
        self._stopwatch = Stopwatch()
        self._parts: list[tuple[int, float]] = []
        self._part_every = max(1, hand.size // MANY)
        self.num_skipped = self.skipped_since = 0
        """The number of consecutive skipped steps, and the first of them."""
        self._sent_at = 0.0
        self._started_at = time.perf_counter()
        self._feed: Feed | None = None
        self._synced_before = 0.0
        self._limit = "compute"
        """What limits the speed of the steps, as it was reported last."""
        self.last_losses: dict[str, float] = {}
        self.sums: dict[str, list[float]] = {}
        """By loss: the total and the number of steps since the last measurement."""
        self.num_samples = 0
        self.recent: deque[tuple[int, dict[str, float]]] = deque(maxlen=MAX_RECENT)
        """The latest losses; the rank that reports them may not have sent all of them yet."""

    def start(self, feed: Feed) -> None:
        self._feed = feed
        self._started_at = time.perf_counter()
        self._synced_before = self._hand.world.waited

    def report_start(self, total: int | None, epochs: int, verdict: Verdict | None) -> None:
        """Report how the network is split, the size of the run, and the result of comparing its first steps."""
        hand = self._hand
        for text in hand.replica.hints():
            hand.notice(text)
        drawn = hand.replica.outline()
        if drawn is not None:
            self.report(event("partition", **asdict(drawn)))
        parameters = sum(p.numel() for p in hand.model.parameters())
        self.report(event("start", total=total, epochs=epochs, parameters=parameters, step=hand.num_steps))
        if verdict is not None:
            self.report(verdict_event(verdict))

    def report_limit(self, feed: Feed) -> None:
        """Report once what limits the speed of the steps, if it is not compute."""
        if feed.waited > INPUT_WAIT_WARNING_SECONDS and feed.limit not in ("compute", self._limit):
            self._limit = feed.limit
            self._hand.notice(feed.describe_limit())

    def record(self, batch: Batch) -> None:
        self.num_samples += batch.global_samples
        self._report_pace()
        losses, step = dict(self._hand.current.losses), self._hand.num_steps
        losses |= {_NORM + key: norm for key, norm in self._hand.current.norms.items()}
        # Replay computes these again, with equal shares.
        is_even = self._feed is None or self._feed.weights is None
        part = self._hand.current.part_loss if is_even and step % self._part_every == 0 else None
        self._unread.append((step, losses if part is None else {**losses, _PART: part}, self._hand.current.good))

    def _report_pace(self) -> None:
        """Periodically report the time of this replica's own work; not under pipeline stages, whose work differs."""
        world = self._hand.world
        seconds = self._stopwatch.step(world.waited)
        if seconds is not None and world.size > 1 and self._hand.spec.stages == 1:
            fields = {
                "rank": world.rank,
                "host": world.rank_info.host,
                "step": self._hand.num_steps,
                "seconds": seconds,
            }
            world.channel.report(event("pace", **fields))

    def read(self, *, alone: bool = False) -> None:
        """Read the losses since the last time; all replicas call this together, or one `alone`, without collectives."""
        unread, self._unread = self._unread, []
        for (step, _, _), values in zip(unread, _read_all(unread), strict=True):
            is_good, part = values.pop(_GOOD, 1.0) != 0.0, values.pop(_PART, math.nan)
            norms = {name: values.pop(name) for name in list(values) if name.startswith(_NORM)}
            if not is_good:
                self._skip(step, "" if alone else self._blame(step, values, part))
                continue
            if math.isfinite(part):
                self._parts.append((step, float(f"{part:.9g}")))
            self.num_skipped = 0
            self._norms = {n.removeprefix(_NORM): norm for n, norm in norms.items() if math.isfinite(norm)}
            self._unsent.append((step, values))
            self.recent.append((step, values))
            for name, value in values.items():
                if not math.isfinite(value):
                    raise LossNotFinite(f"{name} became {value} at step {step}; {self.suspicion(step)}")
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = [total + value, count + 1]
            self.last_losses = values
        if time.perf_counter() - self._sent_at > REPORT_SECONDS:
            self.flush()

    def report_again(self, recent: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Take over losses that a failed replica had not sent."""
        self._unsent += recent
        self.recent.extend(recent)

    def _skip(self, step: int, blame: str) -> None:
        """Report a skipped step."""
        self.num_skipped += 1
        self.report(event("skipped", step=step))
        if self.num_skipped == 1:
            self.skipped_since = step
            self._hand.notice(f"step {step} was skipped: its gradient is not finite{blame}")

    def _blame(self, step: int, values: dict[str, float], part: float) -> str:
        """Describe which ranks and samples are not finite; a collective, run for the first skipped step of a row."""
        if self.num_skipped:
            return ""
        hand = self._hand
        own = part if hand.size > 1 else next(iter(values.values()), math.nan)
        batch = hand.batch if step == hand.num_steps else None
        is_sound = math.isfinite(own) or (batch is not None and not batch.num_samples)
        found = hand.replicas.gather_objects((is_sound, [] if batch is None else _not_finite(batch)))
        ranks = [rank for rank, (is_fine, _) in enumerate(found) if not is_fine]
        samples = [sample for _, some in found for sample in some]
        where = f", on rank {', '.join(map(str, ranks))}" if 0 < len(ranks) < len(found) else ""
        return where + (f"; look at {_some(samples)}" if samples else "")

    def forget(self) -> None:
        """Discard losses that were not sent yet, because their steps are repeated."""
        self._unread, self._unsent, self.sums, self.num_skipped = [], [], {}, 0

    def take_means(self) -> dict[str, float]:
        """Return the mean losses since the last measurement, and reset them."""
        means = {name: total / count for name, (total, count) in self.sums.items()}
        self.sums = {}
        return means

    def suspicion(self, step: int) -> str:
        """Describe likely causes of a loss that is not finite; a collective if the step is the current one."""
        batch = self._hand.batch
        if batch is None or step != self._hand.num_steps:
            return "lower the learning rate, set clip=1.0, or look at the data"
        # The loss is over all replicas, so all of them reach this collective.
        parts = self._hand.replicas.gather_objects(
            (_not_finite(batch), batch.ids.tolist(), self._hand.current.finite_parts)
        )
        guilty, ids = ([sample for part in parts for sample in part[which]] for which in (0, 1))
        if guilty:
            return f"the data itself is not finite: look at {_some(guilty)}"
        flags = [flag for part in parts for flag in part[2]]
        if any(flags) and not all(flags):
            found = f"the loss of {flags.count(False)} of {len(flags)} parts of the batch is not finite"
            why = "a part without a valid target has a mean over nothing, which the whole batch has not"
            return f"{found}: {why}; return mh.mean(total, count), or look at {_some(ids)}"
        return f"lower the learning rate, set clip=1.0, or look at {_some(ids)}"

    def flush(self) -> None:
        """Send the losses since the last time, and the breakdown of this replica's time."""
        self._sent_at = time.perf_counter()
        hand = self._hand
        if hand.is_first and self._unsent:
            names = list(self._unsent[-1][1])
            losses = {name: [values.get(name) for _, values in self._unsent] for name in names}
            steps = [step for step, _ in self._unsent]
            elapsed = self._sent_at - self._started_at
            rate = self.num_samples / elapsed if elapsed > 0 else 0.0
            fields = {
                "losses": losses,
                "epoch": hand.reader.epoch,
                "samples_per_second": rate,
                "lr": _learning_rates(hand),
            }
            if self._norms:
                fields["gradient_norm"] = self._norms
            self.report(event("steps", steps=steps, **fields))
        self._unsent.clear()
        limit = self._feed.limit if self._feed is not None else ""
        world = hand.world
        where = {"rank": world.rank, "host": world.rank_info.host, "device": str(world.rank_info.device)}
        fields = {"seconds": self.breakdown(), "limit": limit, "memory": held_now(hand.device)}
        world.channel.report(event("waits", **where, **fields))
        if self._parts:
            # `replay` compares with these: this replica's own share of each loss.
            of = {"rank": hand.rank, "size": hand.size, "accumulate": hand.spec.accumulate}
            parts = {"steps": [step for step, _ in self._parts], "losses": [loss for _, loss in self._parts]}
            hand.world.channel.report(event("parts", **parts, **of))
            self._parts.clear()

    def epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        self.flush()
        self.report(event("epoch", epoch=epoch, step=self._hand.num_steps, metrics=metrics, losses=self.last_losses))

    def report(self, entry: dict[str, Any]) -> None:
        if self._hand.is_first:
            self._hand.world.channel.report(entry)

    def breakdown(self) -> dict[str, float]:
        """Return seconds by activity; compute is the remainder."""
        total = time.perf_counter() - self._started_at
        waited = self._feed.waited if self._feed is not None else 0.0
        synced = self._hand.world.waited - self._synced_before
        known = {"input": waited, "sync": synced, **self._hand.times.seconds}
        return {"total": total, "compute": max(0.0, total - sum(known.values())), **known}


def _not_finite(batch: Batch) -> list[int]:
    """Return the ids of a batch's samples that contain non-finite values."""
    bad = torch.zeros(max(1, batch.num_samples), dtype=torch.bool)
    for tensor in tensors(batch.data):
        if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(bad):
            bad |= ~tensor.detach().flatten(1).isfinite().all(1).cpu() if tensor.dim() > 1 else ~tensor.isfinite().cpu()
    return [int(batch.ids[row]) for row in bad.nonzero().flatten().tolist() if row < len(batch.ids)]


def _some(samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:8])) + (" …" if len(samples) > 8 else "")
    return f"sample{'s' * (len(samples) != 1)} {shown}"


def _read_all(unread: list[tuple[int, dict[str, Tensor], Tensor | None]]) -> list[dict[str, float]]:
    """Return the values of many steps with a single transfer from the device."""
    named = [
        {**{key or "loss": loss for key, loss in losses.items()}, **({} if good is None else {_GOOD: good})}
        for _, losses, good in unread
    ]
    flat = [value for values in named for value in values.values()]
    if len({value.dtype for value in flat}) > 1:
        flat = [value.double() for value in flat]
    numbers = iter(torch.stack(flat).tolist() if flat else ())
    return [{name: next(numbers) for name in values} for values in named]
