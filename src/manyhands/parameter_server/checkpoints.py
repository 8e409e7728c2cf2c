"""Transfer of the whole network between coordinator and servers: split into their shares, and reassembled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..strategies import MAIN, Embedding, ServedReplica
from ..training import Hand, SavedRows
from .layout import Share, TensorPiece, frames_of, tables_of, tensor_of
from .messages import Load, Slots
from .table import first_slot, kind_of, kind_of_optimizer, settings_of, slot_names
from .update import cut_slot, pack_slots, unpack_slots

CHUNK = 1 << 18
"""Number of rows of an embedding table that are processed together."""


@torch.no_grad()
def load_frames(hand: Hand, share: Share, number: int, num_servers: int, term: int) -> Any:
    """Return the message, and its frames, that loads a share of a hand's network and optimizer into server `number`."""
    held, optimizer = _held(hand.model), hand.optimizers[MAIN]
    tensors: list[Tensor] = []
    slots: list[Slots] = []
    for flat_buffer in share:
        stretches = [held[p.name].detach().reshape(-1)[p.start : p.stop].cpu() for p in flat_buffer.pieces]
        tensors.append(torch.cat([torch.zeros(0, dtype=flat_buffer.dtype), *stretches]))
    for piece in (p for flat_buffer in share for p in flat_buffer.pieces if p.is_trained):
        whole = held[piece.name]
        piece_slots = {name: cut_slot(value, piece, whole) for name, value in optimizer.state.get(whole, {}).items()}
        plain, parts = pack_slots(piece_slots)
        slots.append(plain)
        tensors += [part.cpu() for part in parts]
    tables = []
    for name, table in tables_of(hand.model).items():
        saved = _saved_slots(hand, name, table)
        if table.is_by_rows:
            names = slot_names(kind_of(table, optimizer))
            tables.append([str(int(saved.get(SavedRows.STEP, torch.zeros(())).item())), *names])
            tensors += _some_rows(table, saved, names, number, num_servers)
            continue
        names = slot_names(kind_of(table, optimizer))
        remembered = [saved.get(slot) for slot in names]
        tables.append([str(int(saved.get("step", torch.zeros(())).item())), *names])
        tensors += _own_rows(table, remembered, _first_slot(hand, name, table), number, num_servers)
    return Load(term, hand.num_steps, slots, tables), frames_of(tensors)


@torch.no_grad()
def take_state(hand: Hand, shares: Sequence[Share], answers: Sequence[tuple[Any, list[Any]]]) -> None:
    """Copy the servers' state into a hand's network and optimizer; `answers` has a state and its frames per server."""
    held, optimizer = _held(hand.model), hand.optimizers[MAIN]
    slots: dict[str, dict[str, Any]] = {}
    tables = [
        (_Rows if table.is_by_rows else _WholeTable)(table, name, hand) for name, table in tables_of(hand.model).items()
    ]
    for share, (state, frames) in zip(shares, answers, strict=True):
        at = iter(frames)
        for flat_buffer in share:
            values = tensor_of(next(at), flat_buffer.dtype)
            for piece in flat_buffer.pieces:
                held[piece.name].detach().view(-1)[piece.start : piece.stop] = values[piece.place].to(hand.device)
        pieces = [piece for flat_buffer in share for piece in flat_buffer.pieces if piece.is_trained]
        for piece, plain in zip(pieces, state.slots, strict=True):
            whole_slots = slots.setdefault(piece.name, {})
            for name, value in unpack_slots(plain, at).items():
                _put_slot(whole_slots, name, value, piece, held[piece.name])
        for whole, names in zip(tables, state.tables, strict=True):
            whole.add(int(names[0]), at)
    for name, found in slots.items():
        if found:
            optimizer.state[held[name]] = found
    for whole in tables:
        whole.keep()


class _WholeTable:
    """Assembles a whole embedding table from the rows on the servers."""

    def __init__(self, table: Embedding, name: str, hand: Hand) -> None:
        self._table, self._name, self._hand = table, name, hand
        self._kind = kind_of(table, hand.optimizers[MAIN])
        shape = (table.num_embeddings, table.embedding_dim)
        self._num_updates = 0
        self._values = torch.empty(shape, dtype=table.weight.dtype)
        for start in range(0, len(self._values), CHUNK):
            ids = np.arange(start, min(start + CHUNK, len(self._values)))
            self._values[start : start + len(ids)] = table.first(ids)
        first = _first_slot(hand, name, table)
        self._slots = {slot: torch.full(shape, first, dtype=table.weight.dtype) for slot in slot_names(self._kind)}

    def add(self, num_updates: int, frames: Any) -> None:
        """Copy one server's rows and their optimizer slots into the table."""
        ids = tensor_of(next(frames), torch.int64)
        self._num_updates = max(self._num_updates, num_updates)
        for into in (self._values, *self._slots.values()):
            into[ids] = tensor_of(next(frames), into.dtype).view(len(ids), self._table.embedding_dim)

    def keep(self) -> None:
        """Store the table and its optimizer state in the hand, from which checkpoints are written."""
        self._table.whole = self._values
        optimizer = self._hand.optimizers[MAIN]
        step = torch.tensor(float(self._num_updates))
        if self._kind == kind_of_optimizer(optimizer):
            if self._slots:
                optimizer.state[self._table.weight] = {"step": step, **self._slots}
        else:
            replica = self._hand.replica
            assert isinstance(replica, ServedReplica)
            replica.slots.update({f"{self._name} {n}": v for n, v in {"step": step, **self._slots}.items()})


class _Rows:
    """Collects the existing rows of an embedding table that is too large to be assembled."""

    def __init__(self, table: Embedding, name: str, hand: Hand) -> None:
        self._table, self._name, self._hand = table, name, hand
        self._names = [
            SavedRows.IDS,
            SavedRows.VALUES,
            *slot_names(kind_of(table, hand.optimizers[MAIN])),
        ]
        self._num_updates = 0
        self._parts: list[list[Tensor]] = [[] for _ in self._names]

    def add(self, num_updates: int, frames: Any) -> None:
        """Add one server's rows and their optimizer slots."""
        self._num_updates = max(self._num_updates, num_updates)
        for name, parts in zip(self._names, self._parts, strict=True):
            part = tensor_of(next(frames), torch.int64 if name == SavedRows.IDS else self._table.weight.dtype)
            parts.append(part if name == SavedRows.IDS else part.view(-1, self._table.embedding_dim))

    def keep(self) -> None:
        """Store the rows, sorted by id, in the hand's replica, from which checkpoints are written."""
        replica = self._hand.replica
        assert isinstance(replica, ServedReplica)
        ids = torch.cat(self._parts[0])
        order = ids.argsort()
        for name, parts in zip(self._names, self._parts, strict=True):
            replica.slots[f"{self._name} {name}"] = torch.cat(parts)[order]
            parts.clear()
        replica.slots[f"{self._name} {SavedRows.STEP}"] = torch.tensor(float(self._num_updates))
        replica.slots[f"{self._name} {SavedRows.SEED}"] = torch.tensor(self._table.seed)


def forget_tables(hand: Hand) -> None:
    """Free the coordinator's copies of the embedding tables, whose rows are on the servers."""
    replica = hand.replica
    assert isinstance(replica, ServedReplica)
    for name, table in tables_of(hand.model).items():
        table.whole = None
        if table.is_by_rows:
            replica.slots = {key: slot for key, slot in replica.slots.items() if not key.startswith(f"{name} ")}


def restore_tables(hand: Hand, first: Hand) -> None:
    """Reset a hand's embedding tables to those of `first`, a newly built hand."""
    tables, fresh = tables_of(hand.model), tables_of(first.model)
    for name, table in tables.items():
        table.whole = fresh[name].whole
    assert isinstance(hand.replica, ServedReplica)
    assert isinstance(first.replica, ServedReplica)
    hand.replica.slots = dict(first.replica.slots)


def _some_rows(
    table: Embedding, saved: Mapping[str, Tensor], names: Sequence[str], number: int, num_servers: int
) -> list[Tensor]:
    """Return the ids, values and optimizer slots of the saved rows that belong to server `number`."""
    ids = saved.get(SavedRows.IDS, torch.zeros(0, dtype=torch.int64))
    is_held = ids % num_servers == number
    none = torch.zeros(len(ids), table.embedding_dim, dtype=table.weight.dtype)
    return [
        ids[is_held],
        *(saved.get(name, none)[is_held].to(table.weight.dtype) for name in (SavedRows.VALUES, *names)),
    ]


def _saved_slots(hand: Hand, name: str, table: Embedding) -> Mapping[str, Tensor]:
    """Return a table's saved optimizer slots: the optimizer's if that trains the table, else those of the replica."""
    optimizer = hand.optimizers[MAIN]
    if not table.is_by_rows and kind_of(table, optimizer) == kind_of_optimizer(optimizer):
        found: Mapping[str, Tensor] = optimizer.state.get(table.weight, {})
        return found
    assert isinstance(hand.replica, ServedReplica)
    beside = hand.replica.slots
    return {key.removeprefix(f"{name} "): value for key, value in beside.items() if key.startswith(f"{name} ")}


def _first_slot(hand: Hand, name: str, table: Embedding) -> float:
    optimizer = hand.optimizers[MAIN]
    return first_slot(kind_of(table, optimizer), settings_of(name, table, optimizer, hand.model))


def _own_rows(
    table: Embedding, slots: list[Tensor | None], first: float, number: int, num_servers: int
) -> list[Tensor]:
    """Return the ids, values and slots of those rows of server `number` that differ from their initial values."""
    dim = table.embedding_dim
    if table.whole is None:
        return [torch.zeros(0, dtype=torch.int64), *(torch.zeros(0, dim) for _ in range(1 + len(slots)))]
    found = []
    for start in range(number, len(table.whole), CHUNK * num_servers):
        ids = torch.arange(start, min(start + CHUNK * num_servers, len(table.whole)), num_servers)
        changed = (table.whole[ids] != table.first(ids.numpy())).any(1)
        for slot in slots:
            if slot is not None and slot.dim() == 2 and len(slot) == len(table.whole):
                changed |= (slot[ids] != first).any(1)
        found.append(ids[changed])
    ids = torch.cat(found)
    new = torch.full((len(ids), dim), first, dtype=table.weight.dtype)
    rows = [new if slot is None or len(slot) != len(table.whole) else slot[ids] for slot in slots]
    return [ids, table.whole[ids].to(table.weight.dtype), *rows]


def _put_slot(slots: dict[str, Any], name: str, value: Tensor, piece: TensorPiece, whole: Tensor) -> None:
    """Store an optimizer slot of a piece in `slots`, at its place in the slot of the whole tensor."""
    if value.dim() == 0 or piece.length == whole.numel():
        slots[name] = value
        return
    if name not in slots:
        slots[name] = torch.zeros(whole.shape, dtype=value.dtype)
    slots[name].view(-1)[piece.start : piece.stop] = value


def _held(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
