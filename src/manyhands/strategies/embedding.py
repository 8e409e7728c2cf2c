"""Embedding: an nn.Embedding whose rows live on the servers under the parameter-server strategy.

Every strategy can train it, so it is not in the package `parameter_server`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..core import TaskError, format_bytes

OPTIMIZERS = ("sgd", "adagrad", "adam")
"""Optimizers that can train a table's rows on the servers; only the rows used in a step change."""
CHUNK = 1 << 20
WHOLE = 1 << 28
"""Bytes up to which a table is one tensor in a checkpoint; of a larger one only the existing rows are saved."""
_declaring = False


class EmbeddingRows(Protocol):
    """An object that supplies a table's rows."""

    def rows(self, name: str, ids: Tensor, device: torch.device) -> Tensor:
        """Return the rows of these ids on the device, ready for autograd."""


class Embedding(nn.Embedding):
    """`nn.Embedding(rows, dim)` whose initial values are a function of (seed, row) alone.

    Under `mh.ParameterServer` the rows live on the servers: a worker pulls the rows that its batch uses and pushes
    their gradients. A row that was never used takes no memory, so a table may be larger than any machine.

    - `optimizer`: trains the rows on the servers: "sgd", "adagrad" or "adam" with torch's defaults. By default the
      task's optimizer, if it is one of these. The learning rate is that of the task's optimizer. A row changes only
      when a batch uses it: momentum and weight decay of SGD and Adagrad, which change all rows, are rejected, and
      results with Adam differ from one device. Under other strategies the task's optimizer trains the table;
    - `std`: standard deviation of the normal initial values; `seed`: by default drawn from torch's generator.

    >>> table = Embedding(1000, 4, seed=3)
    >>> bool((table(torch.tensor([7])) == first_rows(np.array([7]), 4, seed=3)).all())
    True
    """

    rows_travel = True
    """Whether a worker exchanges the rows that it uses with parameter servers, instead of holding all of them."""

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        optimizer: str | None = None,
        std: float = 1.0,
        seed: int | None = None,
        **others: Any,
    ) -> None:
        if others:
            raise TaskError(
                "a table can only have rows, dim, optimizer, std and seed",
                got=", ".join(f"{name}={value!r}" for name, value in others.items()),
                remedy="omit it, or use nn.Embedding, which every worker holds completely",
            )
        for name, value in {"rows": rows, "dim": dim}.items():
            if not isinstance(value, int) or value < 1:
                raise TaskError(
                    f"{name} of a table must be a whole number of at least 1",
                    got=repr(value),
                    remedy="pass such a number",
                )
        if optimizer is not None and optimizer not in OPTIMIZERS:
            raise TaskError(
                f"the optimizer of a table must be one of {', '.join(OPTIMIZERS)}",
                got=repr(optimizer),
                remedy="choose one of them",
            )
        if seed is None:
            seed = 0 if _is_planned() else int(torch.randint(0, 1 << 62, (), device="cpu"))
        self.seed = seed
        self.optimizer, self.std = optimizer, std
        if _declaring:
            self._declare(rows, dim)
        else:
            _require_room(rows, dim)
            super().__init__(rows, dim)
        self.source: EmbeddingRows | None = None
        self.name = ""
        self.whole: Tensor | None = None
        """The whole table, while it is transferred from or to the servers."""

    @property
    def is_declared(self) -> bool:
        """Whether the rows are on the servers and not in this module."""
        return self.weight.shape[0] != self.num_embeddings

    @property
    def is_by_rows(self) -> bool:
        """Whether the table is too large to be assembled in one place, and is saved row by row."""
        return self.is_declared and self.num_embeddings * self.embedding_dim * self.weight.element_size() > WHOLE

    def reset_parameters(self) -> None:
        """Set every row to its initial value."""
        if self.weight.device.type == "meta" or _is_planned():
            return
        with torch.no_grad():
            for start in range(0, self.num_embeddings, CHUNK):
                ids = np.arange(start, min(start + CHUNK, self.num_embeddings))
                self.weight[start : start + len(ids)] = self.first(ids)

    def first(self, ids: Any) -> Tensor:
        """Compute the initial values of some rows."""
        return first_rows(ids, self.embedding_dim, self.seed, self.std)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of these ids."""
        if not self.is_declared:
            return super().forward(input)
        assert self.source is not None, "a declared table holds no rows"
        ids, inverse = torch.unique(input, return_inverse=True)
        if ids.numel() and not 0 <= int(ids[0]) <= int(ids[-1]) < self.num_embeddings:
            raise IndexError(f"ids of {self.name} must lie in 0 to {self.num_embeddings - 1}, but got {ids[[0, -1]]}")
        return F.embedding(inverse, self.source.rows(self.name, ids, input.device))

    def _declare(self, rows: int, dim: int) -> None:
        """Set the attributes of an nn.Embedding without allocating its rows."""
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = rows, dim
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.weight = nn.Parameter(torch.empty(0, dim))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_declared and not self.is_by_rows:
            shape = (self.num_embeddings, self.embedding_dim)
            whole = self.whole if self.whole is not None else self.weight.new_zeros(()).expand(shape)
            destination[f"{prefix}weight"] = whole

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if self.is_declared and not self.is_by_rows and f"{prefix}weight" in state_dict:
            self.whole = state_dict[f"{prefix}weight"]
            state_dict = {**state_dict, f"{prefix}weight": self.weight}
        super()._load_from_state_dict(state_dict, prefix, *rest)


@contextlib.contextmanager
def declaring() -> Iterator[None]:
    """Create tables without rows inside this context, because servers will hold them."""
    global _declaring
    before, _declaring = _declaring, True
    try:
        yield
    finally:
        _declaring = before


def _is_planned() -> bool:
    """Return whether tensors have shapes but no values, as in cost estimation with meta or fake tensors."""
    return isinstance(torch.empty(0), FakeTensor)


def _require_room(rows: int, dim: int) -> None:
    """Raise for a table that does not fit into this machine's memory, before allocating it."""
    wanted, there = rows * dim * torch.get_default_dtype().itemsize, psutil.virtual_memory().available
    if wanted > there and torch.get_default_device().type == "cpu" and not _is_planned():
        raise TaskError(
            f"a whole table must fit into memory, of which {format_bytes(there)} are free",
            got=f"{rows} rows of {dim}, {format_bytes(wanted)}",
            remedy="train it with mh.ParameterServer(), whose servers hold only the rows that are used; a "
            "network with such a table cannot be evaluated or exported in one process",
        )


def first_rows(ids: Any, dim: int, seed: int, std: float = 1.0) -> Tensor:
    """Return the initial values of some rows: normal numbers from a hash of (seed, row, column)."""
    with np.errstate(over="ignore"):
        cells: Any = np.asarray(ids, np.uint64)[:, None] * np.uint64(dim) + np.arange(dim, dtype=np.uint64)
        z = cells * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & (1 << 64) - 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    uniform = ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return (torch.from_numpy(2 * uniform - 1).erfinv() * (std * math.sqrt(2))).float()
