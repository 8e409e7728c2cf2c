"""Population: many tasks of one structure, trained side by side as one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..cluster import resolve
from ..core import LayoutFree, StrategySpec, Task, TaskError, UsageError, as_spec
from .build import Built, build, row_of
from .chances import chances
from .course import Block, Course
from .evaluation import Evaluation
from .grouping import check_stackable, difference_between
from .learning import learn_draws
from .member import DONE, FAILED, STOPPED, TRAINING, Member
from .program import Program
from .rounds import Rounds
from .stack import Row, Stack
from .states import fill, state_of

Result = TypeVar("Result")
Report = Callable[[int, int, dict[str, float]], None]
"""Hears of a member's number, its step, and what was measured of it: `loss`, `valid_loss`, `valid_…`."""
IDLE_SHARE = 4
"""On a GPU, where another size means another recording, the stack shrinks when one row in so many is idle."""


class Population:
    """Trains tasks that differ in hyper-parameters, seeds and the order of their data as one program.

    Each member computes what its task alone would with `deterministic=True`: its own first weights, order of samples,
    random numbers, schedule and clipping. A member whose loss is not finite fails alone. `stop` frees a member's place
    and `replace` fills it with another task, which starts at its own first step.

    - `tasks`: as `groups` has found them alike; others are refused with the reason;
    - `strategy`: precision and capture of one device;
    - `device`: where they live; by default what this machine has;
    - `epochs`, `steps`: how far every member goes by itself, which schedules need to know.

    >>> net = lambda: torch.nn.Linear(4, 1)
    >>> data = torch.randn(64, 4), torch.randn(64, 1)
    >>> def task(lr): return Task(
    ...     model=net, loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr), data=data, batch_size=16)
    >>> population = Population([task(lr) for lr in (0.01, 0.1)], device="cpu", epochs=2)
    >>> population.train()
    >>> [(member.step, member.status) for member in population.members]
    [(8, 'done'), (8, 'done')]
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        strategy: StrategySpec | str | None = None,
        *,
        device: Any = None,
        epochs: int = 1,
        steps: int | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.spec = as_spec(strategy) if strategy is not None else StrategySpec()
        _require_one_device(self.spec, len(tasks))
        place = resolve(device, 1)[0][0]
        self.device = place.torch
        self._dtype = torch.float64 if self.spec.precision == "fp64" else None
        self._notice = notice
        self._built = [self._build(task) for task in tasks]
        for index, built in enumerate(self._built[1:], 1):
            self._require_alike(built, index)
        self.members = [Member(task) for task in tasks]
        """In the order of the tasks, for good; `replace` puts another task into a member's place."""
        first = self._built[0]
        rows = [row_of(built) for built in self._built]
        self._odds = [chances(built.model) for built in self._built]
        self._built = [dataclasses.replace(built, model=first.model) for built in self._built]
        """Their networks differ in numbers alone, which lie in the stack, so one of them is kept."""
        self._draws = LayoutFree(self.device)
        self._course = Course(tasks[0], self.device, self._dtype)
        self._program = Program(first, self.spec, self.device, self._draws)
        learn_draws(self._draws, self._program, self._course.data, self._course.batch_size)
        self._stack = Stack.of(rows, self.device)
        self._rows: list[int | None] = list(range(len(tasks)))
        """Which member lies in each row; None where nobody does."""
        self._parked: dict[int, Row] = {}
        """Members that take no steps."""
        self._rounds = Rounds(self._program, self._course.data, self.spec, notice)
        self._evaluation = (
            Evaluation(tasks[0], self._program, place, self._dtype) if tasks[0].valid is not None else None
        )
        self.total = steps if steps is not None else self._course.num_steps * epochs
        """Steps after which a member is done."""
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._look_at_numbers()

    @property
    def num_steps_in_epoch(self) -> int:
        """Batches of a pass over the data."""
        return self._course.num_steps

    # -- training -------------------------------------------------------------------------------------------------

    def train(self, until: int | None = None, *, every: int | None = None, report: Report | None = None) -> None:
        """Trains every member to its own step `until`, by default to its end.

        Members are measured after every pass over the data, or after `every` steps, and where they end; `report` hears
        of it, and may call `stop` and `replace`. One that has failed is reported with what it had last.
        """
        goal = self.total if until is None else min(until, self.total)
        pace = every or self._course.num_steps
        while active := [n for n, m in enumerate(self.members) if m.is_training and m.step < goal]:
            most = min(min(goal - self.members[n].step, pace - self.members[n].step % pace) for n in active)
            self._take(active, most)
            due = [n for n in active if self._is_due(self.members[n], goal, pace)]
            self._measure([n for n in due if self.members[n].status != FAILED])
            for number in due:
                member = self.members[number]
                if report is not None:
                    report(number, member.step, dict(member.metrics))

    def step(self, count: int = 1) -> Tensor:
        """Takes so many steps of every member that trains; returns losses by step and member, NaN where none was."""
        curves = torch.full((count, len(self.members)), torch.nan, dtype=torch.float64)
        done = 0
        while done < count and (active := [n for n, m in enumerate(self.members) if m.is_training]):
            most = min(count - done, *(self.total - self.members[n].step for n in active))
            taken = self._take(active, most)
            for number, losses in taken.items():
                curves[done : done + len(losses), number] = torch.tensor(losses, dtype=torch.float64)
            done += max(map(len, taken.values()))
        return curves

    def evaluate(self) -> list[dict[str, float]]:
        """The loss and the metrics of every member on the task's `valid`, as `valid_loss`, `valid_…`."""
        if self._evaluation is None:
            raise TaskError("members are measured on valid=", got="tasks without it", remedy="give them valid=")
        found = self._on_stream(lambda: self._measured(list(range(len(self.members)))))
        return [found[number] for number in range(len(self.members))]

    def close(self) -> None:
        """Lets recordings go, and ends what compiling left running; members stay as they are."""
        self._rounds.close()

    def __enter__(self) -> Population:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- members --------------------------------------------------------------------------------------------------

    def stop(self, member: int) -> None:
        """Ends a member; what it has learnt stays, and its place is free."""
        found = self._member(member)
        if found.is_training:
            found.status = STOPPED

    def replace(self, member: int, task: Task) -> None:
        """Puts another task into a member's place; it begins at its own first step."""
        self._member(member)
        built = self._build(task)
        self._require_alike(built, member)
        self._release(member)
        self._parked[member] = self._moved(row_of(built))
        self._odds[member] = chances(built.model)
        self._built[member] = dataclasses.replace(built, model=self._program.model)
        self.members[member] = Member(task)
        self._look_at_numbers()

    def state(self, member: int) -> dict[str, Any]:
        """All that a member needs to go on, by the names of its plain network: the fields of a checkpoint of `fit`."""
        found = self._member(member)
        return state_of(found, self._row(member), self._built[member], self.spec)

    def load(self, member: int, state: Mapping[str, Any]) -> None:
        """Lets a member go on from what `state` gave, here or elsewhere, or from a checkpoint of `fit`."""
        found, row = self._member(member), self._row(member)
        fresh = Member(found.task)
        fill(fresh, row, self._built[member], state)
        self._release(member)
        self._parked[member] = row
        fresh.status = DONE if fresh.step >= self.total else TRAINING
        self.members[member] = fresh

    def model(self, member: int) -> torch.nn.Module:
        """A member's network by itself, on the CPU, with its averaged weights where it has some."""
        state = self.state(member)
        model = self._build(self.members[member].task).model
        model.load_state_dict({**state["model"], **state["averages"]})
        return model

    @property
    def num_bytes(self) -> int:
        """What all members take on the device, besides what a step needs while it is computed."""
        return self._stack.bytes_each * len(self._rows)

    def _member(self, number: int) -> Member:
        if not 0 <= number < len(self.members):
            raise UsageError(f"members are 0 to {len(self.members) - 1}", got=number, remedy="name one of them")
        return self.members[number]

    def _row(self, number: int) -> Row:
        """A copy of what a member holds."""
        if number in self._parked:
            return {key: tensor.clone() for key, tensor in self._parked[number].items()}
        return self._stack.row(self._rows.index(number))

    def _moved(self, row: Row) -> Row:
        return {key: tensor.to(self.device) for key, tensor in row.items()}

    def _release(self, number: int) -> None:
        """Gives a member's row up, and what it holds."""
        self._parked.pop(number, None)
        if number in self._rows:
            self._rows[self._rows.index(number)] = None

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _take(self, active: Sequence[int], most: int) -> dict[int, list[float]]:
        """Takes at most so many rounds of some members; returns the losses of each."""
        taken = self._on_stream(lambda: self._take_rounds(active, most))
        for number, losses in taken.items():
            member = self.members[number]
            member.hear(losses, skips=self._program.skips)
            if member.status == FAILED:
                self._notice(f"member {number} stops: {member.reason}")
            if member.is_training and member.step >= self.total:
                member.status = DONE
        return taken

    def _take_rounds(self, active: Sequence[int], most: int) -> dict[int, list[float]]:
        self._lay_out(active)
        sizes = {number: self._course.next_size(self.members[number].cursor) for number in active}
        if len(set(sizes.values())) == 1:
            laid = [self.members[number] for number in self._rows if number is not None]
            block = self._course.block(laid, most)
            left = max(self.total - self.members[number].step for number in active)
            factors = self._factors(self._rows, block.num_rounds)
            losses = self._rounds.take(self._stack, self._spread(block), factors, left)
            self._course.advance(laid, block.num_rounds)
            self._course.prepare(laid)
            by_row = losses.T.tolist()
            taken = {number: by_row[row] for row, number in enumerate(self._rows) if number is not None}
        else:
            # Some are at the end of a pass, with a smaller batch: members with batches of one size go together.
            taken = {}
            for size in set(sizes.values()):
                some = [number for number in active if sizes[number] == size]
                rows, members = [self._rows.index(number) for number in some], [self.members[number] for number in some]
                block = self._course.block(members, 1)
                part = self._stack.pick(rows)
                losses = self._rounds.take_plainly(part, block, self._factors(some, 1))
                self._stack.put_back(rows, part)
                self._course.advance(members, 1)
                taken |= dict(zip(some, losses.T.tolist(), strict=True))
        return taken

    def _lay_out(self, active: Sequence[int]) -> None:
        """Gives rows to those that take steps, and to nobody else as far as that is worth it."""
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
        """A block with samples for idle rows too; what they learn, nobody asks."""
        if None not in self._rows:
            return block
        laid = [row for row, number in enumerate(self._rows) if number is not None]
        ids = block.ids.new_zeros(block.num_rounds, len(self._rows), block.ids.shape[2])
        ids[:] = block.ids[:, :1]
        ids[:, laid] = block.ids
        return Block(ids, block.shared)

    def _factors(self, numbers: Sequence[int | None], num_rounds: int) -> Tensor:
        """What schedules make of learning rates, by round and row."""
        factors = torch.ones(num_rounds, len(numbers), dtype=torch.float64)
        known: dict[tuple[int, int], float] = {}
        for row, number in enumerate(numbers):
            schedule = None if number is None else self.members[number].task.schedule
            if number is None or schedule is None:
                continue
            for ahead in range(num_rounds):
                step = self.members[number].step + ahead
                key = (id(schedule), step)
                if key not in known:
                    known[key] = float(schedule(step, self.total))
                factors[ahead, row] = known[key]
        return factors.to(self.device)

    # -- measuring ------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_due(member: Member, goal: int, pace: int) -> bool:
        return not member.is_training or member.step >= goal or member.step % pace == 0

    def _measure(self, numbers: Sequence[int]) -> None:
        measured = self._on_stream(lambda: self._measured(numbers)) if self._evaluation is not None else {}
        for number in numbers:
            member = self.members[number]
            member.metrics = {**member.take_mean(), **measured.get(number, {})}

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

    # -- what they share ------------------------------------------------------------------------------------------

    def _build(self, task: Task) -> Built:
        check_stackable(task)
        return build(task, self._dtype)

    def _require_alike(self, built: Built, number: int) -> None:
        found = difference_between(self._built[0], built)
        if found:
            raise TaskError(
                "members of a population have the same structure",
                got=f"member {number}, where {found}",
                remedy="manyhands.population.groups(tasks) says which of them go together",
            )

    def _look_at_numbers(self) -> None:
        """Leaves out what no member asks for."""
        decays = any(built.decays for built in self._built)
        clips = any(member.task.clip is not None for member in self.members)
        apart = any(odds != self._odds[0] for odds in self._odds)
        program = self._program
        if (decays, clips, apart) != (program.decays, program.clips, program.own_chances):
            program.decays, program.clips, program.own_chances = decays, clips, apart
            self._rounds.forget_all()

    def _on_stream(self, work: Callable[[], Result]) -> Result:
        """On a GPU, on a stream of our own: the default one cannot be recorded."""
        if self._stream is None:
            return work()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            result = work()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return result


def _require_one_device(spec: StrategySpec, num_tasks: int) -> None:
    if num_tasks == 0:
        raise UsageError("a population has members", got="no tasks", remedy="pass at least one")
    if (spec.replicas, spec.shards, spec.tensor, spec.stages, spec.accumulate) != (1,) * 5 or spec.servers:
        raise UsageError(
            "a population lives on one device, and its batches are not cut",
            got=str(spec),
            remedy="pass a strategy with precision and capture alone",
        )
