"""ParameterServerStrategy: servers sum the gradients of a step, apply the update, and send the values to the workers.

A step computes a whole global batch, so the result is that of one device. Every process runs the script. A worker
computes its rows of the batch. A server, and the chief if there are workers, has no rows; it takes part with a borrowed
row of weight zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from keras.optimizers import LossScaleOptimizer
from torch import Tensor

from ..core import SettingsError
from ..distributed import Pending
from ..launcher import CHIEF, SERVER, TRAINERS, WORKER, described
from ..training import joined_world
from .batch_share import KerasShare
from .cluster_resolver import TFConfigClusterResolver
from .process_setup import hand_of_all, named
from .strategy import Strategy

PARTS = (*TRAINERS, SERVER)
"""The roles of processes that run the script together, in the order of their ranks."""


class ParameterServerStrategy(Strategy):
    """Train with workers that compute gradients and servers that update variables, as TF_CONFIG assigns them.

    Without TF_CONFIG, as under `manyhands launch script.py --on cpu*2`, every replica is both a worker and the server
    of its share of the variables.

    Args:
        cluster_resolver: Only stored as an attribute; by default a TFConfigClusterResolver.
        variable_partitioner: Accepted and ignored; whole variables are assigned to servers, balanced by size.
        **chosen: `accumulate`, `precision` and `recompute`, as in `mh.Mirrored`.
    """

    def __init__(self, cluster_resolver: Any = None, variable_partitioner: Any = None, **chosen: Any) -> None:
        roles = _roles()
        if SERVER in roles:
            joined_world(named(None), roles=PARTS)
        super().__init__(hand_of_all(None, type(self).__name__), **chosen)
        self.cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        every = list(range(self.hand.size))
        # With several ranks per host, as under `manyhands launch`, every rank is a worker, whatever its host's role.
        has_parts = SERVER in roles and len(roles) == self.hand.size
        by_role = {role: [rank for rank in every if roles[rank] == role] for role in PARTS} if has_parts else {}
        self._workers: list[int] = by_role.get(WORKER) or by_role.get(CHIEF) or every
        self._servers: list[int] = by_role.get(SERVER) or every
        self._taken: dict[int, set[int]] = {}
        """Indexes of the optimizer's variables that updates in this process have changed, by id of the optimizer."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of workers, whose gradients are summed."""
        return len(self._workers)

    @property
    def worker(self) -> int | None:
        """Index of this process among the workers; None if it is not a worker."""
        return self._workers.index(self.hand.rank) if self.hand.rank in self._workers else None

    def share(self, total: int, micros: int = 1) -> KerasShare:
        return KerasShare.of(total, rank=self.worker, size=len(self._workers), micros=micros)

    def update(
        self, optimizer: Any, apply: Callable[..., Any], gradients: Sequence[Tensor | None], variables: Sequence[Any]
    ) -> None:
        """Send the workers' gradients to the servers, apply the sums there, and send the new values to all ranks."""
        if not optimizer.built:
            optimizer.build(list(variables))
        values = [variable.value for variable in variables]
        held = self._dealt_out(optimizer, values, self._used(gradients))
        if not held:
            # No variable has a gradient: Keras raises its own error.
            apply(optimizer, list(gradients), list(variables))
        sums = self._pushed(held, gradients, values)
        mine = [variables[index] for index in held.get(self.hand.rank, ())]
        if mine:
            before = [variable._value._version for variable in optimizer.variables]
            apply(optimizer, sums, mine)
            now = [variable._value._version for variable in optimizer.variables]
            changed = {i for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new}
            self._taken.setdefault(id(optimizer), set()).update(changed)
        self._pull(held, variables)
        self._count(optimizer, next(iter(held)))

    def _used(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Return for each gradient whether it exists on any replica."""
        counts = torch.tensor([float(gradient is not None) for gradient in gradients], device=self.hand.device)
        self.hand.replicas.all_reduce(counts)
        return [count > 0 for count in counts.tolist()]

    def _dealt_out(self, optimizer: Any, values: Sequence[Tensor], used: Sequence[bool]) -> dict[int, list[int]]:
        """Return, by rank of the server, the indexes of its variables that have a gradient."""
        load = dict.fromkeys(self._servers[:1] if _looks_at_all(optimizer) else self._servers, 0)
        held: dict[int, list[int]] = {}
        for index in sorted(range(len(values)), key=lambda index: -values[index].numel()):
            # Variables without a gradient are assigned too, so that each variable has the same server in every step.
            server = min(load, key=lambda rank: (load[rank], rank))
            load[server] += values[index].numel()
            if used[index]:
                held.setdefault(server, []).append(index)
        return held

    def _pushed(
        self, held: dict[int, list[int]], gradients: Sequence[Tensor | None], values: Sequence[Tensor]
    ) -> list[Tensor]:
        """Send this rank's gradients to the other servers, and return the summed gradients of its own variables."""
        world, rank = self.hand.replicas, self.hand.rank
        sent, total = [], None
        buffers: dict[int, Tensor] = {}
        got: dict[int, Pending] = {}
        # Servers in the same order on all ranks: over NCCL, two ranks that both send first would deadlock.
        for server, indexes in held.items():
            whole = [torch.zeros_like(values[i]) if gradients[i] is None else gradients[i] for i in indexes]
            flat = torch.cat([each.detach().reshape(-1) for each in whole])  # type: ignore[union-attr]
            if server == rank:
                total = flat
                buffers = {worker: torch.empty_like(flat) for worker in self._workers if worker != rank}
                got = {worker: world.start_receive(buffer, worker, rank) for worker, buffer in buffers.items()}
            elif self.worker is not None:
                sent.append(world.start_send(flat, server, server))
        if total is not None:
            for each in got.values():
                each.wait()
            # Summed in rank order, so that the result is deterministic.
            total = torch.stack([buffers.get(worker, total) for worker in self._workers]).sum(0)
        for each in sent:
            each.wait()
        return [] if total is None else _cut(total, [values[index] for index in held[rank]])

    def _pull(self, held: dict[int, list[int]], variables: Sequence[Any]) -> None:
        for server, indexes in held.items():
            values = [variables[index].value for index in indexes]
            flat = torch.cat([value.detach().reshape(-1) for value in values])
            self.hand.replicas.broadcast(flat, server)
            if server != self.hand.rank:
                for index, part in zip(indexes, _cut(flat, values), strict=True):
                    variables[index].assign(part)

    def _count(self, optimizer: Any, server: int) -> None:
        """Broadcast the optimizer's scalar variables, such as its step and learning rate, from the rank `server`."""
        numbers = [variable for variable in optimizer.variables if variable._value.dim() == 0]
        values = torch.stack([number._value.detach().double() for number in numbers])
        self.hand.replicas.broadcast(values, server)
        for number, value in zip(numbers, values, strict=True):
            number.assign(value.to(number._value.dtype))

    def share_memory(self, model: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None or not optimizer.built:
            return
        taken = self.hand.world.gather_objects(sorted(self._taken.pop(id(optimizer), ())))
        owner = {index: rank for rank, indexes in reversed(list(enumerate(taken))) for index in indexes}
        for index, rank in sorted(owner.items()):
            self.hand.replicas.broadcast(optimizer.variables[index]._value.data, rank)


def _roles() -> list[str]:
    """Return the roles of the processes in the environment's cluster, by rank; empty if there is no cluster."""
    cluster = described()
    return [] if cluster is None else [host.role for host in cluster.hosts if host.role in PARTS]


def _looks_at_all(optimizer: Any) -> bool:
    """Return whether the update of one variable depends on others, so that one server must hold them all."""
    names = ("global_clipnorm", "use_ema", "gradient_accumulation_steps")
    is_plain = not isinstance(optimizer, LossScaleOptimizer) and not hasattr(optimizer, "optimizers")
    return not is_plain or any(getattr(optimizer, name, None) for name in names)


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([value.numel() for value in like])
    return [part.view(value.shape).to(value.dtype) for part, value in zip(parts, like, strict=True)]


def Server(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise SettingsError: tf.distribute.Server is not needed, since every process of the cluster runs the script."""
    raise SettingsError(
        "a Server is not needed, because every task runs the whole script and the strategy assigns its role",
        remedy="remove the branch that creates a Server, so that workers and parameter servers reach "
        "ParameterServerStrategy and model.fit",
    )
