"""Convolutions of stacked networks: as grouped convolutions, which vmap uses, or unfolded into matrix products.

Unfolding (im2col) copies every input as often as the kernel has positions. It is worthwhile most for inputs with few
channels, such as images, for which library kernels are slow. Unfolded convolutions keep tensors in channels-last order.
Grouped convolutions need the members among the channels, so they transpose all tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

GROUPED, THIN, ALL = 0, 64, 1 << 30
"""Settings of which convolutions are unfolded: those whose outputs depend on at most so many inputs each."""
ALIGNED = 8
"""Matrix widths are padded to a multiple of this number, because half-precision kernels are slow on other widths."""


class Unfolded(TorchFunctionMode):
    """Context in which 2-d convolutions without groups are unfolded and computed as matrix products.

    Only convolutions whose outputs depend on at most `most` inputs each are unfolded.

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
        if func is F.adaptive_avg_pool2d and args:
            # In channels-last order, vmap would compute pooling for one member after the other.
            return func(args[0].contiguous(), *args[1:], **(kwargs or {}))
        if func is F.batch_norm and args and args[0].dim() == 4 and not args[0].is_contiguous():
            # In channels-last order, images are rows of channels, so batch norm needs no transposition here.
            rows = args[0].permute(0, 2, 3, 1)
            normal = func(rows.flatten(0, 2), *args[1:], **(kwargs or {}))
            return normal.reshape(rows.shape).permute(0, 3, 1, 2)
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            if func is not Tensor.view:
                raise
            # User code may rely on the memory order of a convolution's output, which unfolding changes.
            return Tensor.reshape(*args, **(kwargs or {}))


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
    top, left = _pair(padding)
    pictures = F.pad(input.permute(0, 2, 3, 1), (0, 0, left, left, top, top))
    for dim, length, step, gap in zip((1, 2), weight.shape[2:], _pair(stride), _pair(dilation), strict=True):
        pictures = pictures.unfold(dim, gap * (length - 1) + 1, step)[..., ::gap]
    seen = pictures.permute(0, 1, 2, 4, 5, 3)
    shape, patches = seen.shape[:3], seen.reshape(-1, weight[0].numel())
    matrix = weight.permute(2, 3, 1, 0).flatten(0, 2)
    if bias is not None:
        # With an additional input of 1, the product also adds the bias, and backward computes its gradient.
        patches, matrix = F.pad(patches, (0, 1), value=1.0), torch.cat([matrix, bias.unsqueeze(0)])
    if missing := -len(matrix) % ALIGNED:
        patches, matrix = F.pad(patches, (0, missing)), F.pad(matrix, (0, 0, 0, missing))
    # Compute one product for all samples, because a batched product would copy the kernels for each sample.
    return (patches @ matrix).view(*shape, -1).permute(0, 3, 1, 2)


def _pair(value: Any) -> tuple[int, int]:
    first, last = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return first, last
