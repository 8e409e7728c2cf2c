"""Stack: the tensors of many networks (members), one row per member, with everything that a step reads or changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Key = tuple[str, str]
"""A kind of tensor and its name, such as ("parameters", "0.weight"), ("exp_avg", "0.weight") or ("lr", "0")."""
Row = dict[Key, Tensor]
"""All tensors of one member."""

PARAMETERS, FROZEN, BUFFERS, AVERAGES, CHANCES = "parameters", "frozen", "buffers", "averages", "chances"
SEED, VALID_SEED, STEP, COUNT = ("seed", ""), ("seed", "valid"), ("step", ""), ("count", "")
CLIP, DECAY = ("clip", ""), ("ema", "")


class Stack:
    """Stacked tensors of several networks (members), by kind and name; the first dimension is the member.

    The tensors of one member are its row.

    >>> stack = Stack.of([{("parameters", "w"): torch.ones(2)}, {("parameters", "w"): torch.zeros(2)}])
    >>> stack.row(1)
    {('parameters', 'w'): tensor([0., 0.])}
    """

    def __init__(self, tensors: Mapping[Key, Tensor]) -> None:
        self.tensors = dict(tensors)

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device | None = None) -> Stack:
        """Stack the rows of several members, and move the stack to `device` if it is given."""
        return cls({key: _as_it_lies(torch.stack, [row[key] for row in rows]).to(device) for key in rows[0]})

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, key: Key) -> Tensor:
        return self.tensors[key]

    def named(self, kind: str) -> dict[str, Tensor]:
        """Return the stacked tensors of one kind, such as "parameters", by name."""
        return {name: tensor for (own, name), tensor in self.tensors.items() if own == kind}

    def row(self, index: int) -> Row:
        """Return a copy of the row at position `index`."""
        return {key: tensor[index].clone() for key, tensor in self.tensors.items()}

    @torch.no_grad()
    def put(self, index: int, row: Row) -> None:
        """Overwrite the row at position `index`, in place."""
        for key, tensor in self.tensors.items():
            tensor[index].copy_(row[key])

    def part(self, start: int, stop: int) -> Stack:
        """Return a stack whose tensors are views of the rows from `start` to before `stop`."""
        return Stack({key: tensor[start:stop] for key, tensor in self.tensors.items()})

    def pick(self, rows: Sequence[int]) -> Stack:
        """Return a stack with copies of the rows at these positions."""
        index = torch.tensor(rows, dtype=torch.int64, device=self[STEP].device)
        return Stack(
            {key: _as_it_lies(lambda own: own[0].index_select(0, index), [t]) for key, t in self.tensors.items()}
        )

    @torch.no_grad()
    def put_back(self, rows: Sequence[int], part: Stack) -> None:
        """Overwrite the rows at these positions, in place, with those of `part`, a result of `pick`."""
        index = torch.tensor(rows, dtype=torch.int64, device=self[STEP].device)
        for key, tensor in self.tensors.items():
            tensor.index_copy_(0, index, part[key])

    def joined(self, others: Iterable[Row]) -> Stack:
        """Return a new stack with the rows of more members appended."""
        more = Stack.of(list(others), self[STEP].device)
        return Stack({key: _as_it_lies(torch.cat, [tensor, more[key]]) for key, tensor in self.tensors.items()})

    @property
    def bytes_each(self) -> int:
        """Bytes of the tensors of one member."""
        return sum(tensor.nbytes // max(1, len(tensor)) for tensor in self.tensors.values())


def turned(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values and shape, whose last two dimensions are transposed in memory.

    >>> turned(torch.zeros(2, 3)).stride()
    (1, 2)
    """
    return tensor.mT.contiguous().mT


def _as_it_lies(make: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """Return `make(tensors)` in the memory order of the first tensor: contiguous, or as `turned` returns it."""
    first = tensors[0]
    if first.dim() >= 2 and first.stride(-2) == 1 < first.stride(-1):
        return make([tensor.mT for tensor in tensors]).mT
    return make(tensors)
