"""Snapshots: everything that a run needs to go on, taken from a hand and put back into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core import CheckpointError, mix, random_state, restore_random_state, seed_all
from ..data import Cursor
from ..store import Checkpoint, check_matches, load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    from .hand import Hand


def take_snapshot(hand: Hand, state: dict[str, Any]) -> Checkpoint:
    """The network, optimizers, cursor, random states of all ranks, and whatever else the caller keeps."""
    replica = hand.replica
    gathered = hand.world.gather_objects(random_state(hand.device))
    random = {f"rank{rank}.{name}": value for rank, states in enumerate(gathered) for name, value in states.items()}
    return Checkpoint(
        step=hand.num_steps,
        model=hand.model.state_dict(),
        optimizers={key: optimizer_state(o, replica.names) for key, o in replica.optimizers.items()},
        state={
            "cursors": [cursor.to_dict() for cursor in hand.cursors],
            "size": hand.size,
            "spec": hand.spec.to_dict(),
            "state": state,
        },
        random=random,
        averages={} if hand.averages is None else hand.averages.state_dict(),
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
    hand.model.load_state_dict(checkpoint.model)
    if hand.averages is not None:
        if not checkpoint.averages:
            hand.notice("the checkpoint has no averaged weights: their average starts from its weights")
        hand.averages.load(checkpoint.averaged)
    for key, optimizer in replica.optimizers.items():
        load_optimizer_state(optimizer, replica.names, checkpoint.optimizers[key])
    hand.num_steps = checkpoint.step
    hand.cursors = [Cursor.from_dict(values) for values in checkpoint.state["cursors"]]
    prefix = f"rank{hand.rank}."
    states = {name.removeprefix(prefix): t for name, t in checkpoint.random.items() if name.startswith(prefix)}
    if states and checkpoint.state["size"] == hand.size:
        restore_random_state(states, hand.device)
    else:
        seed_all(mix(checkpoint.step, hand.rank))
    state: dict[str, Any] = checkpoint.state["state"]
    return state
