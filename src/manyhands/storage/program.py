"""Tracing of a network into plain JSON: the only file that uses the graphs of torch.export.

torch's own serialized form is not used: its schema is private and changes with each release, reading it turns texts
into code (sympy's `sympify` on every size, guards), and saving it pickles the example inputs. Inference needs only the
operators of a traced graph, their arguments, and which value is passed to which. Sizes are values of the graph, so no
expression is stored or parsed. `operators` defines which operators are allowed; `program_builder` rebuilds the network.
"""

from __future__ import annotations

import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..core import ArchiveError
from . import operators
from .lowering import lower

FORMAT = 1
SINGLETONS = ("dtype", "layout", "memory_format")
"""torch's named constants that are allowed as arguments."""
Json = Any


@dataclass(frozen=True)
class StoredProgram:
    """A network as data: the program as JSON, and the tensors to which it refers by name."""

    program: dict[str, Json]
    weights: dict[str, Tensor]
    shapes: list[tuple[str, tuple[int | None, ...]]]
    """dtype and shape of every output; sizes that depend on the inputs are None."""


def trace(network: nn.Module, examples: tuple[Tensor, ...], free: Sequence[Collection[int]]) -> StoredProgram:
    """Trace a network that takes tensors and returns a tuple of tensors; raise ArchiveError if that is impossible.

    Dimension 0 of each example is the batch; its size, and those of the dimensions in `free`, stay dynamic.
    """
    exported = _exported(network, examples, free)
    lower(exported.graph_module)
    _require_pure(exported)
    return _ProgramEncoder(exported).traced()


def user_line(error: BaseException) -> str:
    """Return the last line of an error's traceback that is in the user's code, neither in torch nor in manyhands."""
    ours, torchs = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    seen: BaseException | None = error
    found = ""
    while seen is not None:
        for frame in traceback.extract_tb(seen.__traceback__):
            if not frame.filename.startswith((ours, torchs, "<")):
                found = f"{Path(frame.filename).name}:{frame.lineno}: {(frame.line or '').strip()}"
        seen = seen.__cause__ or seen.__context__
    return found or "a line that torch does not name"


def _exported(network: nn.Module, examples: tuple[Tensor, ...], free: Sequence[Collection[int]]) -> ExportedProgram:
    batch = Dim("batch")
    try:
        with torch.no_grad(), warnings.catch_warnings(), _without_fast_path():
            # Recurrent layers assign attributes; the outputs of program and model are compared afterwards.
            warnings.filterwarnings("ignore", message=".*assigned during export")
            shapes = (tuple({0: batch, **dict.fromkeys(dims, Dim.DYNAMIC)} for dims in free),)
            return torch.export.export(network, examples, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        # torch raises many kinds of errors here, and passes errors of the network itself through unchanged.
        raise _untraceable(error) from error


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Within the context, trace attention layers as single operators: the fused kernel does not check its arguments."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def environment_kept() -> Iterator[None]:
    """Restore the environment after the context: tracing sets a cache folder that child processes would inherit."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            if name.startswith("TORCHINDUCTOR_"):
                del os.environ[name]


def _untraceable(error: Exception) -> ArchiveError:
    text = str(error)
    if any(sign in text for sign in ("Constraints violated", "Suggested fixes", "specializ")):
        return ArchiveError(
            "the network must accept any batch size, and any size in which the examples differ",
            got=f"a fixed or restricted size: {_brief(text)}",
            remedy="take sizes from the shape of an input, not from a number",
        )
    return ArchiveError(
        "the network and its predict function must be traceable by torch.export",
        got=f"{type(error).__name__} at {user_line(error)} ({_brief(text)})",
        remedy="keep values inside tensors there: no .item(), no branches on values, no data-dependent shapes",
    )


def _brief(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:300]


def _require_pure(exported: ExportedProgram) -> None:
    signature = exported.graph_signature
    changed = [spec.target or spec.arg.name for spec in signature.output_specs if spec.kind != OutputKind.USER_OUTPUT]
    if changed:
        raise ArchiveError(
            "predict must not change the model",
            got=f"changes of {', '.join(map(str, changed[:5]))}",
            remedy="assign to copies of its tensors",
        )


class _ProgramEncoder:
    """Encodes the graphs of an exported program as JSON."""

    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.graphs: list[dict[str, Json]] = []
        self.weights: dict[str, Tensor] = {}
        self._keys: dict[Any, str] = {}

    def traced(self) -> StoredProgram:
        inputs = self._inputs()
        self._graph(self.exported.graph_module, inputs)
        program = {"format": FORMAT, "torch": str(torch.__version__), "graphs": self.graphs}
        return StoredProgram(program, self.weights, self._shapes())

    def _inputs(self) -> list[Json]:
        found: list[Json] = []
        for spec in self.exported.graph_signature.input_specs:
            if spec.kind == InputKind.USER_INPUT:
                found.append({"input": sum("input" in one for one in found)})
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                found.append({"weight": self._weight(str(spec.target))})
            else:
                raise ArchiveError(
                    "inputs and constants of a network must be tensors",
                    got=f"{spec.kind.name} {spec.target}",
                    remedy="remove other objects from the network, or store them as tensors",
                )
        return found

    def _weight(self, target: str) -> str:
        held: Mapping[str, Any] = {**self.exported.constants, **self.exported.state_dict}
        tensor = held[target]
        if not isinstance(tensor, Tensor):
            raise ArchiveError(
                "constants of a network must be tensors",
                got=f"{target}, of type {type(tensor).__name__}",
                remedy="store the value as a tensor, for example with register_buffer",
            )
        # Tied weights are one tensor under two names, and are stored once.
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else target
        if same not in self._keys:
            key = target.removeprefix("model.")
            self._keys[same] = target if key in self.weights else key
            self.weights[self._keys[same]] = tensor.detach()
        return self._keys[same]

    def _graph(self, module: fx.GraphModule, inputs: list[Json] | None) -> int:
        """Append a graph and its nested graphs to `graphs`; return the graph's index there."""
        number = len(self.graphs)
        graph: dict[str, Json] = {}
        self.graphs.append(graph)
        places: dict[fx.Node, int] = {}
        nodes: list[Json] = []
        outputs: Json = None
        nested: dict[fx.Node, fx.GraphModule] = {}
        for node in module.graph.nodes:
            if node.op == "output":
                outputs = self._value(node.args[0], places)
            elif node.op == "get_attr":
                nested[node] = _submodule(module, node)
            else:
                if node.op != "placeholder":
                    if _is_check(node):
                        continue
                    nodes.append(self._node(node, places, nested))
                places[node] = len(places)
        count = len(places) - len(nodes)
        graph.update(inputs=inputs if inputs is not None else count, nodes=nodes, outputs=outputs)
        return number

    def _node(self, node: fx.Node, places: dict[fx.Node, int], nested: dict[fx.Node, fx.GraphModule]) -> Json:
        region = REGIONS.get(str(node.target))
        if region is not None:
            return region(self, node.args, places, nested)
        made: dict[str, Json] = {"op": _name_of(node), "args": self._value(node.args, places)}
        # Uninitialized tensors are stored as zeros, which need no memory layout.
        kwargs = {key: value for key, value in node.kwargs.items() if made["op"] not in ZEROS or key in ZEROS_TAKE}
        if kwargs:
            made["kwargs"] = {key: self._value(value, places) for key, value in kwargs.items()}
        return made

    def _value(self, value: Any, places: dict[fx.Node, int]) -> Json:
        if isinstance(value, fx.Node):
            return {"ref": places[value]}
        if isinstance(value, list | tuple):
            return [self._value(item, places) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        for kind in SINGLETONS:
            if isinstance(value, getattr(torch, kind)):
                return {kind: str(value).removeprefix("torch.")}
        raise ArchiveError(
            "arguments in a program must be numbers and tensors",
            got=f"{type(value).__name__} {value}",
            remedy="use other operators, or omit this one from predict",
        )

    def _grad(self, args: Any, places: dict[fx.Node, int], nested: dict[fx.Node, fx.GraphModule]) -> Json:
        """Encode a graph that sets the grad mode as a plain call, because inference does not differentiate."""
        _, body, *operands = args
        return {
            "op": "region.call",
            "graph": self._graph(nested[body], None),
            "args": self._value(operands, places),
        }

    def _autocast(self, args: Any, places: dict[fx.Node, int], nested: dict[fx.Node, fx.GraphModule]) -> Json:
        _, dtype, enabled, _, body, *operands = args
        return {
            "op": "region.autocast",
            "dtype": self._value(dtype, places),
            "enabled": bool(enabled),
            "graph": self._graph(nested[body], None),
            "args": self._value(operands, places),
        }

    def _branch(self, args: Any, places: dict[fx.Node, int], nested: dict[fx.Node, fx.GraphModule]) -> Json:
        chosen, yes, no, operands = args
        return {
            "op": "region.branch",
            "graphs": [self._graph(nested[yes], None), self._graph(nested[no], None)],
            "args": self._value([chosen, *operands], places),
        }

    def _shapes(self) -> list[tuple[str, tuple[int | None, ...]]]:
        (output,) = (node for node in self.exported.graph.nodes if node.op == "output")
        found: list[tuple[str, tuple[int | None, ...]]] = []
        for node in output.args[0]:
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            if not isinstance(value, Tensor):
                raise ArchiveError(
                    "predict must return a tensor or a dict of tensors",
                    got=str(node),
                    remedy='return {"name": tensor, ...}',
                )
            shape = tuple(size if isinstance(size, int) else None for size in value.shape)
            found.append((str(value.dtype).removeprefix("torch."), shape))
        return found


ZEROS = ("aten.zeros.default", "aten.new_zeros.default")
ZEROS_TAKE = ("dtype", "layout", "device", "pin_memory")
REGIONS: dict[str, Callable[..., Json]] = {
    "wrap_with_set_grad_enabled": _ProgramEncoder._grad,
    "wrap_with_autocast": _ProgramEncoder._autocast,
    "cond": _ProgramEncoder._branch,
}
"""Higher-order operators, which call nested graphs, that a program can contain, with the encoder of each."""


def _submodule(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    found = getattr(module, str(node.target), None)
    if not isinstance(found, fx.GraphModule):
        raise ArchiveError(
            "attributes in a program must be graphs",
            got=f"{node.target}, of type {type(found).__name__}",
            remedy="use other operators, or omit this one from predict",
        )
    return found


def _name_of(node: fx.Node) -> str:
    """Return the stored name of a node's operator; if it is not allowed, raise ArchiveError with the model's line."""
    try:
        return operators.name_of(node.target)
    except ArchiveError as error:
        raise ArchiveError(
            error.rule,
            got=f"{error.got}, at {_origin(node)}",
            remedy="use other operators, or omit this one from predict",
        ) from None


def _origin(node: fx.Node) -> str:
    """Return the line of code and the module from which a node was traced, as text."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    where = f"{modules[-1][0] or 'the model'} ({str(modules[-1][1]).rpartition('.')[2]})" if modules else "the model"
    ours, torchs = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in lines if not file.startswith((ours, torchs))]
    return f"{Path(own[-1][0]).name}:{own[-1][1]} in {where}" if own else where


def _is_check(node: fx.Node) -> bool:
    """Return whether a node only checks dtype and device; such a check is valid only on the traced device."""
    return str(node.target) == "aten._assert_tensor_metadata.default" and not node.users
