"""Arguments that let a torch kernel access memory out of bounds are refused before the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.storage.operators import checked

X = torch.ones(1, 2, 8)
PICTURE, GRID = torch.ones(1, 2, 4, 4), torch.zeros(1, 4, 4, 2)
LOWEST = torch.full((4,), -(2**63))
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "huge dilation": ("aten.max_pool1d.default", (X, [5], [2**61], [0], [2**62]), {}),
    "huge stride": ("aten.max_pool2d.default", (PICTURE, [2, 2], [2**62, 1]), {}),
    "few keys": (
        "aten.scaled_dot_product_attention.default",
        (torch.ones(1, 1, 4, 8), torch.ones(1, 1, 1, 8), torch.ones(1, 1, 300, 8)),
        {},
    ),
    "wrapping sum": ("aten.repeat_interleave.Tensor", (torch.tensor([3, *[2**62] * 4]),), {"output_size": 3}),
    "wrong sum": (
        "aten.repeat_interleave.self_Tensor",
        (torch.ones(2), torch.tensor([1, 2])),
        {"dim": 0, "output_size": 2},
    ),
    "unknown interpolation": ("aten.grid_sampler_2d.default", (PICTURE, GRID, 99, 0, False), {}),
    "unknown padding": ("aten.grid_sampler_2d.default", (PICTURE, GRID, 0, 99, False), {}),
    "tiny scale": ("aten.upsample_nearest1d.default", (X.byte(), [4], 1e-30), {}),
    "tiny scales": ("aten._upsample_nearest_exact2d.vec", (PICTURE.byte(), None, [1e-30, 1.0]), {}),
    "multiple of the lowest": ("aten.lcm.default", (LOWEST, torch.tensor(5)), {}),
    "multiple with the lowest": ("aten.lcm_.default", (torch.full((4,), 5), LOWEST), {}),
    "lowest of 32 bits": ("aten.lcm.default", (LOWEST.clamp(-(2**31)).int(), torch.tensor([5] * 4).int()), {}),
    "lowest of 32 bits after conversion": (
        "aten.lcm.default",
        (torch.tensor(2**31), torch.full((4,), 5, dtype=torch.int32)),
        {},
    ),
    "unknown reduction": ("aten.soft_margin_loss.default", (X, X, 3), {}),
    "negative reduction": ("aten.mse_loss.default", (X, X), {"reduction": -1}),
    "wrapping reduction": ("aten.nll_loss.default", (torch.zeros(2, 3), torch.tensor([0, 1]), None, 2**32 + 1), {}),
    "lowest by -1": ("aten.div.Tensor_mode", (LOWEST, torch.tensor(-1)), {"rounding_mode": "trunc"}),
    "lowest by -1 in place": ("aten.div_.Tensor_mode", (LOWEST, torch.tensor(-1)), {"rounding_mode": "floor"}),
    "lowest by -1, another name": ("aten.divide.Scalar_mode", (LOWEST, -1), {"rounding_mode": "trunc"}),
    "lowest by -1, another name in place": ("aten.divide_.Scalar_mode", (LOWEST, -1), {"rounding_mode": "trunc"}),
    "lowest after conversion": (
        "aten.div.Tensor_mode",
        (torch.tensor(2**31), torch.full((4,), -1, dtype=torch.int32)),
        {"rounding_mode": "trunc"},
    ),
}
ALLOWED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "multiples": ("aten.lcm.default", (torch.arange(4), torch.tensor(6)), {}),
    "multiples of bytes": ("aten.lcm.default", (torch.arange(4).byte(), torch.arange(4).byte()), {}),
    "loss": ("aten.soft_margin_loss.default", (X, X, 2), {}),
    "loss of each": ("aten.kl_div.default", (X, X), {"reduction": 0}),
    "pooling": ("aten.max_pool1d.default", (X, [2], [2], [0], [1]), {}),
    "attention": ("aten.scaled_dot_product_attention.default", (torch.ones(1, 1, 4, 8),) * 3, {}),
    "repeats": ("aten.repeat_interleave.self_Tensor", (torch.ones(2), torch.tensor([1, 2])), {"dim": 0}),
    "sampling": ("aten.grid_sampler_2d.default", (PICTURE, GRID, 0, 1, False), {}),
    "upsampling": ("aten.upsample_nearest1d.vec", (X, None, [2.0]), {}),
    "division": ("aten.div.Tensor_mode", (torch.arange(4), torch.tensor(-1)), {"rounding_mode": "trunc"}),
}


@pytest.mark.parametrize(("name", "args", "kwargs"), REFUSED.values(), ids=list(REFUSED))
def test_unsafe_operator_arguments_are_rejected(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must|needs|takes"):
        checked(name)(*args, **kwargs)


@pytest.mark.parametrize(("name", "args", "kwargs"), ALLOWED.values(), ids=list(ALLOWED))
def test_valid_operator_arguments_are_computed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(checked(name)(*args, **kwargs), Tensor)
