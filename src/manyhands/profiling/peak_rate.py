"""Peak rate of a device in operations per second, measured with large matrix products."""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": (256, 512, 1024), "cuda": (4096, 8192)}
SECONDS = 0.1
"""Seconds for which products of one size are repeated on a CPU."""
TYPES = {"bf16": torch.bfloat16, "fp64": torch.float64}


def ceiling(device: torch.device, precision: str) -> float:
    """Return the operations per second of the fastest product."""
    sizes = SIZES.get(device.type, SIZES["cpu"])
    return max(_rate(size, device, TYPES.get(precision, torch.float32)) for size in sizes)


def _rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)
    torch.mm(left, right, out=result)
    _finish(device)
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(left, right, out=result)
        _finish(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
