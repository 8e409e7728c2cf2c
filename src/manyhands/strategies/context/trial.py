"""Trial: run a few samples through a network as context parallelism runs it, on one rank, to find what it needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from ...core import (
    ManyhandsError,
    StrategyError,
    StrategySpec,
    is_scripted,
    random_state,
    remember_state,
    restore_random_state,
)
from ...distributed import Device, NullWorld, culprit
from ..double_backward import on_gradients, refuse_gradients
from .exchange import ContextRanks
from .findings import Findings
from .scope import SequenceSplit, num_samples

Rows = Callable[[Any], Any]
ROWS = 2
"""Samples of the trial: more than one, so that their dim differs from dims of size 1."""


def find(model: nn.Module, spec: StrategySpec, probe: Callable[..., Any], device: torch.device) -> Findings:
    """Return what a network needs under context parallelism; raise if it cannot be split.

    The trial has one rank: it computes with real numbers by the same rules, without communication.

    Raises:
        StrategyError: An operation cannot be computed, or no attention over the sequence was found.
    """
    require_splittable(model)
    states, put_back = random_state(device), remember_state(model)
    failure: Exception | None = None
    # A batch that is not made of rows, such as several packed sequences, can only be tried as a whole.
    for rows in (_first_rows, _all_rows):
        try:
            findings = _tried(model, spec, probe, device, rows)
            break
        except ManyhandsError:
            raise
        except Exception as error:
            put_back()
            failure = error
            if _works(model, probe, rows):
                raise StrategyError(
                    "under context parallelism every operation must be one of torch's functions",
                    got=f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0]} at {culprit(error)}",
                    remedy="use mh.Mirrored() or mh.Sharded(), which compute whole sequences",
                ) from error
        finally:
            put_back()
            restore_random_state(states, device)
    else:
        # An error of the user's code is raised as it is.
        assert failure is not None
        raise failure
    if not findings.num_attentions:
        raise _unused(spec, findings)
    return findings


def _tried(
    model: nn.Module, spec: StrategySpec, probe: Callable[..., Any], device: torch.device, rows: Rows
) -> Findings:
    """Compute the loss on one rank by the rules of split sequences."""
    sequences = SequenceSplit(ContextRanks(NullWorld(Device("cpu"))), spec.sequence_dim)
    findings = Findings()
    narrow = torch.autocast(device.type, dtype=torch.bfloat16) if spec.precision == "bf16" else nullcontext()
    with (
        torch.enable_grad(),
        # With gradients, which lines of the user may ask for, but without keeping what backward would need.
        saved_tensors_hooks(_dropped, _dropped),
        narrow,
        findings.following(model),
        on_gradients(refuse_gradients, backward=False),
        sequences.scope(),
    ):
        probe(model, lambda batch: sequences.inputs(rows(batch)))
    return findings


def _dropped(tensor: Tensor) -> Any:
    """Keep nothing of a tensor that backward would need."""


def _first_rows(batch: Any) -> Any:
    """Return the first samples of a batch: more would only take longer."""
    count = num_samples(batch)

    def first(leaf: Any) -> Any:
        return leaf[:ROWS] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count else leaf

    return tree_map(first, batch)


def _all_rows(batch: Any) -> Any:
    """Return the whole batch."""
    return batch


def _works(model: nn.Module, probe: Callable[..., Any], rows: Rows) -> bool:
    """Return whether the loss can be computed on whole sequences."""
    try:
        with torch.no_grad():
            probe(model, rows)
    except Exception:
        return False
    return True


def _unused(spec: StrategySpec, findings: Findings) -> StrategyError:
    notes = "; ".join(findings.notes[:3])
    return StrategyError(
        "context parallelism needs a network with attention over the sequence that it splits",
        got=f"none in a trial with a few samples{f', where {notes}' if notes else ''}",
        remedy="name the sequence's dim of the inputs by mh.ContextParallel(..., sequence_dim=1), or use mh.Mirrored() "
        "or mh.Sharded()",
    )


def require_splittable(model: nn.Module) -> None:
    """Raise for networks whose lines cannot be followed, or whose statistics are those of all tokens."""
    for name, module in model.named_modules():
        why = ""
        if is_scripted(module):
            why = "which is TorchScript"
        elif isinstance(module, _BatchNorm):
            why = "whose statistics are those of a whole batch"
        elif module._backward_hooks or module._backward_pre_hooks:
            why = "with a backward hook, which would get the gradient of a part of the tokens"
        if why:
            raise StrategyError(
                "under context parallelism every module must work on a part of the tokens",
                got=f"{name or 'the network'}, a {type(module).__name__} {why}",
                remedy="use LayerNorm or GroupNorm and Python modules, or mh.Mirrored() or mh.Sharded()",
            )
