"""Layers that several ranks compute together, each with a part of the parameters."""

from .axis import Axis
from .layout import Layout, find_layout
from .replica import Cutting, TensorReplica

__all__ = ["Axis", "Layout", "find_layout", "Cutting", "TensorReplica"]
