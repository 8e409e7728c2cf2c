"""Layers: modules that are one operation each in a traced graph, so that they can be computed in another way.

`Call` has the arguments with which a network, or a module in it, was called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

_TENSOR = "(a tensor)"


@dataclass(frozen=True)
class Call:
    """The arguments of a network's call: the tensors, and how they are nested in the arguments."""

    tensors: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    """The leaves of the arguments, with a placeholder for each tensor."""
    structure: Any

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Return the call of a network with these arguments."""
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return cls(tensors, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves), structure)

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the same structure with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.rest]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    @property
    def key(self) -> Any:
        """Return a key that is equal for calls that can share a trace if their sizes allow it."""
        kinds = tuple((tensor.dtype, tensor.dim()) for tensor in self.tensors)
        return self.structure, tuple(map(repr, self.rest)), kinds

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)


MARK = "layer"
"""The key of the layer in the metadata of a graph node."""
_library = torch.library.Library("manyhands", "FRAGMENT")
_library.define("layer(Tensor[] tensors, int number) -> Tensor[]")
_under_way: list[Layer] = []
"""The layers of the current trace, in the order of their calls."""


@dataclass
class Layer:
    """A call of a module as one operation of a graph.

    Its inputs are the tensors of the call, then the module's parameters, then its buffers.
    """

    path: str
    module: nn.Module
    call: Call
    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    answer: Callable[[Sequence[Tensor]], Any] = tuple

    def run(self, tensors: Sequence[Tensor], number: int = 0) -> list[Tensor]:
        """Run the module's own forward on the inputs of the operation, and return the tensors among its outputs."""
        return self.by(lambda _, own, *args, **kwargs: own(*args, **kwargs))(tensors, number)

    def by(self, compute: Callable[..., Any]) -> Callable[[Sequence[Tensor], int], list[Tensor]]:
        """Return a function like `run` that calls `compute(module, forward, *args, **kwargs)` instead of forward."""

        def run(tensors: Sequence[Tensor], number: int = 0) -> list[Tensor]:
            count = len(self.call.tensors)
            args, kwargs = self.call.arguments(tensors[:count])
            own = MethodType(type(self.module).forward, self.module)
            with self._holding(tensors[count:]):
                made = compute(self.module, own, *args, **kwargs)
            return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]

        return run

    @contextmanager
    def _holding(self, own: Sequence[Tensor]) -> Iterator[None]:
        """Replace the module's parameters and buffers by the tensors `own` within the context."""
        places = [_place(self.module, name) for name in (*self.parameters, *self.buffers)]
        before = [held[name] for held, name in places]
        try:
            for (held, name), tensor in zip(places, own, strict=True):
                held[name] = tensor
            yield
        finally:
            for (held, name), tensor in zip(places, before, strict=True):
                held[name] = tensor

    @property
    def draws(self) -> bool:
        """Return whether the layer draws random numbers, as attention with dropout does in training."""
        share = getattr(self.module, "dropout", 0.0)
        return self.module.training and isinstance(share, float) and share > 0

    @property
    def changes(self) -> bool:
        """Return whether the layer changes its buffers, as BatchNorm does in training."""
        return isinstance(self.module, _NormBase) and self.module.training and self.module.track_running_stats


def layer_of(node: fx.Node) -> Layer | None:
    """Return the layer that a graph node calls; None if it calls another operation."""
    return node.meta.get(MARK)


def changed_by(node: fx.Node, layer: Layer) -> list[fx.Node]:
    """Return the graph nodes of the buffers that the layer called by `node` changes."""
    return list(node.args[0])[len(layer.call.tensors) + len(layer.parameters) :] if layer.changes else []  # type: ignore[arg-type]


@contextmanager
def kept_whole(model: nn.Module, names: Sequence[str]) -> Iterator[list[Layer]]:
    """Let a trace within the context contain each named module as one operation; yield the list of their calls."""
    found: list[Layer] = []
    modules = [model.get_submodule(name) for name in names]
    before = [module.__dict__.get("forward") for module in modules]
    _under_way[:] = found
    for name, module in zip(names, modules, strict=True):
        module.forward = MethodType(_noted(name, found), module)
    try:
        yield found
    finally:
        _under_way.clear()
        for module, own in zip(modules, before, strict=True):
            del module.forward
            if own is not None:
                module.forward = own


def mark(graph: fx.Graph, found: Sequence[Layer]) -> None:
    """Store the layers `found` by a trace in the metadata of the nodes that call them."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.manyhands.layer.default:
            node.meta[MARK] = found[node.args[1]]


def _noted(name: str, found: list[Layer]) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        layer = Layer(name, module, call, list(parameters), list(buffers))
        found.append(layer)
        _under_way[:] = found
        made = torch.ops.manyhands.layer([*call.tensors, *parameters.values(), *buffers.values()], len(found) - 1)
        return layer.answer(made)

    return forward


def _without_values(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    layer = _under_way[number]
    kept: list[Any] = []

    def compute(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        kept[:] = [made]
        return made

    made = layer.by(compute)(tensors, number)
    leaves, structure = pytree.tree_flatten(kept[0])
    shape = [leaf if not isinstance(leaf, Tensor) else None for leaf in leaves]
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

    def answer(given: Sequence[Tensor]) -> Any:
        rest = iter(given)
        return pytree.tree_unflatten(
            [next(rest) if is_one else leaf for is_one, leaf in zip(is_tensor, shape, strict=True)], structure
        )

    layer.answer = answer
    # Outputs must not alias any input.
    return [torch.empty_like(tensor) for tensor in made]


torch.library.register_fake("manyhands::layer", _without_values, lib=_library)


def _place(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    owner, _, last = name.rpartition(".")
    inner = module.get_submodule(owner)
    held: dict[str, Any] = inner._parameters if last in inner._parameters else inner._buffers
    return held, last
