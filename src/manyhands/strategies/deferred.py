"""Deferred: a network that is built without values, which are created later, one tensor at a time.

Operations of a model function on large tensors are recorded and executed on torch's meta device, where they take no
memory. Later the recorded operations are replayed: random numbers are drawn in the same order, so every value is the
one that the function would have created, but only a few tensors exist at a time. Values that a later operation
overwrites anyway are drawn and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..core import default_dtype, random_state, restore_random_state

LARGE = 1 << 16
"""Tensors of at least this many bytes are created without values; smaller ones may be read by the function."""
OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_"})
"""Operations that overwrite a tensor completely."""
CPU = torch.device("cpu")

Take = Callable[[str, Tensor], None]
"""Called with a name and a tensor of the network when its values are available."""


class CannotDefer(Exception):
    """Raised when the network must be built with its values."""


@dataclass(frozen=True)
class _Ref:
    """A tensor's position in its storage at the time it was used."""

    key: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    capacity: int
    """Number of elements in the tensor's storage."""

    @property
    def is_all(self) -> bool:
        count = 1
        for length in self.size:
            count *= length
        return count == self.capacity


@dataclass
class _Note:
    """A recorded operation and its arguments, with refs in place of tensors."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    made: list[_Ref | None]
    """Refs of the results that have a storage of their own."""
    written: list[_Ref]
    read: set[int]
    draws: bool
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """The default dtype at that time, which the quotient of two integers has, for instance."""

    def run(self, tensor: Callable[[_Ref], Tensor]) -> Any:
        """Execute the operation on tensors for its refs."""
        with default_dtype(self.default_dtype):
            return self.function(*tree_map_only(_Ref, tensor, self.args), **_here(self.kwargs, tensor))

    @property
    def keys(self) -> set[int]:
        """Storages that the operation creates or changes."""
        return {ref.key for ref in (*self.made, *self.written) if ref is not None}

    @property
    def fresh(self) -> set[int]:
        """Storages that the operation overwrites completely."""
        return {ref.key for ref in self.made if ref is not None} | {r.key for r in self.written if self._covers(r)}

    def _covers(self, ref: _Ref) -> bool:
        return ref.is_all and ref.key not in self.read


class Deferred:
    """A network on the meta device, and the recorded operations that create its values."""

    def __init__(self, model: nn.Module, noting: _Noting, states: dict[str, Tensor]) -> None:
        self.model, self._noting, self._states = model, noting, states
        self._names: dict[int, list[tuple[str, _Ref]]] = {}
        parameters: dict[int, str] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            ref = noting.ref(tensor)
            if tensor.is_meta and ref.key not in noting.known:
                raise CannotDefer(f"{name} was made on the meta device")
            self._names.setdefault(ref.key, []).append((name, ref))
            if isinstance(tensor, nn.Parameter) and parameters.setdefault(ref.key, name) != name:
                raise CannotDefer(f"{parameters[ref.key]} and {name} may have the same memory")
        self._brought = {
            noting.ref(tensor).key: tensor.detach()
            for tensor in (*nn.Module.parameters(model), *model.buffers())
            if noting.ref(tensor).key not in noting.known
        }
        """Values that the model function got from elsewhere."""
        _require_no_others(model, noting)
        _empty(model)

    def fill(self, take: Take) -> None:
        """Create the values and pass them to `take` one by one."""
        wanted = dict(self._names)
        for key, tensor in self._brought.items():
            for name, ref in wanted.pop(key):
                take(name, _seen(tensor, ref))
        restore_random_state(self._states, CPU)
        with torch.no_grad():
            for key, storage in _followed(self._noting, wanted.keys()):
                for name, ref in wanted[key]:
                    take(name, _seen(storage, ref))


def defer(make: Callable[[], nn.Module]) -> Deferred:
    """Call a model function without allocating large tensors; raise `CannotDefer` if that is not possible."""
    states = random_state(CPU)
    try:
        with _Noting() as noting, _LikeReal(), _truncated(noting):
            model = make()
        return Deferred(model, noting, states)
    except CannotDefer:
        raise
    except Exception as error:
        raise CannotDefer(f"{type(error).__name__}: {error}") from error
    finally:
        restore_random_state(states, CPU)


class _LikeReal(TorchFunctionMode):
    """Let meta tensors report the CPU as their device, because torch's initializers skip meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = getattr(func, "__self__", None)
        if asked is Tensor.is_meta:
            return False
        if asked is Tensor.device:
            return CPU
        return func(*args, **(kwargs or {}))


class _Noting(TorchDispatchMode):
    """Record operations, and execute those on large tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[_Note] = []
        self.known: set[int] = set()
        """Storages that recorded operations create."""
        self.held: dict[int, Tensor] = {}
        """A tensor of every storage: supplies values from elsewhere, and keeps the address from being reused."""
        self._seed = torch.initial_seed()

    def ref(self, tensor: Tensor) -> _Ref:
        """Return a tensor's position in its storage."""
        storage = tensor.untyped_storage()
        self.held.setdefault(storage._cdata, tensor.detach())
        capacity = storage.nbytes() // tensor.element_size()
        return _Ref(
            storage._cdata, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, capacity
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            raise CannotDefer(f"{func} draws from a separate generator")
        if func is torch.ops.aten.lift_fresh.default:
            # A tensor created from Python numbers: recorded as a copy of a constant.
            func = torch.ops.aten.clone.default
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        refs = {id(tensor): self.ref(tensor) for tensor in tensors}
        written = [refs[id(tensor)] for tensor in _written(func, args, kwargs)]
        for ref in written:
            if ref.key not in self.known:
                raise CannotDefer(f"{func} changes a tensor that was made elsewhere")
        made = self._done(func, args, kwargs, tensors, {ref.key for ref in written})
        outs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        keys = {ref.key for ref in refs.values()}
        new = [ref if ref.key not in keys else None for ref in map(self.ref, outs)]
        noted_args, noted_kwargs = tree_map_only(Tensor, lambda tensor: refs[id(tensor)], (args, kwargs))
        if not tensors and outs and any(argument.name == "dtype" for argument in func._schema.arguments):
            # The default dtype may differ at replay, and then other numbers would be drawn.
            noted_kwargs = {**noted_kwargs, "dtype": outs[0].dtype}
        overwrites = func._schema.name.rpartition("::")[2] in OVERWRITES
        read = keys - {ref.key for ref in written} if overwrites else keys
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            self.require_seed()
        self.notes.append(_Note(func, noted_args, noted_kwargs, new, written, read, draws))
        self.known.update(ref.key for ref in new if ref is not None)
        return made

    def require_seed(self) -> None:
        """Raise if the model function has seeded torch's generator, which a replay would not repeat."""
        if torch.initial_seed() != self._seed:
            raise CannotDefer("the model function seeds torch's generator")

    def _done(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], written: set[int]) -> Any:
        if not tensors:
            tried = func(*args, **{**kwargs, "device": torch.device("meta")})
            is_large = any(leaf.numel() * leaf.element_size() >= LARGE for leaf in tree_leaves(tried))
            return tried if is_large else func(*args, **kwargs)
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if any(tensor.untyped_storage()._cdata in written for tensor in tensors if not tensor.is_meta):
            raise CannotDefer(f"{func} brings a large tensor into a small one")
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


@contextmanager
def _truncated(noting: _Noting) -> Iterator[None]:
    """Record torch's truncated normal initialization as one operation, because it redraws until all values fit."""
    original = init._no_grad_trunc_normal_

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            ref, is_real = noting.ref(tensor), not tensor.is_meta
        if is_real:
            tensor.detach().zero_()  # code that reads it finds zeros until the replay
        noting.require_seed()
        noting.notes.append(_Note(original, (ref, *args), kwargs, [None], [ref], set(), draws=True))
        return tensor

    init._no_grad_trunc_normal_ = noted
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the arguments that an operation changes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _followed(noting: _Noting, wanted: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
    """Replay the recorded operations; yield every wanted storage after the last operation on it."""
    needed = _needed(noting.notes, set(wanted))
    last = {key: index for index, note in enumerate(noting.notes) if index in needed for key in note.keys | note.read}
    ending: dict[int, list[int]] = {}
    for key, index in last.items():
        ending.setdefault(index, []).append(key)
    storages: dict[int, Tensor] = {}
    wanted = set(wanted)

    def tensor(ref: _Ref) -> Tensor:
        if ref.key not in noting.known:
            return _seen(noting.held[ref.key], ref)
        if ref.key not in storages:
            storages[ref.key] = torch.empty(ref.capacity, dtype=ref.dtype)
        return _seen(storages[ref.key], ref)

    for index, note in enumerate(noting.notes):
        if index not in needed:
            if note.draws:
                # Execute it for its draws only, so that later random numbers are the same.
                note.run(_scratch)
            continue
        made = note.run(tensor)
        outs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        for ref, out in zip(note.made, outs, strict=True):
            if ref is not None:
                storages[ref.key] = out
        for key in ending.get(index, ()):
            storage = storages.pop(key, None)
            if key in wanted and storage is not None:
                yield key, storage


def _needed(notes: list[_Note], live: set[int]) -> set[int]:
    """Return which recorded operations the values of some storages depend on."""
    needed = set()
    for index in range(len(notes) - 1, -1, -1):
        note = notes[index]
        if note.keys & live:
            needed.add(index)
            live = (live - note.fresh) | note.read
    return needed


def _seen(storage: Tensor, ref: _Ref) -> Tensor:
    if storage.dtype == ref.dtype:
        return storage.as_strided(ref.size, ref.stride, ref.offset)
    # torch.view_as_real, for instance, shows the same memory as another dtype.
    seen = torch.empty(0, dtype=ref.dtype, device=storage.device)
    return seen.set_(storage.untyped_storage(), ref.offset, ref.size, ref.stride)


def _scratch(ref: _Ref) -> Tensor:
    return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)


def _here(kwargs: Mapping[str, Any], tensor: Callable[[_Ref], Tensor]) -> dict[str, Any]:
    values: dict[str, Any] = tree_map_only(_Ref, tensor, dict(kwargs))
    return {**values, "device": CPU} if "device" in values else values


def _require_no_others(model: nn.Module, noting: _Noting) -> None:
    """Raise if tensors other than parameters and buffers need values: they would get none, or be drawn out of order."""
    drawn = {key for note in noting.notes if note.draws for key in note.keys}
    own = {id(tensor) for tensor in (*nn.Module.parameters(model), *model.buffers())}
    for name, module in model.named_modules():
        registered = {"_parameters", "_buffers", "_modules"}
        for attribute, value in vars(module).items():
            leaves = [] if attribute in registered else tree_leaves(value)
            for leaf in leaves:
                if not isinstance(leaf, Tensor) or id(leaf) in own:
                    continue
                if leaf.is_meta or noting.ref(leaf).key in drawn:
                    raise CannotDefer(f"{name}.{attribute} is a tensor, and neither a parameter nor a buffer")


def _empty(model: nn.Module) -> None:
    """Replace tensors that have values by meta tensors."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in list(own.items()):
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in moved:
                    without: Any = tensor.detach().to("meta")
                    if isinstance(tensor, nn.Parameter):
                        without = nn.Parameter(without, requires_grad=tensor.requires_grad)
                    vars(without).update(vars(tensor))
                    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                        if getattr(tensor, hooks, None):
                            setattr(without, hooks, getattr(tensor, hooks))
                    moved[id(tensor)] = without
                setattr(module, name, moved[id(tensor)])
