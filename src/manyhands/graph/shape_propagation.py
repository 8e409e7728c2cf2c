"""Shape propagation: the shapes that the operations of a traced network return, and the functions that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..core import LayoutFree, StrategyError
from ..distributed import line_in
from .layers import Call, changed_by, layer_of
from .tracing import TracedGraph

Shape = Sequence[int]


@dataclass(frozen=True)
class Value:
    """The shape, dtype and strides of a tensor that an operation returns, and whether it requires a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def order(self) -> tuple[int, ...]:
        """Return the dimensions of the tensor from the outermost to the innermost in memory."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim)))


@dataclass
class GraphFacts:
    """What a traced network computes for inputs of given sizes."""

    values: dict[str, Value]
    """The tensors that operations return, by node name."""
    numbers: dict[str, Any]
    """Results that are no tensors, such as sizes, by node name: known in advance, and the same on all ranks."""
    draws: dict[str, int]
    """The number of random draws before each operation that draws, by node name."""
    num_draws: int = 0
    """The number of all random draws."""


def follow(
    traced: TracedGraph,
    call: Call,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    scope: AbstractContextManager[object],
    *,
    counts_draws: bool = False,
) -> GraphFacts:
    """Run a graph on fake tensors, and return what its operations compute.

    Args:
        traced: The graph.
        call: Arguments of the sizes for which the graph is run.
        tensors: The network's parameters and buffers by name, on any device.
        device: The device of the fake tensors.
        scope: Context in which the strategy computes the network.
        counts_draws: Whether to count random draws, for layout-free randomness.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    held: dict[str, Any] = {}

    def blank(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.requires_grad_(tensor.requires_grad)

    facts = GraphFacts({}, {}, {})
    draws = _Count(device) if counts_draws else None
    given = dict(zip(traced.inputs, call.tensors, strict=True))
    with mode, scope:
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                name = traced.parameters.get(node.name) or traced.buffers.get(node.name)
                source = tensors[name] if name else traced.constants.get(node.name, given.get(node.name))
                assert source is not None
                held[node.name] = blank(source)
            elif node.op == "get_attr":
                held[node.name] = getattr(traced.root, str(node.target))
            elif node.op == "call_function":
                held[node.name] = _follow_one(node, held, facts, draws)
    # At the end, because a tensor that is filled in place requires a gradient only then.
    for node in traced.graph.nodes:
        # A block that changes buffers and returns nothing is not a number that is known in advance.
        if node.name in held and (isinstance(held[node.name], Tensor) or not mutated(node)):
            _note(node.name, held[node.name], facts)
    return facts


def _follow_one(node: fx.Node, held: Mapping[str, Any], facts: GraphFacts, draws: LayoutFree | None) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda other: held[other.name])
    if draws is None or not is_random(node):
        try:
            return plainly(node)(*args, **kwargs)
        except torch._subclasses.fake_tensor.DataDependentOutputException as error:
            raise StrategyError(
                "a partitioned network must be traceable: sizes in it must not depend on values",
                got=f"{node.target} at {line_in(node.meta.get('stack_trace') or '') or 'an unknown line'}",
                remedy="compute that size outside of forward",
            ) from error
    facts.draws[node.name] = facts.num_draws
    with draws:
        made = by_hash(node)(*args, **kwargs)
    facts.num_draws = draws.num_draws
    return made


class _Count(LayoutFree):
    """Layout-free randomness that counts random draws without computing numbers."""

    def words(self, shape: Shape, device: torch.device, owner: Tensor | None = None, *, shared: bool = False) -> Tensor:
        self.num_draws += 1
        return torch.empty(list(shape), dtype=torch.int32, device=device)


def _note(name: str, made: Any, facts: GraphFacts) -> None:
    if isinstance(made, Tensor):
        facts.values[name] = Value(tuple(made.shape), made.dtype, made.requires_grad, _stride(made))
    elif not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(made)) and not isinstance(
        made, fx.GraphModule
    ):
        facts.numbers[name] = made


def _stride(made: Tensor) -> tuple[int, ...]:
    return made.stride() if made.layout == torch.strided else ()


# -- how an operation is executed ------------------------------------------------------------------------------------


def plainly(node: fx.Node) -> Callable[..., Any]:
    """Return the function that runs an operation; for no_grad and autocast blocks one without export's wrappers."""
    assert callable(node.target)
    layer = layer_of(node)
    if layer is not None:
        return layer.run
    if node.target is torch.ops.aten.view.default:
        # The memory layout may differ from that of the trace, which only a reshape supports.
        return torch.ops.aten.reshape.default
    return _BLOCKS.get(getattr(node.target, "__name__", ""), node.target)


def by_hash(node: fx.Node) -> Callable[..., Any]:
    """Return torch's public function for an operation that draws random numbers, which `LayoutFree` can replace."""
    name = getattr(node.target, "_opname", "")
    for place in (torch, F, Tensor):
        found = getattr(place, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return plainly(node)


def is_random(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers with the arguments that it has in the graph."""
    layer = layer_of(node)
    if layer is not None:
        return layer.draws
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    name = getattr(node.target, "_opname", "")
    if name.endswith("dropout") or name == "native_dropout":
        return bool(node.args[2]) and bool(node.args[1] != 0.0)
    if name == "scaled_dot_product_attention":
        given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(given != 0.0)
    return True


def mutated(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of an operation that it changes in place."""
    layer = layer_of(node)
    if layer is not None:
        return changed_by(node, layer)
    if node.op == "call_function" and getattr(node.target, "__name__", "") in _BLOCKS:
        return _changed_in_block(node)
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return _statistics(node)
    named = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
    named.update(node.kwargs)
    changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [found for name in changed if isinstance(found := named.get(name), fx.Node)]


def changed_at_root(node: fx.Node) -> list[fx.Node]:
    """Return the tensors whose memory an operation changes in place, directly or through their views."""
    return [root_of(target) for target in mutated(node)]


def root_of(node: fx.Node) -> fx.Node:
    """Return the tensor whose memory the result of `node` shares, as a view does; `node` if it has its own memory."""
    while (source := aliased(node)) is not None:
        node = source
    return node


def _changed_in_block(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of a block, such as that of torch.no_grad(), that operations in it change in place."""
    place = next(
        i for i, argument in enumerate(node.args) if isinstance(argument, fx.Node) and argument.op == "get_attr"
    )
    block = getattr(node.graph.owning_module, str(node.args[place].target))  # type: ignore[union-attr]
    given = [inner for inner in block.graph.nodes if inner.op == "placeholder"]
    changed = {root for inner in block.graph.nodes for root in changed_at_root(inner)}
    pairs = zip(given, node.args[place + 1 :], strict=False)
    return [outer for inner, outer in pairs if inner in changed and isinstance(outer, fx.Node)]


def _statistics(node: fx.Node) -> list[fx.Node]:
    """Return the running statistics that BatchNorm changes in training, which its schema does not declare."""
    name = getattr(node.target, "_opname", "")
    if name == "batch_norm" and node.args[5]:
        return [buffer for buffer in node.args[3:5] if isinstance(buffer, fx.Node)]
    if name == "instance_norm" and node.args[5]:
        return [buffer for buffer in node.args[3:5] if isinstance(buffer, fx.Node)]
    return []


def aliased(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory an operation's result may share, as for a view; None for a new tensor."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    returns = {kind for result in schema.returns if result.alias_info for kind in result.alias_info.before_set}
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info and argument.alias_info.before_set & returns and isinstance(value, fx.Node):
            return value
    if getattr(node.target, "_opname", "") in ("reshape", "contiguous", "to", "flatten"):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    return None


def _with_grad_mode(enabled: bool, block: Callable[..., Any], *args: Any) -> Any:
    with torch.set_grad_enabled(enabled and torch.is_grad_enabled()):
        return block(*args)


def _with_autocast(
    kind: str, dtype: Any, enabled: bool, cache: Any, block: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache):
        return block(*args, **kwargs)


_BLOCKS: dict[str, Callable[..., Any]] = {
    "wrap_with_set_grad_enabled": _with_grad_mode,
    "wrap_with_autocast": _with_autocast,
}
