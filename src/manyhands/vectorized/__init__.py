"""Vectorized ensembles: many networks of one structure trained as one program."""

from .grouping import TaskGroup, groups
from .member import VectorizedMember
from .population import Population
from .speedup import Gain, gain

__all__ = ["Population", "VectorizedMember", "TaskGroup", "groups", "Gain", "gain"]
