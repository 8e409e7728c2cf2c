"""Segments of a piece of a traced network: functions of named tensors that backward may recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from .partition import GraphPiece, Works
from .shape_propagation import by_hash, changed_at_root, is_random, plainly

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Substitute = Callable[[fx.Node, str], Callable[..., Any] | None]
"""Function that returns a strategy's replacement for an operation of the module at a path, or None."""


@dataclass
class DrawCounter:
    """The number of the network's first random draw in the current forward; each operation adds its own number."""

    start: int = 0


@dataclass
class Segment:
    """Operations of a piece that run as one function."""

    function: Callable[..., Any]
    takes: list[str]
    """Names of the inputs of the function."""
    gives: list[str]
    """Names of the results of the function."""
    is_repeated: bool
    """Whether backward recomputes the segment (activation checkpointing)."""
    contexts: Callable[[], Contexts] | None = None
    """Function that returns the contexts of the first computation and of the recomputation; None for no contexts."""
    changes: list[int] = field(default_factory=list)
    """Indices in `takes` of the buffers that the segment changes; a recomputation must not change them again."""

    def run(self, held: MutableMapping[str, Any], clock: DrawCounter) -> None:
        """Run the segment; take its inputs from `held` by name, and add its results to it."""
        given = [held[name] for name in self.takes]
        if self.is_repeated and torch.is_grad_enabled():
            made = self._keeping_little(given, clock)
        else:
            made = self.function(*given)
        held.update(zip(self.gives, made, strict=True))

    def _keeping_little(self, given: list[Any], clock: DrawCounter) -> Any:
        again = _RecomputedFunction(self.function, {place: given[place] for place in self.changes}, clock)
        again.inner = self.contexts() if self.contexts is not None else (nullcontext(), nullcontext())
        # torch's checkpoint requires that its inputs do not change, but these buffers do.
        rest = [None if place in self.changes else tensor for place, tensor in enumerate(given)]
        return checkpoint(again, *rest, use_reentrant=False, context_fn=again.contexts)


class _RecomputedFunction:
    """A function that runs in forward and again in backward, then with the buffers as they were before forward."""

    def __init__(self, function: Callable[..., Any], changed: dict[int, Tensor], clock: DrawCounter) -> None:
        self._function, self._changed, self._clock, self._start = function, changed, clock, clock.start
        self._before = {place: tensor.clone() for place, tensor in changed.items()}
        self._is_second = False
        self.inner: Contexts = (nullcontext(), nullcontext())

    def __call__(self, *tensors: Any) -> Any:
        self._clock.start = self._start
        own = self._before if self._is_second else self._changed
        return self._function(*(own.get(place, tensor) for place, tensor in enumerate(tensors)))

    def contexts(self) -> Contexts:
        """Return the contexts of the first computation and of the recomputation."""
        return self.inner[0], self._second()

    @contextmanager
    def _second(self) -> Iterator[None]:
        self._is_second = True
        with self.inner[1]:
            yield
        self._is_second = False


def segments_of(
    works: Works,
    piece: GraphPiece,
    *,
    repeated: Mapping[str, str],
    substitute: Substitute,
    clock: DrawCounter,
    counts_draws: bool,
    returned: Iterable[str] = (),
    contexts: Callable[[], Contexts] | None = None,
) -> list[Segment]:
    """Divide a piece into segments: consecutive operations of a block that is recomputed, or of none.

    Args:
        works: The units of the traced network.
        piece: The piece.
        repeated: The block of each module path whose block is recomputed in backward.
        substitute: Returns a strategy's replacement of an operation.
        clock: The counter of random draws that the strategy sets before it runs a segment.
        counts_draws: Whether operations draw layout-free random numbers, by their number in the network.
        returned: Names of results that an additional last segment returns.
        contexts: Returns the contexts in which a block is computed and recomputed.
    """
    runs: list[tuple[str, list[fx.Node]]] = []
    for node in piece.nodes:
        block = repeated.get(works.traced.paths[node.name], "")
        if not runs or runs[-1][0] != block:
            runs.append((block, []))
        runs[-1][1].append(node)
    if returned:
        runs.append(("", []))
    last_use = {name: index for index, (_, nodes) in enumerate(runs) for name in works.needs(nodes)}
    made = []
    for index, (block, nodes) in enumerate(runs):
        names = [node.name for node in nodes]
        kept = [name for name in names if name in piece.gives or last_use.get(name, index) > index]
        ends = list(returned) if index == len(runs) - 1 else []
        made.append(_segment(works, nodes, kept or ends, bool(block), substitute, clock, counts_draws))
        made[-1].contexts = contexts
    return made


def _segment(
    works: Works,
    nodes: list[fx.Node],
    gives: list[str],
    is_repeated: bool,
    substitute: Substitute,
    clock: DrawCounter,
    counts_draws: bool,
) -> Segment:
    graph, facts = fx.Graph(), works.facts
    by_name = {node.name: node for node in works.traced.graph.nodes}
    wanted = [*nodes, *(by_name[name] for name in gives if name not in works.unit_of)]
    own = {node.name for node in nodes}
    closure = works.closure(wanted)
    outside = [
        name for name in dict.fromkeys([*works.needs(wanted), *gives]) if name in works.unit_of and name not in own
    ]
    made: dict[str, Any] = {}
    takes = [*(node.name for node in closure if node.op == "placeholder"), *outside]
    for name in takes:
        made[name] = graph.placeholder(name)
    root = torch.nn.Module()

    def argument(node: fx.Node) -> Any:
        return facts.numbers[node.name] if node.name in facts.numbers else made[node.name]

    for node in closure:
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(works.traced.root, str(node.target)))
            made[node.name] = graph.get_attr(str(node.target))
        elif node.op == "call_function" and node.name not in made:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument)
            another = substitute(node, works.traced.paths.get(node.name, ""))
            function = another or plainly(node)
            if counts_draws and is_random(node):
                function = _drawn(another or by_hash(node), clock, facts.draws[node.name])
            made[node.name] = graph.create_node("call_function", function, args, kwargs, node.name)
    graph.output(tuple(made[name] for name in gives))
    changed = {target.name for node in nodes for target in changed_at_root(node)}
    changes = [place for place, name in enumerate(takes) if name in changed and name in works.traced.buffers]
    return Segment(_compiled(root, graph), takes, gives, is_repeated, changes=changes)


def _compiled(root: torch.nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    module = fx.GraphModule(root, graph)
    return module.forward


def _drawn(function: Callable[..., Any], clock: DrawCounter, offset: int) -> Callable[..., Any]:
    """Return `function` with torch's generator seeded by the draw's number in the whole network.

    So layout-free randomness draws the same numbers as in the network that is not partitioned.
    """

    def draw(*args: Any, **kwargs: Any) -> Any:
        torch.default_generator.manual_seed(clock.start + offset)
        return function(*args, **kwargs)

    return draw
