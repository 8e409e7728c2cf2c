"""Placement: a network partitioned over the ranks of a group. Every rank keeps its own parameters only.

The placement is found once, on the network's first call, and holds for all later calls: each kind of call (training or
evaluation, another batch size) is traced on first use, and its operations run on the ranks that hold their parameters.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import (
    Attributes,
    Mean,
    StrategyError,
    StrategySpec,
    TaskError,
    is_scripted,
    random_state,
    remember_buffers,
    restore_random_state,
)
from ..distributed import World, culprit
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
    register_dataclasses,
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
"""Number of input sizes that are traced as fixed sizes, which is fast; further ones are traced as dynamic."""


@dataclass(frozen=True)
class Calling:
    """How a loss calls its network."""

    call: Call
    counts: bool
    """Whether the loss returns its own count, as with `mh.mean`."""
    used: tuple[int, ...] | None
    """Which of the network's output tensors the loss uses; None if unknown."""
    reads: tuple[str, ...] = ()
    """Parameters and buffers that the loss reads directly, such as a scale or a weight penalty."""


def calling(
    model: nn.Module,
    probe: Callable[[nn.Module, Callable[[Any], Any]], Any],
    scope: AbstractContextManager[object],
    *,
    computes: bool = True,
) -> Calling:
    """Compute a loss on a few samples in the network's current mode, and restore the network afterwards.

    With `computes=False` the network, which then needs no values, is called but not computed.
    """
    calls: list[Call] = []
    looks = _Looks(model)
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call.of(args, kwargs))
        if not computes:
            raise _CallSeen
        return looks.over(lambda: own(*args, **kwargs))

    device = next((p for p in model.parameters() if not p.is_meta), torch.empty(0)).device
    states, put_back, attributes = random_state(device), remember_buffers(model), Attributes(model)
    model.forward = forward
    try:
        # With gradients, as in training: forward may register hooks only on tensors that require one.
        with torch.enable_grad(), scope, looks, on_gradients(refuse_gradients), untraceable(), _no_host_draws(model):
            value = probe(model, lambda batch: batch)
            if changed := attributes.changed():
                if advanced := attributes.advanced():
                    raise _has_memory(advanced)
                count = len(calls)
                restore_random_state(states, device)
                put_back()
                _require_no_memory(changed, value, probe(model, lambda batch: batch))
                del calls[count:]
    except _CallSeen:
        return Calling(calls[0], False, None)
    except RuntimeError as error:
        if not computes and "meta" in str(error):
            # A submodule was called directly, and has no values.
            raise one_call(0) from None
        if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
            torch._dynamo.reset()
            raise StrategyError(
                "a partitioned network must be traceable",
                got=f"an operator with branches or loops at {culprit(error)}",
                remedy="use torch.where in place of torch.cond, or mh.Mirrored() or mh.Sharded()",
            ) from error
        raise
    finally:
        del model.forward
        restore_random_state(states, device)
        put_back()
        attributes.put_back()
    if len(calls) != 1:
        raise one_call(len(calls))
    return Calling(calls[0], isinstance(value, Mean), tuple(sorted(looks.seen)), tuple(looks.reads))


@contextmanager
def _no_host_draws(model: nn.Module) -> Iterator[None]:
    """Raise for a module whose forward draws from Python's or numpy's generator: a trace repeats those numbers."""
    states: list[Any] = []
    drawing: list[str] = []

    def enter(*_: Any) -> None:
        states.append(_host_state())

    def leave(name: str, part: nn.Module, *_: Any) -> None:
        if states.pop() != _host_state():
            drawing.append(f"forward of {name or 'the network'} ({type(part).__name__})")

    hooks = [part.register_forward_pre_hook(enter) for part in model.modules()]
    for name, part in model.named_modules():
        hooks.append(part.register_forward_hook(functools.partial(leave, name), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if drawing:
        raise StrategyError(
            "a partitioned network is traced once, and the trace repeats what Python's random or numpy.random drew",
            got=f"{drawing[0]}, which draws from one of them",
            remedy="draw numbers with torch, and compute both branches, or use mh.Mirrored() or mh.Sharded()",
        )


def _host_state() -> Any:
    """Return the states of Python's and numpy's generators, comparable by value."""
    legacy: Any = np.random.get_state()
    return random.getstate(), legacy[1].tobytes(), legacy[2:]


def _require_no_memory(changed: list[str], first: Any, second: Any) -> None:
    """Raise if a second forward with equal inputs gives another loss, because the first one set attributes."""
    one, two = (loss.total if isinstance(loss, Mean) else loss for loss in (first, second))
    if isinstance(one, Tensor) and not torch.equal(one, two):
        raise _has_memory(changed)


def _has_memory(attributes: list[str]) -> StrategyError:
    return StrategyError(
        "a partitioned network is traced, and the trace does not contain attributes that one forward sets for the next",
        got=", ".join(attributes[:3]),
        remedy="register it as a buffer (register_buffer), pass it as an input, or use mh.Mirrored()",
    )


class _CallSeen(Exception):
    """Raised to stop after the network's call was seen."""


def one_call(count: int) -> TaskError:
    """Return the error for a loss that does not call its network exactly once."""
    return TaskError(
        "under a strategy that partitions the network, a loss must call model(...) exactly once",
        got=f"{count} calls",
        remedy="combine the parts that are called separately into one module, or use mh.Mirrored() or mh.Sharded()",
    )


def _cannot_read(name: str) -> StrategyError:
    return StrategyError(
        "parameters and buffers that the loss of a partitioned network reads must be whole and unchanged on every rank",
        got=f"{name}, which forward changes or which is sharded",
        remedy="compute with it in forward, and return it as an additional output",
    )


class _Looks(TorchDispatchMode):
    """Record which output tensors, and which of the network's own tensors, a loss uses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._places: dict[int, int] = {}
        self._answer: Any = None
        self._is_inside = False
        self.seen: set[int] = set()
        self.reads: dict[str, None] = {}

    def over(self, compute: Callable[[], Any]) -> Any:
        """Start to observe the use of the network's outputs; return copies that only the loss has."""
        self._is_inside = True
        outputs = compute()
        register_dataclasses(outputs)
        leaves, structure = pytree.tree_flatten(outputs)
        fresh = [leaf.detach().view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_inside = False
        tensors = [leaf for leaf in fresh if isinstance(leaf, Tensor)]
        self._answer, self._places = fresh, {id(tensor): place for place, tensor in enumerate(tensors)}
        # A loss that returns an output of the network unchanged uses it too.
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
class Partition:
    """A network in pieces, for calls of one kind and size."""

    works: Works
    pieces: list[GraphPiece]
    crossings: list[Crossing]
    returned: list[str]
    """The results that the loss or another caller gets; the others stay on their ranks."""

    @property
    def end(self) -> int:
        """The rank that has the network's output."""
        return self.pieces[-1].rank


@dataclass
class Placement:
    """Where the units of a network are, and the partitions of the calls seen so far."""

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
    """The rank of modules, by name; operations outside of them follow their inputs."""
    rest: int | None = None
    end: int = 0
    """The rank that computes the loss."""
    first: Partition | None = None
    seconds: list[float] = field(default_factory=list)
    """Measured seconds of each unit of the first partition, if they were requested."""
    _known: dict[bool, list[Any]] = field(default_factory=dict)
    """The settings of the network's modules when it was traced, in training and in evaluation."""
    _traced: dict[Any, TracedGraph] = field(default_factory=dict)
    _partitions: dict[Any, Partition] = field(default_factory=dict)

    # -- the first partition ---------------------------------------------------------------------------------------

    def settle(self, homes_of: Callable[[Works], list[int]]) -> None:
        """Find the ranks of the first call's units, and from them the ranks that hold each parameter."""
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
        self._partitions[self._key(self.calling.call, self.model.training)] = self.first

    def _learn_names(self, works: Works, homes: list[int]) -> None:
        """Store the rank of modules whose units are all on one rank, for calls of other kinds."""
        found: dict[str, set[int]] = {}
        for unit, home in zip(works.units, homes, strict=True):
            found.setdefault(unit.path, set()).add(home)
        for path, ranks in found.items():
            if path and len(ranks) == 1:
                self.named.setdefault(path, *ranks)

    def _default_home(self, name: str) -> int:
        """Return the rank of a parameter that the first call does not use."""
        path = name.rpartition(".")[0]
        while path and path not in self.named:
            path = path.rpartition(".")[0]
        return self.named.get(path, self.rest or 0)

    def notes(self) -> list[str]:
        """Return notes for the user about the partition, other than where its pieces are."""
        reads = self.calling.reads
        if not reads:
            return []
        return [f"the loss itself reads {', '.join(reads[:5])}{' …' if len(reads) > 5 else ''}: all devices hold that"]

    # -- partitions ------------------------------------------------------------------------------------------------

    def partition(self, call: Call, *, training: bool) -> Partition:
        """Return the partition for a call; a new kind of call is traced first."""
        key = self._key(call, training)
        if key not in self._partitions:
            works = self._works(call, training, self._trace(call))
            homes = self._homes(works)
            used = self.calling.used if training and call.key == self.calling.call.key else None
            self._partitions[key] = self._pieces(works, homes, self._wanted(works, used), training=training)
        return self._partitions[key]

    def refresh(self) -> bool:
        """Drop the traces if the network was changed since, for example by a callback; return whether it was."""
        now = self._settings()
        before = self._known.setdefault(self.model.training, now)
        if now == before:
            return False
        self._known[self.model.training] = now
        self._traced = {key: traced for key, traced in self._traced.items() if key[0] != self.model.training}
        self._partitions.clear()
        return True

    def _settings(self) -> list[Any]:
        """Return what a trace takes as constant: numbers and flags of all modules, and each requires_grad."""
        held = [
            value for m in self._modules for value in vars(m).values() if isinstance(value, bool | int | float | str)
        ]
        held += [p.requires_grad for m in self._modules for p in m._parameters.values() if p is not None]
        return held

    def _homes(self, works: Works) -> list[int]:
        return by_map(works, self.named, self.rest, self.holders)

    def _pieces(
        self, works: Works, homes: list[int], wanted: tuple[list[str], list[str]], *, training: bool
    ) -> Partition:
        returned, needed = wanted
        pieces = in_pieces(works, homes, self.end, needed)
        return Partition(works, pieces, list(crossings(pieces)), returned)

    def _key(self, call: Call, training: bool) -> Any:
        return training, call.key, call.shapes, torch.is_autocast_enabled(self.device.type)

    def _trace(self, call: Call) -> TracedGraph:
        """Return a graph that is valid for this call: an existing one, or a new one."""
        key = (self.model.training, call.key)
        known = [traced for other, traced in self._traced.items() if other[:2] == key and traced.fits(call)]
        if known:
            return known[0]
        times = sum(other[:2] == key for other in self._traced)
        with plain_forward(self.model):
            traced = self._traced_sizes(call, free=times >= NUM_FIXED)
        self._traced[*key, call.shapes] = traced
        return traced

    def _traced_sizes(self, call: Call, *, free: bool) -> TracedGraph:
        try:
            return trace(self.model, call, self.device, free=free, layers=self.layers)
        except StrategyError:
            if not free:
                raise
            # Code such as a look-up by length needs numbers as sizes, and it could be traced with those.
            return trace(self.model, call, self.device, layers=self.layers)

    def _works(self, call: Call, training: bool, traced: TracedGraph) -> Works:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with contextlib.nullcontext() if training else torch.no_grad():
            draws = self.spec.deterministic
            facts = follow(traced, call, tensors, self.device, self.scope(), counts_draws=draws)
        return works_of(traced, facts)

    def _wanted(self, works: Works, used: tuple[int, ...] | None) -> tuple[list[str], list[str]]:
        """Return the outputs that are used, and the results of units that they are made of."""
        nodes = [node for node in works.traced.outputs if isinstance(node, fx.Node)]
        tensors = [node for node in nodes if node.name in works.facts.values]
        chosen = tensors if used is None else [node for place, node in enumerate(tensors) if place in used]
        loose = [node for node in chosen if node.name not in works.unit_of]
        needed = [node.name for node in chosen if node.name in works.unit_of] + works.needs(loose)
        return [node.name for node in chosen], list(dict.fromkeys(needed))

    def _end(self, works: Works, homes: list[int], needed: list[str]) -> int:
        """Return the rank that computes most of the network's output, so that least must be sent."""
        weights: dict[int, int] = {}
        for name in needed:
            home = homes[works.unit_of[name]]
            size = works.facts.values[name].num_bytes if name in works.facts.values else 0
            weights[home] = weights.get(home, 0) + size
        return max(weights, key=lambda rank: (weights[rank], rank)) if weights else 0

    def measure(self, works: Works, world: World) -> None:
        """Measure the units of the first call on the first rank, while it has all of the network."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        seconds = measured(works, self.calling.call, tensors, self.scope()) if world.is_first else []
        self.seconds = world.gather_objects(seconds)[0]

    # -- running ---------------------------------------------------------------------------------------------------

    def relay(
        self,
        partition: Partition,
        world: World,
        clock: DrawCounter,
        substitute: Callable[[fx.Node, str], Any],
        holding: Holding,
        own_buffers: Collection[str] = (),
    ) -> Relay:
        """Return this rank's part of a partition; every micro-batch begins with the step's first `own_buffers`."""
        blocks = recomputed_by(self.model, self.spec.recompute)
        segments = {
            piece.index: segments_of(
                partition.works,
                piece,
                repeated=blocks,
                substitute=substitute,
                clock=clock,
                counts_draws=self.spec.deterministic,
                returned=partition.returned if piece is partition.pieces[-1] else (),
                contexts=lambda: holding.again(selective_contexts() if self.spec.recompute == SELECTIVE else None),
            )
            for piece in partition.pieces
            if piece.rank == world.rank
        }
        traced = partition.works.traced
        own = {**traced.parameters, **traced.buffers}
        places = {node: _place_of(self.model, name) for node, name in own.items()}

        def tensor_of(node: str) -> Tensor:
            if node in traced.constants:
                return traced.constants[node]
            held, name = places[node]
            return holding.work(held[name])

        in_turn = _changed_buffers(partition.works) & set(buffers_outside_batch_norm(self.model)) - set(own_buffers)
        return Relay(
            partition.works,
            partition.pieces,
            partition.crossings,
            world,
            segments,
            tensor_of,
            clock,
            holding.plain,
            own_buffers,
            in_turn,
        )

    def drop(self, rank: int) -> None:
        """Keep this rank's parameters and buffers, and replace the others by meta tensors."""
        made: dict[int, Tensor] = {}
        names = {id(t): n for n, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        for module in self.model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and rank not in self.holders[names[id(tensor)]]:
                        held[name] = made.setdefault(id(tensor), _name_only(tensor))  # type: ignore[assignment]

    def holds(self, name: str, rank: int) -> bool:
        """Return whether a rank holds a parameter or a buffer."""
        return rank in self.holders[name]


def _changed_buffers(works: Works) -> set[str]:
    """Return the names of the buffers that a forward changes in place."""
    traced = works.traced
    nodes = (target.name for node in traced.graph.nodes for target in changed_at_root(node))
    return {traced.buffers[name] for name in nodes if name in traced.buffers}


def _place_of(model: nn.Module, name: str) -> tuple[Mapping[str, Any], str]:
    """Return the dict and the key of a tensor of the network, for fast access in every micro-batch."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if last in module._parameters else module._buffers), last


def _name_only(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@contextlib.contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """Restore the network's own forward inside this context."""
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
    """Return a function that places units by a map or, without one, automatically by the first rank's measurements."""
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


def require_partitionable(model: nn.Module) -> None:
    """Raise for networks without a forward to trace, or with hooks that a trace does not contain."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise StrategyError(
            "a network must have a forward method",
            got=type(model).__name__,
            remedy="wrap it in an nn.Module whose forward calls its layers",
        )
    for name, module in model.named_modules():
        if is_scripted(module):
            raise StrategyError(
                "a partitioned network is traced, and TorchScript cannot be",
                got=f"{name or 'the network'}, of type {type(module).__name__}",
                remedy="return the module without torch.jit.script or torch.jit.trace, or use mh.Mirrored()",
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise StrategyError(
                "a partitioned network is traced, and the trace does not contain backward hooks of modules",
                got=f"one on {name or type(module).__name__}",
                remedy="use mh.Mirrored() or mh.Sharded()",
            )
