"""Main function of a replica process: load a model, warm it up, then compute batches until the server disconnects.

The process of an exported model enters its sandbox before it reads the first byte of the archive. A predictor object
passed in by the user's program is trusted code and runs without a sandbox.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from ..core import ArchiveError, Predictor, RunError, Signature
from ..distributed import Device, World
from ..storage import Archive, load
from .compute import Compute, NetworkCompute, PythonCompute, is_served_dtype
from .execution import fastest, in_precision
from .options import Replicas
from .python_model import PythonModel, open_folder
from .sandbox import Protection, Sandbox, default_memory, kept_environment
from .scheduling import shorten_slice
from .slots import ReplicaSlots, SlotLayout

MAX_MESSAGE = 65536
_PATIENCE = 600.0
LOADING_SECONDS = 120.0
"""Seconds that a replica may take to load and warm up, in addition to the time for reading its weights."""
READING_SPEED = 20e6
"""Assumed lower bound of the disk's read rate, in bytes per second."""
COMPILING_SECONDS = 900.0
MAX_LOADING_SECONDS = 7200.0
"""Seconds that a load may take at most, however large the files are."""
_MAX_FILES = 1000
"""Number of files whose sizes count for the time of a load."""
STARVED_SECONDS = 2.0
"""Total seconds that a loading version waits for a core at idle priority before it is loaded at normal priority."""
NETWORK, PREDICTOR, PYTHON = "network", "predictor", "python"
"""Kinds of sources: an exported network, a Predictor of the user, and Python code that `PythonModel` calls."""


class NoFreeCore(RunError):
    """Raised when a replica that loads at idle priority got no CPU time."""


class PredictorSource(Protocol):
    """Protocol for objects that create a replica's predictor and describe how to run it."""

    @property
    def compiles(self) -> bool:
        """Whether the predictor may be compiled."""

    @property
    def kind(self) -> str:
        """NETWORK, PREDICTOR or PYTHON."""

    @property
    def patience(self) -> float:
        """Seconds within which the predictor must be loaded and warmed up."""

    def open(self, device: str) -> Predictor | PythonModel:
        """Create the predictor; called in the replica's process."""

    def sandbox(self, device: Device, group: str) -> Sandbox | None:
        """Return the sandbox for the replica's process, or None if it runs the user's own code."""


@dataclass(frozen=True)
class Exported:
    """Predictor source that loads an exported model from a version's folder."""

    path: Path
    replicas: Replicas = field(default_factory=Replicas)
    memory: int = 0
    """Memory limit of a replica in bytes; 0 for a share of the free memory."""

    @property
    def kind(self) -> str:
        return NETWORK

    @property
    def compiles(self) -> bool:
        return self.replicas.compile

    @property
    def patience(self) -> float:
        found: list[os.stat_result] = []
        with contextlib.suppress(OSError), os.scandir(self.path) as files:
            found = [file.stat(follow_symlinks=False) for file in islice(files, _MAX_FILES)]
        # A file with holes takes no longer to read than what it holds.
        size = sum(min(one.st_size, 512 * one.st_blocks) for one in found)
        limit = LOADING_SECONDS + size / READING_SPEED + (COMPILING_SECONDS if self.compiles else 0)
        return min(limit, MAX_LOADING_SECONDS)

    def open(self, device: str) -> Predictor:
        return in_precision(load(self.path, device), self.replicas.precision)

    def sandbox(self, device: Device, group: str) -> Sandbox | None:
        return _sandbox((str(self.path.absolute()),), self.memory, device, group, compiles=self.replicas.compile)


@dataclass(frozen=True)
class Given:
    """Predictor source for an object from the user's program.

    Its code is trusted, so its process is not sandboxed, except if the object is a loaded `Archive`.
    """

    predictor: Any
    """A Predictor, or an object that `PythonModel` takes."""
    replicas: Replicas = field(default_factory=Replicas)

    @property
    def kind(self) -> str:
        if type(self.predictor) is Archive:
            return NETWORK
        return PREDICTOR if isinstance(self.predictor, Predictor) else PYTHON

    @property
    def compiles(self) -> bool:
        return self.replicas.compile

    @property
    def patience(self) -> float:
        return _PATIENCE + (COMPILING_SECONDS if self.compiles else 0)

    def open(self, device: str) -> Predictor | PythonModel:
        if self.kind == PYTHON:
            return PythonModel(self.predictor, device)
        return in_precision(self.predictor, self.replicas.precision)

    def sandbox(self, device: Device, group: str) -> Sandbox | None:
        is_data = self.kind == NETWORK
        return _sandbox((), 0, device, group, compiles=self.replicas.compile) if is_data else None


@dataclass(frozen=True)
class PythonFolder:
    """Predictor source for a version's folder with Python code, which the operator trusts: it is not sandboxed."""

    path: Path

    @property
    def kind(self) -> str:
        return PYTHON

    @property
    def compiles(self) -> bool:
        return False

    @property
    def patience(self) -> float:
        return _PATIENCE

    def open(self, device: str) -> Predictor | PythonModel:
        return open_folder(self.path, device)

    def sandbox(self, device: Device, group: str) -> Sandbox | None:
        return None


def _sandbox(reads: tuple[str, ...], memory: int, device: Device, group: str, *, compiles: bool) -> Sandbox:
    return Sandbox(
        reads=reads,
        memory=memory or default_memory(),
        group=group,
        cuda_index=device.index if device.kind == "cuda" else None,
        compiles=compiles,
        environ=kept_environment(os.environ),
    )


@dataclass(frozen=True)
class Computing:
    """Callable that an engine runs in a replica's process."""

    source: PredictorSource
    device: Device
    rendezvous: str
    """Path of the Unix socket on which the server waits for its replicas."""
    key: str
    """Unguessable key that identifies this replica to the server."""
    sizes: tuple[int, ...]
    """Batch sizes for the warm-up, in ascending order."""
    quietly: bool = True
    """Whether the model is loaded at idle CPU priority."""
    sandbox: Sandbox | None = None
    bulk_rows: int = 0
    """Maximum rows of a batch of one large request; 0 for none beyond `sizes`."""

    @property
    def confines(self) -> bool:
        """Return whether the process is sandboxed and must not inherit resources that it cannot give up."""
        return self.sandbox is not None

    def __call__(self, world: World) -> None:
        # Must run before the sandbox, which blocks the system call.
        shorten_slice()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(self.rendezvous)
            server.send(json.dumps({"key": self.key}).encode())
            if self.sandbox is None:
                self._serve(server, Protection())
            else:
                self._serve_confined(server, self.sandbox)

    def _serve_confined(self, server: socket.socket, sandbox: Sandbox) -> None:
        """Serve in the sandbox until the server disconnects, then exit the process.

        The launching program unpickles what a rank reports on its control channel, so the channel is closed with all
        other descriptors and failures are reported as text.
        """
        code = 1
        try:
            self._serve(server, sandbox.enter([server.fileno()]))
            code = 0
        except BaseException as error:
            with contextlib.suppress(OSError):
                server.send(json.dumps({"failed": type(error).__name__, "text": str(error)[:2000]}).encode())
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)

    def _serve(self, server: socket.socket, protection: Protection) -> None:
        server.send(json.dumps({"layers": protection.layers, "missing": protection.missing}).encode())
        if self.confines:
            settle(self.device)
        own_cores(self.device)
        # Libraries of a predictor in Python may have to be used on the thread that loaded them.
        is_aside = self.quietly and self.source.kind != PYTHON
        compute = quietly(lambda: self._prepare(server)) if is_aside else self._prepare(server)
        # PyTorch keeps the number of threads per thread.
        torch.set_num_threads(compute.num_threads)
        # Everything allocated so far stays alive; exclude it from garbage collection, which would delay batches.
        gc.collect()
        gc.freeze()
        server.send(b'{"ready": true}')
        while message := server.recv(MAX_MESSAGE):
            server.send(compute(message))
        # Tearing down the process takes CPU time too.
        step_back()

    def _prepare(self, server: socket.socket) -> Compute:
        predictor = self.source.open(str(self.device.torch))
        require_rows(predictor.signature, texts=isinstance(predictor, PythonModel))
        slots = self._introduce(server, predictor.signature)
        compute: Compute
        if isinstance(predictor, PythonModel):
            compute = PythonCompute(predictor, slots)
        else:
            run = fastest(predictor, self.device.torch, self.sizes[-1], compiles=self.source.compiles)
            compute = NetworkCompute(run, predictor.signature, slots, self.device.torch)
        compute.prepare(self.sizes)
        return compute

    def _introduce(self, server: socket.socket, signature: Signature) -> ReplicaSlots:
        server.send(json.dumps({"signature": signature.to_dict()}).encode())
        server.settimeout(_PATIENCE)
        _, (fd,), _, _ = socket.recv_fds(server, MAX_MESSAGE, 1)
        server.settimeout(None)
        slots = ReplicaSlots(SlotLayout(signature, self.sizes[-1], self.bulk_rows), fd)
        os.close(fd)
        return slots


def settle(device: Device) -> None:
    """Set the number of threads and the GPU memory fraction, as the launcher does for other ranks."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if device.kind == "cuda" and device.share < 1.0:
        torch.cuda.set_per_process_memory_fraction(device.share, device.index)


def own_cores(device: Device) -> None:
    """Pin the process to its virtual device's share of the cores, so that replicas on one CPU do not compete."""
    if device.kind != "cpu" or device.share == 1.0:
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, int(len(cores) * device.share + 1e-6))
    assigned = [cores[(device.slot * each + i) % len(cores)] for i in range(each)]
    os.sched_setaffinity(0, assigned)
    torch.set_num_threads(len(assigned))


def require_rows(signature: Signature, *, texts: bool = False) -> None:
    """Raise ArchiveError unless every tensor has a dynamic first dimension (rows) and a supported dtype.

    Only predictors in Python may have strings (`texts`).
    """
    for what, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for name, spec in specs.items():
            if not is_served_dtype(spec.dtype, texts=texts) or not spec.shape or spec.shape[0] is not None:
                raise ArchiveError(
                    f"{what} {name!r} of a served model must be numbers or bools with the rows first",
                    got=str(spec),
                    remedy="let predict return one row for each input row",
                )


def step_back() -> None:
    """Run this thread only when no other thread wants the core (SCHED_IDLE).

    A high nice value is not enough: the kernel lets such a thread finish its time slice when another one wakes.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def quietly(make: Callable[[], Compute]) -> Compute:
    """Load and warm up on a thread of idle priority, so that serving replicas are not slowed down."""
    made: list[Compute | BaseException] = []

    def work() -> None:
        step_back()
        try:
            made.append(make())
        except BaseException as error:
            made.append(error)

    # A daemon thread, so that the process can exit even if the thread never gets a core.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
        if thread.is_alive() and waited(thread.native_id) > STARVED_SECONDS:
            raise NoFreeCore(f"no core was free for {STARVED_SECONDS:g} s")
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


def waited(thread: int | None) -> float:
    """Return the seconds for which a thread was runnable but not running; 0 if the kernel does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
