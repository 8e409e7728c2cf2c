"""A traced network as plain JSON and back: the only file that touches torch.export's graphs.

Why not torch's own serialised form: it is a private schema that changes with each release, reading it turns
texts into code (sympy's `sympify` on every size, guards), and saving it pickles the example inputs. What
inference needs of a traced graph is little: operators, their arguments and which value goes where. Sizes are
values of the graph themselves, so no expression is ever stored or parsed. Tracing and rebuilding use the
public `torch.export` and `torch.fx`; which operators are allowed is in `operators`.
"""

from __future__ import annotations

import keyword
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
from .purity import Purity

FORMAT = 1
MAX_NODES = 500_000
MAX_NESTING = 16
MAX_TEXT = 200
_PLAIN_DTYPE = re.compile(
    r"(float|bfloat|u?int|complex)\d+(_\w+)?|bool|half|float|double|int|long|short|cfloat|cdouble"
)
SINGLETONS = ("dtype", "layout", "memory_format")
"""torch's named constants that are allowed as arguments."""

Json = Any


@dataclass(frozen=True)
class StoredProgram:
    """A network as data: the program, and the tensors that it refers to by name."""

    program: dict[str, Json]
    weights: dict[str, Tensor]
    shapes: list[tuple[str, tuple[int | None, ...]]]
    """dtype and shape of every output; None for sizes that depend on the batch."""


def trace(network: nn.Module, examples: tuple[Tensor, ...], free: Sequence[Collection[int]]) -> StoredProgram:
    """Trace a network from tensors to a tuple of tensors, with dynamic batch dimension and dimensions in `free`."""
    exported = _exported(network, examples, free)
    lower(exported.graph_module)
    _require_pure(exported)
    return _Encoder(exported).traced()


def build(program: Mapping[str, Json], weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Build the network that a program describes; raise for anything that is not plain tensor arithmetic."""
    try:
        return _Builder(program, weights, device).module()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, ArchiveError):
            raise
        raise _malformed(f"{type(error).__name__}: {str(error)[:200]}") from error


def user_line(error: BaseException) -> str:
    """Return the last line of a traceback that is neither in torch nor in manyhands."""
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
    """Trace attention as the operators it consists of: the fused layer's kernel does not check its arguments."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def environment_kept() -> Iterator[None]:
    """Restore the environment after tracing, which sets a cache folder that child processes would inherit."""
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
        raise ArchiveError("predict must not change the model", got=f"changes of {', '.join(map(str, changed[:5]))}")


class _Encoder:
    """Encode the graph of an exported program as JSON."""

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
                raise ArchiveError("a network must consist of tensors", got=f"{spec.kind.name} {spec.target}")
        return found

    def _weight(self, target: str) -> str:
        held: Mapping[str, Any] = {**self.exported.constants, **self.exported.state_dict}
        tensor = held[target]
        if not isinstance(tensor, Tensor):
            raise ArchiveError("constants of a network must be tensors", got=f"{target}: {type(tensor).__name__}")
        # Tied weights are one tensor under two names, and are stored once.
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else target
        if same not in self._keys:
            key = target.removeprefix("model.")
            self._keys[same] = target if key in self.weights else key
            self.weights[self._keys[same]] = tensor.detach()
        return self._keys[same]

    def _graph(self, module: fx.GraphModule, inputs: list[Json] | None) -> int:
        """Append a graph and its nested graphs; return its number."""
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
        raise ArchiveError("arguments in a program must be numbers and tensors", got=f"{type(value).__name__} {value}")

    def _grad(self, args: Any, places: dict[fx.Node, int], nested: dict[fx.Node, fx.GraphModule]) -> Json:
        """Encode a grad-mode region as a plain call, because inference does not differentiate."""
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
                raise ArchiveError("a prediction must consist of tensors", got=str(node))
            shape = tuple(size if isinstance(size, int) else None for size in value.shape)
            found.append((str(value.dtype).removeprefix("torch."), shape))
        return found


ZEROS = ("aten.zeros.default", "aten.new_zeros.default")
ZEROS_TAKE = ("dtype", "layout", "device", "pin_memory")

REGIONS: dict[str, Callable[..., Json]] = {
    "wrap_with_set_grad_enabled": _Encoder._grad,
    "wrap_with_autocast": _Encoder._autocast,
    "cond": _Encoder._branch,
}
"""Higher-order operators that a program can contain, with the encoder of each."""


def _submodule(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    found = getattr(module, str(node.target), None)
    if not isinstance(found, fx.GraphModule):
        raise ArchiveError("attributes in a program must be graphs", got=f"{node.target}: {type(found).__name__}")
    return found


def _name_of(node: fx.Node) -> str:
    """Return the stored name of a node's operator; raise an error that names the line of the model."""
    try:
        return operators.name_of(node.target)
    except ArchiveError as error:
        raise ArchiveError(
            error.rule,
            got=f"{error.got}, at {_origin(node)}",
            remedy="use other operators, or omit it from predict",
        ) from None


def _origin(node: fx.Node) -> str:
    """Return the line and the module that a node was traced from."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    where = f"{modules[-1][0] or 'the model'} ({str(modules[-1][1]).rpartition('.')[2]})" if modules else "the model"
    ours, torchs = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in lines if not file.startswith((ours, torchs))]
    return f"{Path(own[-1][0]).name}:{own[-1][1]} in {where}" if own else where


def _is_check(node: fx.Node) -> bool:
    """Return whether a node only checks dtype and device, which is valid only on the traced device."""
    return str(node.target) == "aten._assert_tensor_metadata.default" and not node.users


class _Call(nn.Module):
    """A region that is called without further context."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *operands: Any) -> Any:
        return self.body(*operands)


class _Autocast(_Call):
    """A region with its own precision."""

    def __init__(self, body: nn.Module, device: str, dtype: torch.dtype | None, enabled: bool) -> None:
        super().__init__(body)
        self.device, self.dtype, self.enabled = device, dtype, enabled

    def forward(self, *operands: Any) -> Any:
        with torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled):
            return self.body(*operands)


class _Branch(nn.Module):
    """Two regions of which a condition selects one."""

    def __init__(self, yes: nn.Module, no: nn.Module) -> None:
        super().__init__()
        self.yes, self.no = yes, no

    def forward(self, chosen: Any, *operands: Any) -> Any:
        return (self.yes if bool(chosen) else self.no)(*operands)


class _Builder:
    """Build modules from a program's graphs; every graph is used once, so that they form a tree."""

    def __init__(self, program: Mapping[str, Json], weights: Mapping[str, Tensor], device: torch.device) -> None:
        if set(program) != {"format", "torch", "graphs"} or program["format"] != FORMAT:
            raise _malformed(f"fields {', '.join(map(str, program))[:200]}")
        self.graphs, self.weights, self.device = program["graphs"], weights, device
        self._used: set[int] = set()
        self._purity = Purity()
        self._returned: dict[int, Any] = {}
        self._num_nodes = sum(len(graph["nodes"]) for graph in self.graphs)
        if self._num_nodes > MAX_NODES:
            raise _malformed(f"{self._num_nodes} nodes")

    def module(self) -> nn.Module:
        return self._module(0, 0)

    def _module(self, number: Json, nesting: int, operands: Sequence[Any] | None = None) -> fx.GraphModule:
        """Build a graph; for a region, `operands` are the arguments of its call."""
        if type(number) is not int or number in self._used or not 0 <= number < len(self.graphs):
            raise _malformed(f"graph {number!r} used twice or not there")
        if nesting > MAX_NESTING:
            raise _malformed(f"graphs nested more than {MAX_NESTING} deep")
        self._used.add(number)
        data = self.graphs[number]
        _require_fields(data, {"inputs", "nodes", "outputs"})
        root, graph = nn.Module(), fx.Graph()
        values = self._placed(root, graph, data["inputs"], nested=nesting > 0)
        # Inputs and weights must not be changed in place, nor may a region's operands that refer to them.
        self._purity.hold(values if operands is None else self._purity.matching(values, operands))
        for node in data["nodes"]:
            values.append(self._call(root, graph, node, values, nesting))
        self._returned[number] = self._value(data["outputs"], values)
        graph.output(self._returned[number])
        return fx.GraphModule(root, graph, class_name="Program")

    def _placed(self, root: nn.Module, graph: fx.Graph, inputs: Json, nested: bool) -> list[fx.Node]:
        """Create placeholders and weights; their names are generated, because torch.fx prints them into source."""
        if nested:
            return [graph.placeholder(f"x{i}") for i in range(_count(inputs))]
        given = [one for one in inputs if "input" in one]
        if [one["input"] for one in given] != list(range(len(given))):
            raise _malformed("inputs out of order")
        holders = iter([graph.placeholder(f"x{i}") for i in range(len(given))])
        return [next(holders) if "input" in one else self._held(root, graph, one) for one in inputs]

    def _held(self, root: nn.Module, graph: fx.Graph, place: Json) -> fx.Node:
        _require_fields(place, {"weight"})
        tensor = self.weights.get(place["weight"])
        if tensor is None:
            raise _malformed(f"no weight {str(place['weight'])[:80]!r}")
        name = f"w{len(root._buffers)}"
        root.register_buffer(name, tensor)
        return graph.get_attr(name)

    def _call(self, root: nn.Module, graph: fx.Graph, node: Json, values: list[fx.Node], nesting: int) -> fx.Node:
        name = node["op"]
        if not isinstance(name, str):
            raise _malformed("an operator without a name")
        if name.startswith("region."):
            return self._region(root, graph, node, values, nesting)
        _require_fields(node, {"op", "args"}, optional={"kwargs"})
        function = operators.named(name)
        args, kwargs = node["args"], node.get("kwargs", {})
        _require_arguments(name, operators.arguments(function), args, kwargs)
        made = graph.call_function(
            operators.checked(name),
            tuple(self._value(arg, values) for arg in args),
            {key: self._value(arg, values) for key, arg in kwargs.items()},
        )
        self._purity.require(name, function, made)
        return made

    def _region(self, root: nn.Module, graph: fx.Graph, node: Json, values: list[fx.Node], nesting: int) -> fx.Node:
        body: nn.Module
        operands = tuple(self._value(arg, values) for arg in node["args"])
        if node["op"] == "region.call":
            _require_fields(node, {"op", "graph", "args"})
            numbers = [node["graph"]]
            body = _Call(self._module(node["graph"], nesting + 1, operands))
        elif node["op"] == "region.autocast":
            _require_fields(node, {"op", "graph", "args", "dtype", "enabled"})
            numbers = [node["graph"]]
            dtype, inner = self._value(node["dtype"], values), self._module(node["graph"], nesting + 1, operands)
            body = _Autocast(inner, self.device.type, dtype, node["enabled"] is True)
        elif node["op"] == "region.branch":
            _require_fields(node, {"op", "graphs", "args"})
            numbers = node["graphs"]
            yes, no = (self._module(number, nesting + 1, operands[1:]) for number in numbers)
            body = _Branch(yes, no)
        else:
            raise _malformed(f"region {node['op'][:80]!r}")
        name = f"r{len(root._modules)}"
        root.add_module(name, body)
        made = graph.call_module(name, operands)
        # A region may return its operands.
        if any(self._purity.is_held(self._returned[number]) for number in numbers):
            self._purity.hold([made])
        return made

    def _value(self, value: Json, values: list[fx.Node]) -> Any:
        if isinstance(value, list):
            return [self._value(item, values) for item in value]
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _malformed("a number beyond 64 bits")
        if not isinstance(value, dict):
            return value
        ((kind, held),) = value.items()
        if kind == "ref":
            return values[_count(held)]
        if kind == "device":
            # A program runs on the device it is loaded on, not on the one it was traced on.
            return self.device
        if kind == "float" and held in ("inf", "-inf", "nan"):
            return float(held)
        if kind == "complex":
            real, imaginary = held
            return complex(float(real), float(imaginary))
        return _singleton(kind, held)


def _singleton(kind: str, name: Json) -> Any:
    plain = kind in SINGLETONS and isinstance(name, str) and name.isidentifier() and not name.startswith("_")
    found = getattr(torch, name, None) if plain else None
    is_plain = kind != "layout" or name == "strided"
    if kind == "dtype":
        is_plain = isinstance(name, str) and _PLAIN_DTYPE.fullmatch(name) is not None
    if found is None or not is_plain or not isinstance(found, getattr(torch, kind)):
        raise _malformed(f"value {kind[:40]!r}: {str(name)[:80]!r}")
    return found


def _require_arguments(name: str, schema: list[tuple[str, str]] | None, args: Json, kwargs: Json) -> None:
    """Raise unless the arguments exist in the operator's schema and have its types."""
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise _malformed(f"arguments of {name}")
    if schema is None:
        _require_scalars(name, args, kwargs)
        return
    if len(args) > len(schema):
        raise _malformed(f"{len(args)} arguments of {name}")
    kinds = dict(schema)
    pairs = [*zip((key for key, _ in schema), args, strict=False), *kwargs.items()]
    if len({key for key, _ in pairs}) != len(pairs):
        raise _malformed(f"an argument of {name} twice")
    for key, value in pairs:
        # torch.fx prints keywords into source, so only names in the operator's schema are accepted.
        if key not in kinds or keyword.iskeyword(key):
            raise _malformed(f"argument {key[:80]!r} of {name}")
        if value is not None and not _is_of_kind(value, kinds[key]):
            raise _malformed(f"{str(value)[:80]} as {key} of {name}, which takes a {kinds[key]}")


def _is_of_kind(value: Json, kind: str) -> bool:
    """Return whether an argument that is not None has the type that the operator takes there."""
    if kind == "text":
        return isinstance(value, str) and len(value) <= MAX_TEXT
    if kind == "flag":
        return isinstance(value, bool) or _has_key(value, ("ref",))
    if kind == "value":
        if isinstance(value, list):
            return all(item is None or _is_of_kind(item, kind) for item in value)
        return isinstance(value, bool | int | float) or _has_key(value, ("ref", "float", "complex"))
    return _has_key(value, (kind,))


def _has_key(value: Json, keys: tuple[str, ...]) -> bool:
    return isinstance(value, dict) and len(value) == 1 and next(iter(value)) in keys


def _require_scalars(name: str, args: list[Json], kwargs: dict[str, Json]) -> None:
    many = name == "torch.sym_sum" and len(args) == 1 and isinstance(args[0], list)
    for value in args[0] if many else args:
        if isinstance(value, list | str) or (isinstance(value, dict) and set(value) - {"ref", "float"}):
            raise _malformed(f"an argument of {name} that is no number")
    if kwargs:
        raise _malformed(f"keywords of {name}")
    if name == "operator.pow" and not (len(args) == 2 and type(args[1]) is int and 0 <= args[1] <= 8):
        raise _malformed("a power beyond 8")


def _count(value: Json) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NODES:
        raise _malformed(f"{str(value)[:40]!r} where a count belongs")
    return value


def _require_fields(data: Json, wanted: set[str], optional: set[str] | None = None) -> None:
    if not isinstance(data, dict) or not wanted <= set(data) <= wanted | (optional or set()):
        raise _malformed(f"fields {', '.join(map(str, data))[:200]} instead of {', '.join(sorted(wanted))}")


def _malformed(what: str) -> ArchiveError:
    return ArchiveError(
        "a program must consist of operators, numbers and references", got=what, remedy="export the model again"
    )
