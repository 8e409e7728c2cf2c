"""Recurrent layers of stacked networks, computed step by step: vmap has no rule for torch's LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_is_stacked: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor
States = tuple[Tensor, ...]
Cell = Callable[[Tensor, States, Sequence[Tensor]], States]
"""Function that computes the new states from the input's gate values, the previous states and the recurrent weights."""


class Unrolled(TorchFunctionMode):
    """Context in which recurrent layers of stacked tensors are computed by products and elementwise operations.

    >>> cells = torch.nn.GRU(3, 4, batch_first=True)
    >>> weights, x = dict(cells.named_parameters()), torch.randn(2, 5, 6, 3)
    >>> stacked = {name: weight.expand(2, *weight.shape) for name, weight in weights.items()}
    >>> with Unrolled():
    ...     found, _ = torch.func.vmap(lambda w, x: torch.func.functional_call(cells, w, x))(stacked, x)
    >>> torch.allclose(found[1], cells(x[1])[0], atol=1e-6)
    True
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cell = _CELLS.get(getattr(func, "__name__", ""))
        # Use torch's layer for packed sequences, which pass weights as fourth argument, and for dropout between layers.
        if cell is None or isinstance(args[3], Sequence) or (args[5] and args[6]) or not _has_stacked(args):
            return func(*args, **(kwargs or {}))
        return _layers(cell, *args)


def _has_stacked(args: Sequence[Any]) -> bool:
    tensors = [args[0], *(args[1] if isinstance(args[1], tuple) else [args[1]]), *args[2]]
    return any(isinstance(tensor, Tensor) and _is_stacked(tensor) for tensor in tensors)


def _layers(
    cell: Cell,
    x: Tensor,
    first: Tensor | States,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> States:
    """Return the same as torch's layer: the outputs of all steps, and the last states of all layers and directions."""
    states = first if isinstance(first, tuple) else (first,)
    outputs = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    last: list[States] = []
    for layer in range(num_layers):
        ways = []
        for direction in range(directions):
            number = layer * directions + direction
            own = weights[number * each : (number + 1) * each]
            began = tuple(state[number] for state in states)
            steps, ended = _walk(cell, outputs, began, own, has_biases, backwards=direction == 1)
            ways.append(steps)
            last.append(ended)
        outputs = torch.cat(ways, -1)
    ends = (torch.stack(parts) for parts in zip(*last, strict=True))
    return (outputs.transpose(0, 1) if batch_first else outputs, *ends)


def _walk(
    cell: Cell, x: Tensor, states: States, weights: Sequence[Tensor], has_biases: bool, *, backwards: bool
) -> tuple[Tensor, States]:
    """Run one recurrent layer in one direction; return the outputs of all steps in order, and the last states."""
    added = F.linear(x, weights[0], weights[2] if has_biases else None)
    rest = [weights[1], *weights[3 if has_biases else 2 :]] if has_biases else [weights[1], None, *weights[2:]]
    steps = []
    for gates in reversed(added.unbind(0)) if backwards else added.unbind(0):
        states = cell(gates, states, rest)  # type: ignore[arg-type]
        steps.append(states[0])
    return torch.stack(steps[::-1] if backwards else steps), states


def _lstm(gates: Tensor, states: States, weights: Sequence[Tensor]) -> States:
    hidden, memory = states
    enter, forget, new, leave = (gates + F.linear(hidden, weights[0], weights[1])).chunk(4, -1)
    memory = forget.sigmoid() * memory + enter.sigmoid() * new.tanh()
    hidden = leave.sigmoid() * memory.tanh()
    return (F.linear(hidden, weights[2]) if len(weights) > 2 else hidden), memory


def _gru(gates: Tensor, states: States, weights: Sequence[Tensor]) -> States:
    (hidden,) = states
    reset, update, new = gates.chunk(3, -1)
    reset_h, update_h, new_h = F.linear(hidden, weights[0], weights[1]).chunk(3, -1)
    candidate = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (candidate + (update + update_h).sigmoid() * (hidden - candidate),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda gates, states, weights: (activation(gates + F.linear(states[0], weights[0], weights[1])),)


_CELLS: dict[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(torch.relu),
}
