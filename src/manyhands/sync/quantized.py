"""Quantized policies (bf16, fp16, int8): gradients are sent in a narrower dtype.

An exchange has two rounds, as in a ring all-reduce: every replica receives one part of the gradient from all others,
sums it in full precision, and sends the sum to all. So the bytes are those of an all-reduce in the narrower dtype, no
partial sum is rounded, and all replicas decode the same bytes. Two replicas simply swap their gradients: as many bytes,
in one round.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..distributed import Pending
from .policy import Policy, PolicyCollectives
from .policy_memory import PolicyMemory

BLOCK = 256
"""Number of elements that share a scale."""


@dataclass(frozen=True)
class Coded(Policy):
    """Base class of sync policies that send gradients in a narrower dtype.

    Where the dtype needs it, each block of numbers has its own scale, so that neither large nor small gradients are
    lost.
    """

    bucket_bytes = 4 << 20
    kind: ClassVar[torch.dtype]
    """The dtype in which numbers are sent."""

    @abstractmethod
    def scale(self, largest: Tensor) -> Tensor:
        """Return the number by which each block is divided before rounding, from the largest magnitude in the block."""

    def has_scales(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of `dtype` are sent with a scale per block."""
        return True

    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        if wire.size <= 2:
            yield from self._swap(wire, gradient, memory)
            return
        blocks = _blocks(gradient, wire.size, memory)
        sent, approximation = self._encode(blocks, memory, "parts")
        received, pending = wire.all_to_all(sent, memory.buffer("received", sent.shape, sent.dtype))
        left = torch.sub(blocks, approximation, out=approximation)
        yield pending
        total = self._sum(received, blocks, memory)
        sent, approximation = self._encode(total, memory, "sum")
        gathered, pending = wire.all_gather(sent[0], memory.buffer("received", received.shape, sent.dtype))
        # Only the replica that rounded the sum knows the error of this rounding.
        left[wire.rank] += total.sub_(approximation)[0]
        memory.feedback.copy_(left.view(-1)[: gradient.numel()])
        yield pending
        gradient.copy_(self._decode(gathered, blocks, memory).view(-1)[: gradient.numel()])

    def _swap(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        blocks = _blocks(gradient, 1, memory)
        sent, approximation = self._encode(blocks, memory, "parts")
        buffer = memory.buffer("received", (wire.size, sent.shape[1]), sent.dtype)
        gathered, pending = wire.all_gather(sent[0], buffer)
        torch.sub(gradient, approximation.view(-1)[: gradient.numel()], out=memory.feedback)
        yield pending
        gradient.copy_(self._sum(gathered, blocks, memory).view(-1)[: gradient.numel()])

    def _encode(self, blocks: Tensor, memory: PolicyMemory, name: str) -> tuple[Tensor, Tensor]:
        """Encode rows of blocks; return rows of bytes, and the numbers to which they decode.

        Each row of bytes has the scales of its blocks and then the codes (numbers in the narrower dtype).
        """
        rows, num_blocks, block = blocks.shape
        width = self._width(blocks)
        sent = memory.buffer(f"sent {name}", (rows, width + num_blocks * block * self.kind.itemsize), torch.uint8)
        approximation = memory.buffer(f"approximation {name}", blocks.shape, blocks.dtype)
        codes = sent[:, width:].view(self.kind).view(blocks.shape)
        if not width:
            codes.copy_(blocks)
            return sent, approximation.copy_(codes)
        scales = self.scale(torch.abs(blocks, out=approximation).amax(-1)).clamp_(min=torch.finfo(blocks.dtype).tiny)
        sent[:, :width].view(blocks.dtype).copy_(scales)
        self._round(torch.div(blocks, scales.unsqueeze(-1), out=approximation), codes)
        return sent, approximation.mul_(scales.unsqueeze(-1))

    def _round(self, numbers: Tensor, codes: Tensor) -> None:
        """Round scaled numbers into `codes`, and replace the numbers by the rounded values."""
        codes.copy_(numbers)
        numbers.copy_(codes)

    def _decode(self, sent: Tensor, like: Tensor, memory: PolicyMemory) -> Tensor:
        """Decode rows of bytes into rows of blocks; the blocks have the shape and dtype of those in `like`."""
        width = self._width(like)
        numbers = memory.buffer(f"decoded {len(sent)}", (len(sent), *like.shape[1:]), like.dtype)
        numbers.view(len(sent), -1).copy_(sent[:, width:].view(self.kind))
        return numbers.mul_(sent[:, :width].view(like.dtype).unsqueeze(-1)) if width else numbers

    def _sum(self, sent: Tensor, like: Tensor, memory: PolicyMemory) -> Tensor:
        """Return the sum of encoded rows, decoded and added in row order, so that all replicas get the same bits."""
        total = memory.buffer("total", (1, *like.shape[1:]), like.dtype).copy_(self._decode(sent[:1], like, memory))
        for row in range(1, len(sent)):
            total += self._decode(sent[row : row + 1], like, memory)
        return total

    def _width(self, blocks: Tensor) -> int:
        """Return the number of bytes that the scales of one row take; 0 without scales."""
        return blocks.shape[1] * blocks.element_size() if self.has_scales(blocks.dtype) else 0


def _blocks(gradient: Tensor, rows: int, memory: PolicyMemory) -> Tensor:
    """Return a flat gradient in the shape (rows, blocks, elements), copied and padded with zeros if necessary."""
    size, share = gradient.numel(), -(-gradient.numel() // rows)
    # Block sizes are multiples of 8, so that codes and scales are aligned.
    block = min(BLOCK, -(-share // 8) * 8)
    num_blocks = -(-share // block)
    full = rows * num_blocks * block
    if full != size:
        filled = memory.buffer("blocks", (full,), gradient.dtype)
        filled[:size].copy_(gradient)
        filled[size:].zero_()
        gradient = filled
    return gradient.view(rows, num_blocks, block)


@dataclass(frozen=True)
class _Half(Coded):
    """Base class of policies with 16-bit floating-point codes; scales are powers of two, so they cost no precision."""

    def scale(self, largest: Tensor) -> Tensor:
        mantissa = torch.frexp(largest).mantissa
        return torch.where(largest == 0, 1.0, largest / (2 * mantissa))


@dataclass(frozen=True)
class BF16(_Half):
    """Sends gradients in bfloat16: half the bytes of float32, eight bits of precision.

    >>> print(BF16())
    bf16
    """

    name = "bf16"
    kind = torch.bfloat16

    def has_scales(self, dtype: torch.dtype) -> bool:
        # bfloat16 has the range of float32.
        return dtype != torch.float32


@dataclass(frozen=True)
class FP16(_Half):
    """Sends gradients in float16: half the bytes of float32, eleven bits of precision.

    >>> print(FP16(warmup=5))
    fp16(warmup=5)
    """

    name = "fp16"
    kind = torch.float16


@dataclass(frozen=True)
class Int8(Coded):
    """Sends gradients as 8-bit integers with a scale per block: a quarter of the bytes of float32.

    >>> print(Int8())
    int8
    """

    name = "int8"
    kind = torch.int8

    def scale(self, largest: Tensor) -> Tensor:
        return largest / 127

    def _round(self, numbers: Tensor, codes: Tensor) -> None:
        codes.copy_(numbers.round_())
