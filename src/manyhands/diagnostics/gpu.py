"""Checks of GPUs: the driver and torch's build, other processes that use the GPUs, and causes of slowdowns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from ..distributed import Device, devices
from ..launcher import Holder, holders
from .finding import Finding, broken, slow
from .nvidia import Gpu, NvidiaDriver, count_on_bus, read_driver

MOSTLY = 0.1
"""The fraction of a GPU's memory in use above which it is reported."""


def driver(found: NvidiaDriver | None = None, num_on_bus: int | None = None, cuda: str | None = None) -> Finding:
    """Check that the NVIDIA driver is installed, and new enough for the CUDA version with which torch was built."""
    found, cuda = found or read_driver(), cuda or torch.version.cuda
    num_on_bus = count_on_bus() if num_on_bus is None else num_on_bus
    if found is None and num_on_bus:
        return broken(
            "driver",
            f"{num_on_bus} NVIDIA GPU(s) on the PCI bus, but no driver answers",
            "the GPU cannot be used",
            "install the NVIDIA driver, and check that nvidia-smi works; if in a container, start it with --gpus all",
        )
    if found is None:
        return Finding("driver", "no NVIDIA GPU")
    text = f"driver {found.version or '?'} for CUDA up to {_dotted(found.cuda)}, torch is built with {cuda or 'none'}"
    if found.cuda is not None and cuda and found.cuda[0] < int(cuda.split(".")[0]):
        return broken(
            "driver",
            text,
            "torch cannot use CUDA with a driver that is older than the major version of its CUDA",
            f"update the driver, or install a torch that was built with CUDA {found.cuda[0]}",
        )
    return Finding("driver", text)


def torch_build(num_gpus: int | None = None, cuda: str | None = None, is_available: bool | None = None) -> Finding:
    """Check that torch was built with CUDA if this machine has NVIDIA GPUs, and that it finds them."""
    if num_gpus is None:
        num_gpus = len(_gpus(None))
        cuda, is_available = torch.version.cuda or torch.version.hip, torch.cuda.is_available()
    build = f"torch {torch.__version__}"
    if not num_gpus or is_available:
        return Finding("torch build", f"{build}, {'uses CUDA' if is_available else 'no NVIDIA GPU to use'}")
    if not cuda:
        return broken(
            "torch build",
            f"{build} is built without CUDA, but there are {num_gpus} NVIDIA GPU(s)",
            "everything runs on the CPU",
            "install torch with CUDA: see pytorch.org/get-started for the command",
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.strip("-1 "):
        return slow(
            "torch build",
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs",
            "everything runs on the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    return broken(
        "torch build",
        f"{build} with CUDA {cuda} sees none of {num_gpus} NVIDIA GPU(s)",
        "everything runs on the CPU",
        "python -c 'import torch; torch.cuda.init()' shows why; often the driver is old, or a container lacks it",
    )


def gpu_architecture(found: list[Device] | None = None) -> Finding:
    """Check that torch was compiled for the architecture of this machine's accelerators."""
    found = [device for device in (devices() if found is None else found) if device.kind != "cpu"]
    for device in found:
        if device.remedy:
            return broken("GPU architecture", f"{device.name}, {device.model}", "it cannot be used", device.remedy)
    return Finding("GPU architecture", ", ".join(f"{d.name} {d.model}" for d in found) or "no accelerator")


def gpu_mode(found: NvidiaDriver | None = None) -> Finding:
    """Check for compute modes of GPUs that exclude processes."""
    odd = [gpu for gpu in _gpus(found) if gpu.mode != "Default"]
    if not odd:
        return Finding("GPU mode", "shared by processes" if _gpus(found) else "no NVIDIA GPU")
    text = _each(odd, lambda gpu: gpu.mode)
    remedy = f"sudo nvidia-smi -i {odd[0].index} -c DEFAULT"
    if any(gpu.mode == "Prohibited" for gpu in odd):
        return broken("GPU mode", text, "no process can compute on it", remedy)
    return slow("GPU mode", text, "only one process can use it: neither 'cuda:0*2' nor a second program works", remedy)


def gpu_memory(found: NvidiaDriver | None = None) -> Finding:
    """Check whether other processes use much of a GPU's memory."""
    taken = [gpu for gpu in _gpus(found) if gpu.total and gpu.used > MOSTLY * gpu.total]
    if not taken:
        return Finding("GPU memory", "free" if _gpus(found) else "no NVIDIA GPU")
    text = _each(taken, lambda gpu: f"{gpu.used / gpu.total:.0%} used by {', '.join(gpu.holders) or 'other processes'}")
    return slow(
        "GPU memory",
        text,
        "less memory is left for batches, and steps wait while the other processes compute",
        "end these processes, or name other devices with on=",
    )


def leased_devices(found: Mapping[str, Holder] | None = None) -> Finding:
    """Check for devices that other manyhands programs have leased, for which a run would wait."""
    found = holders() if found is None else found
    if not found:
        return Finding("leases", "no device is held by another manyhands program")
    return slow(
        "leases",
        "; ".join(f"{name} is held by {holder}" for name, holder in found.items()),
        "a run on this device waits until that program ends",
        "name another device with on=, or set MANYHANDS_ON_BUSY=share",
    )


def gpu_clocks(found: NvidiaDriver | None = None) -> Finding:
    """Check whether clocks of GPUs are throttled because of heat or power, and whether persistence mode is off."""
    hot = [gpu for gpu in _gpus(found) if gpu.slowdowns]
    if hot:
        return slow(
            "GPU clocks",
            _each(hot, lambda gpu: ", ".join(gpu.slowdowns)),
            "every step takes longer than at full speed",
            "check its cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        )
    asleep = [gpu for gpu in _gpus(found) if not gpu.is_persistent]
    if asleep:
        return slow(
            "GPU clocks",
            _each(asleep, lambda gpu: "persistence mode is off"),
            "the first program after a pause waits seconds for the driver",
            "sudo nvidia-smi -pm 1",
        )
    return Finding("GPU clocks", "nothing throttles them" if _gpus(found) else "no NVIDIA GPU")


def _gpus(found: NvidiaDriver | None) -> tuple[Gpu, ...]:
    known = found or read_driver()
    return known.gpus if known is not None else ()


def _each(gpus: list[Gpu], describe: Callable[[Gpu], str]) -> str:
    return "; ".join(f"cuda:{gpu.index} {describe(gpu)}" for gpu in gpus)


def _dotted(version: tuple[int, int] | None) -> str:
    return "?" if version is None else f"{version[0]}.{version[1]}"
