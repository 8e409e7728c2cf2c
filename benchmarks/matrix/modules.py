"""Every module of torch's own test database, with one of its sample inputs, as a network."""

from __future__ import annotations

import inspect
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Generator, Tensor, nn
from torch.utils import _pytree as pytree

from .network import Network, Registry

DRAWS = ("FractionalMaxPool2d", "FractionalMaxPool3d")
PROBABILITIES = ("BCELoss",)
"""Losses that take numbers between 0 and 1."""


CELLS = ("RNNCell", "GRUCell", "LSTMCell")
"""Modules whose samples have no batch: a sample is one row of them."""


class Affine(nn.Module):
    """A scale and a shift, for inputs that are one number per row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class Wrapped(nn.Module):
    """A linear layer before the module, so that every network has parameters and a gradient through the module."""

    def __init__(self, module: nn.Module, width: int | None, call: Callable[[list[Any]], tuple[Any, Any]]) -> None:
        super().__init__()
        self.before: nn.Module = nn.Identity()
        if width is not None:
            self.before = nn.Linear(width, width) if width else Affine()
        self.module, self.call = module, call
        self.is_probability = type(module).__name__ in PROBABILITIES

    def forward(self, *rows: Tensor) -> Any:
        first = self.before(rows[0])
        args, kwargs = self.call([first.sigmoid() if self.is_probability else first, *rows[1:]])
        return self.module(*args, **kwargs)


@dataclass(frozen=True)
class Call:
    """How leaves that have rows are put back between those that have none."""

    spec: Any
    leaves: tuple[Any, ...]
    has_rows: tuple[bool, ...]

    def __call__(self, rows: list[Any]) -> tuple[Any, Any]:
        given = iter(rows)
        leaves = [next(given) if own else leaf for leaf, own in zip(self.leaves, self.has_rows, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def network(info: Any) -> Network:
    """Return a module of the database as a network: rows of its best sample input are mixed to make more of them."""
    sample = max(_samples(info), key=_fitness)
    made, given = sample.constructor_input, sample.forward_input
    leaves, spec = pytree.tree_flatten((given.args, given.kwargs))
    if info.module_cls.__name__ in CELLS:
        leaves = [leaf.unsqueeze(0) for leaf in leaves]
    first = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
    has_rows = tuple(isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == len(first) for leaf in leaves)
    rows = [leaf for leaf, own in zip(leaves, has_rows, strict=True) if own]
    call = Call(spec, tuple(leaves), has_rows)
    width = (first.shape[-1] if first.dim() > 1 else 0) if first.is_floating_point() else None
    # Ranks get the class alone: what else the database has would import all of torch's tests.
    kind, args = info.module_cls, made.args
    kwargs = {name: value for name, value in made.kwargs.items() if name != "_random_samples"}

    def model() -> nn.Module:
        wrapped = Wrapped(kind(*args, **kwargs), width, call)
        if any(nn.parameter.is_lazy(p) for p in wrapped.parameters()):
            wrapped(*(leaf.detach() for leaf in rows))
        return wrapped

    def data(count: int, g: Generator) -> tuple[Tensor, ...]:
        return tuple(_more_rows(leaf.detach(), count, g) for leaf in rows)

    def loss(model: Any, batch: Any) -> Tensor:
        outputs = pytree.tree_leaves(model(*batch))[0]
        return outputs if outputs.dim() == 0 else outputs.square().mean()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    draws = info.module_cls.__name__ in DRAWS
    return Network(model=model, data=data, loss=loss, optimizer=optimizer, rows=11, draws=draws)


def _more_rows(leaf: Tensor, count: int, g: Generator) -> Tensor:
    """Return rows between those of a sample, which stay in its range; whole numbers are taken as they are."""
    one, other = (leaf[torch.randint(len(leaf), (count,), generator=g)] for _ in range(2))
    if not leaf.is_floating_point() or torch.equal(leaf, leaf.round()):
        return one
    share = (0.2 + 0.7 * torch.rand(count, generator=g)).reshape(-1, *(1,) * (leaf.dim() - 1))
    return share * one + 0.3 * (1 - share) * other


def _samples(info: Any) -> list[Any]:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    return [sample for sample in made if sample.forward_input is not None]


def _fitness(sample: Any) -> tuple[bool, ...] | tuple[Any, ...]:
    """Samples with a batch in their first dimension and a mean as reduction come first."""
    options, given = sample.constructor_input.kwargs, sample.forward_input
    first = next((leaf for leaf in pytree.tree_leaves((given.args, given.kwargs)) if isinstance(leaf, Tensor)), None)
    return (
        options.get("batch_first", True) is True,
        options.get("reduction", "mean") == "mean",
        not options.get("return_indices", False),
        0 if first is None else first.dim(),
    )


@cache
def module_registry() -> Registry:
    """Return all modules of the database that have sample inputs."""
    registry = Registry("module")
    source = "\n".join(inspect.getsource(part) for part in (Wrapped, network, _more_rows, _fitness))
    for info in _database():
        registry.add_as(info.module_cls.__name__, lambda info=info: network(info), source)
    return registry


def _database() -> list[Any]:
    # The database is part of torch's tests, which import a package of which the database uses nothing.
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    # Torch's tests forbid to set flags of back-ends from there on, which must not outlive the import.
    with mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal.common_modules import module_db
    return list(module_db)
