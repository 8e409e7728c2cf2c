"""How a step is executed: recorded as CUDA graphs where it can be, and the reason where it cannot; what it holds."""

from .activations import Life, StorageWatch, kept_bytes, largest_sum, lives
from .blame import culprit
from .layout import has_convolutions, lay_out
from .optimizers import CAPTURABLE, make_capturable, skips_on_device
from .recording import CannotRecord, Phase, Recording, rehearsing
from .statics import Statics, shape_of
from .watch import Watch

__all__ = [
    "Recording",
    "Phase",
    "CannotRecord",
    "rehearsing",
    "Statics",
    "has_convolutions",
    "lay_out",
    "shape_of",
    "Watch",
    "make_capturable",
    "CAPTURABLE",
    "skips_on_device",
    "culprit",
    "lives",
    "Life",
    "kept_bytes",
    "largest_sum",
    "StorageWatch",
]
