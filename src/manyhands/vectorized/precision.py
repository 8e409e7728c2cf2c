"""Precision of a stack: apply autocast's casts before vmap decomposes operations.

Autocast would see the decomposed operations: a layer with a bias as a product in half precision and a sum in full
precision, with outputs twice as large; a loss as single steps that would stay in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_NARROW = {F.linear, torch.conv1d, torch.conv2d, torch.conv3d}
_NARROW |= {torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d}
_WIDE = {torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax, F.softmax, F.log_softmax, F.layer_norm}
_WIDE |= {F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.mse_loss, F.l1_loss, F.smooth_l1_loss}
_WIDE |= {F.huber_loss, F.kl_div}


class Cast(TorchFunctionMode):
    """Cast the inputs of layers to `dtype`, and those of losses and softmax to float32, as autocast does.

    >>> inputs, weights, bias = torch.randn(3, 4, 5), torch.randn(3, 2, 5), torch.randn(3, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), Cast(torch.bfloat16):
    ...     torch.func.vmap(F.linear)(inputs, weights, bias).dtype
    torch.bfloat16
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NARROW or func in _WIDE:
            dtype = self._dtype if func in _NARROW else torch.float32
            args, kwargs = pytree.tree_map(lambda value: _cast(value, dtype), (args, kwargs))
        return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_meant = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return value.to(dtype) if is_meant else value
