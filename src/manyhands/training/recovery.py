"""Recovery: what a replica keeps in memory, so that a run goes on from its last step when others are lost or come."""

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
    """The end of a step: what the next one changes before it is sure to count."""

    step: int
    cursors: list[Cursor]
    batch: Batch | None
    buffers: list[Tensor]
    policy: dict[str, Tensor]
    """What the policy remembers of this rank: backward changes it while a step is under way."""
    draws: list[Tensor]
    """Where torch's generators stood. To ask numpy and Python as well would cost a small step a tenth of its time."""


@dataclass
class RecoveryState:
    """What outlives a world: the last step that this replica has taken, and all that it needs to go on from there."""

    checkpoint: Checkpoint | None = None
    copies: list[Checkpoint] = field(default_factory=list)
    """Of a network in parts: this rank's part and another's, of the step when they were last copied."""
    recent: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """The last losses, in case that the replica which was to report them is gone."""
    called_at: int = 0
    """The last step of which this replica's callbacks were told."""
    batches: dict[int, Batch | None] = field(default_factory=dict)
    """The batches of the last step that this replica took and of the one that was under way."""
    gave_way_at: int = 0
    """The first of many steps without a finite gradient, from which the run went back; 0 where it never did."""
    is_verified: bool = False
    """Whether the verdict on the first steps was reported."""
    goes_before: int | None = None
    """The step before which a checkpoint must be to go on from it; None for any."""

    @property
    def held(self) -> list[Checkpoint]:
        """Everything that this rank can give."""
        return [*([] if self.checkpoint is None else [self.checkpoint]), *self.copies]

    @property
    def step(self) -> int:
        """The last step that is known here."""
        return 0 if self.checkpoint is None else self.checkpoint.step


class Rollback(Exception):
    """Steps give no finite gradient any more: the run goes on from what is kept, in the same world."""


class Marker:
    """Marks the end of every step, where somebody would call the replicas together again after a loss."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._is_on = hand.world.line.recovers
        self._mark: StepSnapshot | None = None
        self._room: dict[str, Tensor] = {}

    @property
    def _generators(self) -> list[torch.Generator]:
        device = self._hand.device
        if device.type != "cuda":
            return [torch.default_generator]
        return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]

    def mark(self) -> None:
        """A step is taken and counts: where replicas go apart, once they agree."""
        hand = self._hand
        hand.is_midway = False
        if self._is_on and hand.replica.agrees:
            buffers = [buffer.clone() for buffer in hand.model.buffers()]
            draws = [generator.get_state() for generator in self._generators]
            self._mark = StepSnapshot(
                hand.num_steps, list(hand.cursors), hand.batch, buffers, self._remembered(), draws
            )

    def _remembered(self) -> dict[str, Tensor]:
        """A copy of what the policy remembers, always in the same memory: to ask for fresh one takes longer."""
        now, room = self._hand.replica.own_policy_state(), self._room
        if [(name, t.shape) for name, t in now.items()] != [(name, t.shape) for name, t in room.items()]:
            self._room = {name: tensor.detach().clone() for name, tensor in now.items()}
        elif now:
            torch._foreach_copy_(list(room.values()), [tensor.detach() for tensor in now.values()])
        return self._room

    @property
    def batches(self) -> dict[int, Batch | None]:
        """Of the step that was marked last, and of the one after it if that is under way."""
        if self._mark is None:
            return {}
        return {self._mark.step + 1: self._hand.batch, self._mark.step: self._mark.batch}

    def checkpoint(self, state: dict[str, Any]) -> Checkpoint | None:
        """What this rank holds, as it was at the last mark; None where it was in the middle of updates."""
        hand, mark = self._hand, self._mark
        if mark is None or hand.is_midway or mark.step != hand.num_steps or not hand.replica.agrees:
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
    """What a rank goes on from, and where it was found."""

    checkpoint: Checkpoint
    source: str
    recent: list[tuple[int, dict[str, float]]]
    is_part: bool


def recall(hand: Hand, kept: RecoveryState, at_least: int) -> Recalled | None:
    """The latest step that is whole in the memory of those that are here; None where there is none, or an earlier one.

    Of replicas that hold everything it is what the one that has come farthest has. Of a network in parts all of them
    must be there: each rank gets its own again, or the whole is cut anew where fewer ranks are left.
    """
    world, held = hand.world, {_offer(part): part for part in reversed(kept.held)}
    offers = world.gather_objects(list(held))
    step, shape = next(complete(offers), (-1, ()))
    if step < at_least:
        return None
    wanted = [(step, place, shape) for place in range(math.prod(shape))]
    sources = [next(rank for rank, have in enumerate(offers) if offer in have) for offer in wanted]
    recent = [entry for entry in kept.recent if world.seat.heard < entry[0] <= step]
    told = world.gather_objects(recent)[sources[0]]
    # Of two ranks with the same step one may have ended its epoch already: all go on from where the first one stands.
    stood = None if wanted[0] not in held else {key: held[wanted[0]].state[key] for key in ("cursors", "state")}
    stands = world.gather_objects(stood)[sources[0]]
    live = world.gather_objects(None if kept.checkpoint is None else _offer(kept.checkpoint))
    fits = shape == shape_of(hand.spec)
    parts: list[Any] = []
    for offer, source in zip(wanted, sources, strict=True):
        lacking = [r for r in range(world.size) if r % len(wanted) == offer[1] and offer not in offers[r]]
        part = held.get(offer)
        if lacking or not fits:
            part = share(world, part if world.rank == source else None, source)
        if offer in held and part is not None:
            # Every rank has drawn other numbers than the rest.
            part = dataclasses.replace(part, random=held[offer].random)
        if part is not None and part.policy:
            mine = held.get(offer) or held.get((step - 1, *offer[1:]))
            part = dataclasses.replace(part, policy=with_own_feedback(part.policy, {} if mine is None else mine.policy))
        parts.append(part)
    if len(parts) == 1:
        return Recalled(parts[0], f"the memory of rank {sources[0]}", told, is_part=False)
    names = f"the memory of ranks {', '.join(map(str, sources))}"
    source_text = names if set(wanted) <= set(live) else "copies that ranks keep of each other's parts"
    if fits:
        mine = parts[world.rank % len(parts)]
        mine = dataclasses.replace(mine, state={**mine.state, **stands})
        return Recalled(mine, source_text, told, is_part=True)
    if not all(part.state["joins"] for part in parts):
        return None
    return Recalled(joined(parts), source_text, told, is_part=False)


def _offer(part: Checkpoint) -> tuple[int, int, tuple[int, ...]]:
    """Of which step it is, and which part of how it was cut."""
    return part.step, part.state.get("place", 0), tuple(part.state.get("shape", ()))


def is_sound(hand: Hand) -> bool:
    """Whether this rank's parameters and the optimizers' states are numbers."""
    slots = (slot for o in hand.optimizers.values() for state in o.state.values() for slot in state.values())
    tensors = (tensor for tensor in (*hand.model.parameters(), *slots) if isinstance(tensor, Tensor))
    held = (getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors)
    return all(bool(t.isfinite().all()) for t in held if t.is_floating_point() and not t.is_meta)


def is_whole(spec: StrategySpec) -> bool:
    """Whether every rank holds the whole network."""
    return spec.num_devices == spec.replicas


def resized(spec: StrategySpec, size: int) -> StrategySpec:
    """The same strategy on another number of ranks: as many groups as fit, or one group in as many parts as there are.

    >>> resized(StrategySpec(replicas=4), 3)
    StrategySpec(replicas=3)
    """
    if spec.num_devices in (None, size):
        return spec
    group = (spec.num_devices or 1) // (spec.replicas or 1)
    if size % group == 0:
        return dataclasses.replace(spec, replicas=size // group)
    cut = spec.tensor * spec.stages
    if size % cut:
        raise StrategyError(
            f"{spec} needs a multiple of {cut} ranks (tensor x stages)",
            got=f"{size}, since others were lost",
            remedy="resume the run where there are enough devices, or with another strategy",
        )
    return dataclasses.replace(spec, replicas=1, shards=size // cut)


def eased(spec: StrategySpec, full: StrategySpec, batch_size: int) -> StrategySpec:
    """More micro-batches where fewer replicas are left, so that none takes more rows at a time than it had.

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
    """What an error says of lost peers, free of all that it held; None where it says something else."""
    if not world.line.recovers or not world.is_loss(error):
        return None
    if isinstance(error, PeerLost):
        return PeerLost(error.operation, error.line, error.who, error.detail)
    return PeerLost("a collective", "torch's own", world.line.lost, str(error))
