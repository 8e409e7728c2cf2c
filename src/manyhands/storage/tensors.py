"""Tensors in safetensors files: snapshots, a writer without copies, a validating reader, and plain state dicts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..core import CheckpointError, open_regular, opened, parse_json
from .disk import Digest, Disk, replace_file

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.complex128: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of dtypes in safetensors; complex128, which the format lacks, is stored as pairs of float64."""
PAIRS = "complex128"
"""The metadata key of the list of tensors that are stored as pairs of float64."""

HEADER_CAP = 100_000_000
"""Maximum bytes of a header in the safetensors format; readers reject longer ones."""


def write_tensors(disk: Disk, path: Path, tensors: Mapping[str, Tensor]) -> Digest:
    """Write contiguous CPU tensors as one safetensors file and return its digest."""
    return disk.write(path, encoded(tensors))


def encoded(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: a header, then views of the tensors' memory.

    The writer of the library safetensors copies every tensor while it holds the GIL, which blocks the training loop in
    another thread. These views are hashed and written without a copy and outside the GIL.
    """
    # Wide elements first, so that every tensor starts at a multiple of its element size, as readers expect.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    offset = 0
    pairs = [name for name in order if tensors[name].dtype == torch.complex128]
    if pairs:
        header["__metadata__"] = {PAIRS: json.dumps(pairs)}
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": [*tensor.shape, 2] if name in pairs else list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_CAP:
        raise CheckpointError(
            f"the header of a tensor file must have at most {HEADER_CAP} bytes",
            got=len(text),
            remedy="use fewer tensors, or shorter names",
        )
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            yield raw(tensors[name])


def raw(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def require_storable(name: str, tensor: object) -> Tensor:
    """Return the tensor `name` itself; raise CheckpointError if a file cannot store it."""
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{name!r} must be a tensor", got=type(tensor).__name__, remedy="omit it")
    if tensor.layout != torch.strided or type(tensor).__name__ == "DTensor" or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"{type(tensor).__name__} ({tensor.layout})"
        raise CheckpointError(
            f"{name!r} must be a dense tensor with values",
            got=kind,
            remedy="gather its shards, or convert it with to_dense(), first",
        )
    if tensor.dtype not in DTYPES:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise CheckpointError(
            f"the dtype of {name!r} must be one of {kinds}", got=tensor.dtype, remedy="convert the tensor"
        )
    return tensor


def read_tensors(path: Path, *, follow_links: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; nothing in it is executed.

    Raises:
        CheckpointError: The file is damaged, or not a regular file.
    """
    try:
        with opened(path, follow_links=follow_links) as file:
            pairs = _pairs_of(file)
            return {
                name: torch.view_as_complex(tensor) if name in pairs else tensor
                for name, tensor in load_file(file).items()
            }
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path.name} must be a complete safetensors file", got=str(error), remedy="copy or download the file again"
        ) from error


def _pairs_of(path: Path) -> list[str]:
    """Return the names of the complex128 tensors, which a file stores as pairs of numbers."""
    with safe_open(path, "pt") as file:
        pairs = parse_json((file.metadata() or {}).get(PAIRS, "[]").encode())
    return pairs if isinstance(pairs, list) else []


def save_state_dict(model_state: dict[str, Tensor], path: Path) -> None:
    """Write a state dict as one `.safetensors` file, atomically; raise CheckpointError if it cannot be stored."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            "a state dict must be written to a .safetensors file",
            got=path.name,
            remedy=f"name it {path.stem}.safetensors",
        )
    plain = {name: require_storable(name, tensor) for name, tensor in model_state.items()}
    dense = {name: tensor.detach().cpu().contiguous().resolve_neg() for name, tensor in plain.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(Disk(), path, encoded(dense))


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a `.safetensors` file; raise CheckpointError for a pickle or another file."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError("a state dict must be one .safetensors file", got=str(path), remedy="pass its path")
    with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
        start = file.read(8)
    if start[:2] in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"):
        raise CheckpointError(
            "a state dict must be a .safetensors file, because a pickle can execute code",
            got=f"{path.name}, a pickle",
            remedy="if you trust it, convert it with safetensors",
        )
    # The file may be replaced while these tensors are in use, so they are copied.
    return {name: tensor.clone() for name, tensor in read_tensors(path, follow_links=True).items()}


class Snapshot:
    """Copies of named tensors in CPU buffers, which the first copy allocates and later copies reuse."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Copy tensors now: on their GPU if that has enough free memory, else to the CPU.

        Returns:
            A function that one thread may call once. It returns contiguous CPU copies, which are valid until the next
            `take`. Tied tensors become separate tensors.
        """
        for name, tensor in tensors.items():
            require_storable(name, tensor)
        with torch.no_grad():
            device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
            copies = None if device is None else _device_copies(tensors, device)
            if device is None or copies is None:
                kept = self._copied(tensors)
                return lambda: kept
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
        return lambda: self._fetched(copies, copied, device)

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers = {}

    def _fetched(self, copies: dict[str, Tensor], copied: torch.cuda.Event, device: torch.device) -> dict[str, Tensor]:
        """Return CPU copies of `copies` and free those on the GPU; a separate CUDA stream does not block the steps."""
        stream = torch.cuda.Stream(device)
        stream.wait_event(copied)
        with torch.cuda.stream(stream):
            kept = self._copied(copies)
        copies.clear()
        return kept

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        waiting: set[torch.device] = set()
        kept = {}
        with torch.no_grad():
            for name, tensor in tensors.items():
                buffer = kept[name] = self._buffer(name, tensor)
                buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                if tensor.is_cuda:
                    waiting.add(tensor.device)
        self._buffers = kept
        for device in waiting:
            torch.cuda.current_stream(device).synchronize()
        return dict(kept)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        # Copies from a GPU into pinned memory need no staging and overlap each other.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _device_copies(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor] | None:
    """Return copies on the tensors' GPU; None if they would leave too little memory for training steps."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if torch.cuda.mem_get_info(device)[0] < 2 * num_bytes:
        return None
    try:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    except torch.OutOfMemoryError:
        return None
