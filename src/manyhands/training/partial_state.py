"""In-memory snapshots of a rank's part of a sharded network, and how a run resumes from such parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import MESH_ORDER, StrategySpec
from ..data import Cursor
from ..distributed import World
from ..storage import Checkpoint, load_optimizer_state, optimizer_state
from .snapshot import exchange, stand_where

if TYPE_CHECKING:
    from .hand import Hand

COPY_EVERY = 100
"""Steps between two copies of parts that only one rank holds."""


def num_places(spec: StrategySpec) -> int:
    """Return the number of parts of a replica, whose ranks are consecutive; those of a context hold the same."""
    return (spec.num_devices or 1) // ((spec.replicas or 1) * spec.context)


def shape_of(spec: StrategySpec) -> tuple[int, ...]:
    """Return how a replica is partitioned along each axis, independent of the number of replicas."""
    return tuple(spec.axes.get(axis, 1) for axis in MESH_ORDER if axis not in ("replicas", "context"))


def part_snapshot(
    hand: Hand,
    cursors: Sequence[Cursor],
    buffers: Sequence[Tensor],
    policy: Mapping[str, Tensor],
    random: Mapping[str, Tensor],
    state: dict[str, Any],
) -> Checkpoint:
    """Return this rank's part of all that a run needs to resume: copies on the CPU, without collectives."""
    sharded: list[str] = []
    joins = True

    def copied(path: str, tensor: Tensor) -> Tensor:
        nonlocal joins
        if hasattr(tensor, "placements"):
            sharded.append(path)
            joins = joins and all(place.is_shard(0) for place in tensor.placements)
        return _local(tensor).detach().to("cpu", copy=True)

    def kept(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: copied(f"{prefix}/{name}", value) if isinstance(value, Tensor) else value
            for name, value in tensors.items()
            if not (isinstance(value, Tensor) and value.is_meta)
        }

    named = dict(zip((name for name, _ in hand.model.named_buffers()), buffers, strict=True))
    optimizers: dict[str, dict[str, Any]] = {}
    for key, optimizer in hand.replica.optimizers.items():
        found = optimizer_state(optimizer, hand.replica.names)
        slots = {name: kept(f"{key}/{name}", values) for name, values in found["state"].items()}
        optimizers[key] = {**found, "state": slots}
    return Checkpoint(
        step=hand.num_steps,
        model=kept("model", {**_parameters(hand), **named}),
        optimizers=optimizers,
        averages={} if hand.averages is None else kept("averages", hand.averages.tensors),
        policy={name: tensor.detach().to("cpu", copy=True) for name, tensor in policy.items()},
        random={f"rank{hand.world.rank}.{name}": tensor for name, tensor in random.items()},
        state={
            "cursors": [cursor.to_dict() for cursor in cursors],
            "size": hand.size,
            "spec": hand.spec.to_dict(),
            "state": state,
            "place": hand.world.rank % num_places(hand.spec),
            "shape": list(shape_of(hand.spec)),
            "sharded": sharded,
            "joins": joins and hand.spec.tensor * hand.spec.stages == 1,
        },
    )


@torch.no_grad()
def restore_part(hand: Hand, part: Checkpoint) -> dict[str, Any]:
    """Load a part into a rank that holds the same part of the network; return the loop's state."""
    replica, sharded = hand.replica, set(part.state["sharded"])
    parameters = {name: parameter for parameter, name in replica.names.items()}
    for name, tensor in (*_parameters(hand).items(), *hand.model.named_buffers()):
        if not tensor.is_meta:
            _local(tensor).copy_(part.model[name])
    if hand.averages is not None:
        for name, average in hand.averages.tensors.items():
            if not average.is_meta:
                _local(average).copy_(part.averages[name])
    for key, optimizer in replica.optimizers.items():
        saved = part.optimizers[key]
        slots = {
            name: {
                slot: _laid_out(value, parameters[name]) if f"{key}/{name}/{slot}" in sharded else value
                for slot, value in values.items()
            }
            for name, values in saved["state"].items()
        }
        load_optimizer_state(optimizer, replica.names, {**saved, "state": slots})
    return stand_where(hand, part, draws_on=part.state["size"] == hand.size)


def joined(parts: Sequence[Checkpoint]) -> Checkpoint:
    """Concatenate the parts, in order, to a whole checkpoint; each part has a range of rows."""
    first = parts[0]
    sharded = set(first.state["sharded"])

    def whole(path: str, values: Sequence[Any]) -> Any:
        return torch.cat(list(values)) if path in sharded else values[0]

    def wholes(prefix: str, several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {name: whole(f"{prefix}/{name}", [one[name] for one in several]) for name in several[0]}

    optimizers = {
        key: {
            **saved,
            "state": {
                name: wholes(f"{key}/{name}", [part.optimizers[key]["state"][name] for part in parts])
                for name in saved["state"]
            },
        }
        for key, saved in first.optimizers.items()
    }
    return replace(
        first,
        model=wholes("model", [part.model for part in parts]),
        optimizers=optimizers,
        averages=wholes("averages", [part.averages for part in parts]),
        # Feedback that was not sent yet belongs to ranks that hold other parts now.
        policy={},
    )


def keeps_copies(world: World, spec: StrategySpec) -> bool:
    """Return whether parts are copied: where ranks are replaced, and no other replica has the same parts."""
    return world.channel.recovers and num_places(spec) > 1 and spec.replicas == 1


class Copies:
    """Keeps copies of parts that only one rank holds in the memory of another rank, on another host if there is one."""

    def __init__(self, world: World, every: int) -> None:
        self._world, self._every = world, every
        self._next = 0
        self._step_away = _distance(world.gather_objects(world.rank_info.host))

    def is_due(self, step: int) -> bool:
        """Return whether a copy is due; the same answer on all ranks."""
        return step >= self._next

    def make(self, own: Checkpoint | None) -> list[Checkpoint] | None:
        """Return this rank's part and a copy of another's; None where some rank has no complete state."""
        if not all(self._world.gather_objects(own is not None)):
            return None
        assert own is not None
        self._next = own.step + self._every
        peer = exchange(self._world, own, self._step_away)
        # Older copies are released only when every rank has this one.
        self._world.barrier()
        return [own, peer]


def _distance(hosts: Sequence[str]) -> int:
    """Return how many ranks ahead a copy is kept, preferably on another host.

    >>> _distance(["a", "a", "b", "b"]), _distance(["a", "a", "a"])
    (2, 1)
    """
    size = len(hosts)
    apart = (d for d in range(1, size) if all(hosts[r] != hosts[(r + d) % size] for r in range(size)))
    return next(apart, 1)


def _parameters(hand: Hand) -> dict[str, Tensor]:
    """Return parameters by name as they are between steps: an aborted step may have put others in their place."""
    if hand.spec.sharding == "optimizer":
        return dict(hand.model.named_parameters())
    return {name: parameter for parameter, name in hand.replica.names.items()}


def _laid_out(local: Tensor, like: Tensor) -> Tensor:
    """Wrap a rank's part of a slot in a tensor that is distributed like the parameter."""
    slot = torch.empty_like(like, dtype=local.dtype)
    _local(slot).copy_(local)
    return slot


def _local(tensor: Any) -> Tensor:
    """Return this rank's local part of a tensor, sharing its memory."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def complete(offers: Sequence[Sequence[tuple[int, int, tuple[int, ...]]]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield steps and shapes of which the ranks together hold every part, the latest first.

    Each rank offers (step, place, shape) of what it holds.

    >>> list(complete([[(7, 0, (2,)), (5, 0, (2,)), (5, 1, (2,))], []]))
    [(5, (2,))]
    """
    places: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    for held in offers:
        for step, place, shape in held:
            places.setdefault((step, shape), set()).add(place)
    for (step, shape), found in sorted(places.items(), reverse=True):
        if len(found) == torch.Size(shape).numel():
            yield step, shape
