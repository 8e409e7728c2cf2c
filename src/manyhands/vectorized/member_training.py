"""Base class of the ways to train the members of an ensemble: stacked or one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import Task
from .member import VectorizedMember


class CannotStack(Exception):
    """Raised if members cannot be computed as one program; the message names the reason, and if possible the line."""


class MemberTraining(ABC):
    """Base class of objects that hold the networks of an ensemble's members and take their steps."""

    @property
    @abstractmethod
    def num_steps_in_epoch(self) -> int:
        """Number of steps in an epoch, which is the same for all members."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all members' tensors on the device, without the temporary memory of a step."""

    @abstractmethod
    def take(self, active: Sequence[int], most: int, total: int, taken: dict[int, list[float]]) -> None:
        """Take at most `most` steps of some members.

        Args:
            active: The numbers of the members.
            most: Maximum number of steps.
            total: Number of steps of a member in total, for its learning rate schedule.
            taken: Gets the losses of each member, also if a later step fails.
        """

    @abstractmethod
    def measured(self, numbers: Sequence[int]) -> dict[int, dict[str, float]]:
        """Return the validation loss and metrics of some members, by their numbers; empty without validation data."""

    @abstractmethod
    def state(self, number: int) -> dict[str, Any]:
        """Return the state of member `number` as the fields of a checkpoint of `fit`."""

    @abstractmethod
    def load(self, number: int, member: VectorizedMember, state: Mapping[str, Any]) -> None:
        """Load the fields of a checkpoint: tensors into member `number`, and its progress into `member`."""

    @abstractmethod
    def replace(self, number: int, task: Task) -> None:
        """Replace member `number` by another task with its initial values."""

    @abstractmethod
    def close(self) -> None:
        """Release CUDA graphs, data feeds and processes; the state of the members stays available."""
