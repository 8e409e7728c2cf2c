"""Partitioning of a traced network into pieces, each for one rank, and the tensors that are sent between them.

Operations that need only inputs, or only parameters, are recomputed on every rank that needs their results: a mask or a
transposed weight is never sent. An operation that changes a tensor in place stays together with all operations that
see the change, as one *unit*.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from ..core import StrategyError
from .shape_propagation import GraphFacts, aliased, changed_at_root, is_random, mutated
from .tracing import TracedGraph


@dataclass
class Unit:
    """Operations that must run on the same rank, most often a single one."""

    nodes: list[fx.Node]
    path: str
    """The path of the module that contains the last operation."""
    takes: set[int] = field(default_factory=set)
    """Indices of the units whose results this unit needs."""


@dataclass
class GraphPiece:
    """Operations that a rank runs without waiting for another rank."""

    index: int
    """Position of the piece in the order that all ranks follow in forward, and in reverse in backward."""
    rank: int
    nodes: list[fx.Node]
    takes: list[str] = field(default_factory=list)
    """Names of the results of other pieces that this piece needs."""
    gives: list[str] = field(default_factory=list)
    """Names of the results of this piece that other pieces need."""


@dataclass
class Works:
    """The operations of a traced network that must be placed on ranks, as units in topological order."""

    traced: TracedGraph
    facts: GraphFacts
    units: list[Unit]
    unit_of: dict[str, int]
    """Index of the unit of each placed operation; other operations are recomputed on every rank that needs them."""

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """Return the indices of the units that need each result, except the unit that computes it, in order."""
        users: dict[str, list[int]] = defaultdict(list)
        for index, unit in enumerate(self.units):
            for name in self.needs(unit.nodes):
                users[name].append(index)
        return users

    def needs(self, nodes: Iterable[fx.Node]) -> list[str]:
        """Return the results of other units that operations need, directly or through recomputed operations."""
        own = {node.name for node in nodes}
        seen: dict[str, None] = {}
        for node in self.closure(nodes):
            for other in node.all_input_nodes:
                if other.name in self.unit_of and other.name not in own:
                    seen[other.name] = None
        return list(seen)

    def closure(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return operations with all recomputed operations, parameters and inputs that they need, in graph order."""
        found: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.add(node)
            todo += [n for n in node.all_input_nodes if n.name not in self.unit_of and n.name not in self.facts.numbers]
        return [node for node in self.traced.graph.nodes if node in found]

    @cached_property
    def outputs(self) -> list[str]:
        """Return the names of the results that the network returns."""
        return [node.name for node in self.traced.outputs if isinstance(node, fx.Node)]

    @cached_property
    def output_needs(self) -> list[str]:
        """Return the results of units that are the network's outputs, or from which those are recomputed."""
        nodes = [node for node in self.traced.outputs if isinstance(node, fx.Node)]
        rest = self.needs([node for node in nodes if node.name not in self.unit_of])
        return list(dict.fromkeys([*(node.name for node in nodes if node.name in self.unit_of), *rest]))


def works_of(traced: TracedGraph, facts: GraphFacts) -> Works:
    """Divide the operations of a network into units to be placed on ranks, and operations to be recomputed."""
    nodes = [n for n in traced.graph.nodes if n.op == "call_function" and n.name not in facts.numbers]
    _require_inputs_kept(traced, facts, nodes)
    placed = _placed(traced, facts, nodes)
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    together = _together(traced, nodes, placed)
    for node in nodes:
        if node in placed:
            groups[together.find(node)].append(node)
    made = [Unit(members, traced.paths[members[-1].name]) for members in groups.values()]
    works = _needed(Works(traced, facts, made, _places(made)))
    return _sorted(works, order)


def _require_inputs_kept(traced: TracedGraph, facts: GraphFacts, nodes: Sequence[fx.Node]) -> None:
    """Raise StrategyError if a network changes its inputs in place, because other ranks and the loss use them too."""
    for node in nodes:
        for target in mutated(node):
            while (source := aliased(target)) is not None and _dtype(facts, source) == _dtype(facts, target):
                target = source
            if target.name in traced.inputs:
                raise StrategyError(
                    "a partitioned network must not change its inputs",
                    got=f"{getattr(node.target, '_opname', node.target)} in place, in "
                    f"{traced.paths[node.name] or 'the network itself'}",
                    remedy="write it out of place (x = x + 1 and not x += 1), or start from x.clone()",
                )


def _dtype(facts: GraphFacts, node: fx.Node) -> object:
    return facts.values[node.name].dtype if node.name in facts.values else None


def _places(units: Sequence[Unit]) -> dict[str, int]:
    return {node.name: index for index, unit in enumerate(units) for node in unit.nodes}


def _needed(works: Works) -> Works:
    """Remove units that contribute neither to an output nor to a buffer."""
    kept: set[int] = set()
    todo = [works.unit_of[name] for name in works.output_needs]
    for index, unit in enumerate(works.units):
        if any(target.name in works.traced.buffers for node in unit.nodes for target in changed_at_root(node)):
            todo.append(index)
    while todo:
        index = todo.pop()
        if index not in kept:
            kept.add(index)
            todo += [works.unit_of[name] for name in works.needs(works.units[index].nodes)]
    units = [unit for index, unit in enumerate(works.units) if index in kept]
    return Works(works.traced, works.facts, units, _places(units))


def _placed(traced: TracedGraph, facts: GraphFacts, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the operations that depend on both inputs and parameters, draw random numbers, or change a tensor."""
    changed = {n for node in nodes for n in mutated(node)}
    kinds: dict[str, set[str]] = {name: {"held"} for name in (*traced.parameters, *traced.buffers)}
    kinds.update({name: {"given"} for name in traced.inputs})
    placed: set[fx.Node] = set()
    for node in nodes:
        inputs = node.all_input_nodes
        mine = set().union(*(kinds.get(n.name, set()) for n in inputs))
        kinds[node.name] = mine
        if (
            len(mine) > 1
            or is_random(node)
            or mutated(node)
            or any(n in placed or n in changed for n in inputs)
            or node in changed
        ):
            placed.add(node)
    return placed


class _Together:
    """Groups of operations that belong to the same unit (union-find)."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._above = {node: node for node in nodes}

    def find(self, node: fx.Node) -> fx.Node:
        while self._above[node] is not node:
            self._above[node] = self._above[self._above[node]]
            node = self._above[node]
        return node

    def join(self, nodes: Iterable[fx.Node]) -> None:
        known = [self.find(node) for node in nodes if node in self._above]
        for other in known[1:]:
            self._above[other] = known[0]


def _together(traced: TracedGraph, nodes: Sequence[fx.Node], placed: set[fx.Node]) -> _Together:
    together = _Together(placed)
    order = {node: index for index, node in enumerate(nodes)}
    base: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = node.args[0] if node.target is operator.getitem else aliased(node)
        if isinstance(source, fx.Node):
            base[node] = base.get(source, source)
            if node.target is operator.getitem:
                together.join([source, node])
    sharers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, root in base.items():
        sharers[root].append(node)
    for node in nodes:
        for target in mutated(node):
            root = base.get(target, target)
            seen = [root, *sharers[root]]
            last = max(order[n] for n in nodes if any(t in seen for t in mutated(n)))
            readers = [user for n in seen for user in n.users if user in order and order[user] <= last]
            together.join([*(n for n in seen if n in order), node, *readers])
        if not node.users and any(target.name in traced.buffers for target in changed_at_root(node)):
            # The update of a counter belongs to the layer that contains it.
            path = traced.paths[node.name]
            near = [n for n in nodes[order[node] + 1 :] if n in placed and traced.paths[n.name] == path]
            together.join([node, *near[:1]])
    return together


def _sorted(works: Works, order: Mapping[fx.Node, int]) -> Works:
    """Sort the units topologically, as close to the order of the trace as possible.

    Units that need each other, such as those of a buffer's old and new value, are merged.
    """
    takes = {i: {works.unit_of[name] for name in works.needs(u.nodes)} for i, u in enumerate(works.units)}
    users: dict[int, list[int]] = defaultdict(list)
    for index, needed in takes.items():
        for other in needed:
            users[other].append(index)
    waiting = {index: len(needed) for index, needed in takes.items()}
    places = [order[unit.nodes[0]] for unit in works.units]
    ready = [(places[index], index) for index, count in waiting.items() if not count]
    heapq.heapify(ready)
    sequence: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        sequence.append(index)
        for user in users[index]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (places[user], user))
    if len(sequence) < len(works.units):
        ring = _ring(takes, {index for index, count in waiting.items() if count})
        return _sorted(_merged(works, ring, order), order)
    place = {index: new for new, index in enumerate(sequence)}
    units = [works.units[index] for index in sequence]
    for index, unit in zip(sequence, units, strict=True):
        unit.takes = {place[other] for other in takes[index]}
    return Works(works.traced, works.facts, units, {name: place[index] for name, index in works.unit_of.items()})


def _ring(takes: Mapping[int, set[int]], stuck: set[int]) -> list[int]:
    """Return a cycle of units, each of which needs the next; every unit in `stuck` needs another one of them."""
    way = [min(stuck)]
    while (following := min(takes[way[-1]] & stuck)) not in way:
        way.append(following)
    return way[way.index(following) :]


def _merged(works: Works, ring: Sequence[int], order: Mapping[fx.Node, int]) -> Works:
    nodes = sorted((node for index in ring for node in works.units[index].nodes), key=lambda node: order[node])
    rest = [unit for index, unit in enumerate(works.units) if index not in ring]
    units = [*rest, Unit(nodes, works.traced.paths[nodes[-1].name])]
    return Works(works.traced, works.facts, units, _places(units))


# -- pieces ------------------------------------------------------------------------------------------------------------


def in_stages(works: Works, stages: Sequence[int], ranks: Sequence[int], wanted: Iterable[str]) -> list[GraphPiece]:
    """Return one piece per stage of a pipeline, and a last piece that collects the wanted results.

    Args:
        works: The units.
        stages: The stage of each unit.
        ranks: The rank of each stage; the last one also gets the last piece.
        wanted: Names of the results from which the network's outputs are computed.
    """
    members: dict[int, list[fx.Node]] = {stage: [] for stage in range(len(ranks))}
    for unit, stage in zip(works.units, stages, strict=True):
        members[stage] += unit.nodes
    pieces = [GraphPiece(stage, ranks[stage], nodes) for stage, nodes in members.items()]
    return _joined(works, pieces, ranks[-1], wanted)


def in_pieces(works: Works, homes: Sequence[int], end: int, wanted: Iterable[str]) -> list[GraphPiece]:
    """Return pieces for units that are placed on ranks: as few as allow ranks to run concurrently and to send early.

    The level of a unit is the largest number of sends between ranks on a path to it. Within a level, units whose
    results other ranks wait for come first.

    Args:
        works: The units.
        homes: The rank of each unit.
        end: The rank of the last piece, which collects the wanted results.
        wanted: Names of the results from which the network's outputs are computed.
    """
    levels: list[int] = []
    for index, unit in enumerate(works.units):
        levels.append(max((levels[n] + (homes[n] != homes[index]) for n in unit.takes), default=0))
    awaited = _awaited(works, homes, levels, end, wanted)
    keys = [(levels[i], i not in awaited, homes[i]) for i in range(len(works.units))]
    members: dict[tuple[int, bool, int], list[fx.Node]] = defaultdict(list)
    for unit, key in zip(works.units, keys, strict=True):
        members[key] += unit.nodes
    pieces = [GraphPiece(index, key[2], members[key]) for index, key in enumerate(sorted(members))]
    return _joined(works, pieces, end, wanted)


def _awaited(works: Works, homes: Sequence[int], levels: Sequence[int], end: int, wanted: Iterable[str]) -> set[int]:
    """Return the indices of the units for which another rank waits, directly or through units of their rank and level.

    `in_pieces` explains the arguments.
    """
    wanted = set(wanted)
    found: set[int] = set()
    for index in reversed(range(len(works.units))):
        names = [node.name for node in works.units[index].nodes]
        users = [user for name in names for user in works.users[name]]
        crosses = any(homes[user] != homes[index] for user in users)
        crosses = crosses or (homes[index] != end and not wanted.isdisjoint(names))
        leads = any(user in found and levels[user] == levels[index] and homes[user] == homes[index] for user in users)
        if crosses or leads:
            found.add(index)
    return found


def _joined(works: Works, pieces: list[GraphPiece], end: int, wanted: Iterable[str]) -> list[GraphPiece]:
    """Set what pieces take and give, and return them with a last piece on rank `end` that takes the wanted results."""
    last = GraphPiece(len(pieces), end, [], takes=list(dict.fromkeys(wanted)))
    made = {node.name: piece for piece in pieces for node in piece.nodes}
    for piece in pieces:
        piece.takes = works.needs(piece.nodes)
    for piece in (*pieces, last):
        for name in piece.takes:
            if name not in made[name].gives:
                made[name].gives.append(name)
    return [*pieces, last]


@dataclass(frozen=True)
class Crossing:
    """A result that is sent from the rank that computes it to a rank that needs it."""

    number: int
    name: str
    source: GraphPiece
    to: int
    first: GraphPiece
    """The first piece on rank `to` that needs the result, whose gradient is complete after that piece in backward."""


def crossings(pieces: Sequence[GraphPiece]) -> Iterator[Crossing]:
    """Yield the results that are sent between ranks, in the order in which they are computed."""
    takers: dict[tuple[str, int], GraphPiece] = {}
    for piece in pieces:
        for name in piece.takes:
            takers.setdefault((name, piece.rank), piece)
    number = 0
    for source in pieces:
        for name in source.gives:
            for (taken, rank), first in takers.items():
                if taken == name and rank != source.rank:
                    yield Crossing(number, name, source, rank, first)
                    number += 1
