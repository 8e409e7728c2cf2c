"""Many networks of one structure as one program."""

from .gain import Gain, gain
from .grouping import TaskGroup, groups
from .member import VectorizedMember
from .population import Population

__all__ = ["Population", "VectorizedMember", "TaskGroup", "groups", "Gain", "gain"]
