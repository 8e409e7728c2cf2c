"""Build a network from a stored program; every field is checked before anything is created from it."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core import ArchiveError
from . import operators
from .program import FORMAT, SINGLETONS, Json
from .purity import Purity

MAX_NODES = 500_000
MAX_NESTING = 16
MAX_TEXT = 200
_PLAIN_DTYPE = re.compile(
    r"(float|bfloat|u?int|complex)\d+(_\w+)?|bool|half|float|double|int|long|short|cfloat|cdouble"
)


def build(program: Mapping[str, Json], weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Return the network that a program describes; raise ArchiveError for anything but plain tensor arithmetic."""
    try:
        return _Builder(program, weights, device).module()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, ArchiveError):
            raise
        raise _malformed(f"{type(error).__name__}: {str(error)[:200]}") from error


class _NestedGraph(nn.Module):
    """A nested graph that runs in the context of its caller."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *operands: Any) -> Any:
        return self.body(*operands)


class _Autocast(_NestedGraph):
    """A nested graph that runs in an autocast context."""

    def __init__(self, body: nn.Module, device: str, dtype: torch.dtype | None, enabled: bool) -> None:
        super().__init__(body)
        self.device, self.dtype, self.enabled = device, dtype, enabled

    def forward(self, *operands: Any) -> Any:
        with torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled):
            return self.body(*operands)


class _Branch(nn.Module):
    """Two nested graphs, of which a condition selects one."""

    def __init__(self, yes: nn.Module, no: nn.Module) -> None:
        super().__init__()
        self.yes, self.no = yes, no

    def forward(self, chosen: Any, *operands: Any) -> Any:
        return (self.yes if bool(chosen) else self.no)(*operands)


class _Builder:
    """Builds modules from a program's graphs; each graph may be used only once, so that they form a tree."""

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
        """Return the module of a graph; for a nested graph, `operands` are the arguments of its call."""
        if type(number) is not int or number in self._used or not 0 <= number < len(self.graphs):
            raise _malformed(f"graph {number!r} used twice or not there")
        if nesting > MAX_NESTING:
            raise _malformed(f"graphs nested more than {MAX_NESTING} deep")
        self._used.add(number)
        data = self.graphs[number]
        _require_fields(data, {"inputs", "nodes", "outputs"})
        root, graph = nn.Module(), fx.Graph()
        values = self._placed(root, graph, data["inputs"], nested=nesting > 0)
        # Inputs and weights must not be changed in place, nor may operands of a nested graph that refer to them.
        self._purity.hold(values if operands is None else self._purity.matching(values, operands))
        for node in data["nodes"]:
            values.append(self._call(root, graph, node, values, nesting))
        self._returned[number] = self._value(data["outputs"], values)
        graph.output(self._returned[number])
        return fx.GraphModule(root, graph, class_name="Program")

    def _placed(self, root: nn.Module, graph: fx.Graph, inputs: Json, nested: bool) -> list[fx.Node]:
        """Create the nodes of a graph's inputs and weights, with generated names: torch.fx writes names into source."""
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
            body = _NestedGraph(self._module(node["graph"], nesting + 1, operands))
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
        # A nested graph may return its operands.
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
            # A program runs on the device on which it is loaded, not on the traced one.
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
    """Raise ArchiveError unless an operator's arguments exist in its schema and have the types there.

    A schema of None means arithmetic on sizes.
    """
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
    """Return whether an argument that is not None is of a kind that `operators.arguments` returns."""
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
