"""Identity of a GPU: a name that is the same in every program, whatever CUDA_VISIBLE_DEVICES the program has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Listed:
    """A GPU that the driver lists."""

    uuid: str
    model: str


def gpu_identity(
    index: int,
    listed: Callable[[], Sequence[Listed]] | None = None,
    asked: Callable[[int], str] | None = None,
) -> str:
    """Return the UUID of the GPU to which this program's `index` refers; the index on this machine if that is unknown.

    NVML is queried first, because that does not initialize CUDA in this process. NVML orders GPUs by bus, CUDA by
    speed, so if the GPU models differ, CUDA is asked to which GPU the index refers. A MIG instance has its own name.

    Args:
        index: CUDA's index in this program.
        listed: Returns the GPUs that the driver lists, in bus order; by default asks NVML.
        asked: Returns the UUID of an index, or ""; by default asks CUDA.

    >>> gpu_identity(0, listed=lambda: [Listed("GPU-5ebe", "H200")])
    'GPU-5ebe'
    """
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",") if part]
    name = visible[index] if index < len(visible) else str(index)
    if name.startswith("MIG-"):
        return name
    gpus = (listed or _listed_by_driver)()
    if name.startswith("GPU-"):
        # CUDA accepts a prefix of the UUID if it matches one GPU only.
        fitting = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(name)]
        return fitting[0] if len(fitting) == 1 else (asked or _asked_cuda)(index) or name
    is_counted_alike = len({gpu.model for gpu in gpus}) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if is_counted_alike and name.isdecimal() and int(name) < len(gpus):
        return gpus[int(name)].uuid
    return (asked or _asked_cuda)(index) or name


def _listed_by_driver() -> list[Listed]:
    """Return the GPUs that NVML lists, in bus order; an empty list without a driver or nvidia-ml-py."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        return [Listed(_text(nvml.nvmlDeviceGetUUID(one)), _text(nvml.nvmlDeviceGetName(one))) for one in handles]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _asked_cuda(index: int) -> str:
    """Return the UUID of a GPU that CUDA reports; an empty string if it reports none."""
    with contextlib.suppress(Exception):
        if torch.cuda.is_available():
            return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
