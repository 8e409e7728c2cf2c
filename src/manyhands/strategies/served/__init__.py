"""Parameter servers: a sharded centre that holds values and updates them, and the workers' way to it."""

from .client import Client, Moved, Over
from .layout import Piece, Share, Slab, cut, frames_of, tables_of, tensor_of
from .messages import (
    Apply,
    Ask,
    Close,
    Crew,
    Delivered,
    End,
    Join,
    Load,
    Loaded,
    Part,
    Save,
    Slots,
    State,
    Summed,
    Weighed,
)
from .post import Caller, LinkLost, Listener, new_context, new_token
from .server import Server, Shard
from .table import kind_of, kind_of_optimizer, slot_names
from .update import cut_slot, needs_whole, pack_slots, unpack_slots

__all__ = [
    "Server",
    "Shard",
    "Client",
    "Moved",
    "Over",
    "cut",
    "Share",
    "Slab",
    "Piece",
    "tables_of",
    "frames_of",
    "tensor_of",
    "needs_whole",
    "cut_slot",
    "pack_slots",
    "unpack_slots",
    "kind_of",
    "kind_of_optimizer",
    "slot_names",
    "Caller",
    "Listener",
    "LinkLost",
    "new_context",
    "new_token",
    "Ask",
    "Apply",
    "Close",
    "Crew",
    "Delivered",
    "End",
    "Join",
    "Load",
    "Loaded",
    "Part",
    "Save",
    "Slots",
    "State",
    "Summed",
    "Weighed",
]
