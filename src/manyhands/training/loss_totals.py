"""The loss of one step over all replicas and micro-batches, and the stop vote that is reduced with it.

Losses in which samples depend on each other gather the rows of all replicas, with gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import Mean, TaskError
from ..distributed import Pending, World


@dataclass(frozen=True)
class BatchShare:
    """The share of the step's global batch that a micro-batch of this replica is."""

    size: int
    """Samples of this replica; 0 for padding rows, which have no weight."""
    total: int
    """Samples of the whole step, over all replicas and micro-batches."""
    last: bool = True

    @property
    def is_padding(self) -> bool:
        """Whether the micro-batch consists of padding rows, computed only to take part in the collectives."""
        return self.size == 0


class Tally:
    """Sums losses over micro-batches; one all-reduce sums them, their count and the stop vote over the replicas."""

    def __init__(self, world: World, *, reports_loss: bool = True, is_local_sgd: bool = False) -> None:
        self._world, self._reports_loss, self._is_local_sgd = world, reports_loss, is_local_sgd
        self._num_samples = 1
        self._totals: list[Tensor] = []
        self._sizes: list[int] = []
        self._plain_counts: list[float] = []
        self._token_counts: list[Tensor] = []
        self._pending = Pending()
        self._travelling: Tensor | None = None
        self._sums: Tensor | None = None
        self.is_sent = False
        self.counts_tokens = False
        """Whether the loss has its own count (`mh.mean`), by which gradients must be divided at the end."""

    def add(self, loss: Tensor | Mean, part: BatchShare) -> Tensor:
        """Add a micro-batch's loss; return the tensor that backward starts from."""
        self._sizes.append(part.size)
        if isinstance(loss, Mean):
            self.counts_tokens = True
            weight = 0.0 if part.is_padding else 1.0
            self._totals.append(loss.total.detach() * weight)
            self._token_counts.append(loss.count * weight)
            return loss.total * weight if part.is_padding else loss.total
        _require_scalar(loss)
        self._num_samples = part.total
        is_whole = part.size == part.total and not self._is_local_sgd
        self._totals.append(loss.detach() if is_whole else loss.detach() * part.size)
        self._plain_counts.append(1.0 if is_whole else part.size)
        return loss if is_whole else loss * (part.size / part.total)

    def send(self, vote: Tensor, piggybacked: Tensor | None) -> None:
        """Copy the numbers into the gradients' bucket (`piggybacked`), or start a separate all-reduce."""
        self.is_sent = True
        if self._world.size == 1 and not self._is_local_sgd:
            return
        if piggybacked is not None:
            piggybacked.copy_(self._numbers(vote, piggybacked.dtype))
            self._travelling = piggybacked
            return
        self._travelling = self._numbers(vote, torch.float64)
        self._pending = self._world.start_all_reduce(self._travelling)

    def receive(self) -> None:
        """Wait for the all-reduce, where the numbers have their own."""
        self._pending.wait()

    def settle(self) -> None:
        """Copy the sums; the next step reuses the buffer they were reduced in."""
        if self._travelling is not None:
            self._sums = self._travelling.clone()

    def _numbers(self, vote: Tensor, dtype: torch.dtype) -> Tensor:
        """Return total, count and stop vote; total and count are 0 where another rank reports the same samples."""
        total, count = self._local()
        if not self._reports_loss:
            total, count = torch.zeros_like(total), 0.0
        if not isinstance(count, Tensor):
            count = torch.full((), count, dtype=dtype, device=total.device)
        return torch.stack([total.to(dtype), count.to(dtype), vote.to(dtype)])

    def _local(self) -> tuple[Tensor, Tensor | float]:
        total = self._totals[0] if len(self._totals) == 1 else torch.stack(self._totals).sum()
        return total, torch.stack(self._token_counts).sum() if self.counts_tokens else sum(self._plain_counts)

    @property
    def local_loss(self) -> Tensor:
        """The mean loss over this replica's own samples."""
        total, count = self._local()
        return total / count

    @property
    def count(self) -> Tensor | None:
        """The divisor of the gradients; None where the loss already is a mean over samples.

        Under local SGD a replica's gradient is the mean over its own samples.
        """
        if self._is_local_sgd:
            assert self._travelling is not None
            learnt = self._travelling[1] / (1 if self.counts_tokens else self._num_samples)
            return torch.where(learnt > 0, learnt, torch.ones_like(learnt))
        if not self.counts_tokens:
            return None
        return self._travelling[1] if self._travelling is not None else torch.stack(self._token_counts).sum()

    @property
    def row(self) -> Tensor:
        """A copy of total, count and vote as far as they are reduced."""
        assert self._sums is not None
        return self._sums.clone()

    @property
    def loss(self) -> Tensor:
        """The mean loss over the whole step."""
        if self._sums is not None:
            return self._sums[0] / self._sums[1]
        return self._totals[0] if len(self._totals) == 1 and not self.counts_tokens else self.local_loss

    @property
    def finite_parts(self) -> list[bool]:
        """Whether the loss of each micro-batch with samples is finite, on this replica alone."""
        return [bool(total.isfinite()) for total, size in zip(self._totals, self._sizes, strict=True) if size]

    @property
    def is_finite(self) -> Tensor:
        """Whether the step's loss is finite, as a flag on the device: it may overflow where no gradient does."""
        return (self._local()[0] if self._sums is None else self._sums[0]).isfinite()

    @property
    def stopping(self) -> bool:
        """Whether any replica voted to stop; the same answer on every replica."""
        return self._sums is not None and bool(self._sums[2] > 0)


def _require_scalar(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise TaskError(
            "a loss must return a scalar tensor or mh.mean(total, count)",
            got=type(loss).__name__,
            remedy="return the loss tensor",
        )
    if loss.dim() != 0:
        raise TaskError(
            "a loss must be a scalar, the mean over the samples of the batch",
            got=f"a tensor of shape {tuple(loss.shape)}",
            remedy="end it with .mean(), or return mh.mean(losses.sum(), count)",
        )


def gather_rows(world: World, rows: Tensor) -> Tensor:
    """Concatenate the rows of all replicas; their numbers of rows may differ."""
    return rows if world.size == 1 else _gather(rows, world)


def _gather(*args: Any) -> Tensor:
    return _RowGather.apply(*args)  # type: ignore[no-untyped-call, no-any-return]


class _RowGather(torch.autograd.Function):
    """Gather with rows padded to the longest replica; backward all-reduces gradients and keeps this replica's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World) -> Tensor:
        sizes = world.all_gather(torch.tensor([len(rows)], device=rows.device)).flatten().tolist()
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        ctx.world, ctx.start, ctx.stop = world, sum(sizes[: world.rank]), sum(sizes[: world.rank + 1])
        return torch.cat([part[:size] for part, size in zip(world.all_gather(padded), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous().clone()
        ctx.world.all_reduce(gradient)
        return gradient[ctx.start : ctx.stop], None
