"""Mirrored strategy: each device holds a replica of the whole network; gradients are summed during backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import StrategySpec, TaskError, unsaved_buffers
from ..distributed import World
from ..sync import Buckets, PolicyState, acting, make_policy
from .batch_stats import BatchStats
from .replica import Replica

_ROW = 1024
"""Words per row; every row is weighted with the same weights."""


class MirroredReplica(Replica):
    """One of several identical replicas."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        super().__init__(spec, world, model, optimizers)
        require_dense(model)
        named = make_policy(spec.sync)
        self._policy = acting(named, world)
        if self._policy != named:
            self.notes.append(f"there is one host, so sync={named} has nothing to do: sums are exact")
        self._buckets = {key: Buckets(group, world, self._policy) for key, group in self.groups.items()}
        self._stats = BatchStats(model, world) if spec.batch_stats != "local" else None

    def set_padding(self, is_padding: bool) -> None:
        if self._stats is not None:
            self._stats.is_padding = is_padding

    def piggybacked(self, key: str) -> Tensor | None:
        self._buckets[key].refresh()
        return self._buckets[key].piggybacked

    def backward(self, objective: Tensor, key: str, *, last: bool) -> None:
        if last:
            self._buckets[key].arm()
        super().backward(objective, key, last=last)

    @property
    def is_capturable(self) -> bool:
        return self.world.is_capturable or self.is_local

    @property
    def is_local(self) -> bool:
        return self._stats is None or not self._stats.layers

    @property
    def records_exchange(self) -> bool:
        # A policy with a warm-up or error feedback runs different operations in different steps.
        return self.world.is_capturable and not self._policy.changes_mathematics

    @property
    def num_bytes(self) -> int:
        return sum(buckets.num_bytes for buckets in self._buckets.values())

    def policy_state(self) -> dict[str, Tensor]:
        if not self._policy.changes_mathematics:
            return {}
        return PolicyState.joined(buckets.state() for buckets in self._buckets.values()).tensors()

    def own_policy_state(self) -> dict[str, Tensor]:
        if not self._policy.changes_mathematics:
            return {}
        return PolicyState.joined(buckets.own_state() for buckets in self._buckets.values()).tensors()

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        if not self._policy.changes_mathematics:
            return super().load_policy_state(saved)
        if not saved:
            return f"the checkpoint has no state of sync={self._policy}, which starts fresh"
        for buckets in self._buckets.values():
            buckets.load_state(PolicyState.of(saved))
        return ""

    def defer(self, is_deferred: bool) -> None:
        for buckets in self._buckets.values():
            buckets.deferred = is_deferred

    def usage(self, key: str) -> Any:
        return self._buckets[key].usage

    def settle(self, key: str, usage: Any) -> None:
        self._buckets[key].settle(usage)

    def pack(self, key: str) -> None:
        self._buckets[key].pack()

    def exchange(self, key: str) -> None:
        self._buckets[key].exchange()

    def finish(self, key: str, count: Tensor | None) -> None:
        self._buckets[key].finish()
        if count is not None:
            self._buckets[key].divide(count)

    def rebuild_layout(self) -> None:
        for buckets in self._buckets.values():
            buckets.rebuild_layout()

    def align_buffers(self) -> None:
        for buffer in self.model.buffers():
            self.world.broadcast(buffer)

    def differences(self) -> list[str]:
        """Return the tensors whose hashes differ between replicas; local batch statistics may differ."""
        named = comparable(self.model, self.world, has_own_stats=self.spec.batch_stats == "local")
        return odd_ones(self.world, named)

    def close(self) -> None:
        for buckets in self._buckets.values():
            buckets.close()
        if self._stats is not None:
            self._stats.close()


def comparable(model: nn.Module, world: World, *, has_own_stats: bool) -> dict[str, Tensor]:
    """Return the tensors that must be equal on all replicas: parameters, and buffers except local batch statistics.

    Buffers that are not saved may be caches that grow with the longest sample so far, such as those of rotary
    positions. If their sizes differ between the ranks, the part that all ranks have is returned.
    """
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if not (has_own_stats and name.rsplit(".", 1)[-1] in ("running_mean", "running_var"))
    }
    caches = {name: tuple(buffers[name].shape) for name in unsaved_buffers(model) if name in buffers}
    if caches:
        for name, *shapes in _shapes(world, caches):
            if len(set(shapes)) > 1 and len({len(shape) for shape in shapes}) == 1:
                buffers[name] = buffers[name][tuple(slice(0, min(sizes)) for sizes in zip(*shapes, strict=True))]
    return {**dict(model.named_parameters()), **buffers}


def _shapes(world: World, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the names that all ranks have, each with the shapes on all ranks."""
    gathered = world.gather_objects(dict(shapes))
    for name in shapes:
        if all(name in others for others in gathered):
            yield (name, *(tuple(others[name]) for others in gathered))


def require_dense(model: nn.Module) -> None:
    """Raise for layers with sparse gradients, before any step runs."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise TaskError(
                "gradients must be dense to be summed over replicas",
                got=f"{name or type(layer).__name__} with sparse=True",
                remedy="build it with sparse=False, or use sync=mh.sync.LocalSteps(16), which sums no gradients",
            )


def mirror(model: nn.Module, world: World) -> None:
    """Broadcast the first replica's values to all replicas."""
    for tensor in (*nn.Module.parameters(model), *model.buffers()):
        world.broadcast(tensor.data)


def odd_ones(world: World, named: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors that differ from those of most ranks, with the ranks; without a majority, all ranks."""
    if not named:
        return []
    gathered = world.all_gather(torch.stack([hash_of(tensor) for tensor in named.values()]))
    found = []
    for name, hashes in zip(named, gathered.T.tolist(), strict=True):
        usual, count = Counter(hashes).most_common(1)[0]
        odd = [str(rank) for rank, value in enumerate(hashes) if value != usual]
        if 2 * count <= world.size:
            found.append(f"{name} (ranks {', '.join(map(str, range(world.size)))}: no majority agrees)")
        elif odd:
            found.append(f"{name} (on rank {', '.join(odd)})")
    return found


def hash_of(tensor: Tensor) -> Tensor:
    """Return a 64-bit weighted sum over the tensor's bits; flipping any single bit changes it."""
    data = tensor.detach().contiguous().view(-1)
    if data.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()  # a copy is aligned to eight bytes
    bits = data.view(torch.uint8)
    num_words = len(bits) // 8
    words, tail = bits[: 8 * num_words].view(torch.int64), bits[8 * num_words :]
    in_rows = num_words // _ROW * _ROW
    rows = (words[:in_rows].view(-1, _ROW) * _weights(_ROW, tensor.device)).sum(1)
    sums = torch.cat([rows, words[in_rows:], tail.to(torch.int64)])
    return (sums * _weights(len(sums), tensor.device)).sum()


def _weights(count: int, device: torch.device) -> Tensor:
    """Return a different odd number per element: a changed bit, or values that change places, change the sum."""
    return torch.arange(1, count + 1, device=device) * 2 + 1
