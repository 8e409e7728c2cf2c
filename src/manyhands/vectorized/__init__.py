"""Vectorized ensembles: many networks of equal structure, trained as one program (vmap) on one device."""

from .grouping import groups
from .population import Population
from .speedup import Gain, gain

__all__ = ["Population", "groups", "Gain", "gain"]
