"""Randomness: derived seeds, and the state of every generator that a step draws from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Return a 63-bit seed that depends on all given integers and on their order.

    >>> mix(0, 1) != mix(1, 0)
    True
    """
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = (value ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 31) * 0x94D049BB133111EB & _MASK
        value ^= value >> 29
    return value >> 1


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (on all devices), numpy and Python."""
    import numpy as np
    import torch

    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states, as tensors, of the global generators of torch, numpy, Python and an accelerator `device`."""
    import numpy as np
    import torch

    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    version, words, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": _bytes(np.asarray(keys, dtype=np.uint32).tobytes()),
        "numpy_rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_rest": torch.tensor([version, float("nan") if next_gauss is None else next_gauss], dtype=torch.float64),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the global generators from the result of `random_state`."""
    import numpy as np
    import torch

    torch.set_rng_state(states["torch"])
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    keys = np.frombuffer(states["numpy"].numpy().tobytes(), dtype=np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    version, next_gauss = states["python_rest"].tolist()
    random.setstate((int(version), tuple(states["python"].tolist()), None if next_gauss != next_gauss else next_gauss))
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's and Python's global generators within the context, and restore their states afterwards."""
    import torch

    on_device = None if device.type == "cpu" else torch.get_device_module(device)
    before = torch.get_rng_state(), on_device and on_device.get_rng_state(device), random.getstate()
    # Not torch.manual_seed, which checks every kind of device and takes a quarter of a millisecond.
    torch.default_generator.manual_seed(seed)
    if on_device is not None:
        on_device.manual_seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        if on_device is not None:
            on_device.set_rng_state(before[1], device)
        random.setstate(before[2])


def _bytes(data: bytes) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
