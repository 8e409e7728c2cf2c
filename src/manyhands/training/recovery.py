"""Recovery: the state a replica keeps in memory, so that a run resumes from its last step when ranks fail or join."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import PeerLost, StrategyError, StrategySpec, random_state
from ..data import Batch, Cursor
from ..distributed import World
from ..storage import Checkpoint
from ..strategies import with_own_feedback
from .partial_state import complete, joined, part_snapshot, shape_of
from .snapshot import local_snapshot, share

if TYPE_CHECKING:
    from .hand import Hand


@dataclass(frozen=True)
class StepSnapshot:
    """The state at the end of a step that the next step changes before it is complete."""

    step: int
    cursors: list[Cursor]
    batch: Batch | None
    buffers: list[Tensor]
    policy: dict[str, Tensor]
    """This rank's part of the sync policy's state, which backward changes during a step."""
    draws: list[Tensor]
    """States of torch's generators. Reading numpy's and Python's as well would add a tenth to a small step's time."""


@dataclass
class RecoveryState:
    """The state that outlives a world: this replica's last complete step, and all it needs to resume from there."""

    checkpoint: Checkpoint | None = None
    copies: list[Checkpoint] = field(default_factory=list)
    """Under sharding: this rank's part and another rank's, as of the step when they were last copied."""
    recent: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """The latest losses, in case the replica that reports them has failed."""
    called_at: int = 0
    """The last step for which this replica's callbacks were called."""
    batches: dict[int, Batch | None] = field(default_factory=dict)
    """The batches of this replica's last complete step and of the step in progress."""
    rolled_back_at: int = 0
    """The first step of a row without finite gradients from which the run was rolled back; 0 without a rollback."""
    is_verified: bool = False
    """Whether the result of verifying the first steps was reported."""
    resume_before: int | None = None
    """Only checkpoints of earlier steps than this may be resumed from; None for any."""

    @property
    def held(self) -> list[Checkpoint]:
        """All checkpoints and parts that this rank can offer to others."""
        return [*([] if self.checkpoint is None else [self.checkpoint]), *self.copies]

    @property
    def step(self) -> int:
        """The last step in this rank's memory; 0 without one."""
        return 0 if self.checkpoint is None else self.checkpoint.step


class Rollback(Exception):
    """Raised when too many steps in a row lack a finite gradient; the run resumes from kept state in the same world."""


class Marker:
    """Takes a snapshot at the end of every step, where the launcher regroups the ranks after a failure."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._is_on = hand.world.channel.recovers
        self._mark: StepSnapshot | None = None
        self._policy_state: dict[str, Tensor] = {}

    @property
    def _generators(self) -> list[torch.Generator]:
        device = self._hand.device
        if device.type != "cuda":
            return [torch.default_generator]
        return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]

    def mark(self) -> None:
        """Take the snapshot of a completed step; under local SGD only when the replicas are synchronized."""
        hand = self._hand
        hand.current.is_midway = False
        if self._is_on and hand.replica.agrees:
            buffers = [buffer.clone() for buffer in hand.model.buffers()]
            draws = [generator.get_state() for generator in self._generators]
            self._mark = StepSnapshot(
                hand.num_steps, list(hand.reader.cursors), hand.reader.batch, buffers, self._remembered(), draws
            )

    def _remembered(self) -> dict[str, Tensor]:
        """Copy the sync policy's state into a reused buffer, which is faster than allocating a new one."""
        now, saved = self._hand.replica.own_policy_state(), self._policy_state
        if [(name, t.shape) for name, t in now.items()] != [(name, t.shape) for name, t in saved.items()]:
            self._policy_state = {name: tensor.detach().clone() for name, tensor in now.items()}
        elif now:
            torch._foreach_copy_(list(saved.values()), [tensor.detach() for tensor in now.values()])
        return self._policy_state

    @property
    def batches(self) -> dict[int, Batch | None]:
        """The batches of the last snapshot's step and of the step in progress, by step number."""
        if self._mark is None:
            return {}
        return {self._mark.step + 1: self._hand.batch, self._mark.step: self._mark.batch}

    def checkpoint(self, state: dict[str, Any]) -> Checkpoint | None:
        """Return this rank's state as of the last snapshot; None if it failed in the middle of updates."""
        hand, mark = self._hand, self._mark
        if mark is None or hand.current.is_midway or mark.step != hand.num_steps or not hand.replica.agrees:
            return None
        if not is_whole(hand.spec):
            return part_snapshot(hand, mark.cursors, mark.buffers, mark.policy, self._random(mark), state)
        with torch.no_grad():
            for buffer, before in zip(hand.model.buffers(), mark.buffers, strict=True):
                buffer.copy_(before)
        return local_snapshot(hand, mark.cursors, mark.policy, self._random(mark), state)

    def _random(self, mark: StepSnapshot) -> dict[str, Tensor]:
        for generator, before in zip(self._generators, mark.draws, strict=True):
            generator.set_state(before)
        return random_state(self._hand.device)


@dataclass(frozen=True)
class Recalled:
    """The state a rank resumes from, and a description of where it was found."""

    checkpoint: Checkpoint
    source: str
    recent: list[tuple[int, dict[str, float]]]
    is_part: bool


def recall(hand: Hand, kept: RecoveryState, at_least: int) -> Recalled | None:
    """Return the latest step that is complete in the memory of the present ranks; None if it is before `at_least`.

    Where every replica holds the whole network, the state of the most advanced one is used. A sharded network needs all
    of its parts: each rank gets its own back, or the parts are joined and resharded where fewer ranks are left.
    """
    world, held = hand.world, {_offer(part): part for part in reversed(kept.held)}
    offers = world.gather_objects(list(held))
    step, shape = next(complete(offers), (-1, ()))
    if step < at_least:
        return None
    wanted = [(step, place, shape) for place in range(math.prod(shape))]
    sources = [next(rank for rank, have in enumerate(offers) if offer in have) for offer in wanted]
    recent = [entry for entry in kept.recent if world.rank_info.reported_step < entry[0] <= step]
    recent_losses = world.gather_objects(recent)[sources[0]]
    # Of two ranks at the same step one may have ended its epoch already: all resume from the first source's position.
    positions = None if wanted[0] not in held else {key: held[wanted[0]].state[key] for key in ("cursors", "state")}
    positions = world.gather_objects(positions)[sources[0]]
    live = world.gather_objects(None if kept.checkpoint is None else _offer(kept.checkpoint))
    fits = shape == shape_of(hand.spec)
    parts: list[Any] = []
    for offer, source in zip(wanted, sources, strict=True):
        lacking = [r for r in range(world.size) if r % len(wanted) == offer[1] and offer not in offers[r]]
        part = held.get(offer)
        if lacking or not fits:
            part = share(world, part if world.rank == source else None, source)
        if offer in held and part is not None:
            # Every rank has its own random state.
            part = dataclasses.replace(part, random=held[offer].random)
        if part is not None and part.policy:
            mine = held.get(offer) or held.get((step - 1, *offer[1:]))
            part = dataclasses.replace(part, policy=with_own_feedback(part.policy, {} if mine is None else mine.policy))
        parts.append(part)
    if len(parts) == 1:
        return Recalled(parts[0], f"the memory of rank {sources[0]}", recent_losses, is_part=False)
    names = f"the memory of ranks {', '.join(map(str, sources))}"
    source_text = names if set(wanted) <= set(live) else "copies that ranks keep of each other's parts"
    if fits:
        mine = parts[world.rank % len(parts)]
        mine = dataclasses.replace(mine, state={**mine.state, **positions})
        return Recalled(mine, source_text, recent_losses, is_part=True)
    if not all(part.state["joins"] for part in parts):
        return None
    return Recalled(joined(parts), source_text, recent_losses, is_part=False)


def _offer(part: Checkpoint) -> tuple[int, int, tuple[int, ...]]:
    """Return the step of a checkpoint, its part's index, and the shape of the partition."""
    return part.step, part.state.get("place", 0), tuple(part.state.get("shape", ()))


def is_sound(hand: Hand) -> bool:
    """Return whether this rank's parameters and optimizer state are all finite."""
    slots = (slot for o in hand.optimizers.values() for state in o.state.values() for slot in state.values())
    tensors = (tensor for tensor in (*hand.model.parameters(), *slots) if isinstance(tensor, Tensor))
    held = (getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors)
    return all(bool(t.isfinite().all()) for t in held if t.is_floating_point() and not t.is_meta)


def is_whole(spec: StrategySpec) -> bool:
    """Return whether every rank holds the whole network."""
    return spec.num_devices == (spec.replicas or 1) * spec.context


def resized(spec: StrategySpec, size: int) -> StrategySpec:
    """Return the strategy for another number of ranks: as many groups as fit, or one group sharded over all ranks.

    >>> resized(StrategySpec(replicas=4), 3)
    StrategySpec(replicas=3)
    """
    if spec.num_devices in (None, size):
        return spec
    group = (spec.num_devices or 1) // (spec.replicas or 1)
    if size % group == 0:
        return dataclasses.replace(spec, replicas=size // group)
    if spec.context > 1:
        # Sequences can be split over any number of ranks.
        return dataclasses.replace(spec, replicas=1, context=size)
    per_replica = spec.tensor * spec.stages
    if size % per_replica:
        raise StrategyError(
            f"{spec} needs a multiple of {per_replica} ranks (tensor x stages)",
            got=f"{size} after other ranks failed",
            remedy="resume the run with enough devices, or with another strategy",
        )
    return dataclasses.replace(spec, replicas=1, shards=size // per_replica)


def eased(spec: StrategySpec, full: StrategySpec, batch_size: int) -> StrategySpec:
    """Accumulate over more micro-batches where fewer replicas are left, so that none gets more rows at a time.

    >>> eased(StrategySpec(replicas=3), StrategySpec(replicas=4), 16).accumulate
    2
    """

    def rows(accumulate: int, num_parts: int) -> int:
        return math.ceil(math.ceil(batch_size / accumulate) / num_parts)

    had, accumulate = rows(full.accumulate, full.num_parts), spec.accumulate
    while rows(accumulate, spec.num_parts) > had:
        accumulate += 1
    return dataclasses.replace(spec, accumulate=accumulate)


def as_loss(world: World, error: BaseException) -> PeerLost | None:
    """Convert an error that stems from failed peers to a `PeerLost` without references; None for other errors."""
    if not world.channel.recovers or not world.is_loss(error):
        return None
    if isinstance(error, PeerLost):
        return PeerLost(error.operation, error.line, error.who, error.detail)
    return PeerLost("a collective", "a module of torch", world.channel.lost, str(error))
