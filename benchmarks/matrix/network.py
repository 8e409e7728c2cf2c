"""A network of the matrix: what is trained, on which rows, and how it is turned into a task."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor, nn

import manyhands as mh

BATCH_SIZE = 6
"""Divisible by two and three ranks; the last batch of 11 or 17 rows has 5 and is divisible by neither."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, whose updates are proportional to the gradient: a wrong scale is not normalised away."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network with its loss, data and optimizer.

    Attributes:
        model: Builds the network; called under a seeded generator.
        data: Makes a data set of so many rows from a generator: a tensor, a tuple or a dict of them, or a dataset.
        collate: As for `mh.Task`.
        loss: The mean over samples or `mh.mean`, as for `mh.Task`; None where there is a `step`.
        optimizer: Makes the optimizer of a model, or several by name where there is a `step`.
        step: A step with several optimizers, which uses `hand.model` and `hand.minimize` alone.
        schedule: As for `mh.Task`.
        rows: Rows of the data set; 11 make two steps, 17 make three.
        draws: Whether training draws random numbers. They are then layout-free, and the reference is the product's own
            run on one device.
        precision: "fp64", or "fp32" where the network's own dtypes matter.
        rounding: Largest difference as a share of what training changed, where the network or the optimizer rounds to
            single or half precision by itself, so that another order of additions shows.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int, Generator], Any]
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], Any] = sgd
    step: Callable[[Any, Any], Any] | None = None
    schedule: Callable[[int, int], float] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    rows: int = 17
    draws: bool = False
    precision: str = "fp64"
    rounding: float = 0.0

    def task(self, seed: int) -> mh.Task:
        """Return the network as a task whose rows come in their own order."""
        return mh.Task(
            model=self.model,
            data=self.data(self.rows, torch.Generator().manual_seed(seed + 1)),
            loss=self.loss,
            optimizer=self.optimizer,
            step=self.step,
            schedule=self.schedule,
            collate=self.collate,
            batch_size=BATCH_SIZE,
            shuffle=False,
            seed=seed,
        )


@dataclass(frozen=True)
class Entry:
    """A network by name, built when it is needed."""

    name: str
    kind: str
    make: Callable[[], Network]
    source: str
    """The text that defines it, for the cache and for reports."""

    @cached_property
    def network(self) -> Network:
        """The network itself."""
        return self.make()

    @property
    def digest(self) -> str:
        """A hash of what defines it."""
        return hashlib.sha256(f"{self.name}\n{self.source}".encode()).hexdigest()[:16]


class Registry(Mapping[str, Entry]):
    """Networks of one kind by name.

    >>> classics = Registry("classic")
    >>> @classics.add
    ... def linear() -> Network:
    ...     return Network(model=lambda: nn.Linear(2, 1), data=lambda n, g: randn(g, n, 2), loss=mean_square)
    >>> list(classics)
    ['classic.linear']
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def add(self, make: Callable[[], Network]) -> Callable[[], Network]:
        """Register a function that makes a network, under its own name."""
        self.add_as(make.__name__, make, inspect.getsource(make))
        return make

    def add_as(self, name: str, make: Callable[[], Network], source: str) -> None:
        """Register a network whose source is given as text."""
        full = f"{self.kind}.{name}"
        self._entries[full] = Entry(full, self.kind, make, source)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def randn(generator: Generator, *shape: int) -> Tensor:
    """Return normal numbers in single precision."""
    return torch.randn(*shape, generator=generator)


def randint(generator: Generator, high: int, *shape: int) -> Tensor:
    """Return whole numbers below `high`."""
    return torch.randint(high, shape, generator=generator)


def mean_square(model: Callable[[Any], Tensor], batch: Any) -> Tensor:
    """Return the mean of the squares of what a model gives for a tensor, or for the first of a tuple."""
    outputs = model(batch[0] if isinstance(batch, tuple | list) else batch)
    return (outputs.real.square() + outputs.imag.square() if outputs.is_complex() else outputs.square()).mean()
