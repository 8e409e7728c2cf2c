"""Pickles in shared memory: Python objects for local processes, with arrays and tensors stored once for all ranks."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import importlib
import inspect
import io
import mmap
import os
import pickle
import struct
import traceback
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

from ..core import SendError, TaskError

_INLINE = 4096
_ALIGN = 64
_HEAD = struct.Struct("!QQ")
_unpacking = contextvars.ContextVar("unpacking", default=False)


class _OutOfBandPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle with CPU tensors as out-of-band buffers, as NumPy arrays already are."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            data = obj.detach().contiguous()
            raw: Any = data.view(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(raw), data.dtype, tuple(data.shape), obj.requires_grad)
        if isinstance(obj, _OPERATIONS):
            return _operation, (_path_of(obj),)
        if obj is torch.classes:
            # A function that uses a name `classes`, as in `self.classes`, seems to refer to this module.
            return importlib.import_module, ("torch.classes",)
        return super().reducer_override(obj)


_OPERATIONS = (type(torch.ops), type(torch.ops.aten), torch._ops.OpOverloadPacket, torch._ops.OpOverload)
"""Types of `torch.ops`, its namespaces and operators, which cannot be pickled; notebook functions may refer to them."""


def _path_of(operation: Any) -> str:
    """Return the path of an operator or a namespace in `torch.ops`, such as `aten.addmm.default`."""
    if operation is torch.ops:
        return ""
    if isinstance(operation, type(torch.ops.aten)):
        return operation.name
    return str(operation)


def _operation(path: str) -> Any:
    return functools.reduce(getattr, path.split("."), torch.ops) if path else torch.ops


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_leaf
        and tensor.numel() > 0
        and not tensor.is_quantized
        and not tensor.dtype.is_complex
    )


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(buffer) if memoryview(buffer).readonly else buffer, dtype=dtype)
    return flat.view(shape).requires_grad_(requires_grad)


def pack(obj: Any, what: str = "the task") -> int:
    """Pickle an object into anonymous shared memory and return its file descriptor, which the caller must close.

    Raise SendError if the object cannot be pickled; `what` names it in the error.
    """
    buffers: list[pickle.PickleBuffer] = []

    def aside(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _INLINE:
            return True
        buffers.append(buffer)
        return False

    body = io.BytesIO()
    try:
        _OutOfBandPickler(body, protocol=5, buffer_callback=aside).dump(obj)
    except Exception as error:
        raise _unsendable(obj, what, error) from error
    views = [buffer.raw() for buffer in buffers]
    index = pickle.dumps((body.getvalue(), [view.nbytes for view in views]))
    fd = os.memfd_create("manyhands", os.MFD_CLOEXEC)
    offset = _aligned(_HEAD.size + len(index))
    _write(fd, _HEAD.pack(len(index), offset) + index, 0)
    for view in views:
        _write(fd, view, offset)
        offset = _aligned(offset + view.nbytes)
    return fd


def unpack(fd: int) -> Any:
    """Return the object that `pack` wrote to a file descriptor; its arrays are copy-on-write views of the memory."""
    token = _unpacking.set(True)
    try:
        return _unpack(fd)
    finally:
        _unpacking.reset(token)


def require_unpacked() -> None:
    """Raise TaskError if a module that unpickling imports starts processes: these would start processes in turn."""
    if _unpacking.get():
        line = next((frame for frame in reversed(traceback.extract_stack()) if frame.name == "<module>"), None)
        raise TaskError(
            "a module that ranks import must not start ranks while it is imported",
            got=f"{line.filename}, line {line.lineno}" if line else "a module that starts ranks",
            remedy='put this line under if __name__ == "__main__":',
        )


def _unpack(fd: int) -> Any:
    memory = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    view = memoryview(memory)
    length, offset = _HEAD.unpack_from(view)
    body, sizes = pickle.loads(view[_HEAD.size : _HEAD.size + length])
    buffers = []
    for size in sizes:
        buffers.append(view[offset : offset + size])
        offset = _aligned(offset + size)
    return pickle.loads(body, buffers=buffers)


def _aligned(offset: int) -> int:
    return (offset + _ALIGN - 1) // _ALIGN * _ALIGN


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
    os.truncate(fd, max(offset, os.fstat(fd).st_size))


def _unsendable(obj: Any, what: str, error: Exception) -> SendError:
    path, culprit = _culprit(obj, what) or (what, obj)
    return SendError(
        "objects that are sent to a worker process must be picklable",
        got=f"{path}, of type {type(culprit).__name__} ({error})",
        remedy="create it inside the function that uses it, or pass plain data",
    )


def _culprit(obj: Any, path: str, depth: int = 0) -> tuple[str, Any] | None:
    """Return the innermost part of an object that cannot be pickled, with the path to it; None if there is none."""
    if depth > 6 or _picklable(obj):
        return None
    for name, part in _parts(obj):
        found = _culprit(part, f"{path} {name}", depth + 1)
        if found is not None:
            return found
    return path, obj


def _picklable(obj: Any) -> bool:
    try:
        cloudpickle.dumps(obj)
    except Exception:
        return False
    return True


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, functools.partial):
        yield "→ function", obj.func
        for position, value in enumerate(obj.args):
            yield f"→ argument {position}", value
        for name, value in obj.keywords.items():
            yield f"→ {name}", value
    elif inspect.isfunction(obj):
        captured = inspect.getclosurevars(obj)
        for name, value in {**captured.globals, **captured.nonlocals}.items():
            yield f"→ captured variable {name!r}", value
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for item in dataclasses.fields(obj):
            yield f"→ {item.name}", getattr(obj, item.name)
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield f"→ [{key!r}]", value
    elif isinstance(obj, (list, tuple)):
        for position, value in enumerate(obj):
            yield f"→ [{position}]", value
    elif hasattr(obj, "__dict__") and not isinstance(obj, type):
        for name, value in vars(obj).items():
            yield f"→ attribute {name!r}", value
