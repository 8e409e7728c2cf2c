"""Training with parameter servers: the common training loop, with steps computed by servers and workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core import StrategyError, StrategySpec, Task, TaskError, counted, each_of, event
from ..data import Batch, Cursor, Feed, IndexedSource, source_of
from ..distributed import Device, World
from ..strategies import MAIN, declaring, optimizers_of
from ..training import (
    Hand,
    Job,
    RecoveryState,
    ReplicaResult,
    Rollback,
    Sampler,
    StartTrial,
    Stepper,
    TrainingLoop,
    start_from,
    without_values,
)
from .layout import tables_of
from .table import kind_of, settings_of

if TYPE_CHECKING:
    from .coordinator import ServerCoordinator
    from .member_jobs import Start
    from .roles import ProcessRole

Output = Callable[[int, str, str], None]


def train_served(
    world: World, job: Job, *, devices: Sequence[Device], start: Start | ProcessRole, on_output: Output, timeout: float
) -> ReplicaResult:
    """Train with parameter servers, with this process as the coordinator.

    Args:
        world: The coordinator's world, a single rank.
        job: What to train, and how.
        devices: The device of each worker.
        start: Function that starts a server, a follower or a worker; or this process's role in a cluster whose members
            are started externally.
        on_output: Called with a worker's index (-1 for servers), a line that it printed, and the stream.
        timeout: Seconds after which a member that does not answer has failed.
    """
    hand = Hand(world, single_member_spec(job.spec))
    loop = ServedLoop(hand, job, devices, start, on_output, timeout)
    try:
        with declaring():
            outcome = loop.run()
        outcome.servers = loop.coordinator.stats.to_dict()
        return outcome
    finally:
        loop.reporter.flush()
        loop.close()
        hand.close()


def single_member_spec(spec: StrategySpec) -> StrategySpec:
    """Return the spec of a parameter server strategy for one process: a single replica without backup workers."""
    return replace(spec, replicas=1, backup=0)


def check_served(task: Task) -> None:
    """Raise TaskError or StrategyError if parameter servers cannot train a task, before any process is started."""
    _require_transport()
    if task.step is not None:
        raise TaskError(
            "parameter servers need a task with loss=",
            got="a task with step=",
            remedy="pass loss=, or use mh.Mirrored()",
        )
    if task.ema is not None:
        raise TaskError(
            "parameter servers do not support averaged weights",
            got=f"ema={task.ema}",
            remedy="omit ema, or use mh.Mirrored()",
        )
    if not callable(task.data) and not isinstance(source_of(task), IndexedSource):
        raise StrategyError(
            "parameter servers need data with random access",
            got="a stream, which can only be read from its beginning",
            remedy="pass a dataset with a length, or use mh.Mirrored()",
        )


def tables_in(task: Task) -> list[str]:
    """Return the names of a task's embedding tables whose rows exist on the servers only."""
    with declaring():
        model = without_values(task)
    return [] if model is None else list(tables_of(model))


def has_own_optimizer(task: Task) -> bool:
    """Return whether a task's optimizer is not one of torch's, so that it may behave differently on servers."""
    model = without_values(task)
    try:
        made = {} if model is None else optimizers_of(model, task.optimizer)
    except Exception:
        return False
    members = [member for optimizer in made.values() for member in each_of(optimizer)]
    return any(not type(member).__module__.startswith("torch.optim") for member in members)


def _require_dense(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise StrategyError(
                "gradients that are sent to parameter servers must be dense",
                got=f"{name} ({type(layer).__name__}) with sparse=True",
                remedy="use mh.strategies.Embedding(rows, dim), which sends only the rows of a batch, or sparse=False",
            )


def _lazy_tables(hand: Hand) -> list[str]:
    """Return the embedding tables whose unused rows Adam would change on one device, but not on servers.

    Raise TaskError for an optimizer that cannot update single rows.
    """
    optimizer, waiting = hand.optimizers[MAIN], []
    for name, table in tables_of(hand.model).items():
        settings_of(name, table, optimizer, hand.model)
        if table.optimizer is None and kind_of(table, optimizer) == "adam":
            waiting.append(name)
    return waiting


def _require_transport() -> None:
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise StrategyError(
            "parameter servers need pyzmq",
            got=str(error),
            remedy="install it with pip install 'manyhands[parameter-server]'",
        ) from None


class ServedLoop(TrainingLoop):
    """The training loop of the coordinator, whose steps are computed by servers and workers."""

    def __init__(
        self,
        hand: Hand,
        job: Job,
        devices: Sequence[Device],
        start: Start | ProcessRole,
        on_output: Output,
        timeout: float,
    ) -> None:
        super().__init__(hand, job, RecoveryState())
        self._devices, self._start, self._on_output, self._timeout = devices, start, on_output, timeout
        self._coordinator: ServerCoordinator | None = None
        self._refreshed_at = -1

    @property
    def coordinator(self) -> ServerCoordinator:
        """The coordinator of servers and workers, which `try_out` creates."""
        assert self._coordinator is not None
        return self._coordinator

    def close(self) -> None:
        """Stop the servers and workers."""
        if self._coordinator is not None:
            self._coordinator.close()

    def try_out(self, feed: Feed) -> None:
        from .coordinator import ServerCoordinator
        from .failover import ServerFailed

        if list(self.hand.optimizers) != [MAIN]:
            raise TaskError(
                "parameter servers support one optimizer only",
                got=f"{len(self.hand.optimizers)} optimizers ({', '.join(self.hand.optimizers)})",
                remedy="return one optimizer with several parameter groups",
            )
        _require_dense(self.hand.model)
        lazy = _lazy_tables(self.hand)
        coordinator = ServerCoordinator(self.hand, self.job, self._devices, self._start, self._timeout)
        self._coordinator = coordinator
        coordinator.jobs.on_output = self._on_output
        coordinator.open()
        self._notify_differences(self.hand.model)
        if lazy:
            what = "change only when a batch uses them; on one device, Adam changes the other rows too"
            self.hand.notice(f"rows of {', '.join(lazy)} {what}")
        while True:
            try:
                return super().try_out(feed)
            except ServerFailed as lost:
                self.hand.notice(str(lost))
                self._begin_again()
                coordinator.publish()

    def make_trial(self) -> StartTrial:
        return _ServedTrial(self.hand, self.job)

    def ease(self, batch_size: int) -> None:
        """Do nothing: the coordinator's own hand computes no samples."""

    def sampling(self, feed: Feed) -> Sampler | None:
        """Return no sampler: workers profile and report their own steps."""
        return None

    def prepare(self) -> tuple[Feed, Feed | None]:
        feeds = super().prepare()
        if self.hand.num_steps or self.job.start_from is not None:
            self.coordinator.publish()
        return feeds

    def train(self, train_feed: Feed, valid_feed: Feed | None, stepper: Stepper) -> None:
        from .failover import ServerFailed

        plan: Any = _ServedSteps(self, train_feed)
        reason: Exception | None = None
        while True:
            try:
                if reason is not None:
                    self._go_back(reason)
                super().train(plan, valid_feed, plan)
                # The last checkpoint needs the servers' values; here a server failure is still handled.
                return self.refresh()
            except (ServerFailed, Rollback) as failure:
                reason = failure

    def end_epoch(self, epoch: int, valid_feed: Feed | None) -> None:
        self.refresh()
        super().end_epoch(epoch, valid_feed)
        self.hand.world.channel.report(event("servers", step=self.hand.num_steps, **self.coordinator.stats.to_dict()))

    def save(self) -> None:
        self.refresh()
        super().save()

    def look(self, batch: Batch) -> None:
        super().look(batch)
        # Let updates in flight finish first, so that the last checkpoint contains them.
        self.stopped = self.stopped and self.coordinator.is_settled

    def refresh(self) -> None:
        """Copy the servers' values into the coordinator's network, which is evaluated and saved."""
        if self._refreshed_at != self.hand.num_steps:
            with self.hand.times.timed("save"):
                self.coordinator.refresh()
            self._refreshed_at = self.hand.num_steps

    def take(self) -> None:
        """Wait until workers and servers have completed one step, and record its loss."""
        hand = self.hand
        step = self.coordinator.take_step(self._limit())
        hand.num_steps += 1
        hand.current.losses = {MAIN: torch.tensor(step.loss, dtype=torch.float64)}
        hand.current.good = torch.tensor(step.is_taken) if hand.current.skips else None

    def _limit(self) -> int:
        """Return the step before which samples may be handed out, so that no update is in flight at a checkpoint."""
        steps = self.job.steps if self.job.steps is not None else math.inf
        if self.job.save_every and (self.job.spec.staleness is None or self.job.spec.backup):
            steps = min(steps, (self.hand.num_steps // self.job.save_every + 1) * self.job.save_every)
        return int(min(steps, 1 << 62))

    def _go_back(self, reason: Exception) -> None:
        """Restore the last checkpoint and load it into the servers; `reason` is a failed server or a rollback."""
        hand = self.hand
        before = hand.num_steps
        hand.checkpoints.store(self.path).wait()
        state = hand.restore(self.path, before=self.kept.resume_before)
        if state is None:
            self._begin_again()
        self.kept.resume_before = None
        self.reporter.forget()
        if state is not None:
            self.resume_from(state)
        hand.notice(f"{reason}; {counted(before - hand.num_steps, 'step')} since the last checkpoint will be repeated")
        source = "its beginning" if state is None else "the last checkpoint"
        self.reporter.report(event("recovered", step=hand.num_steps, size=len(self._devices), source=source))
        self._refreshed_at = -1
        self.coordinator.publish()

    def _begin_again(self) -> None:
        """Reset network and optimizer to their initial values, which an aborted save may have overwritten."""
        from .checkpoints import restore_tables

        hand, first = self.hand, Hand(self.hand.world, self.hand.spec)
        first.build(self.task)
        hand.num_steps, hand.reader.cursors = 0, []
        hand.model.load_state_dict(first.model.state_dict())
        hand.optimizers[MAIN].load_state_dict(first.optimizers[MAIN].state_dict())
        restore_tables(hand, first)
        first.close()
        hand.reader.seed(self.task.seed)
        start_from(hand, self.job.start_from)

    def _notify_differences(self, model: nn.Module) -> None:
        if self.job.spec.followers:
            self.hand.notice("every server has a follower, which doubles the memory and the computation of updates")
        if any(isinstance(layer, _BatchNorm) for layer in model.modules()):
            self.hand.notice(
                "batch statistics are those of each worker's part of a batch, and buffers are averaged over the workers"
            )


class _ServedTrial(StartTrial):
    """What is tried before the first step, where workers compute the steps."""

    @property
    def split(self) -> StrategySpec:
        """The strategy by which batches are split over workers; the coordinator's own hand is a single replica."""
        return self.job.spec

    def why_not_verified(self, model: nn.Module) -> str:
        tables = ", ".join(tables_of(self.hand.model))
        return super().why_not_verified(model) or (f"rows of {tables} are on the servers alone" if tables else "")


class _ServedSteps:
    """Replaces feed and stepper in the training loop: yields batches without data, and waits for the workers' steps."""

    waited = 0.0
    limit = "compute"
    captures = False

    def __init__(self, loop: ServedLoop, feed: Feed) -> None:
        self._loop, self._feed = loop, feed

    def epoch(self, cursor: Cursor) -> Iterator[Batch]:
        """Hand the epoch's samples to the coordinator, and yield the batches without data."""
        self._loop.coordinator.begin_epoch(cursor.epoch, (ids for ids, _ in self._feed.plan(cursor)))
        for ids, after in self._feed.plan(cursor):
            yield Batch(None, (len(ids),), (len(ids),), ids, after)

    def take(self, batch: Batch) -> None:
        """Wait until workers and servers have completed one step."""
        self._loop.take()

    def close(self) -> None:
        """Do nothing: there are no resources to free."""

    def describe_limit(self) -> str:
        """Return no text: there is no input limit to report."""
        return ""
