"""Costs of whole networks: their fingerprint, and their costs as one piece where they cannot be traced."""

from __future__ import annotations

import hashlib

from torch._subclasses.fake_tensor import FakeTensorMode

from ..core import Task
from .hardware import Chip
from .network import Network, NetworkPart, PassCost
from .trace import alone, size_of, state_bytes, weightless


def fingerprint(task: Task) -> str:
    """Return the number of parameters and a hash of their names and shapes, to match a plan with its network.

    >>> from torch import nn, optim
    >>> make = lambda model: optim.SGD(model.parameters())
    >>> task = Task(model=lambda: nn.Linear(2, 2), loss=lambda m, b: m(b).mean(), optimizer=make, data=[1])
    >>> fingerprint(task).split(" ")[:2]
    ['6', 'parameters']
    """
    with alone(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = weightless(task.model, mode)
        shapes = [f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters()]
        count = sum(parameter.numel() for parameter in model.parameters())
    return f"{count} parameters ({hashlib.sha256(' '.join(shapes).encode()).hexdigest()[:12]})"


def one_piece(task: Task, *, rows: int, each: float, start: float, chip: Chip) -> Network:
    """Return a network whose step was measured on a chip: `each` seconds per sample plus `start` seconds."""
    with alone(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = weightless(task.model, mode)
        sizes = list(map(size_of, model.parameters()))
        frozen = sum(size_of(parameter) for parameter in model.parameters() if not parameter.requires_grad)
        count = sum(parameter.numel() for parameter in model.parameters())
        state = state_bytes(task, model)
    flops = each * rows * chip.rate("fp32")
    operations = round(start / chip.operation)
    return Network(
        rows=rows,
        pieces=(
            NetworkPart(
                name="all of it, measured",
                forward=PassCost(flops=flops / 3, operations=operations // 3),
                backward=PassCost(flops=2 * flops / 3, operations=operations - operations // 3),
                params=count,
                param_bytes=sum(sizes),
                frozen_bytes=frozen,
                largest=max(sizes, default=0),
            ),
        ),
        state_bytes=state,
        is_measured=True,
    )
