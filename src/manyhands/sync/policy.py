"""Policies: how replicas agree on a gradient. A policy is a small object; buckets call it, strategies name it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ..cluster import Pending, World
from ..core import StrategyError


class Policy(ABC):
    """How the sum of the replicas' gradients comes about."""

    changes_mathematics = False
    """Whether the result may differ from the exact sum; if so it is said in the plan, the log and the record."""

    @abstractmethod
    def start(self, world: World, flat: Tensor) -> Pending:
        """Begins to replace a flat gradient by its sum over the replicas."""


class AllReduce(Policy):
    """The exact sum, by the backend's own all-reduce."""

    def start(self, world: World, flat: Tensor) -> Pending:
        return world.start_all_reduce(flat)


POLICIES: dict[str, type[Policy]] = {"allreduce": AllReduce}
"""Policies by the name that a StrategySpec gives."""


def make_policy(name: str) -> Policy:
    """The policy of this name.

    >>> type(make_policy("allreduce")).__name__
    'AllReduce'
    """
    try:
        return POLICIES[name]()
    except KeyError:
        raise StrategyError(
            f"sync must be one of {', '.join(POLICIES)}", got=repr(name), remedy="choose one of these"
        ) from None
