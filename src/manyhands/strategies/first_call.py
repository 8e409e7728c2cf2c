"""How a loss calls its network, observed before the network is partitioned; and what makes that impossible."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import (
    Attributes,
    Mean,
    StrategyError,
    TaskError,
    is_scripted,
    random_state,
    remember_buffers,
    restore_random_state,
)
from ..distributed import culprit
from ..graph import Call, register_dataclasses
from .double_backward import on_gradients, refuse_gradients, untraceable

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Calling:
    """How a loss calls its network."""

    call: Call
    counts: bool
    """Whether the loss returns its own count, as with `mh.mean`."""
    used: tuple[int, ...] | None
    """Which of the network's output tensors the loss uses; None if unknown."""
    reads: tuple[str, ...] = ()
    """Parameters and buffers that the loss reads directly, such as a scale or a weight penalty."""


def calling(
    model: nn.Module,
    probe: Callable[[nn.Module, Callable[[Any], Any]], Any],
    scope: AbstractContextManager[object],
    *,
    computes: bool = True,
) -> Calling:
    """Compute a loss on a few samples in the network's current mode, and restore the network afterwards.

    With `computes=False` the network, which then needs no values, is called but not computed.
    """
    calls: list[Call] = []
    looks = _Looks(model)
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call.of(args, kwargs))
        if not computes:
            raise _CallSeen
        return looks.over(lambda: own(*args, **kwargs))

    device = next((p for p in model.parameters() if not p.is_meta), torch.empty(0)).device
    states, put_back, attributes = random_state(device), remember_buffers(model), Attributes(model)
    model.forward = forward
    try:
        # With gradients, as in training: forward may register hooks only on tensors that require one.
        with torch.enable_grad(), scope, looks, on_gradients(refuse_gradients), untraceable(), _no_host_draws(model):
            value = probe(model, lambda batch: batch)
            if changed := attributes.changed():
                if advanced := attributes.advanced():
                    raise _has_memory(advanced)
                count = len(calls)
                restore_random_state(states, device)
                put_back()
                _require_no_memory(changed, value, probe(model, lambda batch: batch))
                del calls[count:]
    except _CallSeen:
        return Calling(calls[0], False, None)
    except RuntimeError as error:
        if not computes and "meta" in str(error):
            # A submodule was called directly, and has no values.
            raise one_call(0) from None
        if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
            torch._dynamo.reset()
            raise StrategyError(
                "a partitioned network must be traceable",
                got=f"an operator with branches or loops at {culprit(error)}",
                remedy="use torch.where in place of torch.cond, or mh.Mirrored() or mh.Sharded()",
            ) from error
        raise
    finally:
        del model.forward
        restore_random_state(states, device)
        put_back()
        attributes.put_back()
    if len(calls) != 1:
        raise one_call(len(calls))
    return Calling(calls[0], isinstance(value, Mean), tuple(sorted(looks.seen)), tuple(looks.reads))


@contextmanager
def _no_host_draws(model: nn.Module) -> Iterator[None]:
    """Raise for a module whose forward draws from Python's or numpy's generator: a trace repeats those numbers."""
    states: list[Any] = []
    drawing: list[str] = []

    def enter(*_: Any) -> None:
        states.append(_host_state())

    def leave(name: str, part: nn.Module, *_: Any) -> None:
        if states.pop() != _host_state():
            drawing.append(f"forward of {name or 'the network'} ({type(part).__name__})")

    hooks = [part.register_forward_pre_hook(enter) for part in model.modules()]
    for name, part in model.named_modules():
        hooks.append(part.register_forward_hook(functools.partial(leave, name), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if drawing:
        raise StrategyError(
            "a partitioned network is traced once, and the trace repeats what Python's random or numpy.random drew",
            got=f"{drawing[0]}, which draws from one of them",
            remedy="draw numbers with torch, and compute both branches, or use mh.Mirrored() or mh.Sharded()",
        )


def _host_state() -> Any:
    """Return the states of Python's and numpy's generators, comparable by value."""
    legacy: Any = np.random.get_state()
    return random.getstate(), legacy[1].tobytes(), legacy[2:]


def _require_no_memory(changed: list[str], first: Any, second: Any) -> None:
    """Raise if a second forward with equal inputs gives another loss, because the first one set attributes."""
    one, two = (loss.total if isinstance(loss, Mean) else loss for loss in (first, second))
    if isinstance(one, Tensor) and not torch.equal(one, two):
        raise _has_memory(changed)


def _has_memory(attributes: list[str]) -> StrategyError:
    return StrategyError(
        "a partitioned network is traced, and the trace does not contain attributes that one forward sets for the next",
        got=", ".join(attributes[:3]),
        remedy="register it as a buffer (register_buffer), pass it as an input, or use mh.Mirrored()",
    )


class _CallSeen(Exception):
    """Raised to stop after the network's call was seen."""


def one_call(count: int) -> TaskError:
    """Return the error for a loss that does not call its network exactly once."""
    return TaskError(
        "under a strategy that partitions the network, a loss must call model(...) exactly once",
        got=f"{count} calls",
        remedy="combine the parts that are called separately into one module, or use mh.Mirrored() or mh.Sharded()",
    )


def cannot_read(name: str) -> StrategyError:
    return StrategyError(
        "parameters and buffers that the loss of a partitioned network reads must be whole and unchanged on every rank",
        got=f"{name}, which forward changes or which is sharded",
        remedy="compute with it in forward, and return it as an additional output",
    )


class _Looks(TorchDispatchMode):
    """Record which output tensors, and which of the network's own tensors, a loss uses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._places: dict[int, int] = {}
        self._answer: Any = None
        self._is_inside = False
        self.seen: set[int] = set()
        self.reads: dict[str, None] = {}

    def over(self, compute: Callable[[], Any]) -> Any:
        """Start to observe the use of the network's outputs; return copies that only the loss has."""
        self._is_inside = True
        outputs = compute()
        register_dataclasses(outputs)
        leaves, structure = pytree.tree_flatten(outputs)
        fresh = [leaf.detach().view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_inside = False
        tensors = [leaf for leaf in fresh if isinstance(leaf, Tensor)]
        self._answer, self._places = fresh, {id(tensor): place for place, tensor in enumerate(tensors)}
        # A loss that returns an output of the network unchanged uses it too.
        self.seen |= {place for place, tensor in enumerate(tensors) if tensor.dim() == 0 or len(tensors) == 1}
        return pytree.tree_unflatten(fresh, structure)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in () if self._is_inside else pytree.tree_leaves((args, kwargs)):
            if id(leaf) in self._places:
                self.seen.add(self._places[id(leaf)])
            if id(leaf) in self._own:
                self.reads[self._own[id(leaf)]] = None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """Restore the network's own forward inside this context."""
    own = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if own is not None:
            model.forward = own


def require_partitionable(model: nn.Module) -> None:
    """Raise for networks without a forward to trace, or with hooks that a trace does not contain."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise StrategyError(
            "a network must have a forward method",
            got=type(model).__name__,
            remedy="wrap it in an nn.Module whose forward calls its layers",
        )
    for name, module in model.named_modules():
        if is_scripted(module):
            raise StrategyError(
                "a partitioned network is traced, and TorchScript cannot be",
                got=f"{name or 'the network'}, of type {type(module).__name__}",
                remedy="return the module without torch.jit.script or torch.jit.trace, or use mh.Mirrored()",
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise StrategyError(
                "a partitioned network is traced, and the trace does not contain backward hooks of modules",
                got=f"one on {name or type(module).__name__}",
                remedy="use mh.Mirrored() or mh.Sharded()",
            )
