"""Train the members of an ensemble one after another with the ordinary training loop, if they cannot be stacked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..core import StrategySpec, Task, TaskError, TorchScheduler, UsageError, random_state, restore_random_state
from ..data import Cursor, as_source, check_source, source_of
from ..distributed import Device, DirectChannel, NullWorld
from ..storage import Checkpoint
from ..training import (
    NUM_SAMPLES,
    Hand,
    HeldState,
    LearningRates,
    evaluate,
    learn_draws,
    restore_snapshot,
    take_snapshot,
    take_step,
)
from .member import VectorizedMember
from .member_training import MemberTraining


class Alone:
    """One member of an ensemble that is not stacked: it has its own network, optimizer, data feeds and random state."""

    def __init__(self, task: Task, spec: StrategySpec, device: Device, notice: Callable[[str], None]) -> None:
        def on_event(entry: Mapping[str, Any]) -> None:
            if entry["kind"] == "notice":
                notice(entry["text"])

        self._task = task
        if isinstance(task.schedule, TorchScheduler) and task.schedule.metric is not None:
            raise TaskError(
                "networks that are trained one after another in one process cannot follow a metric",
                got=f"a scheduler that follows {task.schedule.metric}",
                remedy="train the network with mh.fit",
            )
        self._rates: LearningRates | None = None
        self._total = 0
        self._hand = Hand(NullWorld(device, DirectChannel(on_event)), replace(spec, deterministic=True))
        self._random = random_state(self._hand.device)
        self._held = HeldState(task.loss, task.model)
        """The state of the loss function, such as a count of its calls, because members may share one function."""
        with self._own_state():
            self._hand.build(task)
            self._hand.reader.seed(task.seed)
            source = source_of(task)
            size = check_source(source, task.batch_size)
            settings: Any = {"seed": task.seed, "workers": task.workers}
            self._feed = self._hand.reader.make_feed(source, size, shuffle=task.shuffle, **settings)
            self._valid = None
            if task.valid is not None:
                held = as_source(task.valid, collate=task.collate)
                self._valid = self._hand.reader.make_feed(
                    held, task.batch_size or size, shuffle=False, workers=task.workers
                )
            learn_draws(self._hand, task, self._feed, self._feed.peek(NUM_SAMPLES))

    @property
    def num_steps_in_epoch(self) -> int | None:
        """Return the number of steps in an epoch; None if the data have no length."""
        return self._feed.num_steps()

    @property
    def num_bytes(self) -> int:
        """Bytes of the member's parameters, buffers and optimizer state."""
        slots = [slot for o in self._hand.optimizers.values() for held in o.state.values() for slot in held.values()]
        tensors = (*self._hand.model.parameters(), *self._hand.model.buffers(), *slots)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))

    def take(self, count: int, total: int) -> list[float]:
        """Take `count` steps and return their losses; `total` is the number of steps for the learning rate schedule."""
        losses: list[float] = []
        if self._rates is None or total != self._total:
            self._rates, self._total = LearningRates(self._hand, self._task, total), total
        with self._own_state():
            while len(losses) < count:
                with contextlib.closing(self._hand.reader.one_epoch(self._feed)) as batches:  # type: ignore[type-var]
                    for batch in batches:
                        self._rates.set()
                        take_step(self._hand, self._task, batch)
                        losses.append(self._hand.loss if self._hand.losses else 0.0)
                        if len(losses) == count:
                            break
            self._end_pass()
        return losses

    @property
    def cursor(self) -> Cursor:
        """The member's position in its data: the epoch, and the samples consumed."""
        return self._hand.reader.cursors[0] if self._hand.reader.cursors else Cursor()

    def measure(self) -> dict[str, float]:
        """Return the loss and the metrics on the task's validation data."""
        assert self._valid is not None
        with self._own_state():
            return evaluate(self._hand, self._task, self._valid)

    def state(self, loop: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a checkpoint with the loop state `loop`; tensors are copies on the CPU."""
        with self._own_state():
            taken = take_snapshot(self._hand, loop)
        fields = {name: value for name, value in vars(taken).items() if name != "policy"}
        copied: dict[str, Any] = _copied(fields)
        return copied

    def load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Restore a result of `state` or the fields of a checkpoint; return the loop state in it."""
        with self._own_state():
            self._rates = None
            return restore_snapshot(self._hand, Checkpoint(**state))

    @property
    def step(self) -> int:
        """The number of steps that the member has taken."""
        return self._hand.num_steps

    def close(self) -> None:
        """Close the member's data feeds and its replica."""
        for feed in filter(None, (self._feed, self._valid)):
            feed.close()
        self._hand.close()

    def _end_pass(self) -> None:
        """Move the cursor to the next epoch if all samples of the present one were consumed."""
        size = self._feed.source.size
        if size is not None and self.cursor.position >= size:
            self._hand.reader.cursors[0] = Cursor(self.cursor.epoch + 1)

    @contextlib.contextmanager
    def _own_state(self) -> Iterator[None]:
        device = self._hand.device
        before = random_state(device)
        restore_random_state(self._random, device)
        try:
            with self._held:
                yield
        finally:
            self._random = random_state(device)
            restore_random_state(before, device)


class OneByOne(MemberTraining):
    """Train the members of an ensemble one after another.

    Args:
        members: The progress of the members.
        spec: The strategy: precision and capture.
        device: The device to train on.
        notice: Called with messages for the user.
        states: States of the members from which they resume; None to start with initial values.
    """

    def __init__(
        self,
        members: Sequence[VectorizedMember],
        spec: StrategySpec,
        device: Device,
        notice: Callable[[str], None],
        states: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._members, self._spec, self._device = members, spec, device
        self._noticed: set[str] = set()
        self._notice = notice
        self._alone = [self._made(member.task) for member in members]
        for alone, state in zip(self._alone, states or (), strict=bool(states)):
            alone.load(state)

    def _made(self, task: Task) -> Alone:
        return Alone(task, self._spec, self._device, self._notice_once)

    def _notice_once(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._notice(text)

    @property
    def num_steps_in_epoch(self) -> int:
        found = self._alone[0].num_steps_in_epoch
        if found is None:
            raise UsageError(
                "members are evaluated after every epoch, which needs data of known length",
                got="a stream",
                remedy="pass a dataset with a length",
            )
        return found

    @property
    def num_bytes(self) -> int:
        return sum(alone.num_bytes for alone in self._alone)

    def take(self, active: Sequence[int], most: int, total: int, taken: dict[int, list[float]]) -> None:
        for number in active:
            taken[number] = self._alone[number].take(most, total)
            self._members[number].cursor = self._alone[number].cursor

    def measured(self, numbers: Sequence[int]) -> dict[int, dict[str, float]]:
        return {
            number: {f"valid_{name}": value for name, value in self._alone[number].measure().items()}
            for number in numbers
            if self._members[number].task.valid is not None
        }

    def state(self, number: int) -> dict[str, Any]:
        return self._alone[number].state(self._members[number].loop_state())

    def load(self, number: int, member: VectorizedMember, state: Mapping[str, Any]) -> None:
        member.resume_from(self._alone[number].load(state))
        member.step, member.cursor = self._alone[number].step, self._alone[number].cursor

    def replace(self, number: int, task: Task) -> None:
        made = self._made(task)
        self._alone[number].close()
        self._alone[number] = made

    def close(self) -> None:
        for alone in self._alone:
            alone.close()


def _copied(value: Any) -> Any:
    """Return a tensor as a copy on the CPU, and nested dicts with such copies; other values unchanged."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value
