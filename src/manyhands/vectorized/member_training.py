"""How the steps of a population's members are computed, together or one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import Task
from .member import VectorizedMember


class CannotStack(Exception):
    """Members cannot be computed as one program; the text says which line and why."""


class MemberTraining(ABC):
    """Holds what the members of a population have learnt, and takes their steps."""

    @property
    @abstractmethod
    def num_steps_in_epoch(self) -> int:
        """Batches of a pass over the data."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that all members take on the device, besides what a step needs while it is computed."""

    @abstractmethod
    def take(self, active: Sequence[int], most: int, total: int, taken: dict[int, list[float]]) -> None:
        """Takes at most so many steps of some members; puts the losses of each into `taken`, also where it fails.

        Schedules learn that a member has `total` steps in all.
        """

    @abstractmethod
    def measured(self, numbers: Sequence[int]) -> dict[int, dict[str, float]]:
        """What was measured of some members on the task's `valid`; nothing where there is none."""

    @abstractmethod
    def state(self, number: int) -> dict[str, Any]:
        """A member as the fields of a checkpoint of `fit`."""

    @abstractmethod
    def load(self, number: int, member: VectorizedMember, state: Mapping[str, Any]) -> None:
        """Puts the fields of a checkpoint into a member's place, and its progress into `member`."""

    @abstractmethod
    def replace(self, number: int, task: Task) -> None:
        """Puts the first values of another task into a member's place."""

    @abstractmethod
    def close(self) -> None:
        """Releases what training left running; members stay as they are."""
