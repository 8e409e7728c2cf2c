"""Check: compare two steps in float64, whole on one device and split, and name where and why they differ."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core import (
    Attributes,
    DataError,
    LayoutFree,
    Mean,
    StrategySpec,
    Task,
    default_dtype,
    mix,
    seed_all,
    unsaved_buffers,
)
from ..data import check_source, source_of
from ..distributed import NullWorld, World, culprit
from .carried_numbers import Number, differing, nudge, number_slots, numbers_of
from .cause import CallRecorder, ForwardChanges, Output, Outputs, first_difference, first_not_finite, first_other_output
from .error_hints import explain_mistake
from .hand import Hand
from .restored_objects import left_alone, remember_held
from .sample_randomness import learn_draws
from .stepping import take_step
from .trial import LOSS, NUM_SAMPLES
from .trial_rows import Plan, choose_rows, windows

if TYPE_CHECKING:
    from ..strategies import Layout

MOST_ROWS = 256
"""Maximum number of rows per step that `check` compares."""
SHAKE = 1e-14
"""Relative perturbation of weights and gradients that shows how much network and optimizer amplify rounding."""
MAGNIFIED = 30.0
"""A difference up to this multiple of the perturbation's effect counts as rounding."""
MOST_MAGNIFIED = 1e-3
"""Differences of the first gradient above this are not reported as equal, even where rounding may explain them."""


@dataclass(frozen=True)
class Tolerance:
    """How far two computations in the same precision may differ."""

    gradient: float
    """Relative to the largest value of a tensor."""
    floor: float
    """Relative to the largest value of all tensors, as a gradient that should be zero consists of rounding."""
    update: float
    """Of an update, relative to the largest one; wider, as optimizers divide by small numbers."""


TOLERANCES = {"fp64": Tolerance(1e-8, 1e-12, 1e-5), "fp32": Tolerance(1e-3, 1e-5, 2e-2)}
MOST_UNIT = 1e-6
"""Largest machine epsilon with which two computations can be compared; float32 has 1.2e-7."""


@dataclass
class StepRecord:
    """The results of one step, on the first replica."""

    losses: dict[str, float]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    weights: dict[str, Tensor]
    """Parameters after the update."""
    differing: list[str]
    """Names of tensors that are not equal over the replicas."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Numbers in plain attributes of the network and of the loss."""
    moved: list[str] = field(default_factory=list)
    """Trained parameters that changed before the update, on one device."""
    replaced: list[str] = field(default_factory=list)
    """Trained parameters whose memory the update replaced, on one device."""


@dataclass
class Record:
    """The results of a trial's steps."""

    steps: list[StepRecord]
    weights: dict[str, Tensor]
    """Parameters before the first step."""
    batch_norms: list[str]
    num_draws: int
    """Number of random operations that were made layout-free."""
    strayed: bool
    """Whether an operation drew random numbers that are not layout-free."""
    precision: str = "fp64"
    has_gradients: bool = True
    """Whether gradients are available; those of parameter servers are not."""
    unit: float = 0.0
    """Machine epsilon of operations that compute in less than float64 in spite of float64 weights; 0 if unknown."""
    outputs: list[Output] = field(default_factory=list)
    """Outputs of modules in the first step, where several ranks compute layers together."""
    unsaved: frozenset[str] = frozenset()
    """Names of buffers that checkpoints do not contain, which may be caches that grow."""
    drawn_on_host: str = ""
    """Which of Python's and numpy's generators the steps used: "random", "numpy.random" or ""."""

    @property
    def draws(self) -> bool:
        """Whether the steps drew random numbers."""
        return bool(self.num_draws) or self.strayed

    @property
    def tolerance(self) -> Tolerance:
        """How far another computation in the same precision may differ."""
        if not self.unit:
            return TOLERANCES[self.precision]
        return Tolerance(8 * self.unit, self.unit / 10, min(1e4 * self.unit, 0.1))

    @property
    def shake(self) -> float:
        """Relative perturbation of weights that shows how much rounding is amplified."""
        return self.unit / 10 or SHAKE * (1.0 if self.precision == "fp64" else 1e7)


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a strategy's steps with one device: equal, or where they differ and why.

    >>> bool(Verdict("equal", StrategySpec()))
    True
    """

    outcome: str
    """"equal", "different", or "not verified" where the two could not be compared."""
    spec: StrategySpec
    first: str = ""
    """The first parameter (or buffer, or loss) that differs."""
    error: float = 0.0
    """The largest relative difference there, or overall where all are equal."""
    why: str = ""
    remedy: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def equal(self) -> bool:
        """Whether the steps were compared and are equal."""
        return self.outcome == "equal"

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        remedy = f"; {self.remedy}" if self.remedy else ""
        if self.equal:
            summary = f"equal: {self.spec} takes the same first steps as one device"
            return f"{summary} (largest difference {self.error:.1e}){notes}"
        if self.outcome == "not verified":
            return f"not verified: {self.spec} could not be compared with one device, because {self.why}{remedy}{notes}"
        return f"different: under {self.spec}, {self.first} differs by {self.error:.1e}: {self.why}{remedy}{notes}"


class _TrialHand(Hand):
    """A hand for trial steps: it reports nothing and ignores stop requests."""

    def __init__(self, world: World, spec: StrategySpec) -> None:
        super().__init__(world, spec)
        self.current.votes = False

    def notice(self, text: str) -> None:
        pass

    def log(self, **values: Any) -> None:
        pass


def plan_of(task: Task, spec: StrategySpec, most: int = MOST_ROWS) -> Plan:
    """Return the rows on which a task is compared under a definite spec."""
    source = source_of(task)
    return choose_rows(source, check_source(source, task.batch_size), parts_of(spec), task.seed, most)


def with_data(task: Task) -> Task:
    """Return the task with its data function called once; a function that returns iterators stays as it is."""
    if not inspect.isfunction(task.data):
        return task
    made = task.data()
    return task if isinstance(made, Iterator) else task.replace(data=made)


def parts_of(spec: StrategySpec) -> int:
    """Return the number of parts of a batch, over replicas, accumulation and pipeline micro-batches."""
    workers = spec.replicas or 1 if spec.servers else spec.num_parts
    return workers * spec.accumulate * spec.microbatches


def take_steps(
    world: World,
    task: Task,
    spec: StrategySpec,
    plan: Plan,
    *,
    precision: str = "fp64",
    layout: Layout | None = None,
    salt: int = 0,
    shake: float = 0.0,
    begin: Callable[[int], None] = lambda step: None,
    keeps_outputs: bool = False,
    draws: bool = True,
    nudged: Sequence[str] = (),
) -> Record:
    """Take a task's steps on the rows of a plan with layout-free randomness, and return the results.

    `draws` is False if the steps are known to draw no random numbers; `salt` changes those that are not layout-free;
    `shake` perturbs weights and gradients by a relative amount; `begin` is called before every step. The numbers in
    attributes named by `nudged` are changed before the second step. Module outputs are recorded with `keeps_outputs`,
    and where several ranks compute layers together.
    """
    hand = _TrialHand(world, dataclasses.replace(spec, precision=precision, deterministic=True, capture="off"))
    hand.layout = layout
    plain = torch.get_default_dtype()
    wide = torch.float64 if precision == "fp64" else plain
    with left_alone(task.loss), contextlib.closing(hand), default_dtype(wide):
        hand.build(task.replace(model=functools.partial(_built, task.model, plain)))
        hand.reader.seed(task.seed)
        _shake(hand.model.parameters(), shake)
        kept = _Kept(hand, shake, task.loss)
        # Only the whole network's weights are needed for the comparison.
        first = _copied(dict(hand.model.named_parameters())) if world.size == 1 else {}
        source = source_of(task)
        feed = hand.reader.make_feed(
            source, check_source(source, task.batch_size), shuffle=task.shuffle, seed=task.seed
        )
        if draws:
            learn_draws(hand, task, feed, feed.peek(NUM_SAMPLES))
        seed_all(mix(task.seed, hand.rank, salt))
        keeps_outputs |= spec.tensor > 1 and spec.stages == 1 and parts_of(spec) == 1
        outputs = Outputs(hand.model, hand.replica.plain) if keeps_outputs else None
        steps = []
        for number, window in enumerate(windows(source, plan, task.seed)):
            begin(number)
            if number and nudged:
                nudge(number_slots(hand.model, task.loss), nudged)
            batch = feed.part(window)
            hand.reader.take(batch)
            try:
                take_step(hand, task, batch)
            except Exception as error:
                explain_mistake(error, batch.data, batch.ids)
                raise
            hand.agree()
            steps.append(kept.record())
            if outputs is not None:
                outputs.close()
        feed.close()
        assert isinstance(hand.randomness, LayoutFree)
        return Record(
            steps=steps,
            weights=first,
            batch_norms=[name for name, part in hand.model.named_modules() if has_batch_stats(part)],
            num_draws=hand.randomness.num_draws,
            strayed=hand.randomness.strayed,
            precision=precision,
            outputs=[] if outputs is None else outputs.kept,
            unsaved=frozenset(unsaved_buffers(hand.model)),
            drawn_on_host=hand.randomness.drew_on_host(),
        )


def record_of(states: Sequence[Mapping[str, Tensor]], losses: Sequence[float], whole: Record) -> Record:
    """Return a record of steps of which only weights and losses are known, to compare it with a whole record."""
    steps = []
    for state, loss, ours in zip(states, losses, whole.steps, strict=True):
        weights, buffers = ({n: state[n] for n in named if n in state} for named in (ours.weights, ours.buffers))
        # Buffers that are not in the checkpoint cannot be compared.
        steps.append(StepRecord({"loss": loss}, ours.gradients, {**ours.buffers, **buffers}, weights, []))
    return dataclasses.replace(whole, steps=steps, has_gradients=False)


class _Kept:
    """Records the gradients with which a replica's optimizers are called."""

    def __init__(self, hand: Hand, shake: float, loss: Callable[..., Any] | None) -> None:
        self._hand, self._loss, self._gradients = hand, loss, {}  # type: ignore[var-annotated]
        self._before = self._whole_weights()
        self._moved: list[str] = []
        self._replaced: list[str] = []
        update = hand.replica.update

        def keep(key: str, where: Tensor | None = None) -> None:
            self._keep(key, shake)
            places = {name: p.data_ptr() for name, p in self._hand.replica.groups[key].items() if name in self._before}
            update(key, where)
            group = self._hand.replica.groups[key]
            self._replaced += [name for name, place in places.items() if group[name].data_ptr() != place]

        hand.replica.update = keep  # type: ignore[method-assign]

    def _keep(self, key: str, shake: float) -> None:
        replica = self._hand.replica
        group = {name: p for name, p in replica.groups[key].items() if not p.is_meta}
        trained = [name for name, p in group.items() if p.requires_grad and name in self._before]
        self._moved += [name for name in trained if not _equal(group[name].detach().cpu(), self._before[name])]
        here = [name for name, parameter in group.items() if parameter.grad is not None]
        # Gathering shards is a collective, so a rank without a gradient takes part with zeros.
        used = set().union(*self._hand.world.gather_objects(here))
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in group.items() if n in used}
        _shake((parameter.grad for parameter in group.values() if parameter.grad is not None), shake)
        self._gradients |= _copied(replica.gathered({name: _dense(g.detach()) for name, g in gradients.items()}))

    def _whole_weights(self) -> dict[str, Tensor]:
        return _copied(dict(self._hand.model.named_parameters())) if self._hand.world.size == 1 else {}

    def record(self) -> StepRecord:
        """Return the results of the last step."""
        hand, gradients, moved, replaced = self._hand, self._gradients, self._moved, self._replaced
        self._gradients, self._moved, self._replaced, self._before = {}, [], [], self._whole_weights()
        return StepRecord(
            losses={key or "loss": float(loss) for key, loss in hand.losses.items()},
            gradients=gradients,
            buffers=_copied(hand.replica.gathered(dict(hand.model.named_buffers()))),
            weights=_copied(hand.replica.gathered(dict(hand.model.named_parameters()))),
            differing=hand.replica.differences(),
            numbers=numbers_of(number_slots(hand.model, self._loss)),
            moved=moved,
            replaced=replaced,
        )


def _copied(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: _dense(tensor.detach()).cpu().clone() for name, tensor in named.items() if not tensor.is_meta}


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_dense(a), b) or bool(
        (a.isnan() == b.isnan()).all() and torch.equal(a[~a.isnan()], b[~b.isnan()])
    )


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


@torch.no_grad()
def _shake(values: Any, amount: float) -> None:
    if amount:
        generator = torch.Generator().manual_seed(1)
        for value in values:
            if value.is_floating_point() and value.layout == torch.strided:
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device, value.dtype)
                value.mul_(1 + amount * noise)


def _built(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Build a network with the initial values of a real run, which are drawn in the usual precision."""
    with default_dtype(dtype):
        return make()


def has_batch_stats(part: nn.Module) -> bool:
    """Return whether a layer normalizes by batch statistics."""
    return isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The difference of a tensor between two records."""

    step: int
    what: str
    error: float
    limit: float
    has_nan: bool = False
    """Whether both are NaN in the same places."""

    @property
    def is_real(self) -> bool:
        """Whether the difference exceeds the tolerance."""
        return not self.error <= self.limit


def compare(whole: Record, parts: Record) -> Iterator[Difference]:
    """Compare two records by step: gradients, buffers, losses, and weights after the update."""
    tolerance = whole.tolerance
    before = whole.weights
    earlier: dict[str, Tensor] = {}
    unsettled: dict[str, Tensor] = {}
    for number, (ours, theirs) in enumerate(zip(whole.steps, parts.steps, strict=True)):
        scale = _largest(ours.gradients)
        for name in ours.weights if parts.has_gradients else ():
            a, b = _pair(ours.gradients, theirs.gradients, name)
            error, has_nan = _error(a, b, tolerance.floor / tolerance.gradient * scale)
            yield Difference(number, f"the gradient of {name}", error, tolerance.gradient, has_nan)
        for name in dict.fromkeys((*ours.buffers, *theirs.buffers)):
            a, b = ours.buffers.get(name), theirs.buffers.get(name)
            if name in whole.unsaved:
                a, b = _common_part(a, b)
            error, has_nan = _error(a, b, 1e-3)
            yield Difference(number, f"the buffer {name}", error, tolerance.gradient, has_nan)
        for name, value in ours.losses.items():
            error, has_nan = _error(torch.tensor(value), torch.tensor(theirs.losses.get(name, float("nan"))), 1e-3)
            yield Difference(number, f"the value of {name}", error, tolerance.gradient, has_nan)
        moved = _largest({name: ours.weights[name] - before[name] for name in ours.weights})
        for name, weight in ours.weights.items():
            noise = unsettled[name] = _is_rounding(*_pair(ours.gradients, theirs.gradients, name), scale, tolerance)
            if number:
                noise = unsettled[name] = noise.maximum(earlier[name])
            update = _largest({name: weight - before[name]}) + 1e-2 * moved
            size = max(update, 1e-9 * _largest({name: weight}))
            error, has_nan = _error(weight, theirs.weights.get(name), size, fixed=True, without=noise)
            yield Difference(number, f"the update of {name}", error, tolerance.update, has_nan)
        earlier, unsettled = unsettled, {}
        before = ours.weights


def _common_part(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the values that two sizes of a cache have in common."""
    if a is None or b is None or a.dim() != b.dim():
        return a, b
    common = tuple(slice(0, min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
    return a[common], b[common]


def _pair(ours: dict[str, Tensor], theirs: dict[str, Tensor], name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return both gradients of a parameter; a missing one is zeros, as its update is compared in any case."""
    a, b = ours.get(name), theirs.get(name)
    zeros = None if a is None and b is None else torch.zeros_like(a if a is not None else b)  # type: ignore[arg-type]
    return (zeros if a is None else a), (zeros if b is None else b)


def _is_rounding(a: Tensor | None, b: Tensor | None, scale: float, tolerance: Tolerance) -> Tensor:
    """Return a mask of gradients that are only rounding, which sign-based optimizers turn into full-size updates."""
    if a is None or b is None or a.shape != b.shape:
        return torch.zeros(())
    return ((a.abs() <= 1e3 * tolerance.floor * scale) & (b.abs() <= 1e3 * tolerance.floor * scale) & (a != b)).float()


def _largest(named: dict[str, Tensor]) -> float:
    sizes = [float(t.abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in named.values() if t.numel()]
    return max(sizes, default=0.0)


def _error(
    a: Tensor | None, b: Tensor | None, least: float, *, fixed: bool = False, without: Tensor | None = None
) -> tuple[float, bool]:
    """Return the largest difference relative to the size of `a` (at least `least`), and whether both have NaN."""
    if a is None and b is None:
        return 0.0, False
    if a is None or b is None or a.shape != b.shape or a.is_complex() != b.is_complex():
        return float("inf"), False
    if not a.numel():
        return 0.0, False
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    nan = a.isnan()
    if not torch.equal(nan, b.isnan()):
        return float("inf"), False
    apart = torch.where(nan | (a == b), 0.0, (a - b).abs())
    if without is not None:
        apart = apart * (1 - without)
    size = least if fixed else max(_largest({"": a}), least)
    return float(apart.max()) / max(size, 1e-300), bool(nan.any())


def fails_in_parts(
    task: Task, spec: StrategySpec, plan: Plan, whole: Record, world: World | None = None
) -> Verdict | None:
    """Return the verdict on a loss that raises an error only on parts of a batch; None where it does not.

    It runs on one device, where an error leaves no rank waiting. Networks with batch statistics are skipped: they may
    need more rows than a part has, unless they are synchronized.
    """
    if parts_of(spec) == 1 or whole.batch_norms or task.loss is None:
        return None
    try:
        alone = StrategySpec(accumulate=parts_of(spec))
        take_steps(world or NullWorld(), task, alone, plan, precision=whole.precision)
    except DataError:
        # A batch that cannot be split is refused with micro-batches; ranks collate their own samples.
        if spec.accumulate * spec.microbatches > 1:
            raise
        return None
    except Exception as error:
        return failed_in_parts(spec, error)
    return None


def not_linear(task: Task, spec: StrategySpec, plan: Plan, whole: Record, world: World) -> Verdict | None:
    """Return the verdict on a backward that does not scale with the loss; None where it does.

    A worker of parameter servers computes the gradient of its part's mean, a multiple of the part's share in the whole
    batch's gradient. A hook that clamps gradients, for instance, changes the two differently.
    """
    loss, factor = task.loss, float(parts_of(spec))
    if loss is None or factor == 1:
        return None

    def multiplied(model: nn.Module, batch: Any) -> Any:
        value = loss(model, batch)
        return Mean(value.total * factor, value.count) if isinstance(value, Mean) else value * factor

    def first_gradients(task: Task) -> dict[str, Tensor]:
        return take_steps(world, task, StrategySpec(), plan[:1], precision=whole.precision).steps[0].gradients

    try:
        # Clipping by the norm, which is not proportional either, applies to the sum over all workers.
        unclipped = whole.steps[0].gradients if task.clip is None else first_gradients(task.replace(clip=None))
        scaled = first_gradients(task.replace(loss=multiplied, clip=None))
    except Exception:
        # A loss of another form; what matters raises in the comparison of parts.
        return None
    relative = 1e-6 if whole.precision == "fp64" else 1e-2
    for name, gradient in unclipped.items():
        error, size = (scaled[name] / factor - gradient).abs().max(), gradient.abs().max()
        if error > relative * size + 1e-12:
            why = "its backward is not proportional to the loss: a hook or an autograd.Function clamps gradients, say"
            remedy = "change gradients in the optimizer's step, or use mh.Mirrored()"
            return Verdict("different", spec, f"the gradient of {name}", float(error / size), why, remedy)
    return None


def changes_parameters(task: Task, spec: StrategySpec, plan: Plan, whole: Record, world: World) -> Verdict | None:
    """Return the verdict on a forward that changes trained parameters itself; None where it does not.

    A worker of parameter servers computes on its own copy, of which servers get the gradients only.
    """
    if task.loss is None:
        return None
    watch = ForwardChanges()
    try:
        record = take_steps(world, watch.watched(task), StrategySpec(), plan, precision=whole.precision)
    except Exception:
        # What matters raises in the comparison of parts.
        return None
    moved = [name for step in record.steps for name in step.moved]
    if moved:
        why = f"forward changes {next(iter(watch.changed), moved[0])} itself, and servers get gradients only"
        return Verdict("different", spec, moved[0], float("inf"), why, PARAMETERS)
    if watch.unfrozen:
        why = f"forward sets requires_grad of {watch.unfrozen[0]}, and servers update what is trained at the start"
        remedy = "freeze parameters in the model function, detach outputs in place of freezing, or use mh.Mirrored()"
        return Verdict("different", spec, watch.unfrozen[0].split(" ")[0], float("inf"), why, remedy)
    return None


def keeps_state(task: Task, spec: StrategySpec, plan: Plan, whole: Record, world: World) -> Verdict | None:
    """Return the verdict on calls that depend on what earlier ones left outside of buffers; None if they do not.

    How many parts of a step each worker of parameter servers computes is not fixed, and it may be called first in a
    later step. The second step is repeated here as a first call would compute it.
    """
    built: list[nn.Module] = []
    undo: list[Callable[[], None]] = []
    changed: list[str] = []

    def build() -> nn.Module:
        built.append(task.model())
        return built[-1]

    def begin(step: int) -> None:
        if step == 0:
            attributes = Attributes(built[-1])
            undo[:] = [lambda: changed.extend(attributes.changed()), attributes.put_back, remember_held(task.loss)]
        else:
            for one in undo:
                one()

    if task.loss is None or len(whole.steps) < 2:
        return None
    try:
        fresh = take_steps(
            world, task.replace(model=build), StrategySpec(), plan, precision=whole.precision, begin=begin
        )
    except Exception:
        # What matters raises in the comparison of parts.
        return None
    real = next((difference for difference in compare(whole, fresh) if difference.is_real), None)
    if real is None or whole.strayed:
        return None
    where = f"{changed[0]} of the network" if changed else "what the loss refers to"
    why = (
        f"calls of the loss read what earlier ones left in {where}, every worker keeps its own, and how many parts of "
        "the steps a worker computes is not fixed"
    )
    return Verdict("different", spec, real.what, real.error, why, NUMBER)


def failed_in_parts(spec: StrategySpec, error: Exception) -> Verdict:
    """Return the verdict on an error that occurs on a part of a batch but not on the whole."""
    why = f"it raises {type(error).__name__}: {error}, on a part of the batch, at {culprit(error)}"
    return Verdict("different", spec, "the loss", float("inf"), why, LOSS)


def judge(
    task: Task, spec: StrategySpec, plan: Plan, whole: Record, parts: Record, world: World | None = None
) -> Verdict:
    """Return the verdict on split steps; where they differ, repeat the whole ones to find the reason."""
    alone = world or NullWorld()
    verdict = _judge_tensors(task, spec, plan, whole, parts, alone)
    # A number that some ranks do not change may also be why the tensors differ.
    is_explained = not verdict.equal and verdict.remedy != OTHER
    found = None if is_explained else _judge_numbers(task, spec, plan, whole, parts, alone)
    if found is None and verdict.equal:
        from .later_steps import judge_later

        found = judge_later(
            task, spec, plan, whole, alone, lambda task, plan, *both: _judge_tensors(task, spec, plan, *both, alone)
        )
    return verdict if found is None else found


def _judge_numbers(
    task: Task, spec: StrategySpec, plan: Plan, whole: Record, parts: Record, alone: World
) -> Verdict | None:
    """Return the verdict on numbers in attributes that later steps start from and that differ; None if none do."""
    tolerance = 1e-6 if whole.precision == "fp64" else 1e-3
    pairs = list(zip(whole.steps, parts.steps, strict=True))
    names = {name for ours, theirs in pairs for name in differing(ours.numbers, theirs.numbers, tolerance)}
    if len(pairs) < 2:
        return None
    if spec.servers:
        # A worker computes as many parts of a step as it gets to, so that even counts differ.
        names |= set(differing(whole.steps[0].numbers, whole.steps[1].numbers, tolerance))
    if not names:
        return None
    try:
        after = take_steps(alone, task, StrategySpec(), plan, precision=whole.precision, nudged=sorted(names))
        carried = differing(whole.steps[1].numbers, after.steps[1].numbers, tolerance)
    except Exception:
        carried = list(names)
    # A later step may depend on such a number even if the first two do not.
    name = next((name for name in whole.steps[0].numbers if name in names and name in carried), "")
    if not name:
        return None
    ours, theirs = whole.steps[-1].numbers[name], parts.steps[-1].numbers.get(name, 0)
    why = f"it is {theirs:.6g} instead of {ours:.6g} after {len(pairs)} steps, and later steps start from it"
    if spec.servers and ours == theirs:
        why = "every worker changes its own in each part that it computes, and how many those are is not fixed"
    error = abs(theirs - ours) / max(abs(ours), 1e-12)
    return Verdict("different", spec, f"the attribute {name}", error, why, NUMBER)


def _judge_tensors(task: Task, spec: StrategySpec, plan: Plan, whole: Record, parts: Record, alone: World) -> Verdict:
    """Return the verdict on gradients, buffers, losses and weights."""
    found = list(compare(whole, parts))
    notes: list[str] = []
    if whole.num_draws and not spec.deterministic:
        notes.append("random numbers, dropout's too, are compared as with deterministic=True; a run needs it for them")
    worst = max((difference.error for difference in found if not difference.what.startswith("the update")), default=0.0)
    real = next((difference for difference in found if difference.is_real), None)
    if real is not None and whole.precision == "fp64":
        whole = dataclasses.replace(whole, unit=_unit_inside(task, plan, alone))
        found = list(compare(whole, parts)) if whole.unit else found
        real = next((difference for difference in found if difference.is_real), None)
        if real is None and whole.unit > MOST_UNIT:
            why = f"operations of the loss compute in a type that rounds to {whole.unit:.1e}, whatever the weights are"
            return Verdict("not verified", spec, why=why, notes=tuple(notes))

    def again(**changes: Any) -> Record:
        return take_steps(alone, task, StrategySpec(), plan, precision=whole.precision, **changes)

    if real is None:
        nan = next((difference for difference in found if difference.has_nan), None)
        if nan is not None:
            why = f"{nan.what} has NaN on one device too, first in {_source_of_nan(task, plan, alone) or 'backward'}"
            return Verdict("not verified", spec, nan.what, why=why, notes=tuple(notes))
        return _same_everywhere(parts, Verdict("equal", spec, error=worst, notes=tuple(notes)))
    if any(difference.is_real for difference in compare(whole, again(salt=1))):
        notes.append("the step draws random numbers that are not layout-free, so they differ on every replica")
        return Verdict("different", spec, real.what, real.error, RANDOM, notes=tuple(notes))
    shaken = {(d.step, d.what): d.error for d in compare(whole, again(shake=whole.shake))}
    magnified = [d for d in found if d.is_real and d.error <= MAGNIFIED * shaken[d.step, d.what]]
    real = next((d for d in found if d.is_real and d not in magnified), None)
    if real is None:
        most = max(magnified, key=lambda difference: difference.error)
        if any(d.step == 0 and not d.what.startswith("the update") and d.error > MOST_MAGNIFIED for d in magnified):
            why = f"rounding alone changes {most.what} by {shaken[most.step, most.what]:.1e} on one device"
            return Verdict("not verified", spec, most.what, most.error, why, notes=tuple(notes))
        notes.append(f"{most.what} differs by {most.error:.1e}, as much as rounding changes it on one device")
        return _same_everywhere(parts, Verdict("equal", spec, error=worst, notes=tuple(notes)))
    why, remedy = _reason(task, spec, plan, whole, parts, real, alone)
    return Verdict("different", spec, real.what, real.error, why, remedy, tuple(notes))


def _unit_inside(task: Task, plan: Plan, alone: World) -> float:
    """Return the largest machine epsilon of a loss's operations if some use a dtype below float64; else 0."""
    if task.loss is None:
        return 0.0
    operations = CallRecorder()
    take_steps(alone, operations.watched(task), StrategySpec(), plan[:1])
    types = {value.dtype for call in operations.calls for operation in call for value in operation.values}
    units = [torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point or dtype.is_complex]
    unit = max(units, default=0.0)
    return unit if unit > torch.finfo(torch.float64).eps else 0.0


def _same_everywhere(parts: Record, verdict: Verdict) -> Verdict:
    """Return the verdict on equal steps, or "different" if the replicas do not all hold the same."""
    differing = next((step.differing for step in parts.steps if step.differing), [])
    if not differing:
        return verdict
    name = differing[0].split(" ")[0]
    why, remedy = f"it is not equal on every replica: {', '.join(differing)}; nothing synchronizes it", BUFFER
    if name in parts.steps[0].weights:
        why = f"updates are not equal on every replica: {', '.join(differing[:5])}"
        remedy = "let the optimizer draw no random numbers, and change parameters in its step alone"
    return dataclasses.replace(verdict, outcome="different", first=name, error=float("inf"), why=why, remedy=remedy)


# -- reasons ----------------------------------------------------------------------------------------------------------

RANDOM = "the step draws random numbers from a separate generator, which differ on every replica"
SAMPLES = (
    "use an operation of each sample by itself (LayerNorm or GroupNorm in place of batch statistics), torch's own "
    "BatchNorm, whose statistics are synchronized, or a strategy that does not split batches"
)
BUFFER = "make its update a mean over samples, keep it out of forward, or use a strategy that does not split batches"
NUMBER = (
    "register it as a buffer (register_buffer), which is synchronized, pass it as an input, or use a strategy that "
    "does not split batches; if it is only recorded, verify=False skips the comparison"
)
PARAMETERS = (
    "change parameters in the optimizer's step (nn.Embedding without max_norm, for instance), or use a strategy that "
    "does not split batches and weights"
)
OTHER = "use another strategy, mh.Mirrored() say, and report this network: the strategy should have refused it"
MICRO = (
    'batch_stats="micro" takes them of each micro-batch, as a loop in plain PyTorch does; GroupNorm or LayerNorm need '
    "none; accumulate=1 and microbatches=1 do not split a batch"
)


def _reason(
    task: Task,
    spec: StrategySpec,
    plan: Plan,
    whole: Record,
    parts: Record,
    found: Difference,
    alone: World,
) -> tuple[str, str]:
    """Return why a tensor differs, and a remedy."""
    if whole.batch_norms and spec.batch_stats == "local":
        return 'batch statistics are local to each replica; use batch_stats="sync"', ""
    if whole.batch_norms and spec.accumulate * spec.microbatches > 1:
        return f"batch statistics are those of a micro-batch under accumulate ({whole.batch_norms[0]})", MICRO
    if whole.batch_norms and spec.servers:
        return f"batch statistics are those of each worker's part of a batch ({whole.batch_norms[0]})", SAMPLES
    if spec.tensor > 1 and not _differs_in_parts(task, spec, plan, whole, alone):
        return _of_tensor_ranks(task, spec, plan, whole, parts, found, alone)
    if (changed := _of_forward(task, spec, plan, whole, alone)) is not None:
        return changed
    # In later steps, weights differ that an earlier one updated otherwise.
    plans = [] if task.loss is None else [plan[: step + 1] for step in range(found.step + 1)]
    cause = next(filter(None, (_cause(task, spec, one, whole.precision, alone) for one in plans)), "")
    unsynchronized = [
        item for item in parts.steps[found.step].differing if item.split(" ")[0] in whole.steps[0].buffers
    ]
    if unsynchronized and not (cause and found.what.startswith("the gradient")):
        return f"a buffer is not synchronized over the replicas: {', '.join(unsynchronized)}", BUFFER
    if cause and " of " in cause.split(" at ")[0]:
        return f"{cause} looks at other samples of the batch", SAMPLES
    if cause:
        rule = "a loss must be a mean over the batch's samples, or mh.mean(total, count)"
        return f"{cause} gives another result on parts of the batch than on all of it: {rule}", LOSS
    if found.what.startswith("the gradient") and (scaled := not_linear(task, spec, plan, whole, alone)) is not None:
        return scaled.why, scaled.remedy
    return _of_parameters(task, spec, plan, whole, alone) or _of_the_strategy(spec, found, task, whole.drawn_on_host)


def _of_parameters(task: Task, spec: StrategySpec, plan: Plan, whole: Record, alone: World) -> tuple[str, str] | None:
    """Return reason and remedy where forward changes parameters itself, or the optimizer replaces their memory."""
    replaced = [name for step in whole.steps for name in step.replaced]
    if (changed := _of_forward(task, spec, plan, whole, alone)) is not None:
        return changed
    if replaced:
        why = (
            f"the optimizer's step replaces the memory of {replaced[0]} (p.data = ...) in place of changing its values"
        )
        return why, "write p.data.copy_(...) or p.add_(...) in the step, or use mh.Mirrored()"
    return None


def _of_forward(task: Task, spec: StrategySpec, plan: Plan, whole: Record, alone: World) -> tuple[str, str] | None:
    """Return reason and remedy where forward or the loss changes parameters, trained or not, by itself."""
    if task.loss is None:
        return None
    watch = ForwardChanges()
    take_steps(alone, watch.watched(task), StrategySpec(), plan, precision=whole.precision)
    moved = [name for step in whole.steps for name in step.moved]
    where = next(iter((*watch.changed, *moved)), "")
    return (f"forward changes {where} itself, which {spec} does not synchronize", PARAMETERS) if where else None


def _differs_in_parts(task: Task, spec: StrategySpec, plan: Plan, whole: Record, alone: World) -> bool:
    """Return whether splitting the batch on one device already shows a difference."""
    if parts_of(spec) == 1:
        return False
    apart = take_steps(alone, task, StrategySpec(accumulate=parts_of(spec)), plan, precision=whole.precision)
    return any(difference.is_real for difference in compare(whole, apart))


def _of_tensor_ranks(
    task: Task, spec: StrategySpec, plan: Plan, whole: Record, parts: Record, found: Difference, alone: World
) -> tuple[str, str]:
    """Return the first module whose output differs under tensor parallelism, as a reason, and a remedy."""
    if not found.what.startswith(("the gradient", "the value")):
        return _of_parameters(task, spec, plan, whole, alone) or _of_the_strategy(spec, found, task)
    where = f"where {spec.tensor} ranks compute its layers together"
    module = ""
    if parts.outputs:
        again = take_steps(alone, task, StrategySpec(), plan[:1], precision=whole.precision, keeps_outputs=True)
        module = first_other_output(again.outputs, parts.outputs)
    if module:
        return f"forward of {module} returns something else {where}", _replicate(module.split(" ")[0])
    owner = found.what.removeprefix("the gradient of ").rpartition(".")[0] if "gradient" in found.what else ""
    seen = "every module returns the same, but " if parts.outputs else ""
    return f"{seen}backward of {owner or 'the network'} computes another gradient {where}", _replicate(owner)


def _replicate(name: str) -> str:
    layout = f'layout={{"{name}": "replicate"}} has every rank compute all of it; ' if name and name != "the" else ""
    return f"{layout}mh.Mirrored() and mh.Sharded() compute layers whole; report this network, which should be the same"


def _of_the_strategy(spec: StrategySpec, found: Difference, task: Task, drawn: str = "") -> tuple[str, str]:
    """Return reason and remedy for a difference that splitting the batch on one device does not show."""
    if drawn and spec.stages > 1:
        why = f"a partitioned network is traced once, and the trace repeats the numbers that {drawn} drew then"
        return why, "draw numbers with torch, compute both branches, or use mh.Mirrored() or mh.Sharded()"
    if found.what.startswith("the update"):
        return f"gradients are equal, but the optimizer computes another update under {spec}", OTHER
    if found.what.startswith("the buffer"):
        return "forward changes the buffer in a way that depends on how the batch is split", BUFFER
    if spec.num_parts * spec.accumulate * spec.microbatches > 1 and task.loss is None:
        return (
            "some operation looks at other samples of the batch, or a gradient is changed outside of the loss",
            SAMPLES,
        )
    return f"{spec} computes something else than one device there, or a gradient is changed outside of the loss", OTHER


def _cause(task: Task, spec: StrategySpec, plan: Plan, precision: str, alone: World) -> str:
    """Return the first operation that differs when the batch is split on one device; "" where none does."""
    calls = []
    try:
        for accumulate in (1, max(2, parts_of(spec))):
            operations = CallRecorder()
            take_steps(
                alone,
                operations.watched(task),
                StrategySpec(accumulate=accumulate),
                plan,
                precision=precision,
                begin=lambda step, kept=operations.calls: kept.clear(),  # type: ignore[misc]
            )
            calls.append(operations.calls)
    except Exception:
        return ""
    rows, count = len(plan[-1]), len(calls[1])
    sizes = [rows // count + (part < rows % count) for part in range(count)]
    return first_difference(calls[0][0], calls[1], sizes) if count > 1 else ""


def _source_of_nan(task: Task, plan: Plan, alone: World) -> str:
    """Return the first operation of the whole step with a result that is not finite."""
    if task.loss is None:
        return ""
    operations = CallRecorder()
    take_steps(alone, operations.watched(task), StrategySpec(), plan)
    return next(filter(None, map(first_not_finite, operations.calls)), "")
