"""Checkpoints, exported models and files of weights: written atomically, verified by digest, read without executing."""

from .archives import Archive, OutputMismatch, export, load, require_outputs
from .checkpoint_format import Checkpoint
from .checkpoint_root import TermClaim, term_file
from .checkpoints import CheckpointStore, check_matches
from .optimizers import load_optimizer_state, optimizer_state
from .tensors import save_state_dict
from .weights import Weights, check_values, match, open_weights, weights

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "TermClaim",
    "term_file",
    "check_matches",
    "check_values",
    "optimizer_state",
    "load_optimizer_state",
    "Archive",
    "OutputMismatch",
    "require_outputs",
    "export",
    "load",
    "save_state_dict",
    "Weights",
    "weights",
    "open_weights",
    "match",
]
