"""Coded policies: gradients as narrower numbers. Each replica adds up one part of them and sends the sum around.

Two rounds, as in a ring all-reduce: every replica gets one part from all others, adds it up in full precision, and
gives the sum to all. So the bytes are those of an all-reduce of the narrower numbers, no sum is rounded on its way, and
everyone decodes the very same bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cluster import Pending
from .memory import Memory
from .policy import Policy
from .wire import Wire

BLOCK = 256
"""Numbers that share a scale."""


@dataclass(frozen=True)
class Coded(Policy):
    """Narrower numbers with one scale for each block of them, so that neither huge nor tiny ones are lost."""

    kind: ClassVar[torch.dtype]
    """What a number is sent as."""

    @abstractmethod
    def scale(self, largest: Tensor) -> Tensor:
        """What numbers are divided by, from the largest of each block."""

    def reduce(self, wire: Wire, gradient: Tensor, memory: Memory) -> Iterator[Pending]:
        size, share = gradient.numel(), -(-gradient.numel() // wire.size)
        # A multiple of 8, so that the scales lie where numbers may lie.
        block = min(BLOCK, -(-share // 8) * 8)
        num_blocks = -(-share // block)
        blocks = F.pad(gradient, (0, wire.size * num_blocks * block - size)).view(wire.size, num_blocks, block)
        codes = self._encode(blocks)
        received, pending = wire.all_to_all(codes)
        left = blocks - self._decode(codes, blocks)
        yield pending
        total = self._decode(received, blocks).sum(0)
        codes = self._encode(total)
        gathered, pending = wire.all_gather(codes)
        # What the second rounding takes away is known to whoever did it.
        left[wire.rank] += total - self._decode(codes, blocks)
        memory.feedback.copy_(left.view(-1)[:size])
        yield pending
        gradient.copy_(self._decode(gathered, blocks).view(-1)[:size])

    def _encode(self, blocks: Tensor) -> Tensor:
        """The codes of each block, followed by its scale, as bytes."""
        scale = self.scale(blocks.abs().amax(-1, keepdim=True)).clamp(min=torch.finfo(blocks.dtype).tiny)
        codes = self._round(blocks / scale)
        return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], dim=-1)

    def _round(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.kind)

    def _decode(self, codes: Tensor, like: Tensor) -> Tensor:
        width = like.shape[-1] * self.kind.itemsize
        scale = codes[..., width:].contiguous().view(like.dtype)
        return codes[..., :width].contiguous().view(self.kind).to(like.dtype) * scale


@dataclass(frozen=True)
class _Half(Coded):
    """Sixteen bits. The scale is a power of two, so that it takes no precision away."""

    def scale(self, largest: Tensor) -> Tensor:
        mantissa = torch.frexp(largest).mantissa
        return torch.where(largest == 0, 1.0, largest / (2 * mantissa))


@dataclass(frozen=True)
class BF16(_Half):
    """Gradients in bfloat16: half the bytes, eight bits of precision.

    >>> print(BF16())
    bf16
    """

    name = "bf16"
    kind = torch.bfloat16


@dataclass(frozen=True)
class FP16(_Half):
    """Gradients in float16: half the bytes, eleven bits of precision.

    >>> print(FP16(warmup=5))
    fp16(warmup=5)
    """

    name = "fp16"
    kind = torch.float16


@dataclass(frozen=True)
class Int8(Coded):
    """Gradients in eight bits: a quarter of the bytes.

    >>> print(Int8())
    int8
    """

    name = "int8"
    kind = torch.int8

    def scale(self, largest: Tensor) -> Tensor:
        return largest / 127

    def _round(self, numbers: Tensor) -> Tensor:
        return numbers.round().clamp(-127, 127).to(self.kind)
