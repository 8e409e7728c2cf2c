"""Layout of the network over the servers: tensors are concatenated and split evenly, so that loads are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core import StrategyError
from ..strategies import Embedding

SMALL = 65536
"""Minimum bytes of parameters per server; splitting a network further is not worthwhile."""
COUNTED = (torch.int32, torch.int64)
"""Integer dtypes of counting buffers: workers add to them, as to floating-point buffers."""


@dataclass(frozen=True)
class TensorPiece:
    """A contiguous range of one tensor, and its position in a flat buffer.

    `is_trained` is False for buffers and frozen parameters.
    """

    name: str
    start: int
    stop: int
    offset: int
    is_trained: bool

    @property
    def length(self) -> int:
        """Number of elements of this piece."""
        return self.stop - self.start

    @property
    def place(self) -> slice:
        """The slice of the flat buffer that holds this piece."""
        return slice(self.offset, self.offset + self.length)


@dataclass(frozen=True)
class FlatBuffer:
    """All values of one dtype that a server holds, as one vector."""

    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]

    @property
    def length(self) -> int:
        """Number of elements of all pieces."""
        return sum(piece.length for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all pieces."""
        return self.length * self.dtype.itemsize


Share = tuple[FlatBuffer, ...]
"""The parts of the network on one server, a flat buffer per dtype; rows of embedding tables are not included."""


def tables_of(model: nn.Module) -> dict[str, Embedding]:
    """Return the network's embedding tables, whose rows live on the servers, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Embedding)}


def held_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors on the servers by name: trained parameters, and frozen parameters with saved buffers."""
    tables = {f"{name}.weight" if name else "weight" for name in tables_of(model)}
    trained: dict[str, Tensor] = {
        name: p for name, p in model.named_parameters() if p.requires_grad and name not in tables
    }
    saved = model.state_dict(keep_vars=True)
    others: dict[str, Tensor] = {
        name: p for name, p in model.named_parameters() if not p.requires_grad and name not in tables
    }
    others.update({name: buffer for name, buffer in model.named_buffers() if name in saved})
    # Workers build the network themselves, so loaded values must reach them even if no worker changes them.
    kept = {name: t for name, t in others.items() if t.is_floating_point() or t.dtype in COUNTED}
    return trained, kept


def cut(model: nn.Module, num_servers: int, *, whole: bool) -> list[Share]:
    """Return the share of each server; with `whole`, each tensor is on one server, as some optimizers require."""
    trained, buffers = held_tensors(model)
    _require_work(trained, bool(tables_of(model)), num_servers)
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise StrategyError(
                "parameters on parameter servers must be floating-point",
                got=f"{name} of {parameter.dtype}",
                remedy="keep complex or integer parameters out of the network, or use mh.Mirrored()",
            )
    parts = {name: (tensor, True) for name, tensor in trained.items()}
    parts.update({name: (tensor, False) for name, tensor in buffers.items()})
    dtypes = list(dict.fromkeys(tensor.dtype for tensor, _ in parts.values()))
    shares: list[list[FlatBuffer]] = [[] for _ in range(num_servers)]
    for dtype in dtypes:
        same_dtype = {name: pair for name, pair in parts.items() if pair[0].dtype == dtype}
        spread = _whole(same_dtype, num_servers) if whole else _even(same_dtype, num_servers)
        for share, pieces in zip(shares, spread, strict=True):
            share.append(FlatBuffer(dtype, tuple(pieces)))
    return [tuple(share) for share in shares]


def _even(parts: Mapping[str, tuple[Tensor, bool]], num_servers: int) -> list[list[TensorPiece]]:
    """Treat the tensors as one vector and split it into equal ranges."""
    total = sum(tensor.numel() for tensor, _ in parts.values())
    borders = [total * server // num_servers for server in range(num_servers + 1)]
    spread: list[list[TensorPiece]] = [[] for _ in range(num_servers)]
    at = 0
    for name, (tensor, is_trained) in parts.items():
        for server, pieces in enumerate(spread):
            start, stop = max(at, borders[server]), min(at + tensor.numel(), borders[server + 1])
            if start < stop:
                pieces.append(TensorPiece(name, start - at, stop - at, start - borders[server], is_trained))
        at += tensor.numel()
    return spread


def _whole(parts: Mapping[str, tuple[Tensor, bool]], num_servers: int) -> list[list[TensorPiece]]:
    """Assign every tensor, largest first, to the server that holds least so far."""
    spread: list[list[TensorPiece]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    for name, (tensor, is_trained) in sorted(parts.items(), key=lambda item: -item[1][0].numel()):
        server = min(range(num_servers), key=loads.__getitem__)
        spread[server].append(TensorPiece(name, 0, tensor.numel(), loads[server], is_trained))
        loads[server] += tensor.numel()
    return spread


def _require_work(trained: Mapping[str, Tensor], has_tables: bool, num_servers: int) -> None:
    if has_tables:
        return
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in trained.values())
    most = max(len(trained), num_bytes // SMALL)
    if num_servers > most:
        raise StrategyError(
            f"a network of {len(trained)} tensors and {num_bytes} bytes can be split over at most {most} servers",
            got=num_servers,
            remedy=f"pass servers={max(1, most)} or less",
        )


def buffers_of(share: Share) -> list[Tensor]:
    """Return buffers of zeros for the values of a share, or for their gradients: a vector per dtype."""
    return [torch.zeros(flat_buffer.length, dtype=flat_buffer.dtype) for flat_buffer in share]


def frames_of(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Return the bytes of CPU tensors as frames of a message; only non-contiguous tensors are copied."""
    raw: list[Any] = [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy() for tensor in tensors]
    return [memoryview(array) for array in raw]


def tensor_of(frame: memoryview, dtype: torch.dtype) -> Tensor:
    """Return the vector whose bytes are in a frame of a message; only read-only frames are copied."""
    if not len(frame):
        return torch.zeros(0, dtype=dtype)
    if memoryview(frame).readonly:
        frame = memoryview(bytearray(frame))
    return torch.frombuffer(frame, dtype=dtype)
