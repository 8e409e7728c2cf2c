"""Embedding tables on a server: rows are created when they are first requested, and updated one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core import TaskError, each_of, parameters_of
from ..strategies import Embedding, first_rows

SLOTS: dict[str, tuple[str, ...]] = {"sgd": (), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}
"""Names in torch of the optimizer slots that every row has, by kind of optimizer."""
KINDS = {"SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam", "AdamW": "adam"}
MOVING = {"sgd": ("momentum", "weight_decay"), "adagrad": ("weight_decay",), "adam": ("amsgrad",)}
"""Settings that would change rows that no batch uses, or that need slots which rows do not have."""
FIRST = 1024


def kind_of(table: Embedding, optimizer: Any) -> str:
    """Return the kind of optimizer ("sgd", "adagrad" or "adam") for a table's rows: its own, or the task's.

    Raise TaskError if that optimizer cannot update single rows.
    """
    owner = next((m for m in each_of(optimizer) if any(table.weight is p for p in parameters_of(m))), optimizer)
    kind = table.optimizer or kind_of_optimizer(owner)
    if kind is None:
        raise TaskError(
            "the rows of an mh.strategies.Embedding need an optimizer that can update single rows",
            got=type(owner).__name__,
            remedy='write mh.strategies.Embedding(rows, dim, optimizer="adagrad")',
        )
    return kind


def settings_of(name: str, table: Embedding, optimizer: Any, model: nn.Module) -> Mapping[str, Any]:
    """Return the optimizer settings for a table's rows; empty, for the defaults, if the table has its own optimizer.

    Rows change only when a batch uses them. A setting that changes all rows in each step, such as momentum, raises
    TaskError.
    """
    kind = kind_of(table, optimizer)
    if table.optimizer is not None:
        return {}
    group: Mapping[str, Any] = optimizer.param_groups[group_of(name, optimizer, model)]
    for setting in MOVING[kind]:
        if group.get(setting):
            raise TaskError(
                "rows of an mh.strategies.Embedding on parameter servers must change only when a batch uses them",
                got=f"{name}.weight with {setting}={group[setting]}, which changes all rows",
                remedy=f"put {name}.weight into a parameter group without it, or write "
                f'mh.strategies.Embedding(rows, dim, optimizer="{kind}")',
            )
    return group


def group_of(name: str, optimizer: Any, model: nn.Module) -> int:
    """Return the index of the parameter group that holds a table's weight."""
    weight = model.get_submodule(name).weight
    return next(i for i, group in enumerate(optimizer.param_groups) if any(weight is p for p in group["params"]))


def first_slot(kind: str, settings: Mapping[str, Any]) -> float:
    """Return the initial value of a row's optimizer slots under this kind of optimizer and its settings."""
    return float(settings.get("initial_accumulator_value", 0.0)) if kind == "adagrad" else 0.0


def kind_of_optimizer(optimizer: Any) -> str | None:
    """Return the kind of an optimizer, "sgd", "adagrad" or "adam"; None if it cannot update single rows."""
    return KINDS.get(type(optimizer).__name__)


def slot_names(kind: str) -> tuple[str, ...]:
    """Return the names of a row's optimizer slots under this kind of optimizer."""
    return SLOTS[kind]


class ServerTable:
    """One server's rows of one embedding table: those with `id % num_servers == server number`."""

    def __init__(self, table: Embedding, kind: str, group: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.dim, self.seed, self.std, self.dtype = table.embedding_dim, table.seed, table.std, dtype
        self.kind, self.group = kind, dict(group)
        self.num_updates = 0
        self._index: dict[int, int] = {}
        self._values = torch.zeros(0, self.dim, dtype=dtype)
        self._slots = {name: torch.zeros(0, self.dim, dtype=dtype) for name in SLOTS[kind]}

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows with these ids; rows that are requested for the first time are created."""
        places = self._places(ids)
        return self._values[places]

    def update(self, ids: Tensor, gradients: Tensor, rate: float) -> None:
        """Run one optimizer step with learning rate `rate` on the rows with these ids, which must be unique."""
        places = self._places(ids)
        self.num_updates += 1
        values = self._values[places]
        gradients = -gradients if self._setting("maximize", False) else gradients
        if self.kind == "sgd":
            values -= rate * gradients
        elif self.kind == "adagrad":
            decay = self._setting("lr_decay", 0.0)
            sums = self._slots["sum"][places] + gradients.square()
            self._slots["sum"][places] = sums
            slower = rate / (1 + (self.num_updates - 1) * decay)
            values -= slower * gradients / (sums.sqrt() + self._setting("eps", 1e-10))
        else:
            decay = self._setting("weight_decay", 0.0)
            if self._setting("decoupled_weight_decay", False):
                values *= 1 - rate * decay
            elif decay:
                gradients = gradients + decay * values
            values -= self._adam(places, gradients, rate)
        self._values[places] = values

    @property
    def slot_names(self) -> list[str]:
        """The names of the optimizer slots of every row."""
        return list(self._slots)

    def state(self) -> tuple[Tensor, list[Tensor]]:
        """Return the ids of all existing rows, their values, and their optimizer slots."""
        count = len(self._index)
        ids = torch.from_numpy(np.fromiter(self._index, np.int64, count))
        return ids, [self._values[:count], *(slot[:count] for slot in self._slots.values())]

    def load(self, ids: Tensor, tensors: list[Tensor], num_updates: int) -> None:
        """Replace all rows by the ids and tensors that `state` returned after `num_updates` updates."""
        self._index = {row: place for place, row in enumerate(ids.tolist())}
        self.num_updates = num_updates
        shape = (len(ids), self.dim)
        self._values = tensors[0].reshape(shape).to(self.dtype).clone()
        for name, tensor in zip(self._slots, tensors[1:], strict=True):
            self._slots[name] = tensor.reshape(shape).to(self.dtype).clone()

    def _adam(self, places: Tensor, gradients: Tensor, rate: float) -> Tensor:
        first, second = self._setting("betas", (0.9, 0.999))
        mean = self._slots["exp_avg"][places].lerp(gradients, 1 - first)
        square = self._slots["exp_avg_sq"][places] * second + gradients.square() * (1 - second)
        self._slots["exp_avg"][places], self._slots["exp_avg_sq"][places] = mean, square
        scale = (1 - second**self.num_updates) ** 0.5
        root = square.sqrt() / scale + self._setting("eps", 1e-8)
        step: Tensor = rate / (1 - first**self.num_updates) * mean / root
        return step

    def _setting(self, name: str, default: Any) -> Any:
        return self.group.get(name, default)

    def _places(self, ids: Tensor) -> Tensor:
        """Return the positions in memory of the rows with these ids, after appending new rows."""
        wanted = ids.tolist()
        index = self._index
        new = [row for row in wanted if row not in index]
        if new:
            self._make(new)
        return torch.tensor([index[row] for row in wanted], dtype=torch.int64)

    def _make(self, new: list[int]) -> None:
        new = list(dict.fromkeys(new))
        start = len(self._index)
        stop = start + len(new)
        if stop > len(self._values):
            capacity = max(FIRST, stop, 2 * len(self._values))
            self._values = _grown(self._values, capacity)
            self._slots = {name: _grown(slot, capacity) for name, slot in self._slots.items()}
        first = first_rows(np.array(new), self.dim, self.seed, self.std).to(self.dtype)
        self._values[start:stop] = first
        if self.kind == "adagrad":
            self._slots["sum"][start:stop] = first_slot(self.kind, self.group)
        self._index.update((row, start + place) for place, row in enumerate(new))


def _grown(tensor: Tensor, rows: int) -> Tensor:
    bigger = tensor.new_zeros(rows, tensor.shape[1])
    bigger[: len(tensor)] = tensor
    return bigger


def joined(ids: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge row gradients so that every id occurs once; gradients of the same id are summed."""
    unique, inverse = torch.unique(torch.cat(ids), return_inverse=True)
    together = torch.cat(gradients)
    return unique, together.new_zeros(len(unique), together.shape[1]).index_add_(0, inverse, together)
