"""The training loop of one replica: from the network's first value to the last checkpoint, top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from ..cluster import World
from ..core import LossNotFinite, ReplicasDiffer, RunError, StrategySpec, Task, TaskError, event
from ..data import Batch, Feed, as_source, check_source, tensors
from ..strategies import MAIN
from .callbacks import Callback
from .evaluation import evaluate, evaluating
from .hand import Hand
from .memory import explain_memory, limited
from .trial import NUM_SAMPLES, try_loss, try_metrics

CHECKPOINTS = "checkpoints"
REPORT_SECONDS = 0.5
COMPARE_EVERY = 1000
"""Steps between two comparisons of the replicas."""
STRAYED = (
    "an operation draws random numbers that deterministic=True does not know (a kernel of its own, or torch.ops), "
    "so they differ from one number of replicas to another"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a replica is to train: plain data, the same on every one."""

    task: Task
    spec: StrategySpec
    folder: Path
    epochs: int = 1
    steps: int | None = None
    """Ends the run after so many steps, even in mid-epoch."""
    resume: bool = False
    save_every: int | None = None
    """Steps between two checkpoints, besides the one after each epoch."""
    keep: int = 2
    callbacks: Sequence[Callback] = ()
    memory: int | None = None
    """Bytes that a replica may take on its device; None for all there are."""


@dataclass
class Outcome:
    """What a replica says at the end."""

    num_steps: int
    metrics: dict[str, float]
    stopped: bool
    seconds: dict[str, float] = field(default_factory=dict)
    num_samples: int = 0


def train(world: World, job: Job) -> Outcome:
    """Trains one replica."""
    hand = Hand(world, job.spec)
    loop = _Loop(hand, job)
    try:
        with limited(hand.device, job.memory):
            return loop.run()
    finally:
        loop.reporter.flush()
        hand.close()


def take_step(hand: Hand, task: Task, batch: Batch) -> None:
    """One step of a task on a batch: its own, or its loss over the micro-batches and one update."""
    if task.step is not None:
        with hand.drawing():
            task.step(hand, batch.data)
        if MAIN not in hand.optimizers:
            hand.num_steps += 1
        return
    assert task.loss is not None
    for data in hand.accumulate(batch.data):
        with hand.scope():
            loss = task.loss(hand.model, data)
        hand.backward(loss)
    hand.step()


def check_schedule(task: Task, num_steps: int | None) -> None:
    """A schedule knows the total, so there must be one."""
    if task.schedule is not None and num_steps is None:
        raise TaskError(
            "a schedule needs the number of steps", got="a stream of unknown length", remedy="pass steps= to fit"
        )


class _Loop:
    def __init__(self, hand: Hand, job: Job) -> None:
        self.hand, self.job, self.task = hand, job, job.task
        self.metrics: dict[str, float] = {}
        self.reporter = _Reporter(hand)
        self.path = job.folder / CHECKPOINTS
        self.stopped = False
        self.measured_at = 0
        self.compared = False
        self.noticed: set[str] = set()

    def run(self) -> Outcome:
        job, hand = self.job, self.hand
        train_feed, valid_feed = self.prepare()
        for callback in job.callbacks:
            callback.on_start(hand)
        self.reporter.start(train_feed)
        while hand.epoch < job.epochs and not self.is_over:
            epoch = hand.epoch
            for batch in hand.one_epoch(train_feed):
                self.set_learning_rate()
                try:
                    take_step(hand, self.task, batch)
                except (RuntimeError, MemoryError) as error:
                    explain_memory(error, hand, self.task, batch)
                    raise
                self.look(batch)
                for callback in job.callbacks:
                    callback.on_step(hand)
                if job.save_every and hand.num_steps % job.save_every == 0:
                    self.save()
                if self.is_over:
                    break
            else:
                self.end_epoch(epoch, valid_feed)
        if self.measured_at != hand.num_steps and not self.stopped:
            self.end_epoch(hand.epoch, valid_feed)
        self.end()
        train_feed.close()
        if valid_feed is not None:
            valid_feed.close()
        return Outcome(hand.num_steps, self.metrics, self.stopped, self.reporter.breakdown(), self.reporter.num_samples)

    @property
    def is_over(self) -> bool:
        return self.stopped or (self.job.steps is not None and self.hand.num_steps >= self.job.steps)

    def prepare(self) -> tuple[Feed, Feed | None]:
        """Network, optimizers, feeds; a trial of the loss; the last checkpoint where a run is resumed."""
        hand, task = self.hand, self.task
        hand.build(task)
        if not hand.model.training:
            hand.model.train()
        hand.seed(task.seed)
        source = as_source(task.data, collate=task.collate)
        batch_size = check_source(source, task.batch_size)
        feed = hand.make_feed(source, batch_size, shuffle=task.shuffle, seed=task.seed, workers=task.workers)
        self.try_out(feed)
        steps = feed.num_steps()
        self.total = self.job.steps or (steps * self.job.epochs if steps is not None else None)
        check_schedule(task, self.total)
        valid = None
        if task.valid is not None:
            held = as_source(task.valid, collate=task.collate)
            valid = hand.make_feed(held, task.batch_size or batch_size, shuffle=False, workers=task.workers)
        hand.store(self.path, keep=self.job.keep)
        if self.job.resume:
            self.resume()
        self.report_start()
        return feed, valid

    def try_out(self, feed: Feed) -> None:
        """Tries the loss and the metrics on a few samples, and says what to know beforehand."""
        hand, task, model = self.hand, self.task, self.hand.model
        batch = feed.peek(NUM_SAMPLES)
        with evaluating(model):
            if task.loss is not None:
                notice = try_loss(task, model, batch, is_split=hand.size > 1 or hand.spec.accumulate > 1)
                if notice:
                    hand.notice(notice)
            try_metrics(task, model, batch)
        if task.metrics and task.valid is None:
            hand.notice("metrics are measured on valid=, which this task does not have")
        if hand.size > feed.batch_size:
            hand.notice(f"a batch has {feed.batch_size} samples for {hand.size} replicas: some of them are idle")
        if (
            hand.size > 1
            and not hand.spec.deterministic
            and any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in model.modules())
        ):
            hand.notice("dropout draws other numbers on every replica, so losses differ a little from one device's")

    def resume(self) -> None:
        state = self.hand.restore(self.path)
        if state is None:
            self.hand.notice("there is no checkpoint to resume from: starting from the beginning")
            return
        self.metrics = state["metrics"]
        left = "" if self.hand.epoch < self.job.epochs else f"; nothing is left of {self.job.epochs} epochs"
        self.hand.notice(f"resumed at step {self.hand.num_steps}, epoch {self.hand.epoch + 1}{left}")

    def set_learning_rate(self) -> None:
        if self.task.schedule is None:
            return
        assert self.total is not None
        factor = self.task.schedule(self.hand.num_steps, self.total)
        for optimizer in self.hand.optimizers.values():
            for group in optimizer.param_groups:
                base = group.setdefault("initial_lr", float(group["lr"]))
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(base * factor)
                else:
                    group["lr"] = base * factor

    def look(self, batch: Batch) -> None:
        """Records the step; now and then reads losses, hears votes and compares replicas."""
        hand = self.hand
        self.reporter.record(batch)
        if hand.num_steps % hand.look_every == 0:
            self.reporter.read()
            self.stopped = hand.voted_to_stop()
        if hand.num_steps % COMPARE_EVERY == 0 or not self.compared:
            self.compare()

        if (
            self.reporter.num_samples == batch.global_samples
            and hand.randomness is not None
            and hand.randomness.strayed
        ):
            hand.notice(STRAYED)

    def compare(self) -> None:
        """Parameters must be equal on all replicas; buffers that are not are named, and the first replica's count."""
        self.compared = True
        different = self.hand.replica.differences()
        buffers = dict(self.hand.model.named_buffers())
        for text in [text for text in different if text.split(" ")[0] in buffers]:
            different.remove(text)
            name = text.split(" ")[0]
            if name not in self.noticed:
                self.hand.notice(f"the buffer {name} is not synchronised over the replicas: the first one's is used")
            self.noticed.add(name)
        if different:
            raise ReplicasDiffer(
                f"after step {self.hand.num_steps} the replicas differ in {', '.join(different[:5])}: a parameter was "
                "changed outside of the optimizer, a buffer is not synchronised, or memory was corrupted"
            )

    def end_epoch(self, epoch: int, valid_feed: Feed | None) -> None:
        """Measures, reports and saves; also where a run ends in mid-epoch because it has taken its steps."""
        hand = self.hand
        self.measured_at = hand.num_steps
        self.reporter.read()
        if valid_feed is not None:
            if self.noticed or hand.spec.batch_stats == "local":
                hand.replica.align_buffers()
            with hand.timed("validation"):
                measured = evaluate(hand, self.task, valid_feed)
            self.metrics = {f"valid_{name}": value for name, value in measured.items()}
        self.reporter.epoch(epoch, self.metrics)
        for callback in self.job.callbacks:
            callback.on_epoch(hand, self.metrics)
        self.stopped = self.stopped or any(hand.world.gather_objects(hand.world.line.stopping))
        self.save()

    def save(self) -> None:
        self.reporter.read()
        self.reporter.flush()
        score = self.metrics.get("valid_loss", next(iter(self.reporter.last_losses.values()), None))
        self.hand.save(self.path, score=score, metrics=self.metrics)
        self.reporter.report(event("checkpoint", step=self.hand.num_steps))

    def end(self) -> None:
        """The last look: every loss read, replicas compared, the final state on disk."""
        hand = self.hand
        self.reporter.read()
        self.compare()
        store = hand.store(self.path)
        store.wait()
        if not hand.world.gather_objects(hand.num_steps in store.steps())[0]:
            self.save()
            store.wait()
        if not hand.world.gather_objects(hand.num_steps in store.steps())[0]:
            raise RunError(f"the last state, of step {hand.num_steps}, could not be saved: see the notices above")
        for callback in self.job.callbacks:
            callback.on_end(hand)

    def report_start(self) -> None:
        parameters = sum(p.numel() for p in self.hand.model.parameters())
        self.reporter.report(
            event(
                "start",
                total=self.total,
                epochs=self.job.epochs,
                parameters=parameters,
                step=self.hand.num_steps,
            )
        )


class _Reporter:
    """Keeps losses until they are read, and sends events up the line at a pace that costs nothing."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._unread: list[tuple[int, dict[str, Tensor]]] = []
        self._unsent: list[tuple[int, dict[str, float]]] = []
        self._sent_at = 0.0
        self._started_at = time.perf_counter()
        self._feed: Feed | None = None
        self._synced_before = 0.0
        self.last_losses: dict[str, float] = {}
        self.num_samples = 0

    def start(self, feed: Feed) -> None:
        self._feed = feed
        self._started_at = time.perf_counter()
        self._synced_before = self._hand.world.waited

    def record(self, batch: Batch) -> None:
        self.num_samples += batch.global_samples
        self._unread.append((self._hand.num_steps, dict(self._hand.losses)))

    def read(self) -> None:
        for step, losses in self._unread:
            values = {key or "loss": float(loss) for key, loss in losses.items()}
            self._unsent.append((step, values))
            for name, value in values.items():
                if not math.isfinite(value):
                    raise LossNotFinite(f"{name} became {value} at step {step}; {self._suspicion(step)}")
            self.last_losses = values
        self._unread.clear()
        if time.perf_counter() - self._sent_at > REPORT_SECONDS:
            self.flush()

    def _suspicion(self, step: int) -> str:
        """What to look at when a loss is not finite."""
        batch = self._hand.batch
        if batch is None or step != self._hand.num_steps:
            return "lower the learning rate, set clip=1.0, or look at the data"
        ids = ", ".join(map(str, batch.ids[:8])) + (" …" if len(batch.ids) > 8 else "")
        if not all(tensor.isfinite().all() for tensor in tensors(batch.data) if tensor.is_floating_point()):
            return f"the batch itself holds values that are not finite: look at samples {ids}"
        return f"lower the learning rate, set clip=1.0, or look at samples {ids}"

    def flush(self) -> None:
        """Sends the losses since the last time, and where this replica's time went."""
        self._sent_at = time.perf_counter()
        hand = self._hand
        if hand.is_first and self._unsent:
            names = list(self._unsent[-1][1])
            losses = {name: [values.get(name) for _, values in self._unsent] for name in names}
            steps = [step for step, _ in self._unsent]
            elapsed = self._sent_at - self._started_at
            rate = self.num_samples / elapsed if elapsed > 0 else 0.0
            self.report(event("steps", steps=steps, losses=losses, epoch=hand.epoch, samples_per_second=rate))
        self._unsent.clear()
        hand.world.line.report(event("waits", rank=hand.rank, seconds=self.breakdown()))

    def epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        self.flush()
        self.report(event("epoch", epoch=epoch, step=self._hand.num_steps, metrics=metrics, losses=self.last_losses))

    def report(self, entry: dict[str, Any]) -> None:
        if self._hand.is_first:
            self._hand.world.line.report(entry)

    def breakdown(self) -> dict[str, float]:
        """Seconds by what they were spent on; compute is what is left."""
        total = time.perf_counter() - self._started_at
        waited = self._feed.waited if self._feed is not None else 0.0
        synced = self._hand.world.waited - self._synced_before
        known = {"input": waited, "sync": synced, **self._hand.seconds}
        return {"total": total, "compute": max(0.0, total - sum(known.values())), **known}
