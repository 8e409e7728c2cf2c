"""Recompute: activation checkpointing of blocks, whose inner results are recomputed in backward.

The forward of the chosen modules is wrapped; the modules stay the same, so names and checkpoints do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..core import StrategyError

BLOCKS, SELECTIVE = "blocks", "selective"
_MARK = "recomputes"
"""Attribute of a wrapped forward that holds the instance's previous forward; None if it was its class's."""
SMALL = 1 << 16
"""Buffers with at most this many elements are saved before every forward, whether or not they ever change."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
Scope = Callable[[], AbstractContextManager[Any]]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def recompute(model: nn.Module, what: str, *, own_randomness: bool = True, scope: Scope = ExitStack) -> list[str]:
    """Let backward recompute some modules; return their names.

    `what` is "blocks" (modules repeated in a list or a sequence), "selective" (the same, but results of matrix
    products, convolutions and attention are kept) or a pattern of module names; empty selects nothing.
    `own_randomness` means that torch's generators draw for the network, so that the device's state is restored too;
    `scope` makes the context in which the network is computed and recomputed.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> recompute(nn.Sequential(block(), block(), nn.Linear(4, 1)), "blocks")
    ['0', '1']
    """
    if not what:
        return []
    chosen = _chosen(model, what)
    for module in chosen.values():
        _wrap(module, what == SELECTIVE, own_randomness, scope)
    return list(chosen)


def _chosen(model: nn.Module, what: str) -> dict[str, nn.Module]:
    chosen = blocks_of(model) if what in (BLOCKS, SELECTIVE) else _matching(model, what)
    if not chosen:
        raise StrategyError(
            "recompute needs blocks that are repeated in a ModuleList or a Sequential"
            if what in (BLOCKS, SELECTIVE)
            else "recompute must match the name of a module",
            got=f"{what!r} for {type(model).__name__} with {_some_names(model)}",
            remedy='name them by a pattern, such as recompute="*.mlp", or write recompute="blocks"',
        )
    return chosen


def recomputed_by(model: nn.Module, what: str) -> dict[str, str]:
    """Return the block that each module is in, by name, for blocks that backward recomputes."""
    if not what:
        return {}
    chosen = _chosen(model, what)
    return {name: block for name, _ in model.named_modules() for block in chosen if _is_within(name, {block: model})}


def selective_contexts() -> Contexts:
    """Return contexts for computing and recomputing a block in which results of expensive operations are kept."""
    first, second = create_selective_checkpoint_contexts(_policy)
    return first, second


def keep_all(model: nn.Module) -> None:
    """Undo `recompute`."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if hasattr(forward, _MARK):
            del module.forward
            own = getattr(forward, _MARK)
            if own is not None:
                module.forward = own


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with submodules of which a container has several of the same class."""
    found: dict[str, nn.Module] = {}
    for name, container in model.named_modules():
        if not isinstance(container, (*CONTAINERS, nn.Sequential)) or _is_within(name, found):
            continue
        classes = [type(child) for child in container.children()]
        for child_name, child in container.named_children():
            is_block = classes.count(type(child)) > 1 and any(True for _ in child.children())
            if is_block and not isinstance(child, CONTAINERS) and any(p.requires_grad for p in child.parameters()):
                found[f"{name}.{child_name}".lstrip(".")] = child
    return found


def _matching(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the outermost modules whose name matches."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        fits = name and fnmatchcase(name, pattern) and not isinstance(module, CONTAINERS)
        if fits and not _is_within(name, found):
            found[name] = module
    return found


def _is_within(name: str, found: dict[str, nn.Module]) -> bool:
    return any(name == outer or name.startswith(f"{outer}.") for outer in found)


def _some_names(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    return "the modules " + ", ".join(names[:12]) + (" …" if len(names) > 12 else "") if names else "no modules in it"


def _wrap(module: nn.Module, selective: bool, own_randomness: bool, scope: Scope) -> None:
    own = module.__dict__.get("forward")
    forward = _recomputing(own, _BufferChanges(), selective, own_randomness, scope)
    setattr(forward, _MARK, own)
    # A bound method, so that a copy of the module uses the copy's parameters.
    module.forward = MethodType(forward, module)


def _recomputing(
    own: Callable[..., Any] | None, changes: _BufferChanges, selective: bool, own_randomness: bool, scope: Scope
) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = own or MethodType(type(module).forward, module)
        if not (torch.is_grad_enabled() and module.training):
            return plain(*args, **kwargs)
        return checkpoint(
            functools.partial(plain, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=own_randomness,
            context_fn=functools.partial(_contexts, module, changes, selective, scope),
        )

    return forward


def _contexts(module: nn.Module, changes: _BufferChanges, selective: bool, scope: Scope) -> Contexts:
    """Return the contexts for computing and for recomputing a module."""
    first, second = create_selective_checkpoint_contexts(_policy) if selective else (ExitStack(), ExitStack())
    state = torch.default_generator.get_state()
    before = changes.values(module)
    again = _both(_as_before(module, before, state), _both(scope(), second))
    return _both(changes.noticed(module, before), first), again


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _BufferChanges:
    """Buffers that a module's forward changes, such as running statistics; recomputation needs their old values.

    A layer may start to change a buffer at any time, so all small ones are saved. Large ones are mostly constant
    tables, and are saved once they were seen to change.
    """

    def __init__(self) -> None:
        self._large: set[str] | None = None

    def values(self, module: nn.Module) -> dict[str, Tensor]:
        """Return copies of these buffers; of all of them until it is known which large ones change."""
        large = self._large
        return {n: b.clone() for n, b in module.named_buffers() if large is None or b.numel() <= SMALL or n in large}

    @contextmanager
    def noticed(self, module: nn.Module, before: dict[str, Tensor]) -> Iterator[None]:
        """Detect which large buffers change: in the first call by value, later by torch's version counter."""
        versions = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
        yield
        now = {name: buffer for name, buffer in module.named_buffers() if buffer.numel() > SMALL}
        if self._large is None:
            self._large = {name for name in now if name in before and not torch.equal(now[name], before[name])}
            for name in now.keys() & before.keys() - self._large:
                del before[name]
        for name, buffer in now.items():
            old, version = versions.get(name, (buffer, buffer._version))
            if buffer is not old or buffer._version != version:
                self._large.add(name)


@contextmanager
def _as_before(module: nn.Module, before: dict[str, Tensor], state: Tensor) -> Iterator[None]:
    """Use copies of the buffers, and the CPU's random state, from before the forward inside this context."""
    generator = torch.default_generator
    now, after = dict(module.named_buffers()), generator.get_state()
    _put(module, {name: before.get(name, buffer).clone() for name, buffer in now.items()})
    generator.set_state(state)
    try:
        yield
    finally:
        _put(module, now)
        generator.set_state(after)


def _put(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._buffers[last] = buffer


_KEPT = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""Operations that are expensive compared with the size of their results."""


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operation.namespace == "aten" and operation._opname in _KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
