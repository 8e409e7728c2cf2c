"""Placement: a network cut over the ranks of a group. Every rank keeps its own parameters, and the others' names only.

A cut is found once, on the network's first call, and holds for all that follow: each kind of call (training or
evaluation, another batch size) is traced or followed when it first comes, and its parts go to where their parameters
are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import Mean, StrategyError, StrategySpec, TaskError, random_state, remember_buffers, restore_random_state
from ..distributed import World
from ..graph import (
    Call,
    Crossing,
    DrawCounter,
    GraphPiece,
    TracedGraph,
    Works,
    changed_at_root,
    crossings,
    follow,
    in_pieces,
    segments_of,
    trace,
    works_of,
)
from .buffers import buffers_outside_batch_norm
from .double_backward import on_gradients, refuse_gradients, untraceable
from .piece_parameters import Holding
from .piece_runner import Relay
from .placement_rules import REST, automatic, by_map, check_map, measured, module_names, parameters_of
from .recompute import SELECTIVE, recomputed_by, selective_contexts

Loss = Callable[[Any, Any], Any]
NUM_FIXED = 2
"""Sizes of a call that are traced as they are, which is quick; from the next one on they are left free."""


@dataclass(frozen=True)
class Calling:
    """How a loss calls its network."""

    call: Call
    counts: bool
    """Whether it brings a count of its own, as `mh.mean` does."""
    used: tuple[int, ...] | None
    """Which of the tensors that the network returns it looks at; None where that is not known."""
    reads: tuple[str, ...] = ()
    """Parameters and buffers that it reads by itself, such as a scale or a penalty of weights."""


def calling(
    model: nn.Module,
    probe: Callable[[nn.Module, Callable[[Any], Any]], Any],
    scope: AbstractContextManager[object],
    *,
    computes: bool = True,
) -> Calling:
    """Computes a loss on a few samples, in the mode that the network is in; nothing of the network changes.

    With `computes` off the network itself, which then needs no values, is only called and not computed.
    """
    calls: list[Call] = []
    looks = _Looks(model)
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call.of(args, kwargs))
        if not computes:
            raise _Seen
        return looks.over(lambda: own(*args, **kwargs))

    device = next((p for p in model.parameters() if not p.is_meta), torch.empty(0)).device
    states, put_back = random_state(device), remember_buffers(model)
    model.forward = forward
    try:
        with torch.no_grad(), scope, looks, on_gradients(refuse_gradients), untraceable():
            value = probe(model, lambda batch: batch)
    except _Seen:
        return Calling(calls[0], False, None)
    except RuntimeError as error:
        if not computes and "meta" in str(error):
            # A part of the network was called by itself, and has no values.
            raise one_call(0) from None
        raise
    finally:
        del model.forward
        restore_random_state(states, device)
        put_back()
    if len(calls) != 1:
        raise one_call(len(calls))
    return Calling(calls[0], isinstance(value, Mean), tuple(sorted(looks.seen)), tuple(looks.reads))


class _Seen(Exception):
    """The network was called, and that was all that was asked."""


def one_call(count: int) -> TaskError:
    """What to say of a loss that does not call its network exactly once."""
    return TaskError(
        "under a strategy that cuts the network a loss calls model(...) exactly once",
        got=f"{count} calls",
        remedy="make one module of what is called apart, or use mh.Mirrored() or mh.Sharded()",
    )


def _cannot_read(name: str) -> StrategyError:
    return StrategyError(
        "what the loss itself reads of a network that is cut must be on every rank, whole and unchanged",
        got=f"{name}, which is changed by forward or held in parts",
        remedy="compute with it in forward, which may return it beside its answer",
    )


class _Looks(TorchDispatchMode):
    """Notes which tensors of an answer, and which of the network's own, a loss looks at."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._places: dict[int, int] = {}
        self._answer: Any = None
        self._is_inside = False
        self.seen: set[int] = set()
        self.reads: dict[str, None] = {}

    def over(self, compute: Callable[[], Any]) -> Any:
        """Begins to watch what is made of the network's answer; returns copies that nobody else has."""
        self._is_inside = True
        leaves, structure = pytree.tree_flatten(compute())
        fresh = [leaf.detach().view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_inside = False
        tensors = [leaf for leaf in fresh if isinstance(leaf, Tensor)]
        self._answer, self._places = fresh, {id(tensor): place for place, tensor in enumerate(tensors)}
        # A loss that returns a result of the network as it is looks at it too.
        self.seen |= {place for place, tensor in enumerate(tensors) if tensor.dim() == 0 or len(tensors) == 1}
        return pytree.tree_unflatten(fresh, structure)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in () if self._is_inside else pytree.tree_leaves((args, kwargs)):
            if id(leaf) in self._places:
                self.seen.add(self._places[id(leaf)])
            if id(leaf) in self._own:
                self.reads[self._own[id(leaf)]] = None
        return func(*args, **(kwargs or {}))


@dataclass
class Cut:
    """A network in pieces, for calls of one kind and size."""

    works: Works
    pieces: list[GraphPiece]
    crossings: list[Crossing]
    returned: list[str]
    """The results that the loss, or whoever called, is given; the others stay where they are."""

    @property
    def end(self) -> int:
        """The rank that has what the network returns."""
        return self.pieces[-1].rank


@dataclass
class Placement:
    """Where the parts of a network are, and the cuts of the calls that came so far."""

    model: nn.Module
    spec: StrategySpec
    num_ranks: int
    device: torch.device
    scope: Callable[[], AbstractContextManager[object]]
    calling: Calling
    layers: Sequence[str] = ()
    """Modules that stay in one piece, because several ranks compute each of them together."""
    holders: dict[str, set[int]] = field(default_factory=dict)
    """The ranks that hold each parameter and buffer."""
    named: dict[str, int] = field(default_factory=dict)
    """The rank of modules, by name; what is in none of them follows what it reads."""
    rest: int | None = None
    end: int = 0
    """The rank on which the loss is computed."""
    first: Cut | None = None
    seconds: list[float] = field(default_factory=list)
    """What each unit of the first cut costs, where that was asked."""
    _known: dict[bool, list[Any]] = field(default_factory=dict)
    """The settings of the network's modules when it was traced, in training and in evaluation."""
    _traced: dict[Any, TracedGraph] = field(default_factory=dict)
    _cuts: dict[Any, Cut] = field(default_factory=dict)

    # -- the first cut ---------------------------------------------------------------------------------------------

    def settle(self, homes_of: Callable[[Works], list[int]]) -> None:
        """Finds the homes of the first call's parts, and with them who holds which parameter."""
        self._modules = list(self.model.modules())
        self._known[self.model.training] = self._settings()
        works = self._works(self.calling.call, self.model.training, self._trace(self.calling.call))
        homes = homes_of(works)
        wanted = self._wanted(works, self.calling.used)
        self.end = self._end(works, homes, wanted[1])
        for unit, home in zip(works.units, homes, strict=True):
            for name in parameters_of(works, unit.nodes):
                self.holders.setdefault(name, set()).add(home)
        for name in parameters_of(works, [node for node in works.traced.outputs if isinstance(node, fx.Node)]):
            self.holders.setdefault(name, set()).add(self.end)
        changed = _changed_buffers(works)
        for name in self.calling.reads:
            if name in changed or self.spec.shards != 1 or self.spec.tensor > 1:
                raise _cannot_read(name)
            # In evaluation every rank computes the loss.
            self.holders[name] = set(range(self.num_ranks))
        self._learn_names(works, homes)
        for name, _ in (*self.model.named_parameters(), *self.model.named_buffers()):
            self.holders.setdefault(name, {self._default_home(name)})
        self.first = self._pieces(works, homes, wanted, training=True)
        self._cuts[self._key(self.calling.call, self.model.training)] = self.first

    def _learn_names(self, works: Works, homes: list[int]) -> None:
        """Modules all of whose parts are on one rank, for calls of other kinds."""
        found: dict[str, set[int]] = {}
        for unit, home in zip(works.units, homes, strict=True):
            found.setdefault(unit.path, set()).add(home)
        for path, ranks in found.items():
            if path and len(ranks) == 1:
                self.named.setdefault(path, *ranks)

    def _default_home(self, name: str) -> int:
        """Where a parameter is kept that the first call does not use."""
        path = name.rpartition(".")[0]
        while path and path not in self.named:
            path = path.rpartition(".")[0]
        return self.named.get(path, self.rest or 0)

    def notes(self) -> list[str]:
        """What to know of the cut, beside where its parts are."""
        reads = self.calling.reads
        if not reads:
            return []
        return [f"the loss itself reads {', '.join(reads[:5])}{' …' if len(reads) > 5 else ''}: all devices hold that"]

    # -- cuts ------------------------------------------------------------------------------------------------------

    def cut(self, call: Call, *, training: bool) -> Cut:
        """The cut for a call; one that comes for the first time is traced and followed."""
        key = self._key(call, training)
        if key not in self._cuts:
            works = self._works(call, training, self._trace(call))
            homes = self._homes(works)
            used = self.calling.used if training and call.key == self.calling.call.key else None
            self._cuts[key] = self._pieces(works, homes, self._wanted(works, used), training=training)
        return self._cuts[key]

    def refresh(self) -> bool:
        """Forgets the traces of a network that was changed since, by a callback say; True where it was."""
        now = self._settings()
        before = self._known.setdefault(self.model.training, now)
        if now == before:
            return False
        self._known[self.model.training] = now
        self._traced = {key: traced for key, traced in self._traced.items() if key[0] != self.model.training}
        self._cuts.clear()
        return True

    def _settings(self) -> list[Any]:
        """What a trace takes as it is: numbers and flags of all modules, and which parameters have gradients."""
        held = [
            value for m in self._modules for value in vars(m).values() if isinstance(value, bool | int | float | str)
        ]
        held += [p.requires_grad for m in self._modules for p in m._parameters.values() if p is not None]
        return held

    def _homes(self, works: Works) -> list[int]:
        return by_map(works, self.named, self.rest, self.holders)

    def _pieces(self, works: Works, homes: list[int], wanted: tuple[list[str], list[str]], *, training: bool) -> Cut:
        returned, needed = wanted
        pieces = in_pieces(works, homes, self.end, needed)
        return Cut(works, pieces, list(crossings(pieces)), returned)

    def _key(self, call: Call, training: bool) -> Any:
        return training, call.key, call.shapes, torch.is_autocast_enabled(self.device.type)

    def _trace(self, call: Call) -> TracedGraph:
        """A graph that holds for this call: one that is there already, or a new one."""
        key = (self.model.training, call.key)
        known = [traced for other, traced in self._traced.items() if other[:2] == key and traced.fits(call)]
        if known:
            return known[0]
        times = sum(other[:2] == key for other in self._traced)
        with plain_forward(self.model):
            traced = trace(self.model, call, self.device, free=times >= NUM_FIXED, layers=self.layers)
        self._traced[*key, call.shapes] = traced
        return traced

    def _works(self, call: Call, training: bool, traced: TracedGraph) -> Works:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with contextlib.nullcontext() if training else torch.no_grad():
            draws = self.spec.deterministic
            facts = follow(traced, call, tensors, self.device, self.scope(), counts_draws=draws)
        return works_of(traced, facts)

    def _wanted(self, works: Works, used: tuple[int, ...] | None) -> tuple[list[str], list[str]]:
        """What is returned, as far as it is used, and the results of units that it is made of."""
        nodes = [node for node in works.traced.outputs if isinstance(node, fx.Node)]
        tensors = [node for node in nodes if node.name in works.facts.values]
        chosen = tensors if used is None else [node for place, node in enumerate(tensors) if place in used]
        loose = [node for node in chosen if node.name not in works.unit_of]
        needed = [node.name for node in chosen if node.name in works.unit_of] + works.needs(loose)
        return [node.name for node in chosen], list(dict.fromkeys(needed))

    def _end(self, works: Works, homes: list[int], needed: list[str]) -> int:
        """The rank that makes most of what the network returns, so that least must cross."""
        weights: dict[int, int] = {}
        for name in needed:
            home = homes[works.unit_of[name]]
            size = works.facts.values[name].num_bytes if name in works.facts.values else 0
            weights[home] = weights.get(home, 0) + size
        return max(weights, key=lambda rank: (weights[rank], rank)) if weights else 0

    def measure(self, works: Works, world: World) -> None:
        """What the units of the first call cost, as the first rank sees it while it has all of the network."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        seconds = measured(works, self.calling.call, tensors, self.scope()) if world.is_first else []
        self.seconds = world.gather_objects(seconds)[0]

    # -- running ---------------------------------------------------------------------------------------------------

    def relay(
        self,
        cut: Cut,
        world: World,
        clock: DrawCounter,
        substitute: Callable[[fx.Node, str], Any],
        holding: Holding,
        own_buffers: Collection[str] = (),
    ) -> Relay:
        """What this rank does of a cut; `own_buffers` are updated by each micro-batch from where they were before."""
        blocks = recomputed_by(self.model, self.spec.recompute)
        segments = {
            piece.index: segments_of(
                cut.works,
                piece,
                repeated=blocks,
                substitute=substitute,
                clock=clock,
                counts_draws=self.spec.deterministic,
                returned=cut.returned if piece is cut.pieces[-1] else (),
                contexts=lambda: holding.again(selective_contexts() if self.spec.recompute == SELECTIVE else None),
            )
            for piece in cut.pieces
            if piece.rank == world.rank
        }
        traced = cut.works.traced
        own = {**traced.parameters, **traced.buffers}
        places = {node: _place_of(self.model, name) for node, name in own.items()}

        def tensor_of(node: str) -> Tensor:
            if node in traced.constants:
                return traced.constants[node]
            held, name = places[node]
            return holding.work(held[name])

        in_turn = _changed_buffers(cut.works) & set(buffers_outside_batch_norm(self.model)) - set(own_buffers)
        return Relay(
            cut.works, cut.pieces, cut.crossings, world, segments, tensor_of, clock, holding.plain, own_buffers, in_turn
        )

    def drop(self, rank: int) -> None:
        """Keeps this rank's parameters and buffers; of the others only shape and dtype remain."""
        made: dict[int, Tensor] = {}
        names = {id(t): n for n, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        for module in self.model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and rank not in self.holders[names[id(tensor)]]:
                        held[name] = made.setdefault(id(tensor), _name_only(tensor))  # type: ignore[assignment]

    def holds(self, name: str, rank: int) -> bool:
        """Whether a rank holds a parameter or a buffer."""
        return rank in self.holders[name]


def _changed_buffers(works: Works) -> set[str]:
    """Names of the buffers that a forward changes in place."""
    traced = works.traced
    nodes = (target.name for node in traced.graph.nodes for target in changed_at_root(node))
    return {traced.buffers[name] for name in nodes if name in traced.buffers}


def _place_of(model: nn.Module, name: str) -> tuple[Mapping[str, Any], str]:
    """Where a tensor of the network is found, quickly: it is asked for with every microbatch."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if last in module._parameters else module._buffers), last


def _name_only(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@contextlib.contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """The network's own forward, for a while."""
    own = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if own is not None:
            model.forward = own


# -- homes -------------------------------------------------------------------------------------------------------------


def placed_homes(
    placement: Placement, patterns: Mapping[str, int], world: World, *, measures: bool = True
) -> Callable[[Works], list[int]]:
    """Homes by a map; without one, automatic ones, by what the first rank measured."""
    if patterns:
        placement.named = check_map(module_names(placement.model), patterns)
        placement.rest = patterns.get(REST)
        return lambda works: by_map(works, placement.named, placement.rest, {})

    def found(works: Works) -> list[int]:
        if measures:
            placement.measure(works, world)
        else:
            placement.seconds = [1.0] * len(works.units)
        weights = {name: p.numel() * p.element_size() for name, p in placement.model.named_parameters()}
        return automatic(works, placement.seconds, weights, placement.num_ranks)

    return found


def require_cuttable(model: nn.Module) -> None:
    """Refuses networks that have no forward to trace, or hooks that a trace does not contain."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise StrategyError("a network must have a forward", got=type(model).__name__, remedy="wrap it in a module")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise StrategyError(
                "a network that is cut is traced, and the trace does not contain backward hooks of modules",
                got=f"one on {name or type(module).__name__}",
                remedy="use mh.Mirrored() or mh.Sharded()",
            )
