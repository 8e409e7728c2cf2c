"""Ways of splitting a network; `realise` turns a StrategySpec into what one rank holds."""

from .auto import choice_for, is_undecided, under
from .batch_stats import BatchStats
from .embedding import Embedding, declaring
from .marks import on
from .mirrored import MirroredReplica
from .parameter_server import ServedReplica
from .pipeline import PipelineReplica
from .realise import MAIN, Probe, optimizers_of, realise, require_built, require_loss
from .recompute import keep_all, recompute
from .replica import Replica
from .skipping import keep_where

__all__ = [
    "on",
    "PipelineReplica",
    "realise",
    "is_undecided",
    "choice_for",
    "under",
    "require_built",
    "require_loss",
    "optimizers_of",
    "MAIN",
    "Probe",
    "Replica",
    "MirroredReplica",
    "ServedReplica",
    "BatchStats",
    "Embedding",
    "declaring",
    "keep_where",
    "recompute",
    "keep_all",
]
