"""Computing of batches in a replica's process, from the slots into the slots: networks, and predictors in Python."""

from __future__ import annotations

import struct
import sys
import time
import traceback
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..core import Signature
from ..storage import OutputMismatch, require_outputs
from .dtypes import BY_TORCH, Array
from .execution import Run
from .python_model import InvalidInput, PythonModel
from .slots import Dims, ReplicaSlots, Shapes
from .texts import TextRegion, is_text

JOB = struct.Struct("<II")
"""Slot and number of rows including padding, followed by the shapes of the input rows."""
REPLY = struct.Struct("<III")
"""Slot, failure flag and microseconds, followed by the shapes of the output rows or by the error text."""
FAILED, REFUSED = 1, 2
"""Failure flags: an error, whose text is for the log, and an invalid request, whose text is for the client."""
_FREE_SIZE = 8
"""Size used for dynamic dimensions during warm-up."""


class Compute(ABC):
    """Compute batches in a replica's shared-memory slots."""

    def __init__(self, signature: Signature, slots: ReplicaSlots) -> None:
        self._signature, self._slots = signature, slots
        self._dims_in, self._dims_out = Dims(signature.inputs.values()), Dims(signature.outputs.values())
        self.num_threads = 1

    @abstractmethod
    def prepare(self, sizes: tuple[int, ...]) -> None:
        """Warm up for batches of these sizes, and choose the number of threads."""

    def __call__(self, message: bytes) -> bytes:
        """Compute the batch described by a job message and return the reply message."""
        slot, size = JOB.unpack_from(message)
        began = time.perf_counter()
        try:
            shapes = self._run(slot, size, self._dims_in.unpack(message, JOB.size))
        except Exception as error:
            kind, reason = self._failure(error)
            return REPLY.pack(slot, kind, 0) + reason.encode(errors="replace")[:2000]
        micros = min(int((time.perf_counter() - began) * 1e6), 2**32 - 1)
        return REPLY.pack(slot, 0, micros) + self._dims_out.pack(shapes)

    @abstractmethod
    def _run(self, slot: int, size: int, shapes: Shapes) -> Shapes:
        """Compute a batch and return the shapes of its outputs' rows."""

    def _failure(self, error: Exception) -> tuple[int, str]:
        """Return the kind of failure that an exception is, and a text about it."""
        return FAILED, f"{type(error).__name__}: {error}"


class NetworkCompute(Compute):
    """Compute batches by a network."""

    def __init__(self, run: Run, signature: Signature, slots: ReplicaSlots, device: torch.device) -> None:
        super().__init__(signature, slots)
        self._compute = run
        if device.type == "cuda":
            _pin(slots)

    def prepare(self, sizes: tuple[int, ...]) -> None:
        self.warm_up(sizes)
        self._choose_threads(sizes[-1])

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

    def _choose_threads(self, size: int) -> None:
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

    def _run(self, slot: int, size: int, shapes: Shapes) -> Shapes:
        signature = self._signature
        views: Any = self._slots.inputs(slot, size, shapes)
        answers = self._compute({name: as_tensor(view, signature.inputs[name].dtype) for name, view in views.items()})
        require_outputs(signature, answers, size)
        found = [tuple(answers[name].shape[1:]) for name in signature.outputs]
        outputs: Any = self._slots.outputs(slot, size, found)
        for name, view in outputs.items():
            as_tensor(view, signature.outputs[name].dtype).copy_(answers[name])
        return found


class PythonCompute(Compute):
    """Compute batches by a predictor in Python, which the operator trusts."""

    def __init__(self, model: PythonModel, slots: ReplicaSlots) -> None:
        super().__init__(model.signature, slots)
        self._model = model

    def prepare(self, sizes: tuple[int, ...]) -> None:
        """Choose the number of threads; rows that are made up could be invalid for the predictor."""
        self.num_threads = max(1, torch.get_num_threads() - 1)

    def _run(self, slot: int, size: int, shapes: Shapes) -> Shapes:
        inputs = {}
        for name, view in self._slots.inputs(slot, size, shapes).items():
            is_utf8 = self._signature.inputs[name].dtype == "string"
            # Copied, because the predictor may keep its inputs, and the memory is that of the next batch.
            inputs[name] = (
                view.read(bytes.decode if is_utf8 else bytes) if isinstance(view, TextRegion) else view.copy()
            )
        answers = self._model.compute(inputs, size)
        found = [_output_shape(answers[name], size) for name in self._signature.outputs]
        for name, view in self._slots.outputs(slot, size, found).items():
            if isinstance(view, TextRegion):
                view.write(list(answers[name].flat))
            else:
                view[:] = answers[name]
        return found

    def _failure(self, error: Exception) -> tuple[int, str]:
        """Return the error with its line in the predictor; the traceback is printed to the server's stderr."""
        if isinstance(error, InvalidInput):
            return REFUSED, str(error)
        traceback.print_exception(error)
        sys.stderr.flush()
        return FAILED, self._model.described(error)


def _output_shape(array: Array, size: int) -> tuple[int, ...]:
    """Return the shape of a row of an output; the rows with strings share their space."""
    return (*array.shape[1:], -(-sum(map(len, array.flat)) // size)) if is_text(array) else array.shape[1:]


def as_tensor(view: Array, dtype: str) -> Tensor:
    """Return a shared-memory array as a tensor without copying; bfloat16 is stored as uint16."""
    tensor: Tensor = torch.from_numpy(view)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def is_served_dtype(dtype: str, *, texts: bool) -> bool:
    """Return whether tensors of this type can be served; strings only if `texts`."""
    return dtype in BY_TORCH and (texts or not BY_TORCH[dtype].is_text)


def _pin(slots: ReplicaSlots) -> None:
    """Register the shared memory as pinned, so that copies to the GPU need no staging buffer."""
    address, size = slots.address
    if size <= 1 << 28:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))
