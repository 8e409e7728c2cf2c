"""Local policies: replicas train by themselves and agree now and then, so that the network is seldom asked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..distributed import Pending
from .collectives import PolicyCollectives
from .policy import Policy, make_policy, require
from .policy_memory import PolicyMemory


@dataclass(frozen=True)
class Local(Policy):
    """Between two agreements every replica takes its own steps, on its part of each batch.

    Then the ways that they went are averaged, weighed by the samples (or tokens) that each has learnt from; so are
    batch statistics, which are each replica's own meanwhile. Losses and the wish to stop travel with an agreement.
    Before a validation, a checkpoint and the end all agree, and then the states of their optimizers are averaged as
    well, so that whatever is kept is one network. In the warm-up they agree after every step.
    """

    has_velocity: ClassVar[bool] = False
    """Whether it keeps a velocity of each parameter from one agreement to the next."""

    every: int = 16
    """Steps between two agreements."""
    by: str = field(default="allreduce", kw_only=True)
    """The policy that carries the ways, "int8" say."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "by", str(self.by))
        is_count = isinstance(self.every, int) and not isinstance(self.every, bool)
        require(is_count and self.every >= 1, "every is a whole number of steps from 1", self.every)
        require(not isinstance(self.carrier, Local), "by is one that carries gradients", self.by)

    @property
    def carrier(self) -> Policy:
        """What sums the ways over the replicas."""
        return make_policy(self.by)

    @property
    def said(self) -> str:
        times = "step" if self.every == 1 else f"{self.every} steps"
        apart = f"{self.between} train apart and agree every {times}, batch statistics included"
        return f"sync={self} changes the mathematics: {apart}; a wish to stop is heard when they agree"

    @abstractmethod
    def follow(self, ways: Sequence[Tensor], velocities: Sequence[Tensor]) -> Sequence[Tensor]:
        """How far all replicas go from where they last agreed, by the mean of the ways that they went."""

    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        yield from self.carrier.reduce(wire, gradient, memory)


@dataclass(frozen=True)
class LocalSteps(Local):
    """Steps of each replica by itself; every so often the parameters are averaged.

    >>> print(LocalSteps(every=16))
    localsteps(16)
    >>> print(LocalSteps(8, by="int8"))
    localsteps(8,by=int8)
    """

    name = "localsteps"

    def follow(self, ways: Sequence[Tensor], velocities: Sequence[Tensor]) -> Sequence[Tensor]:
        return ways


@dataclass(frozen=True)
class DiLoCo(Local):
    """Many steps of each replica by itself; the mean of their ways is a gradient for an outer Nesterov momentum.

    >>> print(DiLoCo(every=100))
    diloco(100)
    """

    name = "diloco"
    has_velocity = True
    every: int = 100
    outer_lr: float = field(default=0.7, kw_only=True)
    """How much of the way the outer optimizer goes."""
    momentum: float = field(default=0.9, kw_only=True)
    """How much of its velocity it keeps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(_is_number(self.outer_lr) and self.outer_lr > 0, "outer_lr lies above 0", self.outer_lr)
        require(_is_number(self.momentum) and 0 <= self.momentum < 1, "momentum lies from 0 to below 1", self.momentum)

    def follow(self, ways: Sequence[Tensor], velocities: Sequence[Tensor]) -> Sequence[Tensor]:
        torch._foreach_mul_(list(velocities), self.momentum)
        torch._foreach_add_(list(velocities), list(ways))
        ahead = torch._foreach_add(list(ways), list(velocities), alpha=self.momentum)
        return torch._foreach_mul(ahead, self.outer_lr)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
