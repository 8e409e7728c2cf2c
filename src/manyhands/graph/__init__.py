"""Networks as graphs of operations: tracing, partitioning, and the memory of activations."""

from .activations import Life, StorageWatch, kept_bytes, largest_sum, lives
from .layers import Call, layer_of
from .partition import Crossing, GraphPiece, Works, crossings, in_pieces, in_stages, works_of
from .segments import Contexts, DrawCounter, Segment, segments_of
from .shape_propagation import changed_at_root, follow, plainly
from .tracing import TracedGraph, register_dataclasses, trace

__all__ = [
    "register_dataclasses",
    "trace",
    "Call",
    "TracedGraph",
    "follow",
    "changed_at_root",
    "plainly",
    "layer_of",
    "works_of",
    "Works",
    "GraphPiece",
    "Crossing",
    "in_pieces",
    "in_stages",
    "crossings",
    "segments_of",
    "Segment",
    "DrawCounter",
    "Contexts",
    "lives",
    "Life",
    "kept_bytes",
    "largest_sum",
    "StorageWatch",
]
