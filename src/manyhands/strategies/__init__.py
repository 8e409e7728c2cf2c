"""Ways of splitting a network; `realise` turns a StrategySpec into what one rank holds."""

from typing import TYPE_CHECKING

from ..sync import with_own_feedback
from .auto import choice_for, is_undecided, under
from .batch_stats import BatchStats
from .deferred import CannotDefer, Deferred, Take, defer
from .drawing import Outline
from .embedding import Embedding, declaring, first_rows
from .marks import on
from .mirrored import MirroredReplica
from .offload import AT_ONCE
from .outline import check_cut, outline
from .parameter_server import ServedReplica
from .pipeline import PipelineReplica
from .realise import MAIN, Probe, in_double, lay_out, optimizers_of, realise, require_built, require_loss
from .recompute import keep_all, recompute
from .replica import Replica
from .skipping import keep_where
from .table import LayerRow, SplitTable, size_text, table_of

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
