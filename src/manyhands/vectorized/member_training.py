"""Base class of how the steps of an ensemble's members are computed: stacked or one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import Task
from .member import VectorizedMember


class CannotStack(Exception):
    """Raised when members cannot be computed as one program; the message names the line and the reason."""


class MemberTraining(ABC):
    """Hold the weights and state of an ensemble's members, and take their steps."""

    @property
    @abstractmethod
    def num_steps_in_epoch(self) -> int:
        """Number of batches in an epoch."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that all members take on the device, without the temporary memory of a step."""

    @abstractmethod
    def take(self, active: Sequence[int], most: int, total: int, taken: dict[int, list[float]]) -> None:
        """Take at most `most` steps of some members; put the losses of each into `taken`, even if a step fails.

        `total` is the number of steps that a member's schedule assumes.
        """

    @abstractmethod
    def measured(self, numbers: Sequence[int]) -> dict[int, dict[str, float]]:
        """Return the results of some members on the task's `valid`; empty if the task has none."""

    @abstractmethod
    def state(self, number: int) -> dict[str, Any]:
        """Return a member as the fields of a checkpoint of `fit`."""

    @abstractmethod
    def load(self, number: int, member: VectorizedMember, state: Mapping[str, Any]) -> None:
        """Load the fields of a checkpoint into a member's slot, and its progress into `member`."""

    @abstractmethod
    def replace(self, number: int, task: Task) -> None:
        """Put the initial values of another task into a member's slot."""

    @abstractmethod
    def close(self) -> None:
        """Release graphs and processes of training; members keep their state."""
