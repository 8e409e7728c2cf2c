"""Embedding tables saved as rows only: rebuild them whole for a plain network, where memory allows."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

import numpy as np
import torch
from torch import nn

from ..core import CheckpointError
from ..storage import Checkpoint
from ..strategies import Embedding, first_rows


class SavedRows(StrEnum):
    """Names of what is saved for a table by rows, in addition to its optimizer slots."""

    IDS = "ids"
    VALUES = "values"
    STEP = "step"
    SEED = "seed"


CHUNK = 1 << 18
"""Rows that are created together."""


def with_tables(checkpoint: Checkpoint, model: nn.Module) -> Checkpoint:
    """Return a checkpoint for a plain network, in which tables that were saved as rows are whole."""
    whole = {}
    tables = {name: part for name, part in model.named_modules() if isinstance(part, Embedding)}
    for name, table in tables.items():
        ids = checkpoint.policy.get(f"{name} {SavedRows.IDS}")
        if ids is None:
            continue
        values = checkpoint.policy[f"{name} {SavedRows.VALUES}"]
        key = f"{name}.weight" if name else "weight"
        whole[key] = torch.empty(table.num_embeddings, table.embedding_dim, dtype=values.dtype)
        seed = int(checkpoint.policy[f"{name} {SavedRows.SEED}"])
        for start in range(0, table.num_embeddings, CHUNK):
            some = np.arange(start, min(start + CHUNK, table.num_embeddings))
            whole[key][start : start + len(some)] = first_rows(some, table.embedding_dim, seed, table.std)
        whole[key][ids] = values
    return dataclasses.replace(checkpoint, model={**checkpoint.model, **whole}) if whole else checkpoint


def require_no_rows(checkpoint: Checkpoint) -> None:
    """Raise if a checkpoint has tables saved as rows, which only parameter servers can train."""
    names = [key.removesuffix(f" {SavedRows.IDS}") for key in checkpoint.policy if key.endswith(f" {SavedRows.IDS}")]
    if names:
        raise CheckpointError(
            "a table of which only the used rows were saved can only be trained by parameter servers",
            got=f"{names[0]}, with {len(checkpoint.policy[f'{names[0]} {SavedRows.IDS}'])} rows",
            remedy="resume with mh.ParameterServer(), on any number of servers",
        )
