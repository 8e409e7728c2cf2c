"""Snapshots: everything that a run needs to go on, taken from a hand and put back into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core import MESH_ORDER, CheckpointError, StrategySpec, mix, random_state, restore_random_state, seed_all
from ..data import Cursor
from ..store import Checkpoint, check_matches, load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    from .hand import Hand


def take_snapshot(hand: Hand, state: dict[str, Any]) -> Checkpoint:
    """The network, optimizers, cursor, random states of all ranks, and whatever else the caller keeps."""
    replica = hand.replica
    # Whole tensors, by the names of the plain module: any other layout can go on from them.
    whole = _mapped(replica.whole)
    gathered = hand.world.gather_objects(random_state(hand.device))
    random = {f"rank{rank}.{name}": value for rank, states in enumerate(gathered) for name, value in states.items()}
    return Checkpoint(
        step=hand.num_steps,
        model=whole(hand.model.state_dict()),
        optimizers={key: whole(optimizer_state(o, replica.names)) for key, o in replica.optimizers.items()},
        state={
            "cursors": [cursor.to_dict() for cursor in hand.cursors],
            "spec": hand.spec.to_dict(),
            "state": state,
        },
        random=random,
        averages={} if hand.averages is None else whole(hand.averages.state_dict()),
        policy=replica.policy_state(),
    )


def restore_snapshot(hand: Hand, checkpoint: Checkpoint) -> dict[str, Any]:
    """Puts a checkpoint into a hand; on another number of replicas the random states are made anew."""
    replica = hand.replica
    check_matches(checkpoint, hand.model)
    if set(checkpoint.optimizers) != set(replica.optimizers):
        raise CheckpointError(
            f"the checkpoint has optimizers {sorted(checkpoint.optimizers)}",
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
    for key, optimizer in replica.optimizers.items():
        saved = checkpoint.optimizers[key]
        slots = {
            name: {
                slot: replica.part_for(value, parameters[name]) if isinstance(value, Tensor) else value
                for slot, value in values.items()
            }
            for name, values in saved["state"].items()
        }
        load_optimizer_state(optimizer, replica.names, {**saved, "state": slots})
    notice = replica.load_policy_state(checkpoint.policy)
    if notice:
        hand.notice(notice)
    hand.num_steps = checkpoint.step
    hand.cursors = [Cursor.from_dict(values) for values in checkpoint.state["cursors"]]
    prefix = f"rank{hand.world.rank}."
    states = {name.removeprefix(prefix): t for name, t in checkpoint.random.items() if name.startswith(prefix)}
    if states and _axes(checkpoint.state["spec"]) == _axes(hand.spec.to_dict()):
        restore_random_state(states, hand.device)
    else:
        seed_all(mix(checkpoint.step, hand.rank))
    state: dict[str, Any] = checkpoint.state["state"]
    return state


def _axes(spec: dict[str, Any]) -> list[int]:
    """How many ranks a layout has along each axis."""
    return [spec.get(axis, 1) for axis in MESH_ORDER]


def _changes(checkpoint: Checkpoint, hand: Hand) -> Iterator[str]:
    """What is not as it was when the checkpoint was written, besides the number of devices."""
    before, now = checkpoint.state["spec"], hand.spec.to_dict()
    for name in ("precision", "deterministic", "accumulate", "batch_stats", "sync", "recompute"):
        default = getattr(StrategySpec(), name)
        if before.get(name, default) != now.get(name, default):
            yield f"the run goes on with {name}={now.get(name, default)}; it had {before.get(name, default)}"
    if checkpoint.averages and hand.averages is None:
        yield "the run goes on without the average of its weights, because the task has no ema now"


def _mapped(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A function of tensors on all tensors of nested dicts, in one order on every rank."""

    def apply(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        return {key: apply(child) for key, child in value.items()} if isinstance(value, dict) else value

    return apply
