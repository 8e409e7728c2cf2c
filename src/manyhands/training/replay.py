"""Replay: repeat a committed step on one device and compare it with the losses that the replicas reported."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..core import (
    EVENTS,
    CheckpointError,
    SettingsError,
    StrategySpec,
    Task,
    evaluating,
    older_parts,
    read_events,
)
from ..data import Batch, Cursor, Feed, check_source, source_of, split
from ..distributed import Device, NullWorld
from ..storage import CheckpointStore, weights
from .batch_reader import BatchShare
from .hand import Hand
from .initial_weights import start_from
from .job import CHECKPOINTS
from .learning_rates import LearningRates
from .run import Run
from .sample_randomness import learn_draws
from .snapshot import restore_snapshot
from .step import Tally, take_step
from .trial import NUM_SAMPLES

CLOSE = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 5e-2}
"""By precision: tolerance between replayed and recorded losses; rounding grows with the steps in between."""
NUM_WORST = 5


@dataclass(frozen=True)
class PartDiffers:
    """A replica whose reported loss differs from that of its samples."""

    rank: int
    step: int
    recorded: float
    replayed: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} reported {self.recorded:.6g} at step {self.step}, "
            f"but its samples give {self.replayed:.6g}"
        )


@dataclass
class Replay:
    """The result of replaying a step."""

    run: str
    step: int
    since: int
    """The step of the checkpoint that the replay started from; 0 for the beginning of the run."""
    recorded: float
    replayed: float
    close: float
    """Relative tolerance between the two losses."""
    first: int | None = None
    """The first replayed step whose loss differs; None where none does."""
    ranks: list[PartDiffers] = field(default_factory=list)
    num_compared: int = 0
    """Number of single replicas' losses that were compared."""
    samples: list[tuple[int, float]] = field(default_factory=list)
    """The step's samples with the largest losses, each computed alone; losses that are not finite come first."""
    notes: list[str] = field(default_factory=list)
    changed: str = ""
    """Why the run's losses differ from one device's by design, so that no rank is at fault; empty otherwise."""

    @property
    def equal(self) -> bool:
        """Whether the replayed losses equal the recorded ones, on every replica that was compared."""
        return self.first is None and not self.ranks

    @property
    def bad_samples(self) -> list[int]:
        """Ids of samples whose loss is not finite."""
        return [sample for sample, loss in self.samples if not math.isfinite(loss)]

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "different"
        since = f"the checkpoint of step {self.since}" if self.since else "the beginning"
        losses = f"had a loss of {self.recorded:.6g}; repeated on one device, {self.replayed:.6g}"
        lines = [f"note: {self.changed}"] if self.changed else []
        lines.append(f"{verdict}: step {self.step} of {self.run} {losses} (from {since})")
        if self.first is not None and self.first != self.step:
            lines.append(f"the first step that differs is {self.first}")
        lines += map(str, self.ranks)
        worst = ", ".join(f"{sample} ({loss:.4g})" for sample, loss in self.samples)
        lines.append(f"samples with the largest losses: {worst}" if worst else "")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(filter(None, lines))


def replay(run: Run, step: int, device: Device | None = None) -> Replay:
    """Repeat a committed step of a run on one device, from the nearest checkpoint before it."""
    task = run.require_task()
    recorded = _recorded(run, step)
    again = _RepeatedRun(run, task, NullWorld(device))
    with contextlib.closing(again):
        return again.until(step, recorded)


class _RepeatedRun:
    """Repeats a run on one device."""

    def __init__(self, run: Run, task: Task, world: NullWorld) -> None:
        self.run, self.task, self.world = run, task, world
        before = StrategySpec.from_dict(run.record["spec"])
        self.hand = Hand(world, StrategySpec(precision=before.precision, accumulate=before.accumulate,
                                             deterministic=before.deterministic))  # fmt: skip
        self.hand.build(task)
        self.hand.reader.seed(task.seed)
        source = source_of(task)
        self.batch_size = check_source(source, task.batch_size)
        self.source = source
        self.feed = self.hand.reader.make_feed(source, self.batch_size, shuffle=task.shuffle, seed=task.seed)
        if self.hand.randomness is not None:
            learn_draws(self.hand, task, self.feed, self.feed.peek(NUM_SAMPLES))
        self.rates = LearningRates(self.hand, task, self._total())
        self.parts = _parts(run)
        self.notes = list(self._notes(before))
        self.changed = _changed(before)
        if self.changed:
            self.parts = {}

    def close(self) -> None:
        self.feed.close()
        self.hand.close()
        self.world.close()

    def until(self, step: int, recorded: float) -> Replay:
        """Repeat the steps from the nearest checkpoint to this one, comparing each with its recorded loss."""
        since = self._go_back_to(step)
        close = CLOSE[self.hand.spec.precision]
        found = Replay(self.run.name, step, since, recorded, math.nan, close, notes=self.notes, changed=self.changed)
        while self.hand.num_steps < step:
            for batch, cursor in self._epoch():
                number = self.hand.num_steps + 1
                if number == step:
                    found.samples = self._worst(batch)
                self._compare_parts(found, number, cursor)
                self.rates.set()
                take_step(self.hand, self.task, batch)
                self._compare(found, number)
                if number == step:
                    break
        if not self.changed and step not in self.parts and older_parts(self.run.path / EVENTS):
            self.notes.append("the losses of single replicas are kept for recent steps only, so no rank is compared")
        return found

    def _epoch(self) -> Iterator[tuple[Batch, Cursor]]:
        """Yield batches, each with the feed's cursor before it."""
        cursor = self.hand.reader.cursors[0] if self.hand.reader.cursors else Cursor()
        for batch in self.hand.reader.one_epoch(self.feed):
            yield batch, cursor
            cursor = batch.cursor

    def _go_back_to(self, step: int) -> int:
        store = CheckpointStore(self.run.path / CHECKPOINTS, on_notice=self.notes.append)
        for saved in reversed([saved for saved in store.steps() if saved < step]):
            try:
                checkpoint = store.load(saved)
            except CheckpointError as error:
                self.notes.append(f"the checkpoint of step {saved} cannot be read: {error}")
                continue
            state = restore_snapshot(self.hand, dataclasses.replace(checkpoint, policy={}))
            self.rates.restore(state.get("rates", {}))
            return saved
        begun = self.run.record.get("start_from")
        if begun is not None:
            start_from(self.hand, weights(begun))
        return 0

    def _total(self) -> int | None:
        steps, record = self.feed.num_steps(), self.run.record
        return record["steps"] or (steps * record["epochs"] if steps is not None else None)

    def _compare(self, found: Replay, number: int) -> None:
        recorded = self.run.history.get(self.run.first_loss, {}).get(number)
        loss = self.hand.loss
        if number == found.step:
            found.replayed = loss
        if recorded is not None and found.first is None and not _is_close(recorded, loss, found.close):
            found.first = number

    def _compare_parts(self, found: Replay, number: int, cursor: Cursor) -> None:
        """Compare each replica's reported loss with its samples'; stop once the overall loss differs."""
        for rank, size, accumulate, recorded in self.parts.get(number, ()) if found.first is None else ():
            feed = Feed(
                self.source, batch_size=self.batch_size, seed=self.task.seed, shuffle=self.task.shuffle, replica=rank,
                num_replicas=size, accumulate=accumulate, device=self.hand.device, dtype=self.feed.dtype, workers=0,
            )  # fmt: skip
            with contextlib.closing(feed):
                loss = self._part_loss(next(iter(feed.epoch(cursor))))
            found.num_compared += 1
            if not _is_close(recorded, loss, found.close):
                found.ranks.append(PartDiffers(rank, number, recorded, loss))

    def _part_loss(self, batch: Batch) -> float:
        assert self.task.loss is not None
        tally = Tally(self.world)
        with torch.no_grad(), self.hand.scope():
            for data, size, _ in batch.micros():
                tally.add(self.task.loss(self.hand.model, data), BatchShare(size, batch.global_samples))
        return float(tally.local_loss)

    def _worst(self, batch: Batch) -> list[tuple[int, float]]:
        """Return the samples with the largest losses, each computed alone in evaluation mode."""
        if self.task.loss is None:
            return []
        losses: list[tuple[int, float]] = []
        with evaluating(self.hand.model), torch.no_grad(), self.hand.scope():
            for sample, data in zip(batch.ids.tolist(), _rows(batch), strict=True):
                value: Any = self.task.loss(self.hand.model, data)
                losses.append((sample, float(value if isinstance(value, torch.Tensor) else value.total / value.count)))
        return sorted(losses, key=lambda pair: (math.isfinite(pair[1]), -pair[1]))[:NUM_WORST]

    def _notes(self, before: StrategySpec) -> Iterator[str]:
        modules = list(self.hand.model.modules())
        draws = any(isinstance(module, _DropoutNd) and module.p > 0 for module in modules)
        if draws and not before.deterministic:
            yield "dropout drew numbers that cannot be drawn again; train with deterministic=True to compare such steps"
        if draws or any(isinstance(module, _BatchNorm) for module in modules) or self.task.loss is None:
            self.parts = {}
            yield "replicas are not compared one by one: their losses depend on more than their own samples"


def _changed(before: StrategySpec) -> str:
    if before.sync not in (StrategySpec().sync, "auto") and before.replicas != 1:
        return f"sync={before.sync} changed the mathematics, so losses differ from one device's and no rank is accused"
    if before.changes_mathematics:
        return f"{before.changes_mathematics}, so losses differ from one device's and no rank is accused"
    return ""


def _recorded(run: Run, step: int) -> float:
    losses = run.losses
    if not isinstance(step, int) or not 1 <= step <= len(losses):
        raise SettingsError(
            f"the step of {run.name} must be between 1 and {len(losses)}",
            got=repr(step),
            remedy=f"write for example {run.path}@{max(1, len(losses))}",
        )
    return losses[step - 1]


def _parts(run: Run) -> dict[int, list[tuple[int, int, int, float]]]:
    """Return by step what single replicas reported: rank, number of replicas, micro-batches, loss."""
    found: dict[int, dict[tuple[int, int, int], float]] = {}
    for entry in read_events(run.path / EVENTS):
        if entry["kind"] == "parts":
            by = entry["rank"], entry["size"], entry.get("accumulate", run.record["spec"].get("accumulate", 1))
            for step, loss in zip(entry["steps"], entry["losses"], strict=True):
                # Of steps that were repeated after a failure, the last report counts.
                found.setdefault(step, {})[by] = loss
    return {step: [(*by, loss) for by, loss in recorded.items()] for step, recorded in found.items()}


def _rows(batch: Batch) -> list[Any]:
    return split(batch.data, [1] * batch.num_samples)


def _is_close(recorded: float, found: float, close: float) -> bool:
    if not (math.isfinite(recorded) and math.isfinite(found)):
        return math.isfinite(recorded) == math.isfinite(found)
    return math.isclose(recorded, found, rel_tol=close, abs_tol=close * 1e-2)
