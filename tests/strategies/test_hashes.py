"""The hash that compares replicas: one flipped bit changes it, at any position."""

from __future__ import annotations

import pytest
import torch

from manyhands.strategies.mirrored import hash_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flipping_one_bit_changes_tensor_hash(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (2049,), (5, 1001)):
        tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        before = hash_of(tensor)
        bits = tensor.reshape(-1).view(torch.uint8)
        for place in (0, len(bits) // 2, len(bits) - 1):
            bits[place] ^= 1
            assert hash_of(tensor) != before
            bits[place] ^= 1
        assert hash_of(tensor) == before


def test_tensor_hash_depends_on_values_and_order_not_on_strides() -> None:
    tensor = torch.randn(5001)
    assert hash_of(tensor[1:]) == hash_of(tensor[1:].clone())
    assert hash_of(tensor[:5000].view(50, 100).T) == hash_of(tensor[:5000].view(50, 100).T.contiguous())
    assert hash_of(tensor.flip(0)) != hash_of(tensor)
    assert hash_of(torch.empty(0, 3)) == 0
