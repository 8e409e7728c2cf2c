"""Devices of this machine: which exist, how users name them, and virtual devices that share a real one."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import psutil
import torch

from ..core import DeviceError, counted
from .messages import message

_PART = re.compile(r"(?:(?P<host>[A-Za-z0-9_.-]+)/)?(?P<kind>[a-z]+)?(?::?(?P<index>\d+))?(?:\*(?P<copies>\d+))?")


@message
@dataclass(frozen=True)
class Device:
    """A device on which a replica can run: a GPU, the CPU, or a virtual device that shares one of these.

    >>> str(Device("cuda", 1, host="host2"))
    'host2/cuda:1'
    """

    kind: str
    """The device type of torch, such as "cuda" or "cpu"."""
    index: int = 0
    """The index among the devices of this kind on the host."""
    host: str = ""
    """The name of the host; empty for this machine."""
    share: float = 1.0
    """The fraction of the real device that this device may use; below 1 for virtual devices."""
    slot: int = 0
    """The index among the virtual devices that share a real one."""
    model: str = field(default="", compare=False)
    """The product name of a GPU, or the number of CPU cores."""
    memory: int = field(default=0, compare=False)
    """Total bytes of the real device's memory."""
    free: int = field(default=0, compare=False)
    """Free bytes of the real device's memory."""
    capability: str = field(default="", compare=False)
    """The CUDA compute capability, such as "9.0"."""
    links: str = field(default="", compare=False)
    """How the device reaches the others of its host, as text."""
    remedy: str = field(default="", compare=False)
    """Why this torch build cannot use the device and how to fix that; empty if it can."""

    @property
    def torch(self) -> torch.device:
        """Return the device as a torch.device."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def name(self) -> str:
        """Return the name without the host: `cuda:0`, `cpu`, or `cpu#1` for the second virtual one."""
        base = "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"
        return base if self.share == 1.0 else f"{base}#{self.slot}"

    def __str__(self) -> str:
        return f"{self.host}/{self.name}" if self.host else self.name


def this_host() -> str:
    """Return the host name of this machine."""
    return socket.gethostname()


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices() -> list[Device]:
    """Return all devices of this machine, accelerators first, with memory, links and any reason not to use them.

    >>> devices()[-1].kind
    'cpu'
    """
    return [*map(_described, _accelerators()), _cpu()]


def resolve(
    on: str | torch.device | Sequence[Device] | Sequence[str] | None,
    num_wanted: int | None = None,
    arithmetic: str = "",
) -> tuple[list[Device], list[str]]:
    """Return the devices that a user's argument `on` names, and notices about choices made for the user.

    Args:
        on: Names of devices, `Device` objects, or None for the accelerators of this machine, else its CPU.
        num_wanted: Number of devices that the strategy needs; None takes all named devices.
        arithmetic: How that number results from the strategy, for the error if there are too few devices.
    """
    notices: list[str] = []
    if on is None or on == "gpu":
        found, notices = _default(on, num_wanted)
    elif isinstance(on, (str, torch.device)):
        found = _parse(str(on))
    else:
        found = _listed(on)
    if num_wanted is None:
        return found, notices or _crowd(found)
    if num_wanted > len(found):
        names = ", ".join(map(str, found))
        first = replace(found[0], share=1.0, slot=0)
        raise DeviceError(
            f"the strategy needs {num_wanted} devices{arithmetic}",
            got=f"{len(found)} ({names})",
            remedy="use a strategy with fewer devices, or split a device into virtual ones: "
            f'on="{first.name}*{num_wanted}"',
        )
    return found[:num_wanted], notices or _crowd(found[:num_wanted])


def place_of(name: str, among: Sequence[Device]) -> int:
    """Return the index in `among` of the device that `name` is: a device's name, a kind and number, or an index.

    >>> place_of("cpu:1", _virtual(Device("cpu"), 2)), place_of("0", [Device("cuda", 3)])
    (1, 0)
    >>> place_of("b/cpu", [Device("cpu", host="a"), Device("cpu", host="b")])
    1
    """
    for place, device in enumerate(among):
        if name in (str(device), device.name):
            return place
    kind, _, number = name.rpartition(":")
    alike = [place for place, device in enumerate(among) if kind in ("", device.kind)]
    if number.isdecimal() and int(number) < len(alike) and (not kind or any(among[p].share < 1 for p in alike)):
        return alike[int(number)]
    raise DeviceError(
        f"a device of the network must be one of {', '.join(map(str, among))}",
        got=repr(name),
        remedy=f"choose one of them, or a number from 0 to {len(among) - 1}",
    )


def _listed(on: object) -> list[Device]:
    found = list(on) if isinstance(on, (list, tuple)) else []
    if found and all(isinstance(name, (str, torch.device)) for name in found):
        return _parse(",".join(map(str, found)))
    if not found or not all(isinstance(device, Device) for device in found):
        raise DeviceError(
            "on must be a string or a list of devices",
            got=repr(on),
            remedy='pass for example on="cpu*2" or on=mh.devices()',
        )
    return found


def _crowd(found: Sequence[Device]) -> list[str]:
    """Return a list with a notice if more processes than cores would compute on the CPU; else an empty list."""
    num_processes = sum(device.kind == "cpu" for device in found)
    if num_processes <= max(1, num_cores()):
        return []
    cores, most = counted(num_cores(), "CPU core"), counted(num_cores(), "process", "processes")
    return [f"{num_processes} processes share {cores}: they are not faster than {most}"]


def _default(on: str | None, num_wanted: int | None) -> tuple[list[Device], list[str]]:
    found = _accelerators()
    if found:
        return found, []
    if on == "gpu":
        return [_cpu()], ["no accelerator that this torch can use was found: running on the CPU instead"]
    if num_wanted is not None and num_wanted > 1:
        cores = counted(num_cores(), "CPU core")
        notice = f"this machine has no accelerator: {num_wanted} processes share its {cores}"
        return _virtual(_cpu(), num_wanted), [notice]
    return [_cpu()], []


def _parse(text: str) -> list[Device]:
    if "://" in text:
        raise DeviceError(
            'on must name devices of this machine, such as "cuda:0,1" or "cpu*2", or a Ray cluster, such as "ray://head:10001"',
            got=repr(text),
            remedy="correct the address",
        )
    found: list[Device] = []
    kind = ""
    for part in text.replace(" ", "").split(","):
        match = _PART.fullmatch(part)
        if match is None or not (match["kind"] or kind) or not part:
            raise DeviceError(
                "a device must be written like cuda:0, cpu, cpu*2 or host2/cuda:1",
                got=repr(part),
                remedy='pass for example on="cuda:0,1"',
            )
        kind = match["kind"] or kind
        _require_here(match["host"])
        found.extend(_named(kind, match["index"], match["copies"]))
    return found


def _named(kind: str, index: str | None, copies: str | None) -> Iterator[Device]:
    known = [_cpu()] if kind == "cpu" else [device for device in _accelerators() if device.kind == kind]
    if index is not None and kind != "cpu":
        known = [device for device in known if device.index == int(index)]
    if not known:
        have = ", ".join(str(device) for device in [*_accelerators(), _cpu()])
        wanted = kind if index is None else f"{kind}:{index}"
        raise DeviceError(
            f"on must name devices of this machine ({have})",
            got=wanted,
            remedy='choose one of them, or pass on="cpu*2" to try the strategy on the CPU',
        )
    for device in known:
        if copies is not None and int(copies) < 1:
            raise DeviceError(
                "the number of virtual devices must be at least 1", got=copies, remedy=f"write for example {device}*2"
            )
        yield from _virtual(device, int(copies)) if copies is not None else [device]


def _virtual(device: Device, parts: int) -> list[Device]:
    return [replace(device, share=1 / parts, slot=slot) for slot in range(parts)]


def _require_here(host: str | None) -> None:
    if host not in (None, "localhost", this_host()):
        raise DeviceError(f"devices must be on this host, {this_host()}", got=host, remedy="omit the host name")


def _cpu() -> Device:
    memory = psutil.virtual_memory()
    return Device(
        "cpu", model=counted(num_cores(), "core"), memory=memory.total, free=memory.available, links="shared memory"
    )


def _accelerators() -> list[Device]:
    """Return every accelerator that torch finds, without properties: counting does not initialize the devices."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return [Device(kind.type, index, model=kind.type) for index in range(torch.accelerator.device_count())]


def _described(device: Device) -> Device:
    """Return the device with memory, links and capability, which are queried from the device itself."""
    if device.kind != "cuda":
        return device
    index, count = device.index, torch.accelerator.device_count()
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = (properties.major, properties.minor)
    peers = [other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)]
    return replace(
        device,
        model=properties.name,
        memory=total,
        free=free,
        capability=f"{capability[0]}.{capability[1]}",
        links=f"peer access to cuda:{','.join(map(str, peers))}" if peers else "through the host",
        remedy=_capability_remedy(capability, torch.cuda.get_arch_list(), torch.version.cuda or "?"),
    )


def require_usable(device: Device) -> None:
    """Raise DeviceError if this torch build does not support the device; called in the process that will use it."""
    described = _described(device)
    if described.remedy:
        raise DeviceError(
            f"{device} must be supported by the installed torch", got=described.model, remedy=described.remedy
        )


def _capability_remedy(capability: tuple[int, int], built_for: list[str], cuda: str) -> str:
    """Return "" if a torch build for the architectures `built_for` runs on a GPU of this capability, else the remedy.

    >>> _capability_remedy((9, 0), ["sm_80", "sm_90"], "13.0")
    ''
    """
    number = capability[0] * 10 + capability[1]
    binary = [int(arch.split("_")[1].rstrip("af")) for arch in built_for if arch.startswith("sm_")]
    portable = [int(arch.split("_")[1].rstrip("af")) for arch in built_for if arch.startswith("compute_")]
    same_generation = any(arch // 10 == capability[0] and arch <= number for arch in binary)
    if same_generation or any(arch <= number for arch in portable):
        return ""
    have = ", ".join(built_for)
    return (
        f"it is an sm_{number} device and this torch (CUDA {cuda}) was built for {have}: install a torch built for it"
    )


def held_now(device: torch.device) -> int:
    """Return the bytes that this rank uses now: on a GPU its allocated memory, else the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
