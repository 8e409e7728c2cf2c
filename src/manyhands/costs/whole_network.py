"""Networks as a whole: a fingerprint of their parameters, and costs from a measured step if tracing is impossible."""

from __future__ import annotations

import hashlib

from torch._subclasses.fake_tensor import FakeTensorMode

from ..core import Task
from .hardware import Chip
from .network import Network, NetworkPart, PassCost
from .trace import alone, size_of, state_bytes, weightless


def fingerprint(task: Task) -> str:
    """Return a text that identifies a task's network: its number of parameters, and a hash of their names and shapes.

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
    """Return a task's network as one piece with the cost of a measured step, for networks that cannot be traced.

    Args:
        task: The task.
        rows: Number of samples in a micro-batch of the returned network.
        each: Measured seconds per sample.
        start: Measured seconds of a step in addition to those of its samples.
        chip: The device on which the step was measured.
    """
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
