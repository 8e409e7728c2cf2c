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
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core import ArchiveError, Predictor, RunError, Signature
from ..distributed import Device, World
from ..storage import Archive, OutputMismatch, load, require_outputs
from .dtypes import BY_TORCH, Array
from .execution import Run, fastest, in_precision
from .options import Replicas
from .sandbox import Protection, Sandbox, default_memory, kept_environment
from .scheduling import shorten_slice
from .slots import Dims, ReplicaSlots, SlotLayout

MAX_MESSAGE = 65536
JOB = struct.Struct("<II")
"""Slot and number of rows including padding, followed by the shapes of the input rows."""
REPLY = struct.Struct("<III")
"""Slot, failure flag and microseconds, followed by the shapes of the output rows or by the error text."""
_FREE_SIZE = 8
"""Size used for dynamic dimensions during warm-up."""
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


class NoFreeCore(RunError):
    """Raised when a replica that loads at idle priority got no CPU time."""


class PredictorSource(Protocol):
    """Protocol for objects that create a replica's predictor and describe how to run it."""

    @property
    def compiles(self) -> bool:
        """Whether the predictor may be compiled."""

    @property
    def patience(self) -> float:
        """Seconds within which the predictor must be loaded and warmed up."""

    def open(self, device: str) -> Predictor:
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

    predictor: Predictor
    replicas: Replicas = field(default_factory=Replicas)

    @property
    def compiles(self) -> bool:
        return self.replicas.compile

    @property
    def patience(self) -> float:
        return _PATIENCE + (COMPILING_SECONDS if self.compiles else 0)

    def open(self, device: str) -> Predictor:
        return in_precision(self.predictor, self.replicas.precision)

    def sandbox(self, device: Device, group: str) -> Sandbox | None:
        is_data = type(self.predictor) is Archive
        return _sandbox((), 0, device, group, compiles=self.replicas.compile) if is_data else None


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
        compute = quietly(lambda: self._prepare(server)) if self.quietly else self._prepare(server)
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
        require_rows(predictor.signature)
        slots = self._introduce(server, predictor.signature)
        run = fastest(predictor, self.device.torch, self.sizes[-1], compiles=self.source.compiles)
        compute = Compute(run, predictor.signature, slots, self.device.torch)
        compute.warm_up(self.sizes)
        compute.choose_threads(self.sizes[-1])
        return compute

    def _introduce(self, server: socket.socket, signature: Signature) -> ReplicaSlots:
        server.send(json.dumps({"signature": signature.to_dict()}).encode())
        server.settimeout(_PATIENCE)
        _, (fd,), _, _ = socket.recv_fds(server, MAX_MESSAGE, 1)
        server.settimeout(None)
        slots = ReplicaSlots(SlotLayout(signature, self.sizes[-1]), fd)
        os.close(fd)
        return slots


class Compute:
    """Compute batches in a replica's shared-memory slots."""

    def __init__(self, run: Run, signature: Signature, slots: ReplicaSlots, device: torch.device) -> None:
        self._compute, self._signature, self._slots = run, signature, slots
        self._dims_in, self._dims_out = Dims(signature.inputs.values()), Dims(signature.outputs.values())
        self.num_threads = 1
        if device.type == "cuda":
            _pin(slots)

    def warm_up(self, sizes: tuple[int, ...]) -> None:
        """Compute one batch of each size, so that no request pays the cost of a first run."""
        inputs = self._signature.inputs
        shapes = [tuple(_FREE_SIZE if n is None else n for n in spec.shape[1:]) for spec in inputs.values()]
        free = any(n is None for spec in inputs.values() for n in spec.shape[1:])
        for size in sizes:
            try:
                self._run(0, size, shapes)
            except OutputMismatch:
                raise
            except Exception:
                # A model with dynamic dimensions may not accept the sizes made up for the warm-up.
                if not free:
                    raise

    def choose_threads(self, size: int) -> None:
        """Use several threads only if they take less than 70% of one thread's time: the server needs a core too."""
        most = torch.get_num_threads() - 1
        times = {}
        for num in (1, most) if most > 1 else ():
            torch.set_num_threads(num)
            began = time.perf_counter()
            for _ in range(3):
                self.warm_up((size,))
            times[num] = time.perf_counter() - began
        self.num_threads = most if most > 1 and times[most] < 0.7 * times[1] else 1

    def __call__(self, message: bytes) -> bytes:
        """Compute the batch described by a job message and return the reply message."""
        slot, size = JOB.unpack_from(message)
        began = time.perf_counter()
        try:
            shapes = self._run(slot, size, self._dims_in.unpack(message, JOB.size))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".encode(errors="replace")[:2000]
            return REPLY.pack(slot, 1, 0) + reason
        micros = min(int((time.perf_counter() - began) * 1e6), 2**32 - 1)
        return REPLY.pack(slot, 0, micros) + self._dims_out.pack(shapes)

    def _run(self, slot: int, size: int, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        signature = self._signature
        views = self._slots.inputs(slot, size, shapes)
        answers = self._compute({name: as_tensor(view, signature.inputs[name].dtype) for name, view in views.items()})
        require_outputs(signature, answers, size)
        found = [tuple(answers[name].shape[1:]) for name in signature.outputs]
        for name, view in self._slots.outputs(slot, size, found).items():
            as_tensor(view, signature.outputs[name].dtype).copy_(answers[name])
        return found


def settle(device: Device) -> None:
    """Set the number of threads and the GPU memory fraction, as the launcher does for other ranks."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if device.kind == "cuda" and device.share < 1.0:
        torch.cuda.set_per_process_memory_fraction(device.share, device.index)


def as_tensor(view: Array, dtype: str) -> Tensor:
    """Return a shared-memory array as a tensor without copying; bfloat16 is stored as uint16."""
    tensor: Tensor = torch.from_numpy(view)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def own_cores(device: Device) -> None:
    """Pin the process to its virtual device's share of the cores, so that replicas on one CPU do not compete."""
    if device.kind != "cpu" or device.share == 1.0:
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, int(len(cores) * device.share + 1e-6))
    assigned = [cores[(device.slot * each + i) % len(cores)] for i in range(each)]
    os.sched_setaffinity(0, assigned)
    torch.set_num_threads(len(assigned))


def require_rows(signature: Signature) -> None:
    """Raise ArchiveError unless every tensor has a dynamic first dimension (rows) and a supported dtype."""
    for what, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for name, spec in specs.items():
            if spec.dtype not in BY_TORCH or not spec.shape or spec.shape[0] is not None:
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


def _pin(slots: ReplicaSlots) -> None:
    """Register the shared memory as pinned, so that copies to the GPU need no staging buffer."""
    address, size = slots.address
    if size <= 1 << 28:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))
