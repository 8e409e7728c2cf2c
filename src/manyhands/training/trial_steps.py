"""Trial steps: take a task's first steps in float64 and record losses, gradients, buffers and weights."""

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

from ..core import LayoutFree, StrategySpec, Task, default_dtype, mix, seed_all, unsaved_buffers
from ..data import check_source, source_of
from ..distributed import World, hidden_process_group
from .carried_numbers import Number, nudge, number_slots, numbers_of
from .cause import Output, Outputs
from .error_hints import explain_mistake
from .hand import Hand
from .restored_objects import left_alone
from .sample_randomness import learn_draws
from .step import take_step
from .trial import NUM_SAMPLES
from .trial_rows import Plan, choose_rows, windows

if TYPE_CHECKING:
    from ..strategies import Layout

MOST_ROWS = 256
"""Maximum number of rows per step that `check` compares."""
SHAKE = 1e-14
"""Relative perturbation of weights and gradients that shows how much network and optimizer amplify rounding."""


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
class Perturbation:
    """What a repetition of trial steps changes, to find what the results depend on."""

    salt: int = 0
    """Changes the random numbers that are not layout-free."""
    shake: float = 0.0
    """Relative amount by which weights and gradients are perturbed."""
    nudged: tuple[str, ...] = ()
    """Attributes whose numbers are changed before the second step."""


NOT_PERTURBED = Perturbation()


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
    perturbed: Perturbation = NOT_PERTURBED,
    begin: Callable[[int], None] = lambda step: None,
    keeps_outputs: bool = False,
    draws: bool = True,
) -> Record:
    """Take a task's steps on the rows of a plan with layout-free randomness, and return the results.

    `draws` is False if the steps are known to draw no random numbers; `begin` is called before every step. Module
    outputs are recorded with `keeps_outputs`, and where several ranks compute layers together.
    """
    hand = _TrialHand(world, dataclasses.replace(spec, precision=precision, deterministic=True, capture="off"))
    hand.layout = layout
    plain = torch.get_default_dtype()
    wide = torch.float64 if precision == "fp64" else plain
    group = hidden_process_group() if task.loss is not None else contextlib.nullcontext()
    with left_alone(task.loss, task.model), contextlib.closing(hand), default_dtype(wide), group:
        hand.build(task.replace(model=functools.partial(_built, task.model, plain)))
        hand.reader.seed(task.seed)
        _shake(hand.model.parameters(), perturbed.shake)
        kept = _StepRecorder(hand, perturbed.shake, task.loss)
        # Only the whole network's weights are needed for the comparison.
        first = _copied(dict(hand.model.named_parameters())) if world.size == 1 else {}
        source = source_of(task)
        feed = hand.reader.make_feed(
            source, check_source(source, task.batch_size), shuffle=task.shuffle, seed=task.seed
        )
        if draws:
            learn_draws(hand, task, feed, feed.peek(NUM_SAMPLES))
        seed_all(mix(task.seed, hand.rank, perturbed.salt))
        keeps_outputs |= spec.tensor > 1 and spec.stages == 1 and parts_of(spec) == 1
        outputs = Outputs(hand.model, hand.replica.plain) if keeps_outputs else None
        steps = []
        for number, window in enumerate(windows(source, plan, task.seed)):
            begin(number)
            if number and perturbed.nudged:
                nudge(number_slots(hand.model, task.loss), perturbed.nudged)
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


class _StepRecorder:
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
