"""Vectorized ensembles: many networks of one structure trained as one program."""

from .grouping import groups
from .population import Population
from .speedup import Gain, gain

__all__ = ["Population", "groups", "Gain", "gain"]
