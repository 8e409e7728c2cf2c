"""A GPU's identity: a name that is the same in every program, whichever GPUs it sees and in whichever order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Listed:
    """A GPU that the driver lists, in bus order."""

    uuid: str
    model: str


def gpu_identity(
    index: int,
    listed: Callable[[], Sequence[Listed]] | None = None,
    asked: Callable[[int], str] | None = None,
) -> str:
    """Return the UUID of the GPU with this program's index; if it cannot be determined, the index on this machine.

    NVML is queried first, because that does not initialize CUDA in this process. NVML orders GPUs by bus, CUDA by
    speed:
    where GPU models differ, only CUDA knows which GPU an index means. A MIG instance has its own name.

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
    """Return the GPUs that NVML lists; empty without a driver or nvidia-ml-py."""
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
    """Return the UUID that CUDA reports; empty if it reports none."""
    with contextlib.suppress(Exception):
        if torch.cuda.is_available():
            return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
