"""By block: check whether a network can be sharded block by block, with all-gathers inside its own forward.

Ranks must then run the same blocks in the same order, whatever their samples are: each block's all-gather and
reduce-scatter is a collective. This is found before training, by computing the loss on fake tensors, which have shapes
but no values: an operation that needs a value raises there. Nothing of the network itself is computed or changed.
"""

from __future__ import annotations

import copy
import logging
import operator
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..core import Attributes, StrategyError, UsageError, as_written, random_state, restore_random_state
from ..distributed import World, culprit
from .double_backward import on_gradients
from .recompute import blocks_of

Probe = Callable[[nn.Module, Callable[[Any], Any]], Any]


NUM_COMPARED = 50
"""Number of forwards on a GPU in which ranks compare their blocks; each comparison waits for the device."""


class SameBlocks:
    """Compare the blocks that ranks run, if that could not be checked before training.

    Ranks that gather different blocks would compute with each other's parameters, or deadlock.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], world: World) -> None:
        self._names, self._world = [*blocks, "the end of the network"], world
        self._num_left = NUM_COMPARED if world.device.type != "cpu" else -1
        for index, block in enumerate(blocks.values()):
            block.register_forward_pre_hook(lambda *_, index=index: self._meet(index), prepend=True)
        model.register_forward_hook(lambda *_: self._end())

    def _meet(self, index: int) -> None:
        if not self._num_left:
            return
        found = self._world.all_gather(torch.tensor([index], device=self._world.device)).flatten().tolist()
        if len(set(found)) > 1:
            raise StrategyError(
                "ranks that shard one network must run the same blocks of it for all samples",
                got=", ".join(f"rank {rank} at {self._names[place]}" for rank, place in enumerate(found)),
                remedy='use sharding="optimizer", which keeps parameters whole, or mh.Mirrored()',
            )

    def _end(self) -> None:
        self._meet(len(self._names) - 1)
        self._num_left -= self._num_left > 0


def why_not_by_block(model: nn.Module, probe: Probe | None, device: torch.device) -> str:
    """Return why a network's parameters must be whole during a step; empty if each block can gather its own."""
    return _odd_types(model) or ("" if probe is None else _odd_steps(model, probe, device))


def _odd_types(model: nn.Module) -> str:
    """Return the parameters whose dtype prevents torch from flattening them with the others of their block."""
    blocks = blocks_of(model)
    own: dict[str, dict[torch.dtype, str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            return f"{name} is complex"
        block = next((b for b in blocks if name.startswith(f"{b}.")), "")
        own.setdefault(block, {}).setdefault(parameter.dtype, name)
    mixed = next((found for found in own.values() if len(found) > 1), {})
    return " and ".join(f"{name} is of {dtype}" for dtype, name in mixed.items())


def _odd_steps(model: nn.Module, probe: Probe, device: torch.device) -> str:
    """Return what makes ranks with different samples run different blocks, or makes a block run again in backward."""
    states, python, numpy = random_state(device), random.getstate(), np.random.get_state()
    # A copy's hooks refer to the network itself, in whose attributes they may leave fake tensors.
    attributes = Attributes(model)
    # torch logs every operation that fails on fake tensors, and such failures are expected here.
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        all_rows, fewer_rows = (_blocks_run(model, probe, device, fewer) for fewer in (0, 1))
        if random.getstate() != python or str(np.random.get_state()) != str(numpy):
            return "its forward draws random numbers of Python or numpy, which may choose layers"
    except UsageError:
        raise
    except _CannotCopy as error:
        return f"the network could not be copied to find out which blocks it runs ({error})"
    except Exception as error:
        return f"what it computes may depend on values ({culprit(error)})"
    finally:
        logging.disable(before)
        attributes.put_back()
        restore_random_state(states, device)
        random.setstate(python)
        np.random.set_state(numpy)
    if all_rows != fewer_rows:
        return "which layers it runs depends on the number of samples"
    converted = next((name.removeprefix(_CONVERTED) for name in all_rows if name.startswith(_CONVERTED)), "")
    if converted:
        return f"its forward converts {converted} to another dtype"
    read = next((name.removeprefix(_READ) for name in all_rows if name.startswith(_READ)), "")
    if read:
        return f"the loss reads {read} by itself"
    written = next((name.removeprefix(_WRITTEN) for name in all_rows if name.startswith(_WRITTEN)), "")
    if written:
        return f"{written} changes a list or dict that it is called with"
    line = next((name.removeprefix(_GRADIENT) for name in all_rows if name.startswith(_GRADIENT)), "")
    return f"what a block gathered for forward is needed by a second backward ({line})" if line else ""


_GRADIENT, _READ, _CONVERTED, _WRITTEN = "gradient ", "read ", "converted ", "written "


class _Reads(TorchFunctionMode):
    """Record parameters that are used outside of the network's forward, which alone gathers them."""

    def __init__(self, model: nn.Module, ran: list[str]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._ran, self._depth = ran, 0
        model.register_forward_pre_hook(lambda *_: self._enter(1))
        model.register_forward_hook(lambda *_: self._enter(-1))

    def _enter(self, by: int) -> None:
        self._depth += by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._depth and not _asks(func):
            self._ran += [_READ + self._names[id(arg)] for arg in tree_leaves((args, kwargs)) if id(arg) in self._names]
        return func(*args, **(kwargs or {}))


def _asks(func: Any) -> bool:
    """Return whether a function only reads a tensor's metadata: shape, device or whether it has a gradient."""
    return getattr(func, "__name__", "") in ("__get__", "size", "dim", "numel", "is_floating_point", "is_complex")


def _blocks_run(model: nn.Module, probe: Probe, device: torch.device, fewer: int) -> list[str]:
    """Return the modules with parameters that a loss calls, in order."""
    ran: list[str] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def few(batch: Any) -> Any:
        rows = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)

        def fake(tensor: Tensor) -> Tensor:
            is_by_row = tensor.dim() > 0 and len(tensor) == rows > fewer
            return mode.from_tensor(tensor[: rows - fewer] if is_by_row else tensor)

        return tree_map_only(str, _UnknownText, tree_map_only(Tensor, fake, batch))

    with ExitStack() as scope:
        twin = _fake_twin(model, mode, device).train()
        dtypes = {name: parameter.dtype for name, parameter in twin.named_parameters()}
        for name, module in twin.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda _, __, name=name: ran.append(name))
        for name, block in blocks_of(twin).items():
            _watch_containers(name, block, ran)
        scope.enter_context(as_written())
        scope.enter_context(on_gradients(lambda line: ran.append(_GRADIENT + line)))
        scope.enter_context(mode)
        scope.enter_context(_Reads(twin, ran))
        probe(twin, few)
    changed = (name for name, parameter in twin.named_parameters() if parameter.dtype != dtypes.get(name))
    return ran + [_CONVERTED + name for name in changed]


def _watch_containers(name: str, block: nn.Module, ran: list[str]) -> None:
    """Record a block that changes a list or dict that it is called with: torch calls a sharded one with a copy."""
    calls: list[list[tuple[Any, list[Any]]]] = []

    def remember(_: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append([(held, _items(held)) for held in (*args, *kwargs.values()) if isinstance(held, list | dict)])

    def compare(*_: Any) -> None:
        for held, before in calls.pop():
            now = _items(held)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                ran.append(_WRITTEN + name)

    block.register_forward_pre_hook(remember, with_kwargs=True)
    block.register_forward_hook(compare)


def _items(held: list[Any] | dict[Any, Any]) -> list[Any]:
    return [*held, *held.values()] if isinstance(held, dict) else list(held)


class _UnknownText(str):
    """A text of a sample; comparing it, or using it as a key, raises an error."""

    def _unknown(self, *_: Any) -> Any:
        raise RuntimeError("what the network runs depends on a text of the batch")

    __eq__ = __ne__ = __lt__ = __contains__ = __getitem__ = __iter__ = _unknown
    __hash__ = startswith = endswith = split = lower = upper = strip = _unknown  # type: ignore[assignment]


def _fake_twin(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Return a copy of a network on fake tensors of a device."""
    memo: dict[int, Any] = {}
    with mode:
        for module in model.modules():
            held: list[Mapping[str, Any]] = [module._parameters, module._buffers, vars(module)]
            for tensor in (value for own in held for value in own.values() if isinstance(value, Tensor)):
                if id(tensor) not in memo:
                    memo[id(tensor)] = _fake(tensor, device)
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            raise _CannotCopy(f"{type(error).__name__}: {error}") from error


class _CannotCopy(Exception):
    """Raised when a network holds an object that Python cannot copy, such as a lock or an open file."""


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
