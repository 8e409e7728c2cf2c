"""Check before tasks are stacked: loss and gradients for a few samples must be equal in a stack and alone."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core import LayoutFree, Mean, StrategySpec, TaskError, UsageError, stacked_keys
from ..data import Resident, as_source, in_memory
from ..distributed import culprit
from ..training import left_alone
from .build import CPU, Built, row_of
from .program import FIRST_PASS, Program, pair_of
from .stack import BUFFERS, PARAMETERS, SEED, STEP, Stack

NUM_ROWS = 4
"""Number of samples that are compared."""
TOLERANCE = 1e-3
"""Relative difference up to which losses and gradients count as equal."""


def try_stacked(built: Built) -> None:
    """Compute loss and gradients of a task for two stacked members and alone.

    Raises:
        TaskError: They differ, or the loss cannot be vectorized.
    """
    with left_alone(built.task.loss, built.task.model):
        _try_stacked(built)


def _try_stacked(built: Built) -> None:
    own = dataclasses.replace(built, model=_copied(built.model))
    draws = LayoutFree(CPU)
    program = Program(own, StrategySpec(), CPU, draws)
    source = as_source(built.task.data, collate=built.task.collate)
    data = Resident(in_memory(source), CPU, next(built.model.parameters()).dtype.to_real())
    rows = min(NUM_ROWS, source.size or NUM_ROWS)
    ids = torch.arange(rows).expand(2, rows)
    stack = Stack.of([row_of(own), row_of(own)])
    keys = stacked_keys(stack[SEED], stack[STEP], ids)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            together, slopes = _together(program, stack, lambda: keys, data.fetch(ids))
    except UsageError:
        raise
    except Exception as error:
        raise TaskError(
            "a stacked loss must be computable for many networks at once (torch.vmap)",
            got=describe_error(error),
            remedy="avoid .item(), branches on values and layers without a vmap rule, or train the task alone",
        ) from error
    drawn = draws.drew_on_host()
    if drawn:
        raise TaskError(
            "members of a stack must draw their own random numbers",
            got=f"numbers from {drawn}, which would be the same for all",
            remedy="draw random numbers with torch",
        )
    alone, own_slopes = _alone(own, draws, keys[0], data.fetch(ids[0]))
    if not torch.allclose(together[0], alone, rtol=TOLERANCE, atol=1e-5):
        _refuse(f"a loss of {together[0]:.6g} and {alone:.6g}")
    # A gradient that should be zero consists of rounding errors, so tolerances are relative to the largest gradient.
    scale = max((float(slope.abs().max()) for slope in own_slopes.values() if slope.numel()), default=0.0)
    for name, slope in own_slopes.items():
        if name in slopes and not torch.allclose(slopes[name][0], slope, rtol=TOLERANCE, atol=TOLERANCE * scale):
            _refuse(f"another gradient of {name}")


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise TaskError(
            "a stacked network must be copyable",
            got=f"an error when it is copied ({error})",
            remedy="train the task alone",
        ) from error


def describe_error(error: Exception) -> str:
    """Return a text with the line of user code that cannot be vectorized, and torch's message."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{culprit(error)}, which cannot be ({text[:160]})"


def _together(
    program: Program, stack: Stack, keys: Callable[[], Tensor], batch: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in stack.named(PARAMETERS).items()}
    tensors = {**stack.named("frozen"), **leaves}
    buffers = {name: buffer.clone() for name, buffer in stack.named(BUFFERS).items()}
    loss, _ = program.compute(tensors, buffers, keys, batch, shared=False, num_passes=FIRST_PASS)
    total, count = pair_of(loss)
    total = total if count is None else total / count.to(total.dtype)
    found = torch.autograd.grad(total.sum(), list(leaves.values()), allow_unused=True)
    return total.detach(), {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}


def _alone(built: Built, draws: LayoutFree, keys: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    assert built.task.loss is not None
    with draws.given(keys, FIRST_PASS):
        loss = built.task.loss(built.model, batch)
    value = loss.total / loss.count.to(loss.total.dtype) if isinstance(loss, Mean) else loss
    parameters = {name: p for name, p in built.model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return value.detach(), {name: slope for name, slope in zip(parameters, found, strict=True) if slope is not None}


def _refuse(got: str) -> None:
    raise TaskError(
        "a network must compute the same results in a stack and alone",
        got=f"{got} for the same samples",
        remedy="train the task alone, and check whether samples of other members can change its results",
    )
