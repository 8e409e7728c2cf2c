"""Snapshots: take everything that a run needs to resume from a hand, and restore it into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import MESH_ORDER, CheckpointError, StrategySpec, mix, random_state, restore_random_state, seed_all
from ..data import Cursor
from ..distributed import World, message
from ..storage import Checkpoint, check_matches, load_optimizer_state, optimizer_state
from .embedding_tables import require_no_rows

if TYPE_CHECKING:
    from .hand import Hand


def take_snapshot(hand: Hand, state: dict[str, Any]) -> Checkpoint:
    """Return a checkpoint of network, optimizers, cursors, the random states of all ranks, and the caller's `state`."""
    replica = hand.replica
    # Whole tensors, by the names of the plain module: every other layout can load them.
    whole = replica.gathered
    gathered = hand.world.gather_objects(random_state(hand.device))
    random = {f"rank{rank}.{name}": value for rank, states in enumerate(gathered) for name, value in states.items()}
    return Checkpoint(
        step=hand.num_steps,
        model=whole(hand.model.state_dict()),
        optimizers={key: whole(optimizer_state(o, replica.names)) for key, o in replica.optimizers.items()},
        state={
            "cursors": [cursor.to_dict() for cursor in hand.reader.cursors],
            "spec": hand.spec.to_dict(),
            "state": state,
        },
        random=random,
        averages={} if hand.averages is None else whole(hand.averages.state_dict()),
        policy=replica.policy_state(),
    )


def local_snapshot(
    hand: Hand,
    cursors: Sequence[Cursor],
    policy: dict[str, Tensor],
    random: Mapping[str, Tensor],
    state: dict[str, Any],
) -> Checkpoint:
    """Return a checkpoint of a replica that holds the whole network, without collectives: copies on the CPU."""
    copied = _mapped(lambda tensor: tensor.detach().to("cpu", copy=True))
    replica = hand.replica
    return Checkpoint(
        step=hand.num_steps,
        model=copied(dict(hand.model.state_dict())),
        optimizers={key: copied(optimizer_state(o, replica.names)) for key, o in replica.optimizers.items()},
        state={
            "cursors": [cursor.to_dict() for cursor in cursors],
            "size": hand.size,
            "spec": hand.spec.to_dict(),
            "state": state,
        },
        random={f"rank{hand.rank}.{name}": tensor for name, tensor in random.items()},
        averages={} if hand.averages is None else copied(dict(hand.averages.state_dict())),
        policy=copied(policy),
    )


def share(world: World, checkpoint: Checkpoint | None, source: int) -> Checkpoint:
    """Broadcast the source rank's checkpoint to all ranks."""
    structure, own = _split_structure(checkpoint)
    structure = world.gather_objects(structure)[source]
    tensors = own if world.rank == source else _empty_tensors(structure)
    for tensor in tensors:
        if tensor.numel():
            world.broadcast(tensor.view(-1).view(torch.uint8), source)
    return _joined(structure, tensors)


def exchange(world: World, own: Checkpoint, step_away: int) -> Checkpoint:
    """Send a checkpoint `step_away` ranks ahead in a ring; return the one received from `step_away` ranks before."""
    structure, tensors = _split_structure(own)
    source = (world.rank - step_away) % world.size
    peer_structure = world.gather_objects(structure)[source]
    received = _empty_tensors(peer_structure)
    going = [
        world.start_send(tensor.view(-1).view(torch.uint8), (world.rank + step_away) % world.size, tag)
        for tag, tensor in enumerate(tensors)
        if tensor.numel()
    ]
    coming = [
        world.start_receive(tensor.view(-1).view(torch.uint8), source, tag)
        for tag, tensor in enumerate(received)
        if tensor.numel()
    ]
    for pending in (*coming, *going):
        pending.wait()
    return _joined(peer_structure, received)


def _split_structure(checkpoint: Checkpoint | None) -> tuple[Any, list[Tensor]]:
    """Split a checkpoint into a small picklable structure with slots, and the tensors for those slots."""
    tensors: list[Tensor] = []

    def aside(tensor: Tensor) -> _TensorPlaceholder:
        tensors.append(tensor.detach().cpu().contiguous())
        return _TensorPlaceholder(len(tensors) - 1, tuple(tensor.shape), tensor.dtype)

    parts = None if checkpoint is None else {f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}
    return _mapped(aside)(parts), tensors


def _empty_tensors(structure: Any) -> list[Tensor]:
    slots: list[_TensorPlaceholder] = []
    _mapped(slots.append, _TensorPlaceholder)(structure)
    return [torch.empty(slot.shape, dtype=slot.dtype) for slot in slots]


def _joined(structure: Any, tensors: Sequence[Tensor]) -> Checkpoint:
    return Checkpoint(**_mapped(lambda slot: tensors[slot.index], _TensorPlaceholder)(structure))


@message
@dataclass(frozen=True)
class _TensorPlaceholder:
    """Placeholder of a tensor that is sent separately."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def restore_snapshot(hand: Hand, checkpoint: Checkpoint) -> dict[str, Any]:
    """Load a checkpoint into a hand and return the loop's state; on another layout random states are reseeded."""
    replica = hand.replica
    if not hand.spec.servers:
        require_no_rows(checkpoint)
    check_matches(checkpoint, hand.model)
    if set(checkpoint.optimizers) != set(replica.optimizers):
        raise CheckpointError(
            f"the task must have the optimizers of the checkpoint, {sorted(checkpoint.optimizers)}",
            got=sorted(replica.optimizers),
            remedy="resume with the task that wrote it",
        )
    parameters = {name: parameter for parameter, name in replica.names.items()}
    replica.load(checkpoint.model)
    for text in _changes(checkpoint, hand):
        hand.notice(text)
    if hand.averages is not None:
        if not checkpoint.averages:
            hand.notice("the checkpoint has no averaged weights: their average starts from its weights")
        hand.averages.load(replica.parts(checkpoint.averaged))
    has_schedule = _has_schedule(checkpoint.state["state"])
    for key, optimizer in replica.optimizers.items():
        saved = checkpoint.optimizers[key]
        slots = {
            name: {
                slot: replica.part_for(value, parameters[name], name) if isinstance(value, Tensor) else value
                for slot, value in values.items()
            }
            for name, values in saved["state"].items()
        }
        load_optimizer_state(optimizer, replica.names, {**saved, "state": slots}, has_schedule=has_schedule)
    return stand_where(hand, checkpoint, draws_on=_axes(checkpoint.state["spec"]) == _axes(hand.spec.to_dict()))


def stand_where(hand: Hand, checkpoint: Checkpoint, *, draws_on: bool) -> dict[str, Any]:
    """Set a hand to a checkpoint's step, cursors and policy state; return the loop's state.

    `draws_on`: also restore this rank's random state, where the checkpoint has it; otherwise reseed.
    """
    notice = hand.replica.load_policy_state(checkpoint.policy)
    if notice:
        hand.notice(notice)
    hand.num_steps = checkpoint.step
    hand.reader.cursors = [Cursor.from_dict(values) for values in checkpoint.state["cursors"]]
    prefix = f"rank{hand.world.rank}."
    states = {name.removeprefix(prefix): t for name, t in checkpoint.random.items() if name.startswith(prefix)}
    if states and draws_on:
        restore_random_state(states, hand.device)
    else:
        seed_all(mix(checkpoint.step, hand.rank))
    return dict(checkpoint.state["state"])


def _has_schedule(state: Any) -> bool:
    """Return whether the state that a loop saves has that of a scheduler of torch, which counts `last_epoch`."""
    if isinstance(state, dict):
        return "last_epoch" in state or any(map(_has_schedule, state.values()))
    return isinstance(state, list) and any(map(_has_schedule, state))


def _axes(spec: dict[str, Any]) -> list[int]:
    """Return the number of ranks along each axis of a layout."""
    return [spec.get(axis, 1) for axis in MESH_ORDER]


def _changes(checkpoint: Checkpoint, hand: Hand) -> Iterator[str]:
    """Describe options that differ from those the checkpoint was written with, other than the number of devices."""
    before, now = checkpoint.state["spec"], hand.spec.to_dict()
    for name in ("precision", "deterministic", "accumulate", "batch_stats", "sync", "recompute"):
        default = getattr(StrategySpec(), name)
        if before.get(name, default) != now.get(name, default):
            yield f"the run continues with {name}={now.get(name, default)}; it had {before.get(name, default)}"
    if checkpoint.averages and hand.averages is None:
        yield "the run continues without the average of its weights, because the task has no ema now"


def _mapped(function: Callable[[Any], Any], kind: type = Tensor) -> Callable[[Any], Any]:
    """Lift a function of tensors to nested dicts, visiting tensors in the same order on every rank."""

    def apply(value: Any) -> Any:
        if isinstance(value, kind):
            return function(value)
        return {key: apply(child) for key, child in value.items()} if isinstance(value, dict) else value

    return apply
