"""The training loop of one replica: from building the network to the last checkpoint."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..core import LossNotFinite, ReplicasDiffer, RunError, StrategySpec, Task, counted, evaluating, event
from ..data import Batch, Feed, as_source, check_source, first_dim, source_of, tensors
from ..distributed import World
from ..launcher import regroup
from ..monitoring import Stopwatch
from ..storage import Weights
from .callbacks import Callback
from .check import Verdict
from .checkpoint_pace import CheckpointPace
from .error_hints import explain_mistake
from .evaluation import evaluate
from .hand import Hand
from .identical import require_identical
from .initial_weights import start_from
from .learning_rates import LearningRates, check_schedule
from .memory import Guard, explain_memory, held_now, limited, used
from .partial_state import COPY_EVERY, Copies, restore_part
from .patience import Patience, PatienceState, check_patience
from .recovery import Marker, RecoveryState, Rollback, as_loss, eased, is_sound, recall, resized
from .restored_objects import left_alone
from .sample_randomness import guess_notice, learn_draws
from .sampling import NoSampler, Sampler
from .snapshot import restore_snapshot
from .stepping import Stepper
from .trial import NUM_SAMPLES, try_halves, try_loss, try_metrics
from .verify import is_split, refuse, require_whole_statistics, verdict_event, verify, why_not

if TYPE_CHECKING:
    from ..strategies import Layout

CHECKPOINTS = "checkpoints"
REPORT_SECONDS = 0.5
MAX_RECENT = 10_000
_GOOD, _PART, _NORM = "\0good", "\0part", "\0norm "
MANY = 8
"""Up to this many replicas, every step's per-replica losses are reported; with more, only those of some steps."""
INPUT_WAIT_WARNING_SECONDS = 1.0
"""Seconds of waiting for data above which the user gets a notice."""
COMPARE_EVERY = 1000
"""Steps between two comparisons of the replicas."""
STRAYED = (
    "an operation draws random numbers that deterministic=True does not know (a custom kernel, or torch.ops), "
    "so they change with the number of replicas"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The description of a training run: plain data, the same on every replica."""

    task: Task
    spec: StrategySpec
    folder: Path
    epochs: int = 1
    steps: int | None = None
    """Ends the run after this many steps, even in mid-epoch."""
    resume: bool = False
    save_every: int | None = None
    """Steps between two checkpoints, in addition to those at epoch ends."""
    save_seconds: float = 0.0
    """Minimum seconds between checkpoints at epoch ends; 0 to follow what they cost. The run's end is always saved."""
    keep: int = 2
    copy_every: int = COPY_EVERY
    """Steps between two copies of a rank's exclusive shards into the memory of another rank."""
    callbacks: Sequence[Callback] = ()
    stop: Sequence[Patience] = ()
    """Ends the run when a metric that one of these watches stops improving."""
    start_from: Weights | None = None
    """Initial weights of a run that is not resumed."""
    layout: Layout | None = None
    """How layers are sharded, where that was found before any rank was started."""
    memory: int | None = None
    """Bytes that a replica may use on its device; None for all of it."""
    profile: int = 0
    """Every how many steps one step is profiled; 0 for none."""
    verify: bool = True
    """Whether the first steps are compared with those of one device before training."""
    sources: Mapping[str, str] | None = None
    """Digests of this host's modules, to compare them with those of the other hosts; None if there are none."""
    allow_different: bool = False
    """Whether hosts may have different code or data."""


@dataclass
class ReplicaResult:
    """The result of one replica's training."""

    num_steps: int
    metrics: dict[str, float]
    stopped: bool
    seconds: dict[str, float] = field(default_factory=dict)
    num_samples: int = 0
    servers: dict[str, Any] = field(default_factory=dict)
    """Under parameter servers: staleness of gradients, late gradients, and failed members."""


def train(world: World, job: Job) -> ReplicaResult:
    """Train one replica; when ranks fail or join, regroup and resume with the ranks that are present."""
    kept = RecoveryState()
    if job.sources is not None and world.size > 1 and world.rank_info.generation == 0:
        require_identical(world, job.task, job.sources, allow_different=job.allow_different)
    while True:
        try:
            return _train(world, job, kept)
        except RuntimeError as error:
            lost = as_loss(world, error)
            if lost is None:
                raise
        except Rollback:
            continue
        world = regroup(world, lost, kept.step)


def _train(world: World, job: Job, kept: RecoveryState) -> ReplicaResult:
    with own_stream(world.device):
        hand = Hand(world, resized(job.spec, world.size))
        loop = TrainingLoop(hand, job, kept)
        try:
            with limited(hand.device, job.memory) as loop.guard:
                return loop.run()
        except RuntimeError as error:
            if as_loss(world, error) is not None:
                loop.keep()
            raise
        finally:
            loop.reporter.flush()
            hand.close()
            del loop, hand
            _tidy(world.device)


class TrainingLoop:
    """The training loop of one replica; subclasses may let other processes compute the steps."""

    def __init__(self, hand: Hand, job: Job, kept: RecoveryState) -> None:
        self.hand, self.job, self.task, self.kept = hand, job, job.task, kept
        self.marker = Marker(hand)
        self.ending: dict[str, Any] | None = None
        """The loop's state from before the end of the epoch, while that end is being processed."""
        self.metrics: dict[str, float] = {}
        self.reporter = _Reporter(hand)
        self.path = job.folder / CHECKPOINTS
        self.guard = Guard()
        self.stopped = False
        self.watch = PatienceState(job.stop)
        self.out_of_patience = ""
        self.pace = CheckpointPace()
        self.best_score = math.inf
        """The lowest score of an epoch so far."""
        self.measured_at = 0
        self.measured: dict[str, float] = {}
        """Mean losses and metrics of the network as it is now; empty after a further step."""
        self.called_at = 0
        """The last step for which callbacks were called."""
        self.compare_at = 0
        """The step from which on the replicas are compared next."""
        self.is_ending = False
        self.has_reported_guess = False
        self.is_tried = False
        self.not_verified = ""
        self.verdict: Verdict | None = None
        self.seconds_per_row = self.seconds_to_build = 0.0
        self.noticed: set[str] = set()
        self.limit = "compute"
        self.sampler: Sampler = NoSampler()
        self._rates: LearningRates | None = None

    @property
    def rates(self) -> LearningRates:
        """How learning rates follow the schedule; available after `prepare`."""
        assert self._rates is not None
        return self._rates

    def run(self) -> ReplicaResult:
        train_feed, valid_feed = self.prepare()
        with contextlib.ExitStack() as held:
            for feed in filter(None, (train_feed, valid_feed)):
                held.callback(feed.close)
            for callback in self.job.callbacks:
                callback.on_start(self.hand)
            self.reporter.start(train_feed)
            self.marker.mark()
            self.sampler = self.sampling(train_feed)
            self.copies = Copies(self.hand.world, self.hand.spec, self.job.copy_every)
            self.copy_parts()
            stepper = Stepper(self.hand, self.task, self.total)
            held.callback(stepper.close)
            if self.called_at < self.hand.num_steps:
                # Other ranks failed after this step was taken and before its callbacks were called.
                self.call_back(stepper)
            self.train(train_feed, valid_feed, stepper)
            self.end()
        breakdown, num_samples = self.reporter.breakdown(), self.reporter.num_samples
        return ReplicaResult(self.hand.num_steps, self.metrics, self.stopped, breakdown, num_samples)

    def sampling(self, feed: Feed) -> Sampler:
        """Return the sampler that profiles some of the steps."""
        return Sampler(self.hand, feed, self.job.profile) if self.job.profile else NoSampler()

    def train(self, train_feed: Feed, valid_feed: Feed | None, stepper: Stepper) -> None:
        """Run steps and epochs to the end of the run."""
        job, hand = self.job, self.hand
        while hand.epoch < job.epochs and not self.is_over:
            epoch = hand.epoch
            for batch in hand.one_epoch(train_feed):
                self.rates.set()
                self.take_step(batch, stepper)
                self.marker.mark()
                self.copy_parts()
                self.look(batch)
                self.keep_agreed()
                hand.world.require_current()
                if self.reporter.num_skipped >= self.task.max_skipped:
                    self.go_back()
                self.call_back(stepper)
                if self.is_midway_due():
                    self.save_midway()
                self.sampler.step()
                if self.is_over:
                    break
            else:
                self.sampler.pause()
                self.report_limit(train_feed)
                self.end_epoch(epoch, valid_feed)
        if self.measured_at != hand.num_steps and not self.stopped:
            self.end_epoch(hand.epoch, valid_feed)

    def save_midway(self) -> None:
        """Save in mid-epoch."""
        self.save()
        self.keep_agreed()
        self.sampler.pause()

    def is_midway_due(self) -> bool:
        """Return whether to save after this step: as `save_every` defines, else where too much work is unsaved.

        Local SGD is not saved by time, since its result depends on when the replicas are synchronized.
        """
        hand, job = self.hand, self.job
        if job.save_every:
            return hand.num_steps % job.save_every == 0
        if job.save_seconds or hand.replica.is_local_sgd or not self.pace.is_look(hand.num_steps):
            return False
        forecast = hand.world.gather_objects(self.pace.forecast(hand.num_steps))[0]
        return self.pace.is_overdue(hand.num_steps, *forecast)

    def call_back(self, stepper: Stepper) -> None:
        """Call the callbacks for the step that was taken."""
        self.called_at = self.hand.num_steps
        for callback in self.job.callbacks:
            callback.on_step(self.hand)
        if self.job.callbacks:
            stepper.look_again()

    def take_step(self, batch: Batch, stepper: Stepper) -> None:
        """Take one step; explain out-of-memory errors and common mistakes."""
        with self.hand.world.collective_log.step():
            try:
                with self.guard():
                    stepper.take(batch)
            except (RuntimeError, MemoryError, IndexError) as error:
                stepper.close()
                explain_mistake(error, batch.data, batch.ids, self.hand.num_steps + 1)
                explain_memory(error, self.hand, self.task, batch, self.guard.limit)
                raise

    @property
    def is_over(self) -> bool:
        return (
            self.stopped
            or bool(self.out_of_patience)
            or (self.job.steps is not None and self.hand.num_steps >= self.job.steps)
        )

    def prepare(self) -> tuple[Feed, Feed | None]:
        """Build network, optimizers and feeds, try the loss, and load the last checkpoint of a resumed run."""
        hand, task = self.hand, self.task
        hand.layout = self.job.layout
        goes_on = self.job.resume and hand.store(self.path).steps()
        timed = task.replace(model=functools.partial(self.timed_build, task.model))
        hand.build(timed.replace(weights=None) if goes_on else timed, self.try_on)
        check_patience(self.job.stop, task, [key or "loss" for key in hand.optimizers])
        hand.seed(task.seed)
        source = source_of(task)
        batch_size = check_source(source, task.batch_size)
        self.ease(batch_size)
        feed = hand.make_feed(source, batch_size, shuffle=task.shuffle, seed=task.seed, workers=task.workers)
        is_new = hand.world.rank_info.generation == 0 and not self.kept.rolled_back_at
        if is_new:
            self.try_out(feed)
        else:
            learn_draws(hand, task, feed, feed.peek(NUM_SAMPLES))
        steps = feed.num_steps()
        self.total = self.job.steps or (steps * self.job.epochs if steps is not None else None)
        check_schedule(task, self.total)
        self._rates = LearningRates(hand, task, self.total)
        if task.ema is not None and self.total is not None and self.total * (1 - task.ema) < 1:
            reach = f"ema={task.ema} looks back about {1 / (1 - task.ema):.0f} steps and the run has {self.total}"
            hand.notice(f"{reach}: the average stays near the initial weights; use a smaller ema")
        valid = None
        if task.valid is not None:
            held = as_source(task.valid, collate=task.collate)
            valid = hand.make_feed(held, task.batch_size or batch_size, shuffle=False, workers=task.workers)
        store = hand.store(self.path, keep=self.job.keep)
        if hand.is_first:
            store.claim()
        if is_new:
            self.begin()
            self.report_start()
        else:
            self.recover()
        return feed, valid

    def timed_build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build the network and measure how long that takes."""
        began = time.perf_counter()
        try:
            return make()
        finally:
            self.seconds_to_build = time.perf_counter() - began

    @property
    def clock(self) -> Callable[[], float]:
        """A clock for work on this rank's device: on a CPU the time of this thread, otherwise the wall clock."""
        return time.thread_time if self.hand.device.type == "cpu" else time.perf_counter

    def ease(self, batch_size: int) -> None:
        """With fewer replicas than planned, use more micro-batches instead of larger ones, which might not fit."""
        hand = self.hand
        spec = eased(hand.spec, self.job.spec, batch_size)
        if spec == hand.spec or self.task.loss is None:
            return
        if any(isinstance(layer, _BatchNorm) for layer in hand.model.modules()):
            hand.notice(
                "batch statistics need micro-batches of the same size, so replicas process more rows at a time "
                "than before"
            )
        else:
            hand.spec = spec

    def begin(self) -> bool:
        """Resume from the checkpoint on disk, or load the initial weights; return whether there was a checkpoint."""
        resumed = self.job.resume and self.kept.resume_before is None and self.resume()
        if not resumed:
            start_from(self.hand, self.job.start_from)
        return resumed

    def recover(self) -> None:
        """Resume after ranks failed or joined: from the memory of a rank, else from the last checkpoint."""
        hand, recent, kept = self.hand, [], self.kept
        saved = max(hand.world.gather_objects(hand.store(self.path).steps())[0], default=0)
        found = recall(hand, kept, at_least=0 if kept.resume_before is not None else saved)
        if found is not None:
            self.resume_from((restore_part if found.is_part else restore_snapshot)(hand, found.checkpoint))
            hand.batch = kept.batches.get(hand.num_steps)
            # A step completed while other ranks failed still gets its callbacks, if this rank worked on it.
            self.called_at = hand.num_steps if hand.batch is None else min(kept.called_at, hand.num_steps)
            # This state is valid even if another failure comes before the next snapshot.
            kept.checkpoint, kept.recent = found.checkpoint, []
            source, recent = found.source, found.recent
        elif (state := hand.restore(self.path, before=kept.resume_before)) is not None:
            self.resume_from(state)
            source = "the last checkpoint"
        else:
            source = "the last checkpoint" if self.begin() else "its beginning"
        kept.resume_before = None
        if not any(hand.world.gather_objects(kept.is_verified)):
            why = "a rank failed before the verdict, and after that nothing is compared"
            self.reporter.report(verdict_event(Verdict("not verified", hand.spec, why=why)))
        kept.is_verified = True
        fields = {
            "step": hand.num_steps,
            "generation": hand.world.rank_info.generation,
            "size": hand.size,
            "source": source,
        }
        self.reporter.report(event("recovered", **fields))
        self.reporter.report_again(recent)

    def copy_parts(self) -> None:
        """Periodically copy shards that only one rank holds into the memory of another rank."""
        if self.copies.is_due(self.hand.num_steps):
            with self.hand.timed("save"):
                made = self.copies.make(self.marker.checkpoint(self.state()))
            self.kept.copies = made or self.kept.copies

    def keep(self) -> None:
        """Store the state of the last step, to resume from it; keep the older state if there is no newer one."""
        self.kept.called_at, self.kept.batches = self.called_at, self.marker.batches
        if self.hand.is_apart:
            # Local SGD steps that are not synchronized are repeated.
            return
        self.reporter.read(alone=True)
        checkpoint = self.marker.checkpoint(self.ending or self.state())
        if checkpoint is not None:
            self.kept.checkpoint, self.kept.recent = checkpoint, list(self.reporter.recent)
        elif self.hand.is_midway and not self.hand.replica.is_local_sgd:
            self.kept.checkpoint = None

    def keep_agreed(self) -> None:
        """Under local SGD, store the last synchronized state: after a failure all replicas resume from it."""
        if self.hand.replica.is_local_sgd and self.hand.replica.agrees:
            self.marker.mark()
            checkpoint = self.marker.checkpoint(self.state())
            if checkpoint is not None:
                self.kept.checkpoint, self.kept.recent = checkpoint, list(self.reporter.recent)

    def go_back(self) -> None:
        """Roll back to the last good state after too many skipped steps; raise if the same steps fail again."""
        hand, kept, since = self.hand, self.kept, self.reporter.skipped_since
        what = f"{self.reporter.num_skipped} steps in a row from step {since} on had no finite gradient"
        rolled_back_at = max(hand.world.gather_objects(kept.rolled_back_at))
        if since <= rolled_back_at:
            again = f"again, after the run was rolled back from step {rolled_back_at}"
            raise LossNotFinite(f"{what}, {again}; {self.reporter.suspicion(hand.num_steps)}")
        hand.notice(f"{what}: the run is rolled back to its last good state")
        # If only some replicas' state is not finite, the others keep theirs as the source; else all roll back.
        sound = hand.world.gather_objects(is_sound(hand))
        is_kept = sound[hand.world.rank] and not all(sound)
        kept.checkpoint = self.marker.checkpoint(self.state()) if is_kept else None
        kept.recent, kept.batches = [], {}
        kept.rolled_back_at = kept.resume_before = since
        raise Rollback(what)

    def state(self) -> dict[str, Any]:
        """Return the loop's own state for checkpoints."""
        return {
            "metrics": self.metrics,
            "measured": self.measured,
            "measured_at": self.measured_at,
            "called_at": self.called_at,
            "patience": self.watch.state(),
            "rates": {} if self._rates is None else self._rates.state(),
            "sums": {name: list(sums) for name, sums in self.reporter.sums.items()},
        }

    def resume_from(self, state: dict[str, Any]) -> None:
        """Restore the loop's own state from a checkpoint."""
        self.metrics = state["metrics"]
        self.measured = state.get("measured", {})
        self.measured_at = state.get("measured_at", 0)
        self.called_at = state.get("called_at", self.hand.num_steps)
        self.watch.restore(state.get("patience", []))
        self.rates.restore(state.get("rates", {}))
        self.reporter.sums = state.get("sums", {})
        self.apply_patience()

    def try_out(self, feed: Feed) -> None:
        """Try the loss and the metrics on a few samples, verify the first steps, and report notices to the user."""
        hand, task, model = self.hand, self.task, self.hand.model
        require_whole_statistics(model, self.split)
        batch = feed.peek(NUM_SAMPLES)
        if not self.is_tried:
            with left_alone(task.loss), hand.replica.scope():
                self.try_on(model, batch)
        learn_draws(hand, task, feed, batch)
        self.verify()
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

    def try_on(self, model: nn.Module, batch: Any = None) -> None:
        """Try the loss and the metrics on a network that is not split."""
        self.is_tried = True
        hand, task = self.hand, self.task
        if batch is None:
            source = source_of(task)
            batch = hand.peek(source, check_source(source, task.batch_size), NUM_SAMPLES)
        with evaluating(model):
            if task.loss is not None:
                began = self.clock()
                notices = [try_loss(task, model, batch)]
                first = self.clock() - began
                try_loss(task, model, batch)
                # The first call may include torch's one-time initialization.
                self.seconds_per_row = min(first, self.clock() - began - first) / first_dim(batch)
                self.not_verified = self.why_not_verified(model)
                splits = is_split(self.split)
                if self.job.verify and (self.not_verified or not splits):
                    notices.append(try_halves(task, model, batch, refuses=splits))
                for notice in filter(None, notices):
                    hand.notice(notice)
            for notice in try_metrics(task, model, batch, hand.replicas):
                hand.notice(notice)

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

    def verify(self) -> None:
        """Compare the first steps with those of one device; raise on a difference, store the verdict."""
        spec, why = self.split, self.not_verified or self.why_not_verified(self.hand.model)
        if not is_split(spec):
            verdict = Verdict("equal", spec, why="nothing is split")
        elif why:
            verdict = Verdict("not verified", spec, why=why)
        else:
            seconds = self.seconds_per_row, self.seconds_to_build
            verdict = verify(self.hand, self.task, spec, self.job.layout, *seconds)
        refuse(verdict)
        self.verdict = verdict
        self.kept.is_verified = True

    def resume(self) -> bool:
        """Restore the last checkpoint; return whether there was one."""
        state = self.hand.restore(self.path)
        if state is None:
            self.hand.notice("there is no checkpoint to resume from: starting from the beginning")
            return False
        self.resume_from(state)
        left = "" if self.hand.epoch < self.job.epochs else "; all epochs are complete"
        self.hand.notice(f"resumed at step {self.hand.num_steps}, epoch {self.hand.epoch + 1}{left}")
        return True

    def look(self, batch: Batch) -> None:
        """Record the step; periodically read losses, check stop votes and compare replicas."""
        hand = self.hand
        self.measured = {}
        self.reporter.record(batch)
        if hand.is_look:
            self.reporter.read()
            self.stopped = hand.voted_to_stop()
        if hand.num_steps >= self.compare_at and hand.replica.agrees:
            self.compare()

        if (
            self.reporter.num_samples == batch.global_samples
            and hand.randomness is not None
            and hand.randomness.strayed
        ):
            hand.notice(STRAYED)
        if hand.randomness is not None and hand.randomness.guess and not self.has_reported_guess:
            self.has_reported_guess = True
            hand.notice(guess_notice(hand.randomness))

    def compare(self) -> None:
        """Raise if parameters differ between replicas; report differing buffers, where the first replica's are used."""
        self.compare_at = (self.hand.num_steps // COMPARE_EVERY + 1) * COMPARE_EVERY
        different = self.hand.replica.differences()
        buffers = dict(self.hand.model.named_buffers())
        for text in [text for text in different if text.split(" ")[0] in buffers]:
            different.remove(text)
            name = text.split(" ")[0]
            if name not in self.noticed:
                self.hand.notice(
                    f"the buffer {name} is not synchronized over the replicas: that of the first replica is used"
                )
            self.noticed.add(name)
        if different:
            raise ReplicasDiffer(
                f"after step {self.hand.num_steps} the replicas differ in {', '.join(different[:5])}: a parameter was "
                "changed outside of the optimizer, a buffer is not synchronized, or memory was corrupted"
            )

    def end_epoch(self, epoch: int, valid_feed: Feed | None) -> None:
        """Evaluate, report and save at the end of an epoch, or of a run that ends in mid-epoch."""
        hand = self.hand
        hand.agree()
        self.reporter.read()
        self.ending = self.state()
        self.measured_at = hand.num_steps
        if valid_feed is not None:
            if self.noticed or hand.spec.batch_stats == "local":
                hand.replica.align_buffers()
                if hand.averages is not None:
                    hand.averages.align(hand.replicas)
            with hand.timed("validation"):
                measured = evaluate(hand, self.task, valid_feed)
            self.metrics = {f"valid_{name}": value for name, value in measured.items()}
        self.reporter.epoch(epoch, self.metrics)
        self.measured = {**self.measured, **self.reporter.take_means(), **self.metrics}
        self.watch.look(hand.num_steps, self.measured)
        self.rates.end_epoch(epoch, self.measured)
        self.apply_patience()
        for callback in self.job.callbacks:
            callback.on_epoch(hand, self.metrics)
        self.stopped = self.stopped or any(hand.world.gather_objects(hand.world.channel.stopping))
        if hand.world.gather_objects(self.is_worth_saving())[0]:
            self.save()
        self.marker.mark()
        self.ending = None
        self.keep_agreed()

    def report_limit(self, feed: Feed) -> None:
        """Report once what limits the speed of the steps, if it is not compute."""
        if feed.waited > INPUT_WAIT_WARNING_SECONDS and feed.limit not in ("compute", self.limit):
            self.limit = feed.limit
            self.hand.notice(feed.describe_limit())

    def apply_patience(self) -> None:
        """End the run where patience ran out; the first replica's measurements decide for all."""
        if self.job.stop and not self.out_of_patience:
            self.out_of_patience = self.hand.world.gather_objects(self.watch.reason)[0]
            if self.out_of_patience:
                self.hand.notice(f"out of patience at step {self.hand.num_steps}: {self.out_of_patience}")

    def is_worth_saving(self) -> bool:
        """Return whether the end of this epoch is saved: the best one under patience, and otherwise as costs allow."""
        score = self.watch.score(self.measured)
        is_best = score is not None and score < self.best_score
        if is_best:
            assert score is not None
            self.best_score = score
        if self.job.save_seconds:
            return self.pace.seconds_unsaved >= self.job.save_seconds
        store = self.hand.store(self.path)
        is_due = self.pace.is_due(self.hand.seconds["save"] + store.written_seconds)
        return is_due or (is_best and bool(self.job.stop))

    def save(self) -> None:
        self.pace.saved()
        self.hand.agree()
        self.reporter.read()
        self.reporter.flush()
        if self.reporter.num_skipped > 1 and not self.is_ending:
            # Checkpoints are kept from before a row of skipped steps.
            return
        self.hand.save(
            self.path,
            # In mid-epoch nothing was measured; a checkpoint without a score is never the best one.
            score=self.watch.score(self.measured),
            **self.state(),
        )
        self.reporter.report(event("checkpoint", step=self.hand.num_steps))

    def end(self) -> None:
        """Finish the run: read all losses, compare the replicas, and save the final state."""
        hand = self.hand
        self.is_ending = True
        hand.agree()
        self.reporter.read()
        self.compare()
        for text in hand.replica.remarks():
            hand.notice(text)
        store = hand.store(self.path)
        store.wait()
        if not hand.world.gather_objects(hand.num_steps in store.steps())[0]:
            self.save()
            store.wait()
        if not hand.world.gather_objects(hand.num_steps in store.steps())[0]:
            raise RunError(
                f"the last state, of step {hand.num_steps}, could not be saved: see the notices above; "
                "free some space, and resume from the last checkpoint that was written"
            )
        for callback in self.job.callbacks:
            callback.on_end(hand)
        if hand.spec.shards != 1 or hand.spec.tensor > 1:
            hand.world.channel.report(event("used", rank=hand.world.rank, device=hand.device.type, **used(hand)))

    def report_start(self) -> None:
        for text in self.hand.replica.hints():
            self.hand.notice(text)
        drawn = self.hand.replica.outline()
        if drawn is not None:
            self.reporter.report(event("partition", **asdict(drawn)))
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
        if self.verdict is not None:
            self.reporter.report(verdict_event(self.verdict))


def _learning_rates(hand: Hand) -> dict[str, float]:
    """Return the learning rate by optimizer; optimizers without one are left out."""
    rates = {name: optimizer.param_groups[0].get("lr") for name, optimizer in hand.optimizers.items()}
    return {name: float(rate) for name, rate in rates.items() if rate is not None}


class _Reporter:
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

    def record(self, batch: Batch) -> None:
        self.num_samples += batch.global_samples
        self._report_pace()
        losses, step = dict(self._hand.losses), self._hand.num_steps
        losses |= {_NORM + key: norm for key, norm in self._hand.norms.items()}
        part = self._hand.part_loss if step % self._part_every == 0 else None
        self._unread.append((step, losses if part is None else {**losses, _PART: part}, self._hand.good))

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
        parts = self._hand.replicas.gather_objects((_not_finite(batch), batch.ids.tolist(), self._hand.finite_parts))
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
            fields = {"losses": losses, "epoch": hand.epoch, "samples_per_second": rate, "lr": _learning_rates(hand)}
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
        known = {"input": waited, "sync": synced, **self._hand.seconds}
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


def _tidy(device: torch.device) -> None:
    """Free GPU memory that networks and CUDA graphs hold through reference cycles."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the enclosed block on a new CUDA stream, since the default stream cannot be captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
