"""Assign units of a network to ranks, by the user's map or by the measured cost of the units."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core import StrategyError
from ..graph import Call, Works, plainly

REST = "*"
"""The pattern for everything that no other pattern matches."""
SECONDS_PER_BYTE = 2e-9
"""Assumed cost of transferring a byte forth and back, if unknown: half a gigabyte per second."""
MAX_SPLITS = 160
BACKWARD = 2.0
"""Assumed ratio of backward to forward time of an operation."""


def check_map(names: Sequence[str], patterns: Mapping[str, int]) -> dict[str, int]:
    """Return the rank of every module that a map matches; raise for unmatched patterns and modules with two ranks.

    >>> check_map(["", "a", "a.0", "b"], {"a.*": 0, "b": 1})
    {'a': 0, 'a.0': 0, 'b': 1}
    """
    found: dict[str, tuple[int, str]] = {}
    for pattern, rank in patterns.items():
        named = [name for name in names if name and _names(pattern, name)]
        if not named and pattern != REST:
            some = ", ".join(name for name in names if name and name.count(".") < 2)
            raise StrategyError(
                "every pattern of a map must match a part of the network",
                got=f"{pattern!r}, where the parts are {some[:300]}",
                remedy="correct the pattern",
            )
        for name in named if pattern != REST else ():
            other = found.get(name)
            if other is not None and other[0] != rank:
                raise StrategyError(
                    "a part of the network must be placed on one device",
                    got=f"{name} on two, by {other[1]!r} and {pattern!r}",
                    remedy="make the patterns narrower",
                )
            found[name] = (rank, pattern)
    return {name: rank for name, (rank, _) in found.items()}


def _names(pattern: str, name: str) -> bool:
    """Return whether a pattern matches; `tower.*` also matches the tower itself, for operations of its own forward."""
    return fnmatchcase(name, pattern) or (pattern.endswith(".*") and name == pattern[:-2])


def by_map(works: Works, named: Mapping[str, int], rest: int | None, holders: Mapping[str, set[int]]) -> list[int]:
    """Return every unit's rank: that of its innermost module in the map, else the rank that most of its input is on.

    `holders` are the ranks that already hold a parameter, which decides for units that the map does not name.
    """
    homes: list[int] = []
    for index, unit in enumerate(works.units):
        home = _named_home(unit.path, named)
        able = able_ranks(works, index, holders)
        if home is None:
            home = rest
        if home is None or (able is not None and home not in able):
            home = _near(works, index, homes, named, able)
        homes.append(home)
    return homes


def _named_home(path: str, named: Mapping[str, int]) -> int | None:
    while path:
        if path in named:
            return named[path]
        path = path.rpartition(".")[0]
    return named.get("")


def able_ranks(works: Works, index: int, holders: Mapping[str, set[int]]) -> set[int] | None:
    """Return the ranks that hold all of a unit's parameters; None if it has none or no rank holds any yet."""
    unit = works.units[index]
    names = [name for name in parameters_of(works, unit.nodes) if name in holders]
    if not names:
        return None
    able = set.intersection(*(holders[name] for name in names))
    if not able:
        raise StrategyError(
            "the tensors that one operation reads must be on one device, as in the first call of the network",
            got=f"{unit.nodes[-1].target} in {unit.path or 'the network itself'}, which reads {', '.join(names[:5])}",
            remedy="give these parts one device with mh.Placed, or compute the same in training and evaluation",
        )
    return able


def _near(works: Works, index: int, homes: Sequence[int], named: Mapping[str, int], able: set[int] | None) -> int:
    weights: Counter[int] = Counter(dict.fromkeys(able or (), 0))
    for name in works.needs(works.units[index].nodes):
        home = homes[works.unit_of[name]]
        if able is None or home in able:
            weights[home] += works.facts.values[name].num_bytes if name in works.facts.values else 1
    if weights:
        return max(weights, key=lambda rank: (weights[rank], -rank))
    # It has no inputs with a rank yet: use the rank of the first unit that needs its result.
    for node in works.units[index].nodes:
        for user in works.users[node.name]:
            named_home = _named_home(works.units[user].path, named)
            if named_home is not None:
                return named_home
    return min(named.values(), default=0)


def parameters_of(works: Works, nodes: Sequence[fx.Node]) -> list[str]:
    """Return the names of the parameters and buffers that these operations read."""
    held = {**works.traced.parameters, **works.traced.buffers}
    return [held[node.name] for node in works.closure(nodes) if node.name in held]


# -- cost of units -----------------------------------------------------------------------------------------------------


def measured(
    works: Works, call: Call, tensors: Mapping[str, Tensor], scope: AbstractContextManager[object], rounds: int = 3
) -> list[float]:
    """Measure the seconds of each unit's forward and backward, as the best of a few rounds."""
    best = [float("inf")] * len(works.units)
    with torch.no_grad(), scope:
        for _ in range(rounds):
            for index, seconds in enumerate(_one_round(works, call, tensors)):
                best[index] = min(best[index], seconds)
    return [seconds * (1 + BACKWARD) for seconds in best]


def _one_round(works: Works, call: Call, tensors: Mapping[str, Tensor]) -> list[float]:
    traced, facts = works.traced, works.facts
    held: dict[str, Any] = dict(zip(traced.inputs, call.tensors, strict=True))
    held.update(traced.constants)
    # Running statistics and counters are updated on copies.
    held.update({node: tensors[name].clone() for node, name in traced.buffers.items()})
    held.update({node: tensors[name] for node, name in traced.parameters.items()})
    spent = [0.0] * len(works.units)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            held[node.name] = getattr(traced.root, str(node.target))
        elif node.op == "call_function" and node.name not in facts.numbers:
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda n: facts.numbers[n.name] if n.name in facts.numbers else held[n.name]
            )
            start = time.perf_counter()
            held[node.name] = plainly(node)(*args, **kwargs)
            if node.name in works.unit_of:
                spent[works.unit_of[node.name]] += time.perf_counter() - start
    return spent


# -- stages ------------------------------------------------------------------------------------------------------------


def balanced(works: Works, seconds: Sequence[float], num_stages: int) -> list[int]:
    """Return every unit's stage: consecutive units, with the slowest stage including its sends as fast as possible."""
    layers = len({unit.path for unit in works.units})
    if layers < num_stages:
        raise too_many_stages(num_stages, layers)
    handed = _handed_bytes(works)
    total = list(accumulate(seconds, initial=0.0))
    splits = _candidates(handed, num_stages)
    bounds = _best_bounds(splits, total, handed, num_stages)
    stages = [0] * len(works.units)
    for stage, (start, end) in enumerate(zip([0, *bounds], [*bounds, len(works.units)], strict=True)):
        stages[start:end] = [stage] * (end - start)
    return stages


def too_many_stages(num_stages: int, layers: int) -> StrategyError:
    """Return the error for more stages than there are layers to put into them."""
    return StrategyError(
        f"a pipeline of {num_stages} stages needs at least {num_stages} layers",
        got=f"{layers}",
        remedy=f"use at most {layers} stages",
    )


def _handed_bytes(works: Works) -> list[int]:
    """Return the bytes to send if the network is split before each unit; one entry more than there are units."""
    change = [0] * (len(works.units) + 1)
    ends = set(works.output_needs)
    for index, unit in enumerate(works.units):
        for node in unit.nodes:
            users = works.users.get(node.name, [])
            last = max(users, default=index)
            if node.name in ends:
                last = len(works.units) - 1
            if last > index and node.name in works.facts.values:
                size = works.facts.values[node.name].num_bytes
                change[index + 1] += size
                if last + 1 < len(change):
                    change[last + 1] -= size
    return list(accumulate(change))


def _candidates(handed: Sequence[int], num_stages: int) -> list[int]:
    """Return positions to consider for a split: those that send least, and some spread over the network."""
    inner = range(1, len(handed) - 1)
    if len(inner) <= MAX_SPLITS:
        return list(inner)
    least = sorted(inner, key=lambda place: handed[place])[: MAX_SPLITS // 2]
    spread = [inner[round(i * (len(inner) - 1) / (MAX_SPLITS // 2 - 1))] for i in range(MAX_SPLITS // 2)]
    return sorted({*least, *spread})


def _best_bounds(splits: Sequence[int], total: Sequence[float], handed: Sequence[int], num_stages: int) -> list[int]:
    """Return the best split positions by dynamic programming over the slowest stage; ties go to fewer bytes."""
    Cost = tuple[float, float]
    best: dict[int, tuple[Cost, list[int]]] = {0: ((0.0, 0.0), [])}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        nexts = [len(total) - 1] if is_last else splits
        new: dict[int, tuple[Cost, list[int]]] = {}
        for end in nexts:
            out = 0.0 if is_last else handed[end] * SECONDS_PER_BYTE
            for start, ((worst, carried), bounds) in best.items():
                if start >= end:
                    continue
                cost = (max(worst, total[end] - total[start] + out), carried + out)
                if end not in new or cost < new[end][0]:
                    new[end] = (cost, [*bounds, end])
        best = new
    _, bounds = best[len(total) - 1]
    return bounds[:-1]


# -- an automatic placement --------------------------------------------------------------------------------------------


def automatic(works: Works, seconds: Sequence[float], weights: Mapping[str, int], num_ranks: int) -> list[int]:
    """Return every unit's rank, so that branches run in parallel and every rank holds its share of the parameters.

    Two placements are tried, by branch and by consecutive stages, and the one with the shorter predicted step is
    returned. `weights` are the bytes of parameters, by name.
    """
    share = 1.25 * sum(weights.values()) / num_ranks
    ways = [_by_branches(works, seconds, weights, num_ranks, share)]
    if len({unit.path for unit in works.units}) >= num_ranks:
        ways.append(balanced(works, seconds, num_ranks))
    return min(ways, key=lambda homes: predicted(works, seconds, homes) * _overload(works, homes, weights, share))


def _overload(works: Works, homes: Sequence[int], weights: Mapping[str, int], share: float) -> float:
    held: dict[int, set[str]] = {}
    for unit, home in zip(works.units, homes, strict=True):
        held.setdefault(home, set()).update(parameters_of(works, unit.nodes))
    largest = max((sum(weights.get(name, 0) for name in names) for names in held.values()), default=0)
    return max(1.0, largest / share) if share else 1.0


def predicted(works: Works, seconds: Sequence[float], homes: Sequence[int]) -> float:
    """Return the predicted time of a step, with each rank running its units in order and transfers taking time."""
    free: Counter[int] = Counter()
    done: list[float] = []
    for index, unit in enumerate(works.units):
        start = float(free[homes[index]])
        for name in works.needs(unit.nodes):
            other = works.unit_of[name]
            size = works.facts.values[name].num_bytes if name in works.facts.values else 0
            start = max(start, done[other] + (size * SECONDS_PER_BYTE if homes[other] != homes[index] else 0.0))
        done.append(start + seconds[index])
        free[homes[index]] = done[-1]  # type: ignore[assignment]
    return max(done, default=0.0)


def _by_branches(
    works: Works, seconds: Sequence[float], weights: Mapping[str, int], num_ranks: int, share: float
) -> list[int]:
    """Assign each unit to the rank on which it finishes first; full ranks take no more parameters."""
    free = [0.0] * num_ranks
    free_bytes = [share] * num_ranks
    placed: dict[str, int] = {}
    done: list[float] = []
    homes: list[int] = []
    for index, unit in enumerate(works.units):
        names = [name for name in parameters_of(works, unit.nodes) if name in weights]
        size = sum(weights[name] for name in names if name not in placed)

        def ends(rank: int, unit: Any = unit, index: int = index, size: int = size) -> tuple[bool, float, int]:
            start = free[rank]
            for name in works.needs(unit.nodes):
                other = works.unit_of[name]
                carried = works.facts.values[name].num_bytes * SECONDS_PER_BYTE if name in works.facts.values else 0.0
                start = max(start, done[other] + (carried if homes[other] != rank else 0.0))
            return size > free_bytes[rank], start + seconds[index], rank

        bound = next((placed[name] for name in names if name in placed), None)
        home = bound if bound is not None else min(range(num_ranks), key=ends)
        for name in names:
            placed.setdefault(name, home)
        free_bytes[home] -= size
        done.append(ends(home)[1])
        free[home] = done[-1]
        homes.append(home)
    return homes


def module_names(model: nn.Module) -> list[str]:
    """Return the names of a network's modules."""
    return [name for name, _ in model.named_modules()]
