"""Local policies (local SGD, DiLoCo): replicas train independently and synchronize every few steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..distributed import Pending
from .policy import Policy, PolicyCollectives, make_policy, require
from .policy_memory import PolicyMemory


@dataclass(frozen=True)
class Local(Policy):
    """Base class of policies with which replicas train independently and synchronize every `every` steps.

    Each replica takes steps on its part of each batch. A synchronization averages the replicas' updates and their batch
    statistics, weighted by the samples (or tokens) that each replica trained on, and exchanges losses and stop
    requests. The replicas also synchronize before a validation, before a checkpoint and at the end, and then average
    their optimizer states too, so that the result is one network. During the warm-up they synchronize after every step.
    """

    has_velocity: ClassVar[bool] = False
    """Whether the policy keeps a velocity (momentum buffer) per parameter from one synchronization to the next."""

    every: int = 16
    """Number of steps between two synchronizations."""
    by: str = field(default="allreduce", kw_only=True)
    """The policy that sums the replicas' updates, such as "int8"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "by", str(self.by))
        is_count = isinstance(self.every, int) and not isinstance(self.every, bool)
        require(is_count and self.every >= 1, "every must be a whole number of at least 1", self.every)
        require(not isinstance(self.carrier, Local), "by must be a policy that exchanges gradients", self.by)

    @property
    def carrier(self) -> Policy:
        """Return the policy that sums the updates over the replicas."""
        return make_policy(self.by)

    @property
    def explanation(self) -> str:
        times = "step" if self.every == 1 else f"{self.every} steps"
        apart = f"{self.between} train independently and synchronize every {times}, including batch statistics"
        return f"sync={self} changes the mathematics: {apart}; a stop takes effect when they synchronize"

    @abstractmethod
    def follow(self, ways: Sequence[Tensor], velocities: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the change to apply to the parameters of the last synchronization, one tensor per parameter.

        Args:
            ways: The replicas' mean update since then.
            velocities: Velocities of the parameters, changed in place; empty unless `has_velocity`.
        """

    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        yield from self.carrier.reduce(wire, gradient, memory)


@dataclass(frozen=True)
class LocalSteps(Local):
    """Local SGD: each replica trains independently, and the parameters are averaged every `every` steps.

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
    """DiLoCo: many local steps per replica; their mean update is the gradient of an outer SGD with Nesterov momentum.

    >>> print(DiLoCo(every=100))
    diloco(100)
    """

    name = "diloco"
    has_velocity = True
    every: int = 100
    outer_lr: float = field(default=0.7, kw_only=True)
    """The learning rate of the outer optimizer."""
    momentum: float = field(default=0.9, kw_only=True)
    """The momentum of the outer optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(_is_number(self.outer_lr) and self.outer_lr > 0, "outer_lr must be above 0", self.outer_lr)
        require(
            _is_number(self.momentum) and 0 <= self.momentum < 1,
            "momentum must be at least 0 and below 1",
            self.momentum,
        )

    def follow(self, ways: Sequence[Tensor], velocities: Sequence[Tensor]) -> Sequence[Tensor]:
        torch._foreach_mul_(list(velocities), self.momentum)
        torch._foreach_add_(list(velocities), list(ways))
        ahead = torch._foreach_add(list(ways), list(velocities), alpha=self.momentum)
        return torch._foreach_mul(ahead, self.outer_lr)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
