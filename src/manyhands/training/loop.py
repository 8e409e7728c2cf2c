"""The training loop of one replica: from building the network to the last checkpoint."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from ..capture import free_graphs, own_stream
from ..core import LossNotFinite, RunError, event
from ..data import Batch, Feed, as_source, check_source, source_of
from ..distributed import World, hidden_process_group
from ..launcher import regroup
from .checkpoint_schedule import CheckpointSchedule
from .error_hints import explain_mistake
from .evaluation import evaluate
from .hand import Hand
from .host_comparison import require_identical
from .initial_weights import start_from
from .job import CHECKPOINTS, Job, ReplicaResult
from .learning_rates import LearningRates, check_schedule
from .load_balance import LoadBalance, balances
from .memory import explain_memory, used
from .memory_limit import Guard, limited
from .partial_state import Copies, keeps_copies, restore_part
from .patience import PatienceState, check_patience
from .recovery import Marker, RecoveryState, Rollback, as_loss, eased, is_sound, recall, resized
from .replica_comparison import ReplicaComparison
from .restored_objects import left_alone
from .sample_randomness import guess_notice, learn_draws
from .sampling import Sampler
from .snapshot import restore_snapshot
from .start_trial import StartTrial
from .step_reporter import StepReporter
from .stepping import Stepper
from .trial import NUM_SAMPLES
from .verdict import Verdict
from .verify import verdict_event

_UNLIMITED = contextlib.nullcontext()
STRAYED = (
    "an operation draws random numbers that deterministic=True does not know (a custom kernel, or torch.ops), "
    "so they change with the number of replicas"
)


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
            free_graphs(world.device)


class TrainingLoop:
    """The training loop of one replica; subclasses may let other processes compute the steps."""

    def __init__(self, hand: Hand, job: Job, kept: RecoveryState) -> None:
        self.hand, self.job, self.task, self.kept = hand, job, job.task, kept
        self.marker = Marker(hand)
        self.ending: dict[str, Any] | None = None
        """The loop's state from before the end of the epoch, while that end is being processed."""
        self.metrics: dict[str, float] = {}
        self.reporter = StepReporter(hand)
        self.path = job.folder / CHECKPOINTS
        self.guard = Guard()
        self.stopped = False
        self.watch = PatienceState(job.stop)
        self.out_of_patience = ""
        self.comparison = ReplicaComparison(hand)
        self.schedule = CheckpointSchedule(
            hand, self.path, save_every=job.save_every, save_seconds=job.save_seconds, keeps_best=bool(job.stop)
        )
        self.measured_at = 0
        self.measured: dict[str, float] = {}
        """Mean losses and metrics of the network as it is now; empty after a further step."""
        self.called_at = 0
        """The last step for which callbacks were called."""
        self.is_ending = False
        self.has_reported_guess = False
        self.copies: Copies | None = None
        self.balance: LoadBalance | None = None
        self.trial = self.make_trial()
        self.sampler: Sampler | None = None
        self._rates: LearningRates | None = None

    @property
    def rates(self) -> LearningRates:
        """How learning rates follow the schedule; available after `prepare`."""
        assert self._rates is not None
        return self._rates

    def run(self) -> ReplicaResult:
        with contextlib.ExitStack() as held:
            if self.task.loss is not None:
                held.enter_context(hidden_process_group())
            with left_alone(self.task.collate):
                train_feed, valid_feed = self.prepare()
            for feed in filter(None, (train_feed, valid_feed)):
                held.callback(feed.close)
            for callback in self.job.callbacks:
                callback.on_start(self.hand)
            self.reporter.start(train_feed)
            self.marker.mark()
            self.sampler = self.sampling(train_feed)
            if keeps_copies(self.hand.world, self.hand.spec):
                self.copies = Copies(self.hand.world, self.job.copy_every)
                self.copy_parts(self.copies)
            if balances(self.hand, train_feed, self.job.balance, is_limited=self.job.memory is not None):
                self.balance = LoadBalance(self.hand, train_feed)
            stepper = Stepper(self.hand, self.task, self.total)
            held.callback(stepper.close)
            if self.called_at < self.hand.num_steps:
                # Other ranks failed after this step was taken and before its callbacks were called.
                self.call_back(stepper)
            self.train(train_feed, valid_feed, stepper)
            self.end()
        breakdown, num_samples = self.reporter.breakdown(), self.reporter.num_samples
        return ReplicaResult(self.hand.num_steps, self.metrics, self.stopped, breakdown, num_samples)

    def make_trial(self) -> StartTrial:
        """Return what is tried before the first step."""
        return StartTrial(self.hand, self.job)

    def sampling(self, feed: Feed) -> Sampler | None:
        """Return the sampler that profiles some of the steps; None if no step is profiled."""
        return Sampler(self.hand, feed, self.job.profile) if self.job.profile else None

    def train(self, train_feed: Feed, valid_feed: Feed | None, stepper: Stepper) -> None:
        """Run steps and epochs to the end of the run."""
        job, hand = self.job, self.hand
        while hand.epoch < job.epochs and not self.is_over:
            epoch = hand.epoch
            for batch in hand.reader.one_epoch(train_feed):
                if self.task.schedule is not None:
                    self.rates.set()
                self.take_step(batch, stepper)
                self.marker.mark()
                if self.balance is not None:
                    self.balance.step(batch)
                if self.copies is not None:
                    self.copy_parts(self.copies)
                self.look(batch)
                self.keep_agreed()
                hand.world.require_current()
                if self.reporter.num_skipped >= self.task.max_skipped:
                    self.go_back()
                self.call_back(stepper)
                if hand.num_steps >= self.schedule.look_at and self.schedule.is_midway_due():
                    self.save()
                    self.keep_agreed()
                    if self.sampler is not None:
                        self.sampler.pause()
                if self.sampler is not None:
                    self.sampler.step()
                if self.is_over:
                    break
            else:
                if self.sampler is not None:
                    self.sampler.pause()
                self.reporter.report_limit(train_feed)
                self.end_epoch(epoch, valid_feed)
        if self.measured_at != hand.num_steps and not self.stopped:
            self.end_epoch(hand.epoch, valid_feed)

    def call_back(self, stepper: Stepper) -> None:
        """Call the callbacks for the step that was taken."""
        self.called_at = self.hand.num_steps
        for callback in self.job.callbacks:
            callback.on_step(self.hand)
        if self.job.callbacks and stepper.captures:
            stepper.look_again()

    def take_step(self, batch: Batch, stepper: Stepper) -> None:
        """Take one step; explain out-of-memory errors and common mistakes."""
        with self.hand.world.collective_log.step():
            try:
                with self.guard() if self.guard.limit is not None else _UNLIMITED:
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
        goes_on = self.job.resume and hand.checkpoints.store(self.path, keep=self.job.keep).steps()
        timed = task.replace(model=functools.partial(self.trial.timed_build, task.model))
        hand.build(timed.replace(weights=None) if goes_on else timed, self.trial.try_losses)
        check_patience(self.job.stop, task, [key or "loss" for key in hand.optimizers])
        hand.reader.seed(task.seed)
        source = source_of(task)
        batch_size = check_source(source, task.batch_size)
        self.ease(batch_size)
        feed = hand.reader.make_feed(source, batch_size, shuffle=task.shuffle, seed=task.seed, workers=task.workers)
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
            valid = hand.reader.make_feed(held, task.batch_size or batch_size, shuffle=False, workers=task.workers)
        hand.checkpoints.store(self.path, keep=self.job.keep)
        hand.checkpoints.claim(self.path)
        if is_new:
            self.begin()
            self.reporter.report_start(self.total, self.job.epochs, self.trial.verdict)
        else:
            self.recover()
        return feed, valid

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
        hand, resumes = self.hand, self.job.resume and self.kept.resume_before is None
        state = hand.restore(self.path) if resumes else None
        if state is None:
            if resumes:
                hand.notice("there is no checkpoint to resume from: starting from the beginning")
            start_from(hand, self.job.start_from)
            return False
        self.resume_from(state)
        left = "" if hand.epoch < self.job.epochs else "; all epochs are complete"
        hand.notice(f"resumed at step {hand.num_steps}, epoch {hand.epoch + 1}{left}")
        return True

    def recover(self) -> None:
        """Resume after ranks failed or joined: from the memory of a rank, else from the last checkpoint."""
        hand, recent, kept = self.hand, [], self.kept
        saved = max(hand.world.gather_objects(hand.checkpoints.store(self.path).steps())[0], default=0)
        found = recall(hand, kept, at_least=0 if kept.resume_before is not None else saved)
        if found is not None:
            self.resume_from((restore_part if found.is_part else restore_snapshot)(hand, found.checkpoint))
            hand.reader.batch = kept.batches.get(hand.num_steps)
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

    def copy_parts(self, copies: Copies) -> None:
        """Periodically copy shards that only one rank holds into the memory of another rank."""
        if copies.is_due(self.hand.num_steps):
            with self.hand.times.timed("save"):
                made = copies.make(self.marker.checkpoint(self.state()))
            self.kept.copies = made or self.kept.copies

    def keep(self) -> None:
        """Store the state of the last step, to resume from it; keep the older state if there is no newer one."""
        self.kept.called_at, self.kept.batches = self.called_at, self.marker.batches
        if self.hand.current.unsynchronized.is_apart:
            # Local SGD steps that are not synchronized are repeated.
            return
        self.reporter.read(alone=True)
        checkpoint = self.marker.checkpoint(self.ending or self.state())
        if checkpoint is not None:
            self.kept.checkpoint, self.kept.recent = checkpoint, list(self.reporter.recent)
        elif self.hand.current.is_midway and not self.hand.replica.is_local_sgd:
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
        """Try the run before its first step; raise where the strategy changes the result."""
        self.trial.run(feed)
        self.kept.is_verified = True

    def look(self, batch: Batch) -> None:
        """Record the step; periodically read losses, check stop votes and compare replicas."""
        hand = self.hand
        self.measured = {}
        self.reporter.record(batch)
        if hand.current.is_look:
            self.reporter.read()
            self.stopped = hand.current.voted_to_stop()
        if hand.num_steps >= self.comparison.next_step and hand.replica.agrees:
            self.comparison.run()

        if (
            self.reporter.num_samples == batch.global_samples
            and hand.randomness is not None
            and hand.randomness.strayed
        ):
            hand.notice(STRAYED)
        if hand.randomness is not None and hand.randomness.guess and not self.has_reported_guess:
            self.has_reported_guess = True
            hand.notice(guess_notice(hand.randomness))

    def end_epoch(self, epoch: int, valid_feed: Feed | None) -> None:
        """Evaluate, report and save at the end of an epoch, or of a run that ends in mid-epoch."""
        hand = self.hand
        hand.agree()
        self.reporter.read()
        self.ending = self.state()
        self.measured_at = hand.num_steps
        if valid_feed is not None:
            if self.comparison.differing_buffers or hand.spec.batch_stats == "local":
                hand.replica.align_buffers()
                if hand.averages is not None:
                    hand.averages.align(hand.replicas)
            with hand.times.timed("validation"):
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
        if hand.world.gather_objects(self.schedule.is_epoch_due(self.watch.score(self.measured)))[0]:
            self.save()
        self.marker.mark()
        self.ending = None
        self.keep_agreed()

    def apply_patience(self) -> None:
        """End the run where patience ran out; the first replica's measurements decide for all."""
        if self.job.stop and not self.out_of_patience:
            self.out_of_patience = self.hand.world.gather_objects(self.watch.reason)[0]
            if self.out_of_patience:
                self.hand.notice(f"out of patience at step {self.hand.num_steps}: {self.out_of_patience}")

    def save(self) -> None:
        self.schedule.saved()
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
        self.comparison.run()
        for text in hand.replica.remarks():
            hand.notice(text)
        store = hand.checkpoints.store(self.path)
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
