"""Arguments with which a kernel of torch leaves its memory are refused before it is called."""

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
    "lowest by -1": ("aten.div.Tensor_mode", (LOWEST, torch.tensor(-1)), {"rounding_mode": "trunc"}),
}
ALLOWED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "pooling": ("aten.max_pool1d.default", (X, [2], [2], [0], [1]), {}),
    "attention": ("aten.scaled_dot_product_attention.default", (torch.ones(1, 1, 4, 8),) * 3, {}),
    "repeats": ("aten.repeat_interleave.self_Tensor", (torch.ones(2), torch.tensor([1, 2])), {"dim": 0}),
    "sampling": ("aten.grid_sampler_2d.default", (PICTURE, GRID, 0, 1, False), {}),
    "upsampling": ("aten.upsample_nearest1d.vec", (X, None, [2.0]), {}),
    "division": ("aten.div.Tensor_mode", (torch.arange(4), torch.tensor(-1)), {"rounding_mode": "trunc"}),
}


@pytest.mark.parametrize(("name", "args", "kwargs"), REFUSED.values(), ids=list(REFUSED))
def test_unsafe_arguments_are_refused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must|needs|takes"):
        checked(name)(*args, **kwargs)


@pytest.mark.parametrize(("name", "args", "kwargs"), ALLOWED.values(), ids=list(ALLOWED))
def test_ordinary_arguments_are_computed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(checked(name)(*args, **kwargs), Tensor)
