"""Random stages: importing this module makes pipelines split at random places instead of balanced ones.

The places depend only on the network and its initial weights, so that a cell gives the same result again, and
other seeds split elsewhere.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from manyhands.graph import Works
from manyhands.strategies import placement


def _seconds(works: Works, call: Any, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> list[float]:
    """Return the seconds of each unit, made up, in place of measuring them."""
    names = " ".join(unit.path for unit in works.units)
    first = next((tensor for tensor in tensors.values() if tensor.numel()), None)
    value = "" if first is None else str(first.detach().flatten()[0].item())
    chooser = random.Random(zlib.crc32(f"{names} {value}".encode()))
    return [chooser.random() ** 4 for _ in works.units]


placement.measured = _seconds
