"""Execution of a training step: CUDA graphs, checks of values that they would not notice, fused updates, layout."""

from .cuda_graphs import CapturedGraphs, CaptureError, Phase, StaticInputs, rehearsing, shape_of
from .memory_layout import has_convolutions, lay_out
from .optimizers import CAPTURABLE, fuse_on_cpu, make_capturable, match_strides, skips_on_device
from .resources import free_graphs, own_stream, stop_compilers
from .value_watch import ValueWatch

__all__ = [
    "CapturedGraphs",
    "Phase",
    "CaptureError",
    "rehearsing",
    "StaticInputs",
    "shape_of",
    "ValueWatch",
    "make_capturable",
    "fuse_on_cpu",
    "match_strides",
    "CAPTURABLE",
    "skips_on_device",
    "has_convolutions",
    "lay_out",
    "stop_compilers",
    "own_stream",
    "free_graphs",
]
