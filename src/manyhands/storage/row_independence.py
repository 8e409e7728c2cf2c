"""Check that a network computes every row of a batch by itself: a server joins rows of several clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..core import ArchiveError, Signature

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Maximum difference, relative to the largest value: kernels sum in another order for another number of rows."""
SEED = 0


def require_independent_rows(
    network: Callable[..., Sequence[Tensor]],
    names: Sequence[str],
    examples: Mapping[str, Tensor],
    signature: Signature,
) -> None:
    """Raise ArchiveError unless every output has one row for each input row, which depends on no other row.

    The first row of the example is computed alone, and before, between and after rows that differ from it.
    """
    for name, spec in signature.outputs.items():
        if not spec.shape or spec.shape[0] is not None:
            raise ArchiveError(
                "every output must have one row for each row of the inputs",
                got=f"{name!r}: {spec}",
                remedy="select the others with outputs=, or put the rows first in a module around the network",
            )
    alone = [tensor[:1] for tensor in examples.values()]
    joined = [torch.cat([tensor[:1], tensor[-1:], _other(tensor)]) for tensor in examples.values()]
    with torch.no_grad():
        wanted = network(*alone)
        for place in range(3):
            found = network(*(tensor.roll(place, 0) for tensor in joined))
            for name, want, have in zip(names, wanted, found, strict=True):
                if not _is_close(want, have[place : place + 1]):
                    raise ArchiveError(
                        "every row must be computed independently of the others, because a server joins rows of "
                        "several requests",
                        got=f"an output {name!r}, of which a row changes with the rows "
                        f"{'after' if place == 0 else 'before'} it",
                        remedy="compute nothing over the batch dimension, such as a mean, a cumulative sum or a "
                        "softmax over dim 0",
                    )


def _other(example: Tensor) -> Tensor:
    """Return a row unlike the first one: other values of the same range, or integers in another order."""
    row = example[:1]
    if not row.is_floating_point():
        if row.dim() > 1:
            return row.flip(-1)
        differing = example[example != row]
        return differing[:1] if len(differing) else (row - 1).clamp(min=0) if row.dtype != torch.bool else ~row
    values = row.float()
    low, high = (float(values.min()), float(values.max())) if row.numel() else (math.nan, math.nan)
    if not math.isfinite(high - low):
        return row
    made = torch.rand(row.shape, generator=torch.Generator().manual_seed(SEED))
    return (low + made * ((high - low) or 1.0)).to(row)


def _is_close(want: Tensor, have: Tensor) -> bool:
    if want.shape != have.shape:
        return False
    if want.dtype not in CLOSE:
        return torch.equal(want, have)
    first, second = want.double(), have.double()
    most = CLOSE[want.dtype] * float(first.nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if first.numel() else 0.0
    return torch.allclose(second, first, rtol=0.0, atol=most, equal_nan=True)
