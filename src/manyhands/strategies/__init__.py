"""Ways of splitting a network; `realise` builds one rank's replica from a StrategySpec."""

from typing import TYPE_CHECKING

from ..sync import with_own_feedback
from .auto import choice_for, is_undecided, under
from .batch_stats import BatchStats
from .build_replica import (
    MAIN,
    Probe,
    in_double,
    lay_out,
    optimizers_of,
    realise,
    require_built,
    require_loss,
)
from .deferred import CannotDefer, Deferred, Take, defer
from .device_marks import on
from .embedding import Embedding, declaring, first_rows
from .mirrored import MirroredReplica
from .offload import AT_ONCE
from .parameter_server import ServedReplica
from .partition_drawing import Outline
from .partition_outline import check_cut, outline
from .pipeline import PipelineReplica
from .recompute import keep_all, recompute
from .replica import Replica
from .skipped_updates import keep_where
from .split_table import LayerRow, SplitTable, size_text, table_of

if TYPE_CHECKING:
    from .tensor import Layout

__all__ = [
    "on",
    "PipelineReplica",
    "Outline",
    "outline",
    "check_cut",
    "realise",
    "with_own_feedback",
    "is_undecided",
    "choice_for",
    "under",
    "require_built",
    "require_loss",
    "optimizers_of",
    "MAIN",
    "Probe",
    "in_double",
    "Replica",
    "MirroredReplica",
    "ServedReplica",
    "BatchStats",
    "Embedding",
    "first_rows",
    "declaring",
    "keep_where",
    "SplitTable",
    "LayerRow",
    "table_of",
    "size_text",
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
