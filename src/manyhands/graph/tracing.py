"""Tracing: a network as a graph of operations, each with the module it belongs to. No value is computed or needed.

torch.export follows the network on tensors without values, so a network that lies on the meta device, or in parts on
many ranks, can be traced as well. Sizes stay free where the network allows it.
"""

from __future__ import annotations

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
from .call import Call
from .layers import kept_whole, mark
from .user_lines import culprit

_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")
"""Operations that only look whether sizes are as they were."""
_NET = "net"


@dataclass(frozen=True)
class Absent:
    """An output that cannot be carried between ranks, such as a cache of a class that torch does not know."""

    kind: str


@dataclass(frozen=True)
class OutputStructure:
    """What a network returns: a structure with tensors at some of its leaves."""

    structure: Any
    leaves: tuple[Any, ...]
    """The place of a tensor among those that the graph returns, in brackets; or a value of another kind."""

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The same structure with these tensors."""
        leaves = [tensors[leaf[0]] if isinstance(leaf, _Place) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)


class _Place(tuple[int]):
    """The number of a tensor among those that a graph returns."""


@dataclass
class TracedGraph:
    """A network's graph. Node names are the currency: parameters, buffers, inputs and results go by them."""

    graph: fx.Graph
    root: nn.Module
    """What the graph's own attributes, such as the bodies of blocks without gradients, are found in."""
    parameters: dict[str, str]
    """Names of the plain module's parameters, by node."""
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: list[str]
    outputs: list[Any]
    """What is returned, as nodes or numbers, in order."""
    answer: OutputStructure
    paths: dict[str, str] = field(default_factory=dict)
    """The module that each operation belongs to."""
    bounds: Mapping[Any, Any] = field(default_factory=dict)

    def fits(self, call: Call) -> bool:
        """Whether the graph holds for tensors of these sizes."""
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
    """Follows a network through one call, in the mode (training or evaluation) that it is in.

    With `free` the graph holds for other sizes too, where the network allows it; that takes a few times as long.
    Modules that `layers` names are one operation each.

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
    with _without_values(model, mode, device), as_written(), _quiet(), kept_whole(model, layers) as found:
        try:
            program = torch.export.export(wrapper, inputs, dynamic_shapes=(sizes,) if free else None, strict=False)
        except Exception as error:
            raise _cannot(error) from error
    mark(program.graph_module.graph, found)
    return _traced(program, wrapper.kept.answer, _first_names(model))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps to itself what export says besides its errors: warnings, log lines, and printed graphs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Kept:
    """What export, which puts a module's attributes back as they were, leaves alone."""

    answer: OutputStructure


class _Flat(nn.Module):
    """A network that takes tensors only, and returns tensors only."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.net = model
        self.call = call
        self.kept = _Kept()

    def forward(self, *tensors: Tensor) -> list[Any]:
        args, kwargs = self.call.arguments(tensors)
        with _buffers_kept(self.net):
            leaves, structure = pytree.tree_flatten(self.net(*args, **kwargs))
        carried = [leaf for leaf in leaves if isinstance(leaf, Tensor | torch.SymInt)]
        places = iter(range(len(carried)))
        kept = tuple(
            _Place((next(places),)) if isinstance(leaf, Tensor | torch.SymInt) else _plain(leaf) for leaf in leaves
        )
        self.kept.answer = OutputStructure(structure, kept)
        return carried


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Makes a change in place of every buffer that is replaced by another tensor, which export would overlook."""
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
                "a buffer of a network that is cut keeps its size",
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
    """Tensors without values in the place of parameters and buffers; a tied one is tied here too."""
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
    places = [held for module in model.modules() for held in (module._parameters, module._buffers)]
    before = [dict(held) for held in places]
    try:
        for held in places:
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = other(tensor)  # type: ignore[assignment]
        yield
    finally:
        for held, old in zip(places, before, strict=True):
            held.clear()
            held.update(old)  # type: ignore[arg-type]


def _cannot(error: Exception) -> StrategyError:
    """Export's own words are long; the first line says what it was, and the culprit where."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return StrategyError(
        "a network that is cut must be traced: what it does may not depend on values that are computed in it",
        got=f"{culprit(error)} ({said[:300]})",
        remedy="take that branch out of forward (torch.where computes both), or use mh.Mirrored() or mh.Sharded()",
    )


def _first_names(model: nn.Module) -> dict[str, str]:
    """The name that a tensor goes by, for each of its names: a tied one has several."""
    first: dict[int, str] = {}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in every}


def _traced(program: Any, answer: OutputStructure, names: Mapping[str, str]) -> TracedGraph:
    from .shape_propagation import mutated

    graph: fx.Graph = program.graph_module.graph
    for node in [n for n in graph.nodes if n.op == "call_function" and _name_of(n.target) in _CHECKS]:
        graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(mutated(node)))
    operations = [node for node in graph.nodes if node.op == "call_function"]
    signature = program.graph_signature
    strip = len(_NET) + 1
    buffers = {node: names[name[strip:]] for node, name in signature.inputs_to_buffers.items()}
    returned = next(node for node in graph.nodes if node.op == "output")
    return TracedGraph(
        graph=graph,
        root=program.graph_module,
        parameters={node: names[name[strip:]] for node, name in signature.inputs_to_parameters.items()},
        buffers=buffers,
        constants={node: program.constants[name] for node, name in signature.inputs_to_lifted_tensor_constants.items()},
        inputs=list(signature.user_inputs),
        outputs=list(returned.args[0]),
        answer=answer,
        paths={node.name: _path_of(node) or _owner_of(node, buffers) for node in operations},
        bounds=dict(program.range_constraints),
    )


def _name_of(target: Any) -> str:
    return getattr(target, "_opname", getattr(target, "__name__", str(target)))


def _path_of(node: fx.Node) -> str:
    """The innermost module in whose forward an operation stands; a module that is called again is the same one."""
    stack = [entry[0] for entry in node.meta.get("nn_module_stack", {}).values()]
    inner = [path.split("@")[0] for path in stack if path.split(".")[0] == _NET]
    return inner[-1][len(_NET) + 1 :] if inner else ""


def _owner_of(node: fx.Node, buffers: Mapping[str, str]) -> str:
    """The module of the buffer that is filled after the network's last operation."""
    if node.target is torch.ops.aten.copy_.default and isinstance(first := node.args[0], fx.Node):
        return buffers.get(first.name, "").rpartition(".")[0]
    return ""
