"""Train the members of an ensemble as one vectorized program over their stacked tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core import (
    Attributes,
    LayoutFree,
    OutOfMemory,
    StrategySpec,
    Task,
    TaskError,
    TorchScheduler,
    UsageError,
    random_state,
    remember_state,
    restore_random_state,
)
from ..data import Resident, map_leaves
from ..distributed import Device
from ..training import differing, left_alone, number_slots, numbers_of
from .build import Built, build, row_of
from .dropout_rates import chances
from .evaluation import Evaluation
from .grouping import check_stackable, difference_between
from .member import VectorizedMember
from .member_training import CannotStack, MemberTraining
from .program import Program
from .shared_feed import Block, SharedFeed
from .stack import Row, Stack
from .stacked_steps import Rounds
from .states import fill, state_of
from .trial import describe_error, try_stacked

Result = TypeVar("Result")
IDLE_SHARE = 4
"""On a GPU, idle rows are removed from the stack only if they are at least 1/IDLE_SHARE of its rows.

Every size of the stack needs its own CUDA graph.
"""


class StackedTraining(MemberTraining):
    """Train members by stacking their tensors: the stack has one row per member, and a round is a step of all rows.

    Args:
        members: The progress of the members, whose tasks must have the same structure.
        spec: The strategy: precision and capture.
        place: The device to train on.
        notice: Called with messages for the user.

    Raises:
        CannotStack: The tasks cannot be computed as one program.
    """

    def __init__(
        self, members: list[VectorizedMember], spec: StrategySpec, place: Device, notice: Callable[[str], None]
    ) -> None:
        self.members, self.spec, self.device = members, spec, place.torch
        self._dtype = torch.float64 if spec.precision == "fp64" else None
        tasks = [member.task for member in members]
        self._built = [self._build(task) for task in tasks]
        first = self._built[0]
        _stacking(lambda: try_stacked(first))
        for index, built in enumerate(self._built[1:], 1):
            self._require_alike(built, index)
        rows = [row_of(built) for built in self._built]
        self._odds = [chances(built.model) for built in self._built]
        self._built = [dataclasses.replace(built, model=first.model) for built in self._built]
        """The tasks as built, all with one module, because the values of the networks are in the stack."""
        self._draws = LayoutFree(self.device)
        self._shared_feed = SharedFeed(tasks[0], self.device, self._dtype)
        self._program = Program(first, spec, self.device, self._draws)
        learn_draws(self._draws, self._program, self._shared_feed.data, self._shared_feed.batch_size)
        self._stack = Stack.of(rows, self.device)
        self._rows: list[int | None] = list(range(len(tasks)))
        """For each row of the stack, the number of its member; None for an idle row."""
        self._parked: dict[int, Row] = {}
        """Tensors of members that take no steps now, by the number of the member."""
        self._rounds = Rounds(self._program, self._shared_feed.data, spec, notice)
        self._evaluation = (
            Evaluation(tasks[0], self._program, place, self._dtype) if tasks[0].valid is not None else None
        )
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._look_at_numbers()

    @property
    def num_steps_in_epoch(self) -> int:
        return self._shared_feed.num_steps

    @property
    def num_bytes(self) -> int:
        return self._stack.bytes_each * len(self._rows)

    def take(self, active: Sequence[int], most: int, total: int, taken: dict[int, list[float]]) -> None:
        _stacking(lambda: self._on_stream(lambda: self._take_rounds(active, most, total, taken)))

    def measured(self, numbers: Sequence[int]) -> dict[int, dict[str, float]]:
        return _stacking(lambda: self._on_stream(lambda: self._measured(numbers)))

    def replace(self, number: int, task: Task) -> None:
        built = self._build(task)
        self._require_alike(built, number)
        self._release(number)
        self._parked[number] = self._moved(row_of(built))
        self._odds[number] = chances(built.model)
        self._built[number] = dataclasses.replace(built, model=self._program.model)
        self._look_at_numbers(task)

    def state(self, number: int) -> dict[str, Any]:
        # Members always use layout-free random numbers, as a run with deterministic=True does.
        spec = dataclasses.replace(self.spec, deterministic=True)
        return state_of(self.members[number], self._row(number), self._built[number], spec, self._program.used)

    def load(self, number: int, member: VectorizedMember, state: Mapping[str, Any]) -> None:
        row = self._row(number)
        fill(member, row, self._built[number], state)
        self._release(number)
        self._parked[number] = row

    def close(self) -> None:
        self._rounds.close()

    # -- rows -----------------------------------------------------------------------------------------------------

    def _row(self, number: int) -> Row:
        """Return a copy of the tensors of member `number`."""
        if number in self._parked:
            return {key: tensor.clone() for key, tensor in self._parked[number].items()}
        return self._stack.row(self._rows.index(number))

    def _moved(self, row: Row) -> Row:
        return {key: tensor.to(self.device) for key, tensor in row.items()}

    def _release(self, number: int) -> None:
        """Make the row of member `number` idle, and drop the member's tensors."""
        self._parked.pop(number, None)
        if number in self._rows:
            self._rows[self._rows.index(number)] = None

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _take_rounds(self, active: Sequence[int], most: int, total: int, taken: dict[int, list[float]]) -> None:
        self._lay_out(active)
        sizes = {number: self._shared_feed.next_size(self.members[number].cursor) for number in active}
        if len(set(sizes.values())) == 1:
            laid = [self.members[number] for number in self._rows if number is not None]
            block = self._shared_feed.block(laid, most)
            left = max(total - self.members[number].step for number in active)
            factors = self._factors(self._rows, block.num_rounds, total)
            try:
                self._rounds.take(self._stack, self._spread(block), factors, left)
            finally:
                # Rounds before a failed one have changed the stack, so their losses and samples count.
                losses = self._rounds.losses
                self._shared_feed.advance(laid, len(losses))
                by_row = losses.T.tolist() if len(losses) else [[] for _ in self._rows]
                taken |= {number: by_row[row] for row, number in enumerate(self._rows) if number is not None}
            self._shared_feed.prepare(laid)
        else:
            # Some members are at the smaller last batch of an epoch: run members with equal batch sizes together.
            for size in set(sizes.values()):
                some = [number for number in active if sizes[number] == size]
                rows, members = [self._rows.index(number) for number in some], [self.members[number] for number in some]
                block = self._shared_feed.block(members, 1)
                part = self._stack.pick(rows)
                losses = self._rounds.take_plainly(part, block, self._factors(some, 1, total))
                self._stack.put_back(rows, part)
                self._shared_feed.advance(members, 1)
                taken |= dict(zip(some, losses.T.tolist(), strict=True))

    def _lay_out(self, active: Sequence[int]) -> None:
        """Put the tensors of active members into rows of the stack, and take out those of other members.

        Remove idle rows from the stack if there are enough of them.
        """
        wanted, laid = set(active), set(self._rows)
        for row, number in enumerate(self._rows):
            if number is not None and number not in wanted:
                self._parked[number] = self._stack.row(row)
                self._rows[row] = None
        coming = [number for number in active if number not in laid]
        for row in [row for row, number in enumerate(self._rows) if number is None]:
            if coming:
                self._rows[row] = coming.pop(0)
                self._stack.put(row, self._parked.pop(self._rows[row]))  # type: ignore[arg-type]
        if coming:
            self._stack = self._stack.joined(self._parked.pop(number) for number in coming)
            self._rows += coming
            self._rounds.forget()
        kept = [row for row, number in enumerate(self._rows) if number is not None]
        idle = len(self._rows) - len(kept)
        if idle and (self.device.type == "cpu" or idle * IDLE_SHARE >= len(self._rows)):
            self._stack = self._stack.pick(kept)
            self._rows = [self._rows[row] for row in kept]
            self._rounds.forget()

    def _spread(self, block: Block) -> Block:
        """Return a block with sample ids for idle rows too; the results of these rows are not used."""
        if None not in self._rows:
            return block
        laid = [row for row, number in enumerate(self._rows) if number is not None]
        ids = block.ids.new_zeros(block.num_rounds, len(self._rows), block.ids.shape[2])
        ids[:] = block.ids[:, :1]
        ids[:, laid] = block.ids
        return Block(ids, block.shared)

    def _factors(self, numbers: Sequence[int | None], num_rounds: int, total: int) -> Tensor:
        """Return the factors of the members' learning-rate schedules, by round and row.

        `numbers` has the member in each row (None for idle rows), and `total` is the number of steps for schedules.
        """
        factors = torch.ones(num_rounds, len(numbers), dtype=torch.float64)
        known: dict[tuple[int, int], float] = {}
        for row, number in enumerate(numbers):
            schedule = None if number is None else self.members[number].task.schedule
            if number is None or schedule is None:
                continue
            assert not isinstance(schedule, TorchScheduler)  # `check_stackable` refuses them
            for ahead in range(num_rounds):
                step = self.members[number].step + ahead
                key = (id(schedule), step)
                if key not in known:
                    known[key] = float(schedule(step, total))
                factors[ahead, row] = known[key]
        return factors.to(self.device)

    def _measured(self, numbers: Sequence[int]) -> dict[int, dict[str, float]]:
        if not numbers or self._evaluation is None:
            return {}
        if list(numbers) == self._rows:
            stack = self._stack
        else:
            stack = Stack.of([self._row(number) for number in numbers], self.device)
        found = self._evaluation.measure(stack)
        return {
            number: {f"valid_{name}": value for name, value in values.items()}
            for number, values in zip(numbers, found, strict=True)
        }

    # -- shared structure -----------------------------------------------------------------------------------------

    def _build(self, task: Task) -> Built:
        def made() -> Built:
            check_stackable(task)
            return build(task, self._dtype)

        return _stacking(made)

    def _require_alike(self, built: Built, number: int) -> None:
        found = difference_between(self._built[0], built)
        if found:
            raise TaskError(
                "members of a population must have the same structure",
                got=f"member {number}, where {found}",
                remedy="call manyhands.vectorized.groups(tasks) to see which of them can be stacked",
            )

    def _look_at_numbers(self, *new: Task) -> None:
        """Omit weight decay, clipping and per-member dropout rates from the program if no member needs them."""
        decays = any(built.decays for built in self._built)
        clips = any(task.clip is not None for task in (*(member.task for member in self.members), *new))
        apart = any(odds != self._odds[0] for odds in self._odds)
        program = self._program
        if (decays, clips, apart) != (program.decays, program.clips, program.own_chances):
            program.decays, program.clips, program.own_chances = decays, clips, apart
            self._rounds.forget_all()

    def _on_stream(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, run on a side stream of a GPU, because the default stream cannot be captured."""
        if self._stream is None:
            return work()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            result = work()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return result


def _stacking(work: Callable[[], Result]) -> Result:
    """Return the result of `work`; convert its errors to CannotStack, so that members are trained one by one."""
    try:
        return work()
    except (CannotStack, OutOfMemory, torch.OutOfMemoryError):
        raise
    except UsageError as error:
        why = error.rule if error.got is None else f"{error.rule}, and this has {error.got}"
        raise CannotStack(why) from error
    except Exception as error:
        raise CannotStack(describe_error(error)) from error


MOST_ROWS = 5
"""Maximum number of samples with which `learn_draws` computes the loss."""


def learn_draws(draws: LayoutFree, program: Program, data: Resident, batch_size: int) -> None:
    """Find out which random numbers the loss draws, by computing it with two batch sizes in training mode.

    `fit` does the same. Buffers and random generators are restored.

    Raises:
        CannotStack: The loss changes a Python number, which the members would share.
    """
    loss, model = program.task.loss, program.model
    assert loss is not None
    more = min(MOST_ROWS, batch_size)
    few = max(1, more - 2)
    if few == more:
        return
    batch = data.fetch(torch.arange(more, device=program.device))
    put_back = remember_state(model)
    slots = number_slots(model, loss)
    numbers, attributes = numbers_of(slots), Attributes(model)
    states, before, is_random = random_state(program.device), draws.num_draws, False

    def compute(count: int) -> None:
        nonlocal is_random
        with program.scope():
            loss(model, map_leaves(lambda leaf: leaf[:count], batch))
        is_random = is_random or draws.num_draws > before

    try:
        with left_alone(loss, program.task.model):
            draws.learn(compute, few, more)
            changed = [*attributes.advanced(), *differing(numbers, numbers_of(slots), 0.0)]
        if changed:
            raise CannotStack(f"the loss changes {changed[0]}, which every member needs for itself")
        program.is_random = is_random or draws.strayed or bool(draws.drew_on_host())
    except (UsageError, CannotStack):
        raise
    except Exception:
        return  # the first step raises an error of the user's code again
    finally:
        put_back()
        restore_random_state(states, program.device)
