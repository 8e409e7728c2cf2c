"""Step execution: CUDA graph capture, memory of activations, and tracing and partitioning of networks."""

from .activations import Life, StorageWatch, kept_bytes, largest_sum, lives
from .call import Call
from .compilers import stop_compilers
from .cuda_graphs import CannotRecord, Phase, Recording, rehearsing
from .layers import Layer, layer_of
from .layout import has_convolutions, lay_out
from .optimizers import CAPTURABLE, fuse_on_cpu, lie_alike, make_capturable, skips_on_device
from .partition import Crossing, GraphPiece, Unit, Works, crossings, in_pieces, in_stages, works_of
from .segments import Contexts, DrawCounter, Segment, segments_of
from .shape_propagation import GraphFacts, Value, changed_at_root, follow, plainly
from .static_inputs import Statics, shape_of
from .tracing import Absent, OutputStructure, TracedGraph, trace
from .user_lines import calling_line, culprit
from .value_watch import ValueWatch

__all__ = [
    "Recording",
    "Phase",
    "CannotRecord",
    "rehearsing",
    "stop_compilers",
    "Statics",
    "has_convolutions",
    "lay_out",
    "shape_of",
    "ValueWatch",
    "make_capturable",
    "fuse_on_cpu",
    "lie_alike",
    "CAPTURABLE",
    "skips_on_device",
    "calling_line",
    "culprit",
    "trace",
    "Call",
    "TracedGraph",
    "OutputStructure",
    "Absent",
    "follow",
    "GraphFacts",
    "Value",
    "changed_at_root",
    "plainly",
    "Layer",
    "layer_of",
    "works_of",
    "Works",
    "Unit",
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
