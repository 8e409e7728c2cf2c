"""ParameterServerStrategy: servers sum the gradients of a step, apply the update, and send the values to the workers.

A step is a whole batch, so the result is that of one device. Every process runs the script: a worker takes rows, a
server (and the chief, if there are workers) takes none and takes part with a borrowed row of weight zero.
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
"""The tasks of a cluster that run the script together, ordered by rank."""


class ParameterServerStrategy(Strategy):
    """Workers compute, servers update: the chief, workers and servers of TF_CONFIG.

    Without TF_CONFIG, as under `manyhands launch script.py --on cpu*2`, every replica is a worker and a server of its
    share of the variables.

    - `cluster_resolver`: a resolver of manyhands, all of which read the environment;
    - `variable_partitioner`: accepted and ignored: whole variables are assigned to servers, balanced by size;
    - `accumulate`, `precision`, `recompute`: as in `mh.Mirrored`.
    """

    def __init__(self, cluster_resolver: Any = None, variable_partitioner: Any = None, **chosen: Any) -> None:
        roles = _roles()
        if SERVER in roles:
            joined_world(named(None), roles=PARTS)
        super().__init__(hand_of_all(None, type(self).__name__), **chosen)
        self.cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        every = list(range(self.hand.size))
        # A launch on many hosts knows only replicas, whatever the roles of its hosts in a cluster.
        has_parts = SERVER in roles and len(roles) == self.hand.size
        by_role = {role: [rank for rank in every if roles[rank] == role] for role in PARTS} if has_parts else {}
        self._workers: list[int] = by_role.get(WORKER) or by_role.get(CHIEF) or every
        self._servers: list[int] = by_role.get(SERVER) or every
        self._taken: dict[int, set[int]] = {}
        """By optimizer, the state variables that updates in this process have changed."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of workers, whose gradients are summed."""
        return len(self._workers)

    @property
    def worker(self) -> int | None:
        """Index among the workers; None for other processes."""
        return self._workers.index(self.hand.rank) if self.hand.rank in self._workers else None

    def share(self, total: int, micros: int = 1) -> KerasShare:
        return KerasShare.of(total, rank=self.worker, size=len(self._workers), micros=micros)

    def update(
        self, optimizer: Any, apply: Callable[..., Any], gradients: Sequence[Tensor | None], variables: Sequence[Any]
    ) -> None:
        """Push gradients from the workers, apply their sums on the servers, and pull the values everywhere."""
        if not optimizer.built:
            optimizer.build(list(variables))
        values = [variable.value for variable in variables]
        held = self._dealt_out(optimizer, values, self._used(gradients))
        if not held:
            # Keras raises its own error for this.
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
        """Return which gradients exist on some replica."""
        counts = torch.tensor([float(gradient is not None) for gradient in gradients], device=self.hand.device)
        self.hand.replicas.all_reduce(counts)
        return [count > 0 for count in counts.tolist()]

    def _dealt_out(self, optimizer: Any, values: Sequence[Tensor], used: Sequence[bool]) -> dict[int, list[int]]:
        """Return, by server, the indexes of its variables among those that were used."""
        load = dict.fromkeys(self._servers[:1] if _looks_at_all(optimizer) else self._servers, 0)
        held: dict[int, list[int]] = {}
        for index in sorted(range(len(values)), key=lambda index: -values[index].numel()):
            # All variables are assigned, so that each has the same server whichever were used.
            server = min(load, key=lambda rank: (load[rank], rank))
            load[server] += values[index].numel()
            if used[index]:
                held.setdefault(server, []).append(index)
        return held

    def _pushed(
        self, held: dict[int, list[int]], gradients: Sequence[Tensor | None], values: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the summed gradients of this rank's variables, and send its gradients for the other servers."""
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
        """Broadcast scalar optimizer variables, such as steps, rates and scales, from a server."""
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
    """Return the roles of a described cluster's processes in rank order; empty for a plain program."""
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
    """Raise SettingsError: tf.distribute.Server is not supported, since every task runs the script."""
    raise SettingsError(
        "a Server is not needed, because every task runs the whole script and the strategy assigns its role",
        remedy="remove that branch, so that workers and parameter servers reach ParameterServerStrategy and model.fit",
    )
