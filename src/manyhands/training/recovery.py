"""Recovery: what a replica keeps in memory, so that a run goes on from its last step when others are lost or come."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cluster import World
from ..core import PeerLost, StrategyError, StrategySpec, random_state
from ..data import Cursor
from ..store import Checkpoint
from .snapshot import local_snapshot, share

if TYPE_CHECKING:
    from .hand import Hand


@dataclass(frozen=True)
class Mark:
    """The end of a step: what the next one changes before it is sure to count."""

    step: int
    cursors: list[Cursor]
    buffers: list[Tensor]
    draws: list[Tensor]
    """Where torch's generators stood. To ask numpy and Python as well would cost a small step a tenth of its time."""


@dataclass
class Kept:
    """What outlives a world: the last step that this replica has taken, and all that it needs to go on from there."""

    checkpoint: Checkpoint | None = None
    recent: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """The last losses, in case that the replica which was to report them is gone."""
    called_at: int | None = None
    """The last step of which this replica's callbacks were told; None where it is new."""
    gave_way_at: int = 0
    """The first of many steps without a finite gradient, from which the run went back; 0 where it never did."""
    goes_before: int | None = None
    """The step before which a checkpoint must be to go on from it; None for any."""

    @property
    def step(self) -> int:
        """The last step that is known here."""
        return 0 if self.checkpoint is None else self.checkpoint.step


class GoBack(Exception):
    """Steps give no finite gradient any more: the run goes on from what is kept, in the same world."""


class Marker:
    """Marks the end of every step, where somebody would call the replicas together again after a loss."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._is_on = hand.world.line.recovers and is_whole(hand.spec)
        self._mark: Mark | None = None

    @property
    def _generators(self) -> list[torch.Generator]:
        device = self._hand.device
        if device.type != "cuda":
            return [torch.default_generator]
        return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]

    def mark(self) -> None:
        """A step is taken and counts."""
        hand = self._hand
        hand.is_midway = False
        if self._is_on:
            buffers = [buffer.clone() for buffer in hand.model.buffers()]
            draws = [generator.get_state() for generator in self._generators]
            self._mark = Mark(hand.num_steps, list(hand.cursors), buffers, draws)

    def checkpoint(self, state: dict[str, Any]) -> Checkpoint | None:
        """The replica as it was at the last mark; None where it has only parts, or was in the middle of updates."""
        hand, mark = self._hand, self._mark
        if mark is None or hand.is_midway or mark.step != hand.num_steps or not is_whole(hand.spec):
            return None
        with torch.no_grad():
            for buffer, before in zip(hand.model.buffers(), mark.buffers, strict=True):
                buffer.copy_(before)
        for generator, before in zip(self._generators, mark.draws, strict=True):
            generator.set_state(before)
        return local_snapshot(hand, mark.cursors, random_state(hand.device), state)


def recall(hand: Hand, kept: Kept) -> tuple[Kept, str]:
    """What the replicas go on from, and whose it is: of those that have something the one that has come farthest."""
    world = hand.world
    offers = world.gather_objects(None if kept.checkpoint is None else kept.step)
    steps = [step for step in offers if step is not None]
    if not steps:
        return Kept(), ""
    source = offers.index(max(steps))
    recent = [entry for entry in kept.recent if entry[0] > world.seat.heard]
    told = world.gather_objects(recent if world.rank == source else None)[source]
    checkpoint = share(world, kept.checkpoint if world.rank == source else None, source)
    if kept.checkpoint is not None and kept.step == checkpoint.step:
        # Every replica has drawn other numbers than the rest.
        checkpoint = dataclasses.replace(checkpoint, random=kept.checkpoint.random)
    return Kept(checkpoint, told), f"the memory of rank {source}"


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


def as_loss(world: World, error: BaseException) -> PeerLost | None:
    """What an error says of lost peers, free of all that it held; None where it says something else."""
    if not world.line.recovers or not world.is_loss(error):
        return None
    if isinstance(error, PeerLost):
        return PeerLost(error.operation, error.line, error.who, error.detail)
    return PeerLost("a collective", "torch's own", world.line.lost, str(error))
