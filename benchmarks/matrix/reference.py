"""The reference: a plain PyTorch loop on one device in float64, which uses nothing of the product's training code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

import manyhands as mh
from manyhands.core import Mean, mix, seed_all


class CannotTrain(Exception):
    """The plain loop cannot train a network, so there is nothing to compare with."""


@dataclass
class Result:
    """What training left: losses by step, and the state before and after it."""

    losses: list[float]
    state: dict[str, Tensor]
    start: dict[str, Tensor] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    """Names of `state` that are parameters; the others are buffers."""


class PlainHand:
    """The part of a hand that steps of the matrix use: the model, and one update of a named optimizer."""

    def __init__(self, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], batch: Any) -> None:
        self.model, self.optimizers, self._batch = model, optimizers, batch
        self.losses: list[float] = []

    def minimize(self, loss: Callable[[Any], Any], key: str = "") -> None:
        """Take one step of an optimizer, with the gradients of its own parameters alone."""
        optimizer = self.optimizers[key]
        own = [p for group in optimizer.param_groups for p in group["params"]]
        value = _scalar(loss(self._batch))
        gradients = torch.autograd.grad(value, own, allow_unused=True)
        for parameter, gradient in zip(own, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(value.item())


def train(task: mh.Task, precision: str) -> Result:
    """Train a task for one pass over its rows, in their order.

    Raises:
        CannotTrain: The network raises, or its loss or weights are not finite.
    """
    try:
        return _train(task, torch.float64 if precision == "fp64" else None)
    except CannotTrain:
        raise
    except Exception as error:
        raise CannotTrain(f"{type(error).__name__}: {error}") from error


def _train(task: mh.Task, dtype: torch.dtype | None) -> Result:
    # The seed of the first weights is the one thing that both sides must share.
    seed_all(mix(task.seed, 0))
    model = task.model()
    if dtype is not None:
        model = widened(model)
    model.train()
    optimizer: Any = task.optimizer(model)
    if isinstance(optimizer, list):
        optimizer = dict(enumerate(optimizer))
    optimizers = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
    rates = [(group, group["lr"]) for one in optimizers.values() for group in one.param_groups]
    start = copied(model)
    losses = []
    batches = list(_batches(task, dtype))
    for number, batch in enumerate(batches):
        if task.schedule is not None:
            for group, rate in rates:
                group["lr"] = rate * task.schedule(number, len(batches))
        losses.append(_step(task, model, optimizers, batch))
    state = copied(model)
    if not all(map(math.isfinite, losses)) or not all(_is_finite(value) for value in state.values()):
        raise CannotTrain(f"losses {losses} or weights are not finite")
    if all(torch.equal(start[name], state[name]) for name, _ in model.named_parameters() if name in state):
        raise CannotTrain("no parameter changes")
    return Result(losses, state, start, frozenset(name for name, _ in model.named_parameters()))


def _step(task: mh.Task, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], batch: Any) -> float:
    if task.step is not None:
        hand = PlainHand(model, optimizers, batch)
        task.step(hand, batch)
        return hand.losses[0]
    assert task.loss is not None
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss = _scalar(task.loss(model, batch))
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return float(loss.item())


def _scalar(loss: Any) -> Tensor:
    if isinstance(loss, Mean):
        return loss.total / loss.count
    assert isinstance(loss, Tensor)
    return loss


def _batches(task: mh.Task, dtype: torch.dtype | None) -> Iterator[Any]:
    is_dataset = isinstance(task.data, Dataset)
    rows = len(task.data) if is_dataset else len(pytree.tree_leaves(task.data)[0])
    assert task.batch_size is not None
    for first in range(0, rows, task.batch_size):
        part = slice(first, first + task.batch_size)
        if is_dataset:
            samples = [task.data[index] for index in range(rows)[part]]
            batch = (task.collate or default_collate)(samples)
        else:
            batch = pytree.tree_map(lambda tensor, part=part: tensor[part], task.data)
        yield pytree.tree_map(lambda leaf: _wide(leaf, dtype), batch)


def _wide(leaf: Any, dtype: torch.dtype | None) -> Any:
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return replace(leaf, **{part.name: _wide(getattr(leaf, part.name), dtype) for part in fields(leaf)})
    is_wide = dtype is not None and isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_wide else leaf


def widened(model: nn.Module) -> nn.Module:
    """Return a model in double precision; complex weights become complex128."""
    wide = {torch.complex64: torch.complex128}
    return model._apply(lambda t: t.to(wide.get(t.dtype, torch.float64 if t.is_floating_point() else t.dtype)))


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters and persistent buffers by name."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {name: (value.to_dense() if value.is_sparse else value).detach().clone() for name, value in state.items()}


def _is_finite(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())
