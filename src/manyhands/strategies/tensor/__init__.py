"""Tensor parallelism: layers that several ranks compute together, each with a shard of the parameters."""

from .axis import Axis, in_tensors
from .glue import plain, replicating
from .layout import Layout, find_layout
from .replica import TensorReplica, TensorSharding, reorder

__all__ = [
    "Axis",
    "Layout",
    "find_layout",
    "TensorReplica",
    "TensorSharding",
    "in_tensors",
    "plain",
    "reorder",
    "replicating",
]
