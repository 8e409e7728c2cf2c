"""Ways of splitting a network; `make_replica` builds one rank's replica from a StrategySpec."""

from typing import TYPE_CHECKING

from ..sync import with_own_feedback
from .auto import choice_for, is_undecided, under
from .build_replica import (
    MAIN,
    Probe,
    in_double,
    lay_out,
    make_replica,
    optimizers_of,
    require_built,
    require_loss,
    sequence_notes,
)
from .deferred import CannotDefer, Deferred, Take, defer
from .device_marks import place_on
from .embedding import Embedding, declaring, first_rows
from .offload import AT_ONCE
from .optimizer_traits import (
    draws_numbers,
    is_by_element,
    is_by_tensor,
    odd_slots,
    stateless_copy,
    updates_own_tensors,
)
from .parameter_server import ServedReplica
from .partition_drawing import Outline
from .partition_outline import check_partition, outline
from .pipeline import PipelineReplica
from .recompute import keep_all, recompute
from .replica import Replica, keep_where
from .split_table import SplitTable, table_of

if TYPE_CHECKING:
    from .tensor import Layout

__all__ = [
    "place_on",
    "PipelineReplica",
    "Outline",
    "outline",
    "check_partition",
    "make_replica",
    "with_own_feedback",
    "is_undecided",
    "choice_for",
    "under",
    "require_built",
    "require_loss",
    "sequence_notes",
    "optimizers_of",
    "MAIN",
    "Probe",
    "in_double",
    "Replica",
    "draws_numbers",
    "is_by_element",
    "is_by_tensor",
    "odd_slots",
    "stateless_copy",
    "updates_own_tensors",
    "ServedReplica",
    "Embedding",
    "first_rows",
    "declaring",
    "keep_where",
    "SplitTable",
    "table_of",
    "Layout",
    "lay_out",
    "recompute",
    "keep_all",
    "AT_ONCE",
    "Deferred",
    "defer",
    "CannotDefer",
    "Take",
]
