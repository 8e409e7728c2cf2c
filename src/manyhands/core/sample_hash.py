"""Counter-based hash: random numbers as a function of a key per sample and a code per element of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .randomness import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LAST = 0x846CA68B - 2**32
KEPT_PLACES, KEPT_SHAPES = 1 << 14, 64


def sample_keys(seed: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a 64-bit key for every sample id, and one more for draws that belong to no sample (splitmix64)."""
    keys = np.append(ids, -1).astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed)
    keys = (keys ^ keys >> np.uint64(30)) * np.uint64(_FIRST)
    keys = (keys ^ keys >> np.uint64(27)) * np.uint64(_SECOND)
    return (keys ^ keys >> np.uint64(31)).view(np.int64)


def stacked_keys(seeds: Tensor, steps: Tensor, ids: Tensor) -> Tensor:
    """Return in row i the keys that `LayoutFree.load(seeds[i], steps[i], ids[i])` makes, on the device of the tensors.

    >>> from .layout_free import LayoutFree
    >>> draws = LayoutFree(torch.device("cpu"))
    >>> draws.load(5, 7, np.arange(3))
    >>> keys = stacked_keys(torch.tensor([5]), torch.tensor([7]), torch.arange(3)[None])
    >>> torch.equal(keys[0], draws._keys)
    True
    """
    value = torch.full_like(seeds, _signed(_GOLDEN, 64))
    for part in (seeds, steps):
        value = (value ^ part) * _signed(_FIRST, 64)
        value = (value ^ _shifted(value, 31)) * _signed(_SECOND, 64)
        value = value ^ _shifted(value, 29)
    samples = torch.cat([ids, torch.full_like(ids[:, :1], -1)], 1)
    keys = samples * _signed(_GOLDEN, 64) + _shifted(value, 1).unsqueeze(1)
    keys = (keys ^ _shifted(keys, 30)) * _signed(_FIRST, 64)
    keys = (keys ^ _shifted(keys, 27)) * _signed(_SECOND, 64)
    return keys ^ _shifted(keys, 31)


def _shifted(values: Tensor, count: int) -> Tensor:
    """Return the values shifted right by `count` bits, with zeros from the left."""
    return (values >> count) & (1 << 64 - count) - 1


class ElementCodes:
    """Codes of a sample's elements, which the hash combines with the sample's key; codes of small shapes are cached."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def of(self, inner: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the codes of the elements of a sample of shape `inner`, in one row."""
        found = self._known.get((inner, device))
        if found is None:
            found = _codes(inner, device)
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if found.numel() <= KEPT_PLACES and len(self._known) < KEPT_SHAPES and not capturing:
                self._known[inner, device] = found
        return found


def _codes(inner: Sequence[int], device: torch.device) -> Tensor:
    """Return a code for every element of a sample of shape `inner`, made from its coordinates, in one row."""
    codes = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for dim, size in enumerate(inner):
        if size != 1:
            coordinate = torch.arange(size, dtype=torch.int32, device=device).mul_(_signed(mix(dim) | 1))
            codes = (codes.view(-1, 1) + coordinate).view(1, -1)
    return codes


def scramble(places: Tensor, keys: Tensor) -> Tensor:
    """Return the int32 hash of every key and element code (`places`), a row per key.

    Both halves of the 64-bit key enter a 32-bit finalizer.
    """
    keys = keys.bitwise_xor(keys >> 32)
    # Not a view of halves, for which torch 2.11 has no vmap rule.
    first, second = (half.to(torch.int32).unsqueeze(-1) for half in (keys, keys >> 32))
    x = places ^ first
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += second
    x *= _LAST
    return x


def _signed(value: int, bits: int = 32) -> int:
    """Return the lowest `bits` bits of a number as a signed integer, as torch's int32 or int64 stores them."""
    half = 1 << bits - 1
    return (value + half) % (2 * half) - half
