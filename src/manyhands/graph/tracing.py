"""Tracing: turns a network into a graph of operations and their modules, without computing any values.

torch.export runs the network on fake tensors, so a network on the meta device, or one that is sharded over many ranks,
can be traced as well. Sizes stay dynamic where the network allows it.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..core import StrategyError, as_written
from ..distributed import culprit, line_in
from .layers import Call, kept_whole, mark

_FUNCTORCH = "torch._functorch.predispatch"
"""The Python module of the operations that torch.func's transforms leave in a trace."""
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")
"""Operations that only check sizes and dtypes; they are removed from a trace."""
_NET = "net"


@dataclass(frozen=True)
class Absent:
    """Placeholder of an output that cannot be sent between ranks, such as a cache of a class unknown to torch."""

    kind: str


@dataclass(frozen=True)
class OutputStructure:
    """The nesting of a network's output in tuples, dicts and other containers, without its tensors."""

    structure: Any
    leaves: tuple[Any, ...]
    """For each leaf a `_Place` if it is a tensor, or else its value."""

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Return the network's output with these tensors, the outputs of the graph."""
        leaves = [tensors[leaf[0]] if isinstance(leaf, _Place) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)


class _Place(tuple[int]):
    """The index of a tensor among a graph's outputs."""


@dataclass
class TracedGraph:
    """The graph of a network. Parameters, buffers, inputs and results are identified by the names of graph nodes."""

    graph: fx.Graph
    root: nn.Module
    """The module with the graph's own attributes, such as the bodies of no_grad blocks."""
    parameters: dict[str, str]
    """Names of parameters in the network, by node name."""
    buffers: dict[str, str]
    """Names of buffers in the network, by node name."""
    constants: dict[str, Tensor]
    """Tensors that are neither parameters nor buffers, by node name."""
    inputs: list[str]
    """Node names of the tensors among the network's arguments, in order."""
    outputs: list[Any]
    """The outputs of the graph, as nodes or numbers, in order."""
    answer: OutputStructure
    """How the outputs of the graph are nested in the network's output."""
    paths: dict[str, str] = field(default_factory=dict)
    """Path of the module that contains each operation, by node name."""
    bounds: Mapping[Any, Any] = field(default_factory=dict)
    """Ranges of the dynamic sizes for which the graph is valid, by symbol."""

    def fits(self, call: Call) -> bool:
        """Return whether the graph is valid for the sizes of the tensors of a call."""
        placeholders = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        found: dict[Any, int] = {}
        compound: list[tuple[Any, int]] = []
        for name, tensor in zip(self.inputs, call.tensors, strict=True):
            for wanted, size in zip(placeholders[name].meta["val"].shape, tensor.shape, strict=True):
                if isinstance(wanted, int):
                    if wanted != size:
                        return False
                elif wanted.node.expr.is_Symbol:
                    if found.setdefault(wanted.node.expr, size) != size:
                        return False
                else:
                    compound.append((wanted.node.expr, size))
        return all(expr.subs(found) == size for expr, size in compound) and all(
            symbol not in found or bound.lower <= found[symbol] <= bound.upper for symbol, bound in self.bounds.items()
        )


def trace(
    model: nn.Module, call: Call, device: torch.device, *, free: bool = False, layers: Sequence[str] = ()
) -> TracedGraph:
    """Trace a network through one call, in its current mode (training or evaluation).

    Args:
        model: The network, on any device.
        call: The arguments of the call.
        device: The device for which the network is traced.
        free: Whether the graph must be valid for other sizes too, where the network allows it; tracing then takes a few
            times as long.
        layers: Names of modules, each of which becomes one operation of the graph.

    Raises:
        StrategyError: The network cannot be traced.

    >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> traced = trace(net, Call.of([torch.zeros(3, 2)], {}), torch.device("cpu"))
    >>> [(traced.paths[node.name], node.name) for node in traced.graph.nodes if node.op == "call_function"]
    [('0', 'linear'), ('1', 'tanh'), ('2', 'linear_1')]
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.export import Dim
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        inputs = tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in call.tensors)
    sizes = tuple(dict.fromkeys(range(tensor.dim() if free else 0), Dim.AUTO) for tensor in inputs)
    wrapper = _Flat(model, call)
    with (
        _without_values(model, mode, device),
        as_written(),
        _quiet(),
        _without_reentrant_checkpoints(),
        kept_whole(model, layers) as found,
    ):
        try:
            program = torch.export.export(wrapper, inputs, dynamic_shapes=(sizes,) if free else None, strict=False)
        except Exception as error:
            raise _cannot(error) from error
    mark(program.graph_module.graph, found)
    return _traced(program, wrapper.kept.answer, _first_names(model))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings, log lines and printed graphs of torch.export within the context, but no exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _without_reentrant_checkpoints() -> Iterator[None]:
    """Let torch.export trace the functions of reentrant activation checkpoints within the context.

    It cannot trace the checkpoints themselves, whose forward runs without gradients and whose backward is Python code.
    """
    from torch.utils.checkpoint import CheckpointFunction

    CheckpointFunction.apply = lambda function, preserves, *args: function(*args)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CheckpointFunction.apply


class _OutputStructureHolder:
    """Holder of the output structure: torch.export resets attributes of modules, but not those of this object."""

    answer: OutputStructure


class _Flat(nn.Module):
    """A network that takes and returns a flat list of tensors, as torch.export requires."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.net = model
        self.call = call
        self.kept = _OutputStructureHolder()

    def forward(self, *tensors: Tensor) -> list[Any]:
        args, kwargs = self.call.arguments(tensors)
        with _buffers_kept(self.net):
            outputs = self.net(*args, **kwargs)
        register_dataclasses(outputs)
        leaves, structure = pytree.tree_flatten(outputs)
        carried = [leaf for leaf in leaves if isinstance(leaf, Tensor | torch.SymInt)]
        places = iter(range(len(carried)))
        kept = tuple(
            _Place((next(places),)) if isinstance(leaf, Tensor | torch.SymInt) else _plain(leaf) for leaf in leaves
        )
        self.kept.answer = OutputStructure(structure, kept)
        return carried


def register_dataclasses(outputs: Any) -> None:
    """Register the dataclasses in a network's outputs as containers of torch's pytrees, so that tensors are found.

    >>> @dataclasses.dataclass
    ... class Outputs:
    ...     logits: Tensor
    >>> register_dataclasses([Outputs(torch.zeros(1))])
    >>> pytree.tree_leaves(Outputs(torch.zeros(1)))
    [tensor([0.])]
    """
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if not isinstance(leaf, type)]
    kinds: set[Any] = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf)}
    known = [kind for kind in kinds if all(each.init for each in dataclasses.fields(kind))]
    for kind in known:
        pytree.register_dataclass(kind)
    if known:
        register_dataclasses(outputs)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Turn the replacement of a buffer by another tensor within the context into an in-place change.

    torch.export would miss the replacement. Raise StrategyError if a buffer changes its shape.
    """
    before = [
        (module, name, held) for module in model.modules() for name, held in module._buffers.items() if held is not None
    ]
    yield
    for module, name, held in before:
        now = module._buffers[name]
        if now is held:
            continue
        if now is None or now.shape != held.shape:
            raise StrategyError(
                "a buffer of a partitioned network must keep its size",
                got=f"{name} of {type(module).__name__}, {'None' if now is None else list(now.shape)} after "
                f"{list(held.shape)}",
                remedy="register it with its largest size, or use mh.Mirrored() or mh.Sharded()",
            )
        held.copy_(now.detach())
        module._buffers[name] = held


def _plain(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else Absent(type(leaf).__name__)


@contextmanager
def _without_values(model: nn.Module, mode: Any, device: torch.device) -> Iterator[None]:
    """Replace parameters and buffers by fake tensors within the context; tied parameters stay tied."""
    made: dict[int, Tensor] = {}

    def blank(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    with _swapped(model, blank):
        yield


@contextmanager
def _swapped(model: nn.Module, other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    places: list[dict[str, Any]] = [held for m in model.modules() for held in (m._parameters, m._buffers)]
    before = [dict(held) for held in places]
    # A network on the meta device has plain attributes there too.
    plain = [(vars(m), n, v) for m in model.modules() for n, v in vars(m).items() if _is_empty(v)]
    try:
        for held in places:
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = other(tensor)
        for own, name, value in plain:
            own[name] = other(value)
        yield
    finally:
        for held, old in zip(places, before, strict=True):
            held.clear()
            held.update(old)
        for own, name, value in plain:
            own[name] = value


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _cannot(error: Exception) -> StrategyError:
    """Return the error for a network that cannot be traced, with the user's line and the start of export's message."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return StrategyError(
        "a partitioned network must be traceable: its operations must not depend on values that it computes",
        got=f"{culprit(error)} ({text[:300]})",
        remedy="take that branch out of forward (torch.where computes both), or use mh.Mirrored() or mh.Sharded()",
    )


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter and buffer by each of its names; tied ones have several names."""
    first: dict[int, str] = {}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in every}


def _traced(program: Any, answer: OutputStructure, names: Mapping[str, str]) -> TracedGraph:
    from .shape_propagation import mutated

    graph: fx.Graph = program.graph_module.graph
    for node in graph.nodes:
        if getattr(node.target, "__module__", "") == _FUNCTORCH:
            raise StrategyError(
                "a partitioned network is traced, and the trace does not support torch.func.vmap and torch.func.jvp",
                got=f"a call of one in forward, at {_line_of(node)}",
                remedy="write the loop or the derivative without it, or use mh.Mirrored() or mh.Sharded()",
            )
    for node in [n for n in graph.nodes if n.op == "call_function" and _name_of(n.target) in _CHECKS]:
        graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(mutated(node)))
    operations = [node for node in graph.nodes if node.op == "call_function"]
    signature = program.graph_signature
    strip = len(_NET) + 1
    buffers = {node: names[name[strip:]] for node, name in signature.inputs_to_buffers.items()}
    returned = next(node for node in graph.nodes if node.op == "output")
    parameters = {node: names[name[strip:]] for node, name in signature.inputs_to_parameters.items()}
    constants = {node: program.constants[name] for node, name in signature.inputs_to_lifted_tensor_constants.items()}
    _require_tensors(graph, {*parameters, *buffers, *constants, *signature.user_inputs})
    return TracedGraph(
        graph=graph,
        root=program.graph_module,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        inputs=list(signature.user_inputs),
        outputs=list(returned.args[0]),
        answer=answer,
        paths={node.name: _path_of(node) or _owner_of(node, buffers) for node in operations},
        bounds=dict(program.range_constraints),
    )


def _require_tensors(graph: fx.Graph, known: set[str]) -> None:
    """Raise StrategyError if the graph uses an object, such as a torch.Generator, that a trace does not contain."""
    for node in graph.nodes:
        if node.op == "placeholder" and node.name not in known and node.users:
            user = next(iter(node.users))
            raise StrategyError(
                "a partitioned network is traced, and the trace contains tensors and numbers only",
                got=f"an object, a torch.Generator for instance, that {_name_of(user.target)} uses at {_line_of(user)}",
                remedy="draw without generator=, with deterministic=True, or use mh.Mirrored() or mh.Sharded()",
            )


def _line_of(node: fx.Node) -> str:
    return line_in(node.meta.get("stack_trace") or "") or "an unknown line"


def _name_of(target: Any) -> str:
    return getattr(target, "_opname", getattr(target, "__name__", str(target)))


def _path_of(node: fx.Node) -> str:
    """Return the path of the innermost module whose forward contains an operation; "" for the network itself."""
    stack = [entry[0] for entry in node.meta.get("nn_module_stack", {}).values()]
    inner = [path.split("@")[0] for path in stack if path.split(".")[0] == _NET]
    return inner[-1][len(_NET) + 1 :] if inner else ""


def _owner_of(node: fx.Node, buffers: Mapping[str, str]) -> str:
    """Return the path of the module whose buffer an operation updates after the network's last operation, or ""."""
    if node.target is torch.ops.aten.copy_.default and isinstance(first := node.args[0], fx.Node):
        return buffers.get(first.name, "").rpartition(".")[0]
    return ""
