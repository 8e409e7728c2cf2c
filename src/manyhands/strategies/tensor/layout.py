"""Layout: how several ranks compute every layer of a network, found by running a small batch through it.

A layer that gets all features computes some output features; a layer that gets some features computes its term of a
sum. So pairs of layers, attention and MLPs are split as by hand, whatever the modules are called. The search computes
and sends nothing: it uses torch's fake tensors, which have only shapes.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...core import Attributes, Mean, StrategyError, UsageError, is_scripted, remember_state
from ...distributed import culprit
from ..double_backward import on_gradients, refuse_gradients
from ..recompute import blocks_of
from .axis import WHOLE, Axis, in_tensors
from .glue import glued, no_sparse_gradients
from .heads import AttentionHeads, fits
from .layers import LayerSplit, Replicated, can_be, gathered, is_norm, way_named, ways_for
from .operators import missing_operator, registered, run_whole

LOSS = "the loss"
_UNKNOWN_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@dataclass
class Layout:
    """How several ranks compute a network."""

    ways: dict[str, LayerSplit] = field(default_factory=dict)
    """How each layer is computed, by the layer's name."""
    whole: set[str] = field(default_factory=set)
    """Modules with a forward that gets whole tensors, because an operation in it cannot run on shards."""
    operators: set[str] = field(default_factory=set)
    """Operators of a backward that run on whole tensors, because torch cannot run them on shards."""
    blocks: set[str] = field(default_factory=set)
    spreads: bool = True
    """Whether results that would be replicated stay sharded within a block."""
    notes: list[str] = field(default_factory=list)
    traffic: int = 0
    """Bytes that a rank sends in forward and backward of the probed samples."""

    def way_of(self, name: str) -> str:
        """Return the name of how a layer is computed; "whole" by default."""
        way = next((way for owner, way in self.ways.items() if name == owner or name.startswith(f"{owner}.")), None)
        return way.name if way is not None and way.is_sharded else "whole"

    def placements(self, model: nn.Module) -> dict[str, Placement]:
        """Return how parameters and buffers are sharded, by name; those not named are replicated."""
        return dict(self._by_name(model, lambda way, layer: way.placements(layer)))

    def sections(self, model: nn.Module) -> dict[str, Sequence[int]]:
        """Return the sections of parameters that are sharded section by section."""
        return dict(self._by_name(model, lambda way, layer: way.sections_of(layer)))

    def _by_name(self, model: nn.Module, ask: Callable[[LayerSplit, nn.Module], Mapping[str, Any]]) -> Iterator[Any]:
        for name, way in self.ways.items():
            layer = model.get_submodule(name)
            for key, value in ask(way, layer).items():
                owner, _, last = key.rpartition(".")
                part = layer.get_submodule(owner)
                if part._parameters.get(last) is not None or part._buffers.get(last) is not None:
                    yield f"{name}.{key}".lstrip("."), value


def find_layout(
    model: nn.Module, axis: Axis, probe: Callable[..., Any], asked: Mapping[str, str], *, spreads: bool = True
) -> Layout:
    """Find a layout by trial; what cannot be computed on shards stays whole, and the layout's notes say so."""
    _require_shardable(model)
    layout = Layout(blocks=set(blocks_of(model)), spreads=spreads)
    requested = _requested_layouts(model, asked)
    pretends, tries = True, 0
    while True:
        tries += 1
        layout.ways = {name: way_named(kind, model.get_submodule(name)) for name, kind in requested.items()}
        for name in layout.whole:
            layout.ways.pop(name, None)
        stack: list[str] = []
        # Fake tensors must not stay in attributes that forward sets.
        put_back = Attributes(model).put_back if pretends else remember_state(model)
        try:
            for decides in (True, False):
                with _pretending(model, axis, layout, decides=decides, pretends=pretends) as fake:
                    _follow(model, axis, layout, probe, stack, fake, decides)
        except Exception as error:
            if pretends and _needs_values(error):
                layout.notes.append(
                    f"the layout was found with real numbers, because the network looks at values ({error})"
                )
                pretends = False
                continue
            if isinstance(error, (UsageError, *_UNKNOWN_VALUES)) or tries > 50:
                raise
            if not stack and (operator := missing_operator(error)):
                layout.notes.append(f"{operator} runs on whole tensors on every rank")
                run_whole([operator])
                continue
            _give_way(model, layout, requested, stack, error)
            continue
        finally:
            put_back()
        _note_whole_attention(model, axis, layout)
        # Other processes, which get the layout, may need an operator that an earlier network made known here.
        layout.operators |= registered
        return layout


def _needs_values(error: Exception) -> bool:
    """Return whether an error comes from fake tensors, which have no values that could be read."""
    return isinstance(error, _UNKNOWN_VALUES) or ".numpy() is not supported for tensor subclasses" in str(error)


def _note_whole_attention(model: nn.Module, axis: Axis, layout: Layout) -> None:
    """Add a note why attention is not split by heads, unless another note explains it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and not fits(module, axis) and name not in layout.whole:
            reason = "it has a custom forward, or adds keys and values"
            if module.num_heads % axis.size:
                reason = f"{module.num_heads} heads cannot be divided among {axis.size} ranks"
            _note(layout, name, f" works on whole tensors on every rank: {reason}")


def _require_shardable(model: nn.Module) -> None:
    """Raise for layers with sparse gradients, which torch cannot shard, and for TorchScript."""
    for name, layer in model.named_modules():
        if is_scripted(layer):
            raise StrategyError(
                "under tensor parallelism a network must consist of Python modules",
                got=f"{name or 'the network'}, which is TorchScript",
                remedy="return the module before it is traced or scripted, or use mh.Mirrored()",
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise no_sparse_gradients(f"{name or type(layer).__name__} with sparse=True")


def _requested_layouts(model: nn.Module, asked: Mapping[str, str]) -> dict[str, str]:
    """Return the layers that the user's patterns match, with the requested way for each."""
    found: dict[str, str] = {}
    for pattern, kind in asked.items():
        names = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
        fitting = {name: kind for name in names if can_be(kind, model.get_submodule(name))}
        if not fitting:
            raise StrategyError(
                f"a pattern of layout= must match a layer that can be split by {kind}"
                if names
                else "a pattern of layout= must match the name of a module",
                got=f"{pattern!r}" + (f", which matches {', '.join(names[:3])}" if names else ""),
                remedy="choose another layer or another kind of split"
                if names
                else "see the names in dict(model.named_modules())",
            )
        found |= fitting
    return found


def _note(layout: Layout, name: str, text: str) -> None:
    """Add a note; notes with the same text for several modules are merged into one."""
    for place, known in enumerate(layout.notes):
        if known.endswith(text):
            layout.notes[place] = f"{known.removesuffix(text)}, {name}{text}"
            return
    layout.notes.append(f"{name}{text}")


def _give_way(model: nn.Module, layout: Layout, requested: dict[str, str], stack: list[str], error: Exception) -> None:
    """Fall back to whole tensors after a failure: first for a module's own forward, then for the whole module."""
    reason = textwrap.shorten(f"{type(error).__name__}: {error}".splitlines()[0], 160, placeholder=" …")
    name = stack[-1] if stack else LOSS
    parents = [n for n in stack if n in layout.blocks]
    if name == "":
        name = "the network itself"
    if layout.spreads:
        # Keeping results sharded between layers is the first thing to give up.
        layout.spreads = False
        return
    place = stack[-1] if stack else LOSS
    if place not in layout.whole:
        layout.whole.add(place)
        _note(layout, name, f" works on whole tensors on every rank: {reason}")
    elif place and place != LOSS and requested.get(place) != Replicated.name:
        layout.whole.discard(place)
        requested[place] = Replicated.name
        _note(layout, name, f" is replicated: {reason}")
    elif parents and requested.get(parents[-1]) != Replicated.name:
        requested[parents[-1]] = Replicated.name
        _note(layout, parents[-1], f" is replicated: {reason}")
    elif "" not in layout.whole:
        layout.whole.add("")
        layout.notes.append(f"the network's own lines work on whole tensors on every rank: {reason}")
    else:
        if "torch._dynamo" in sys.modules:
            # A compiled operator that failed in a trial, such as torch.cond, would not run in this process any more.
            torch._dynamo.reset()
        raise StrategyError(
            "tensor parallelism needs a network that can be computed in parts",
            got=f"{name}: {reason.rstrip('.')} at {culprit(error)}",
            remedy="leave tensor= at 1 (mh.Mirrored() and mh.Sharded() compute layers whole), or correct the error",
        ) from error


def _follow(
    model: nn.Module,
    axis: Axis,
    layout: Layout,
    probe: Callable[..., Any],
    stack: list[str],
    fake: Callable[[Any], Any],
    decides: bool,
) -> None:
    """Compute the loss, and in the second pass its gradients, while `stack` tracks the module that runs."""
    names = {module: name for name, module in model.named_modules()}
    stack.clear()

    def enter(module: nn.Module, *_: Any) -> None:
        if module in names:
            stack.append(names[module])

    def leave(module: nn.Module, *_: Any) -> None:
        if module in names:
            stack.pop()

    def on_sections(layer: nn.Module, sizes: Sequence[int]) -> None:
        way = layout.ways.get(names[layer])
        if way is not None and way.is_sharded and all(size % axis.size == 0 for size in sizes):
            way.sections = list(sizes)

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    undo = dress(model, axis, layout, decides=decides)
    try:
        with glued(axis, on_sections if decides else None, draws=False), _Traffic(axis) as traffic:
            with on_gradients(refuse_gradients, backward=False):
                found = probe(model, fake)
            results = [axis.whole(t) for t in tree_leaves(found.total if isinstance(found, Mean) else found)]
            ends = [result.sum() for result in results if result.requires_grad]
            if ends and not decides:
                inputs = [parameter for parameter in model.parameters() if parameter.requires_grad]
                torch.autograd.grad(ends, inputs, allow_unused=True)
        layout.traffic = traffic.num_bytes
    finally:
        undo()
        for handle in handles:
            handle.remove()


def dress(model: nn.Module, axis: Axis, layout: Layout, *, decides: bool = False) -> Callable[[], None]:
    """Replace the forward of every layer by its parallel version; return a function that undoes it."""
    undo: list[Callable[[], None]] = []
    for name, module in model.named_modules():
        forward = _forward(model, axis, layout, name, module, decides)
        if forward is not None:
            undo.append(_put_on(module, forward))

    def take_off() -> None:
        for step in reversed(undo):
            step()

    return take_off


def _put_on(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    own = module.__dict__.get("forward")
    module.forward = MethodType(forward, module)

    def take_off() -> None:
        del module.forward
        if own is not None:
            module.forward = own

    return take_off


def _forward(
    model: nn.Module, axis: Axis, layout: Layout, name: str, module: nn.Module, decides: bool
) -> Callable[..., Any] | None:
    """Return a module's forward under a layout; None if it does not change."""
    own = module.__dict__.get("forward")
    is_layer = name in layout.ways or (decides and not isinstance(module, nn.ModuleList) and _is_layer(module, axis))
    gathers = layout.spreads and (name in layout.blocks or is_norm(module))
    gives_whole = (name == "" and LOSS in layout.whole) or _caller(name, module, layout)
    gets_whole = name in layout.whole
    if not (is_layer or gathers or gives_whole or gets_whole):
        return None

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = own or MethodType(type(module).forward, module)
        if is_layer and _holds_parts(module, args):
            if name not in layout.ways:
                _decide(model, axis, layout, name, module, args, is_patched=_is_patched(own))
            result = layout.ways[name].run(axis, module, plain, *args, **kwargs)
        elif gets_whole:
            with _own_whole(axis, module):
                given = in_tensors(lambda tensor: _own(axis, tensor), (args, kwargs))
                result = plain(*given[0], **given[1])
        else:
            result = plain(*args, **kwargs)
        result = gathered(result) if gathers else result
        return in_tensors(lambda tensor: _own(axis, tensor), result) if gives_whole else result

    return forward


def _own(axis: Axis, tensor: Tensor) -> Tensor:
    """Return the whole tensor, not as a view, which autograd would not allow a module to change in place."""
    whole = axis.whole(tensor)
    is_view = whole is not tensor and whole.requires_grad and whole._is_view()
    return torch.ops.aten._unsafe_view(whole, whole.shape) if is_view else whole


def _caller(name: str, module: nn.Module, layout: Layout) -> bool:
    """Return whether the module that calls this one works on whole tensors."""
    parent = name.rpartition(".")[0]
    return bool(name) and any(
        whole == parent or (parent.startswith(f"{whole}." if whole else "") and _only_digits(parent, whole))
        for whole in layout.whole
        if whole != LOSS
    )


def _only_digits(parent: str, whole: str) -> bool:
    """Return whether there is only a list of modules between two modules, given by name."""
    rest = parent.removeprefix(whole).lstrip(".")
    return "." not in rest


def _is_layer(module: nn.Module, axis: Axis) -> bool:
    return fits(module, axis) or ways_for(module, None, axis) is not None


def _holds_parts(module: nn.Module, args: Any) -> bool:
    own = (*module._parameters.values(), *module._buffers.values(), *args)
    return any(isinstance(tensor, DTensor) for tensor in own)


def _is_patched(forward: Any) -> bool:
    """Return whether the user replaced a module's forward, so that its class says nothing about it."""
    return forward is not None and not (getattr(forward, "__module__", None) or "").startswith("manyhands.")


def _decide(
    model: nn.Module, axis: Axis, layout: Layout, name: str, layer: nn.Module, args: Any, *, is_patched: bool
) -> None:
    """Choose how a layer is computed by its inputs, and shard its parameters accordingly."""
    way = AttentionHeads(layer) if fits(layer, axis) else ways_for(layer, args[0] if args else None, axis)
    assert way is not None
    if is_patched:
        way = Replicated(layer)
    way.spreads = layout.spreads and any(name == b or name.startswith(f"{b}.") for b in layout.blocks)
    if _conflicts(way, layer):
        others = [way_named(kind, layer) for kind in ("column", "row", "vocabulary") if can_be(kind, layer)]
        way = next((other for other in others if not _conflicts(other, layer)), Replicated(layer))
    layout.ways[name] = way
    shard_parameters(
        model, axis, {key: place for key, place in layout.placements(model).items() if key.startswith(f"{name}.")}
    )


def _conflicts(way: LayerSplit, layer: nn.Module) -> bool:
    """Return whether a parameter is shared with a layer that shards it differently."""
    for key, place in way.placements(layer).items():
        held = layer._parameters.get(key)
        if isinstance(held, DTensor) and isinstance(held.placements[0], Shard) and held.placements[0] != place:
            return True
    return False


def shard_parameters(model: nn.Module, axis: Axis, placements: Mapping[str, Placement]) -> None:
    """Shard tensors that every rank has whole; a tensor shared by several modules stays shared."""
    for name, place in placements.items():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        held = module._parameters.get(last, module._buffers.get(last))
        if isinstance(held, DTensor) and held.placements[0] == place:
            continue
        parted = axis.as_parted(held.detach()).redistribute(placements=[place])  # type: ignore[union-attr]
        _replace(model, held, parted.requires_grad_(held.requires_grad))  # type: ignore[union-attr]


def _replace(model: nn.Module, before: Any, after: Tensor) -> None:
    owners: list[dict[str, Any]] = [own for module in model.modules() for own in (module._parameters, module._buffers)]
    for own in owners:
        for name, tensor in own.items():
            if tensor is before:
                own[name] = after


@contextmanager
def _own_whole(axis: Axis, module: nn.Module) -> Iterator[None]:
    """Replace a module's own parameters by whole plain tensors inside this context; submodules keep theirs."""
    held: dict[str, Any] = dict(module._parameters)
    try:
        for name, tensor in held.items():
            if isinstance(tensor, DTensor):
                module._parameters[name] = axis.whole(tensor)  # type: ignore[assignment]
        yield
    finally:
        module._parameters.update(held)


@contextmanager
def _pretending(
    model: nn.Module, axis: Axis, layout: Layout, *, decides: bool, pretends: bool
) -> Iterator[Callable[[Any], Any]]:
    """Replace the network's tensors by fake ones inside this context, sharded as far as the layout is known."""
    owners: list[dict[str, Any]] = [own for module in model.modules() for own in (module._parameters, module._buffers)]
    held = [(own, dict(own)) for own in owners]
    # A network that is inspected without values has plain attributes without values too.
    held += [(vars(m), {n: v for n, v in vars(m).items() if _is_empty(v)}) for m in model.modules()]
    mode = FakeTensorMode(allow_non_fake_inputs=True) if pretends else None

    def fake(value: Any) -> Any:
        return in_tensors(mode.from_tensor, value) if mode is not None else value

    made: dict[int, Any] = {}
    with ExitStack() as scope:
        if mode is not None:
            scope.enter_context(mode)
        try:
            for own, before in held:
                for name, tensor in before.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = _stand_in(axis, tensor, fake)
                        own[name] = made[id(tensor)]
            shard_parameters(model, axis, layout.placements(model))
            yield fake
        finally:
            for own, before in held:
                own.update(before)


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _stand_in(axis: Axis, tensor: Tensor, fake: Callable[[Any], Any]) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    if tensor.is_meta:
        # A network on the meta device, inspected without values.
        tensor = _plausible(tensor, axis.mesh.device_type).requires_grad_(tensor.requires_grad)
        return tensor if not is_parameter else axis.of(tensor.detach(), WHOLE).requires_grad_(tensor.requires_grad)
    copy: Tensor = fake(tensor.detach())
    if not is_parameter:
        return copy if copy is not tensor else tensor.clone()
    return axis.of(copy.detach(), WHOLE).requires_grad_(tensor.requires_grad)


def _plausible(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor with harmless values in place of a fake one: uninitialized memory may hold NaN or bad indices."""
    if not isinstance(tensor, nn.Parameter):
        return (
            torch.ones_like(tensor, device=device)
            if tensor.is_floating_point()
            else torch.zeros_like(tensor, device=device)
        )
    scale = torch.arange(tensor.numel(), device=device) % 7 - 3
    return (0.02 * scale).to(tensor.dtype).view(tensor.shape)


class _Traffic(TorchDispatchMode):
    """Count the bytes that collectives send."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._share = (axis.size - 1) / axis.size
        self._axis = axis
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and args and isinstance(args[0], Tensor):
            times = {"all_reduce": 2.0, "all_gather_into_tensor": float(self._axis.size)}.get(func._opname, 1.0)
            if func._opname != "wait_tensor":
                self.num_bytes += round(times * self._share * args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))
