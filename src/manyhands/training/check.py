"""Check: the first step in float64, whole on one device against split, with a name and a reason where they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..cluster import World
from ..core import StrategySpec, Task, mix, seed_all
from ..data import as_source, check_source
from .draws import learn_draws
from .evaluation import evaluating
from .hand import Hand
from .stepping import take_step
from .trial import NUM_SAMPLES, try_loss

RELATIVE, ABSOLUTE = 1e-8, 1e-10


@dataclass
class StepRecord:
    """What one step did, on the first replica."""

    losses: dict[str, float]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    differing: list[str]
    """Names that are not equal over the replicas."""
    has_batch_norm: bool
    loss_notice: str
    num_draws: int
    """Random operations that were made layout-free."""


@dataclass(frozen=True)
class Verdict:
    """Whether a strategy gives the same first step as one device, and if not, where it differs and why.

    >>> bool(Verdict(equal=True, spec=StrategySpec()))
    True
    """

    equal: bool
    spec: StrategySpec
    first: str = ""
    """The first parameter (or buffer, or loss) that differs."""
    error: float = 0.0
    """The largest relative difference there, or overall where all are equal."""
    why: str = ""
    notes: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        if self.equal:
            said = f"equal: {self.spec} takes the same first step as one device"
            return f"{said} (largest difference {self.error:.1e}){notes}"
        return f"different: under {self.spec}, {self.first} differs by {self.error:.1e}: {self.why}{notes}"


def one_step(world: World, task: Task, spec: StrategySpec, salt: int = 0) -> StepRecord:
    """Takes the task's first step in float64, with layout-free randomness, and keeps what came out.

    `salt` changes what is drawn at random in spite of that.
    """
    hand = Hand(world, dataclasses.replace(spec, precision="fp64", deterministic=True))
    assert hand.randomness is not None
    hand.build(task)
    if not hand.model.training:
        hand.model.train()
    hand.seed(task.seed)
    gradients: dict[str, Tensor] = {}
    for optimizer in hand.optimizers.values():
        optimizer.register_step_pre_hook(_keeper(hand, gradients))
    source = as_source(task.data, collate=task.collate)
    feed = hand.make_feed(source, check_source(source, task.batch_size), shuffle=task.shuffle, seed=task.seed)
    notice = ""
    if task.loss is not None:
        with evaluating(hand.model):
            notice = try_loss(task, hand.model, feed.peek(NUM_SAMPLES), is_split=False)
        learn_draws(hand, task, feed.peek(NUM_SAMPLES))
    seed_all(mix(task.seed, hand.rank, salt))
    take_step(hand, task, next(iter(hand.one_epoch(feed))))
    hand.agree()
    record = StepRecord(
        losses={key or "loss": float(loss) for key, loss in hand.losses.items()},
        gradients={n: g.cpu() for n, g in hand.replica.gathered(gradients).items()},
        buffers={n: b.cpu().clone() for n, b in hand.replica.gathered(dict(hand.model.named_buffers())).items()},
        differing=hand.replica.differences(),
        has_batch_norm=any(isinstance(m, _BatchNorm) for m in hand.model.modules()),
        loss_notice=notice,
        num_draws=hand.randomness.num_draws,
    )
    feed.close()
    hand.close()
    return record


def compare(whole: StepRecord, again: StepRecord, parts: StepRecord, spec: StrategySpec) -> Verdict:
    """The verdict on a split step; `again` is the whole one with other random numbers."""
    notes = []
    is_random = whole.losses != again.losses
    if is_random:
        notes.append("the step draws random numbers that are not layout-free, so they differ on every replica")
    if whole.num_draws and not spec.deterministic:
        notes.append("random numbers, dropout's too, are compared as with deterministic=True; a run needs it for them")
    worst = 0.0
    for name, ours, theirs in _pairs(whole, parts):
        error = _error(ours, theirs)
        if error > RELATIVE:
            return Verdict(False, spec, name, error, _reason(whole, parts, spec, name, is_random), tuple(notes))
        worst = max(worst, error)
    if parts.differing:
        why = f"it is not equal on every replica: {', '.join(parts.differing)}; nothing synchronises it"
        return Verdict(False, spec, parts.differing[0].split(" ")[0], float("inf"), why, tuple(notes))
    return Verdict(True, spec, error=worst, notes=tuple(notes))


def _pairs(whole: StepRecord, parts: StepRecord) -> list[tuple[str, Tensor, Tensor]]:
    pairs = [
        (f"the gradient of {name}", gradient, parts.gradients[name])
        for name, gradient in whole.gradients.items()
        if name in parts.gradients
    ]
    pairs += [(f"the buffer {name}", buffer, parts.buffers[name]) for name, buffer in whole.buffers.items()]
    pairs += [(f"the value of {k}", torch.tensor(v), torch.tensor(parts.losses[k])) for k, v in whole.losses.items()]
    return pairs


def _error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    difference, size = float((a - b).abs().max()), float(a.abs().max())
    return 0.0 if difference <= ABSOLUTE else difference / max(size, 1e-30)


def _reason(whole: StepRecord, parts: StepRecord, spec: StrategySpec, name: str, is_random: bool) -> str:
    if parts.loss_notice:
        return parts.loss_notice
    if whole.has_batch_norm and spec.batch_stats == "local":
        return 'batch statistics are local to each replica; use batch_stats="sync"'
    if whole.has_batch_norm and spec.accumulate > 1:
        return "batch statistics are those of a micro-batch under accumulate; use a layer without batch statistics"
    unsynchronised = [item for item in parts.differing if item.split(" ")[0] in whole.buffers]
    if unsynchronised:
        return f"a buffer is not synchronised over the replicas: {', '.join(unsynchronised)}"
    if is_random:
        return "the step draws random numbers from a generator of its own, which differ on every replica"
    return "some operation looks at other samples of the batch, or a gradient is changed outside of the loss"


def _keeper(hand: Hand, gradients: dict[str, Tensor]) -> Callable[..., None]:
    """Keeps the first gradient that each parameter's optimizer sees."""

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = hand.replica.names[parameter]
                if parameter.grad is not None and name not in gradients:
                    gradients[name] = parameter.grad.detach().clone()

    return keep
