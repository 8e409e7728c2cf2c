"""What a forked process does as a rank: set up its device, join the world, run the function, report the outcome."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core import DataWorkerLost, ManyhandsError, PeerLost
from ..distributed import FAILURE, RESULT, Device, RankInfo, SocketChannel, World, current_world, this_host
from .pickles import pack, unpack
from .rendezvous import RendezvousInfo, join


@dataclass(frozen=True)
class TorchSettings:
    """Process-wide torch settings of the program, which its ranks must have as well."""

    default_dtype: torch.dtype
    deterministic: int
    matmul_precision: str
    cudnn: tuple[bool, bool, bool]
    anomaly: bool

    @classmethod
    def now(cls) -> TorchSettings:
        """Return the settings of this process."""
        cudnn = torch.backends.cudnn
        return cls(
            torch.get_default_dtype(),
            torch.get_deterministic_debug_mode(),
            torch.get_float32_matmul_precision(),
            (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
            torch.is_anomaly_enabled(),
        )

    def apply(self) -> None:
        """Apply the settings to this process."""
        cudnn: Any = torch.backends.cudnn
        torch.set_default_dtype(self.default_dtype)
        torch.set_deterministic_debug_mode(self.deterministic)
        torch.set_float32_matmul_precision(self.matmul_precision)
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = self.cudnn
        torch.autograd.set_detect_anomaly(self.anomaly)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What all ranks on a host have in common: the function and the state of the program; sent as a pickle."""

    fn: Callable[[World], Any]
    devices: Sequence[Device]
    """The devices of this host, one per slot."""
    timeout: float
    recovers: bool
    host: str
    cores: Sequence[int]
    cwd: str
    environ: dict[str, str]
    argv: Sequence[str]
    torch: TorchSettings
    confines: bool = False
    """Whether the function sandboxes its process itself: the process gets no environment, and no device is set up."""

    @classmethod
    def here(cls, fn: Callable[[World], Any], devices: Sequence[Device], timeout: float, recovers: bool) -> Assignment:
        """Return an assignment with the current state of this program."""
        confines = bool(getattr(fn, "confines", False))
        return cls(
            fn=fn,
            devices=list(devices),
            timeout=timeout,
            recovers=recovers,
            host=this_host(),
            cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0],
            cwd=_folder(),
            environ={} if confines else dict(os.environ),
            argv=[] if confines else list(sys.argv),
            torch=TorchSettings.now(),
            confines=confines,
        )


_kept: list[object] = []
"""Assignments, which are never freed: destructors of the user's objects may wait for a process group that has ended."""


def run_rank(request: dict[str, Any], sock: socket.socket, pickle_fd: int) -> int:
    """Run one rank and return its exit code; its result or failure is sent over the control channel `sock`."""
    channel = SocketChannel(sock)
    slot = int(request["slot"])
    try:
        _settle_signals()
        sys.path[:] = request["path"]
        assignment: Assignment = unpack(pickle_fd)
        _kept.append(assignment)
        os.close(pickle_fd)
        _settle(assignment, slot)
        channel.recovers = assignment.recovers
        device = assignment.devices[slot]
        # Two hosts of a job may be one machine under different names.
        host = device.host or assignment.host
        if assignment.confines:
            # Creating a world initializes the device and starts driver threads: too early for a process that is
            # sandboxed later.
            device = Device("cpu")
        rank_info = RankInfo(device=device, host=host, timeout=assignment.timeout)
        world = join(RendezvousInfo(**request["rendezvous"]), rank_info, channel)
        _pin(assignment, slot)
        fd = pack(assignment.fn(world), "the result")
        (current_world() or world).close()
    except BaseException as error:
        _send_failure(channel, error)
        return 1
    channel.send(RESULT, b"", (fd,))
    os.close(fd)
    return 0


def _settle_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _settle(assignment: Assignment, slot: int) -> None:
    """Apply the program's folder, environment, arguments and torch settings, and set up the device."""
    assignment.torch.apply()
    with contextlib.suppress(OSError):
        os.chdir(assignment.cwd)
    if assignment.confines:
        # Threads and contexts created now would be outside of the sandbox.
        return
    os.environ.clear()
    os.environ.update(assignment.environ)
    sys.argv[:] = assignment.argv
    torch.set_num_threads(len(core_share(assignment.cores, slot, len(assignment.devices))))
    device = assignment.devices[slot]
    if device.kind == "cuda":
        torch.cuda.set_device(device.index)
        if device.share < 1.0:
            torch.cuda.set_per_process_memory_fraction(device.share, device.index)


def _pin(assignment: Assignment, slot: int) -> None:
    """Pin the computing thread to its cores; communication threads, started before, stay unpinned."""
    if hasattr(os, "sched_setaffinity") and len(assignment.devices) <= len(assignment.cores):
        os.sched_setaffinity(0, core_share(assignment.cores, slot, len(assignment.devices)))


def core_share(cores: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """Return the cores of one rank, so that ranks do not compete for the same cores.

    >>> core_share([0, 1, 2, 3], 1, 2)
    [2, 3]
    >>> core_share([0, 1], 2, 4)
    [0]
    """
    each = len(cores) // num_ranks
    if each == 0:
        return [cores[rank % len(cores)]]
    return list(cores[rank * each : (rank + 1) * each])


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return a failure as a dict: the error if it is a ManyhandsError, its text and traceback, and its kind.

    "echo" is whether it only follows from another rank's failure, "is_ours" whether it is a ManyhandsError.
    """
    return {
        "error": error if isinstance(error, ManyhandsError) else None,
        "reason": f"{type(error).__name__}: {error}",
        "traceback": _trimmed(error),
        "echo": isinstance(error, PeerLost),
        "is_ours": isinstance(error, ManyhandsError) and not isinstance(error, DataWorkerLost),
    }


def _send_failure(channel: SocketChannel, error: BaseException) -> None:
    with contextlib.suppress(Exception):
        fd = pack(failure_of(error), "the failure")
        channel.send(FAILURE, b"", (fd,))
        os.close(fd)


def _trimmed(error: BaseException) -> str:
    """Return the traceback of an error as text, beginning at the first line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    start = next((i for i, frame in enumerate(frames) if os.sep + "manyhands" + os.sep not in frame.filename), 0)
    text = "".join(traceback.format_list(frames[start:]))
    return f"Traceback (most recent call last):\n{text}{type(error).__name__}: {error}"


def _folder() -> str:
    """Return the current folder, or the root folder if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep
