"""Convolutions of a stack: grouped, as vmap makes them, or unfolded into one product of matrices for each member.

Unfolding repeats every input as often as the kernel is large. That pays most where inputs have few channels, as
pictures have: kernels of libraries are bad at these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

GROUPED, THIN, ALL = 0, 64, 1 << 30
"""Which convolutions are unfolded: those whose outputs are computed from so many inputs at the most."""


class Unfolded(TorchFunctionMode):
    """Computes plain convolutions by unfolding them, of outputs that have `most` inputs each; others stay as they are.

    >>> pictures, kernels = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    >>> with Unfolded():
    ...     found = F.conv2d(pictures, kernels, padding=1)
    >>> torch.allclose(found, F.conv2d(pictures, kernels, padding=1), atol=1e-5)
    True
    """

    def __init__(self, most: int = ALL) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d:
            return _convolved(self._most, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _convolved(
    most: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if groups != 1 or isinstance(padding, str) or input.dim() != 4 or weight[0].numel() > most:
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    size = weight.shape[-2:]
    columns = F.unfold(input, size, dilation, padding, stride)
    rows, wide, places = columns.shape
    # One product for all samples: the kernels would be copied for each of them otherwise.
    product = weight.flatten(1) @ columns.transpose(0, 1).reshape(wide, rows * places)
    heights = _length(input.shape[-2], size[0], _pair(stride)[0], _pair(padding)[0], _pair(dilation)[0])
    found = product.view(-1, rows, places).transpose(0, 1).reshape(rows, -1, heights, places // heights)
    return found if bias is None else found + bias.view(-1, 1, 1)


def _length(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _pair(value: Any) -> tuple[int, int]:
    first, last = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return first, last
