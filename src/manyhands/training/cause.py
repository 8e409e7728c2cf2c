"""Find the first operation of a loss whose results on the parts of a batch do not combine to that of the whole."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..core import Task
from ..data import tensors
from ..distributed import innermost

TOLERANCE = 1e-7
MOST_VALUES = 4096
"""Values that are kept of each output of a module."""
MAX_DEPTH = 60
"""Stack frames that are searched for a line of the user's code."""


_SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CHANGES_NO_VALUES = ("requires_grad_", "detach_", "share_memory_", "rename_")
_SETS_GRADIENT = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


@dataclass
class RecordedCall:
    """A call of a torch function: its name, its source line, and what it returned."""

    name: str
    module: str
    """The module that called it, as `blocks.0.norm (LayerNorm)`; empty outside of the network."""
    line: str
    values: list[Tensor] = field(repr=False, default_factory=list)

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        return f"{self.name}{where} at {self.line}"

    @property
    def is_finite(self) -> bool:
        """Whether all returned values are finite."""
        return all(bool(value.isfinite().all()) for value in self.values if value.is_floating_point())


class CallRecorder(TorchFunctionMode):
    """Records the torch operations of each call of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[RecordedCall]] = []
        self._path: list[str] = []

    def watched(self, task: Task) -> Task:
        """Return the task with a loss whose operations are recorded."""
        loss = task.loss
        assert loss is not None

        def compute(model: Any, batch: Any) -> Any:
            with self._within(model):
                return loss(model, batch)

        return task.replace(loss=compute)

    @contextmanager
    def _within(self, model: nn.Module) -> Iterator[None]:
        self.calls.append([])
        self._path = []
        hooks = [hook for name, part in model.named_modules() for hook in self._follow(name, part)]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _follow(self, name: str, part: nn.Module) -> list[RemovableHandle]:
        label = _named(name, part)
        return [
            part.register_forward_pre_hook(lambda *_: self._path.append(label)),
            part.register_forward_hook(lambda *_: self._path.pop() and None, always_call=True),
        ]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            values = [value.detach().clone() for value in tensors(result) if not value.is_meta]
        if values:
            name = getattr(func, "__name__", str(func)).strip("_")
            self.calls[-1].append(RecordedCall(name, self._path[-1] if self._path else "", _line(), values))
        return result


class ForwardChanges(TorchFunctionMode):
    """Finds the first operation of a loss that changes a parameter in place, or whether it requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        # A list, because a trial restores plain attributes of what a loss refers to.
        self.changed: list[str] = []
        """Parameters that change in place, and where."""
        self.unfrozen: list[str] = []
        """Parameters whose requires_grad is set, and where."""
        self._names: dict[int, str] = {}
        self._versions: list[tuple[Tensor, int]] = []

    def watched(self, task: Task) -> Task:
        """Return the task with a loss whose operations are watched."""
        loss = task.loss
        assert loss is not None

        def compute(model: nn.Module, batch: Any) -> Any:
            named = dict(model.named_parameters())
            self._names = {id(parameter): name for name, parameter in named.items()}
            self._versions = [(parameter, parameter._version) for parameter in named.values()]
            with self:
                return loss(model, batch)

        return task.replace(loss=compute)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            if func in _SETS_GRADIENT and id(args[0]) in self._names:
                self.unfrozen.append(f"{self._names[id(args[0])]} at {_line()}")
            moved = next((p for p, version in self._versions if p._version != version), None)
            if moved is None:
                moved = self._changed_as_data(func, args)
            if moved is not None:
                name = "an assignment" if func == _SETS_DATA else getattr(func, "__name__", str(func)).strip("_")
                self.changed.append(f"{self._names[id(moved)]} by {name} at {_line()}")
                self._versions = []
        return result

    def _changed_as_data(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
        """Return the parameter whose `data` a function sets or changes in place, which autograd does not count."""
        if not args or not isinstance(args[0], Tensor):
            return None
        if func == _SETS_DATA:
            return next((p for p, _ in self._versions if p is args[0]), None)
        name = getattr(func, "__name__", "")
        if not name.endswith("_") or name.endswith("__") or name in _CHANGES_NO_VALUES or not args[0].numel():
            return None
        place = _place(args[0])
        return next((p for p, _ in self._versions if place and _place(p) == place), None)


def _place(tensor: Tensor) -> int:
    """Return where a tensor's values are in memory; 0 for one without, such as a sparse or a meta tensor."""
    # torch.func passes wrappers without memory, of which only the innermost tensor has some.
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.data_ptr() if torch._C._has_storage(tensor) and not tensor.is_meta else 0


@dataclass
class Output:
    """A sample of what the first call of a module returned."""

    module: str
    """Its name and class, as `blocks.0.norm (LayerNorm)`."""
    line: str
    """The source line of its forward."""
    values: list[Tensor] = field(repr=False, default_factory=list)


class Outputs:
    """Records what each module of a network returned when it was first called, in order of completion."""

    def __init__(self, model: nn.Module, whole: Callable[[Any], Any]) -> None:
        self.kept: list[Output] = []
        self._seen: set[str] = set()
        self._whole = whole
        self._hooks = [part.register_forward_hook(self._keep(name)) for name, part in model.named_modules()]

    def _keep(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(part: nn.Module, _: Any, output: Any) -> None:
            if name in self._seen:
                return
            self._seen.add(name)
            with torch.no_grad():
                values = [_some(value.detach()) for value in tensors(self._whole(output)) if not value.is_meta]
            self.kept.append(Output(_named(name, part), _line_of(part), values))

        return keep

    def close(self) -> None:
        """Remove the hooks from the network."""
        for hook in self._hooks:
            hook.remove()


def first_other_output(whole: Sequence[Output], parts: Sequence[Output]) -> str:
    """Return the first module whose output differs, by name and line; "" if none does."""
    known = {output.module: output for output in parts}
    for output in whole:
        other = known.get(output.module)
        if other is None or len(other.values) != len(output.values):
            continue
        if not all(_are_close(a, b) for a, b in zip(output.values, other.values, strict=True)):
            return f"{output.module} at {output.line}" if output.line else output.module
    return ""


def _some(value: Tensor) -> Tensor:
    """Return at most a few thousand values of a tensor, evenly spread."""
    flat = value.flatten()
    return flat[:: max(1, flat.numel() // MOST_VALUES)].cpu().clone()


def _named(name: str, part: nn.Module) -> str:
    return f"{name or 'the network'} ({type(part).__name__})"


def _line_of(part: nn.Module) -> str:
    """Return the source line of a module's forward; "" for torch's own layers."""
    code = getattr(type(part).forward, "__code__", None)
    if code is None or type(part).__module__.startswith("torch."):
        return ""
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def first_difference(
    whole: Sequence[RecordedCall], parts: Sequence[Sequence[RecordedCall]], sizes: Sequence[int]
) -> str:
    """Return the first operation whose results on the parts do not combine to that of the whole; "" if all do."""
    for index, operation in enumerate(whole):
        others = [part[index] if index < len(part) else None for part in parts]
        if any(other is None or other.name != operation.name for other in others):
            return f"{operation}, which parts of the batch do not reach in this order,"
        columns = zip(operation.values, *(other.values for other in others if other is not None), strict=False)
        if not all(_combine(value, list(theirs), sizes) for value, *theirs in columns):
            return str(operation)
    return ""


def first_not_finite(operations: Sequence[RecordedCall]) -> str:
    """Return the first operation that returned NaN or infinity; "" if none did."""
    return next((str(operation) for operation in operations if not operation.is_finite), "")


def _combine(whole: Tensor, parts: list[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether concatenation, mean or sum of the parts gives the whole."""
    if whole.dtype == torch.bool or any(part.dim() != whole.dim() for part in parts):
        return whole.dtype == torch.bool
    joined = [dim for dim in range(whole.dim()) if sum(part.shape[dim] for part in parts) == whole.shape[dim]]
    if any(_are_close(whole, torch.cat(parts, dim)) for dim in joined if _fit(whole, parts, dim)):
        return True
    if any(part.shape != whole.shape for part in parts):
        # Parts that were padded to different lengths cannot be compared here.
        return bool(joined) and len(joined) == 1 and not _fit(whole, parts, joined[0])
    if all(_are_close(whole, part) for part in parts):
        return True
    stacked = torch.stack(parts).to(torch.complex128 if whole.is_complex() else torch.float64)
    weights = torch.tensor(sizes, dtype=torch.float64).view(-1, *[1] * whole.dim())
    return _are_close(whole, stacked.sum(0)) or _are_close(whole, (stacked * weights).sum(0) / sum(sizes))


def _fit(whole: Tensor, parts: list[Tensor], dim: int) -> bool:
    sizes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    return sizes == {(*whole.shape[:dim], *whole.shape[dim + 1 :])}


def _are_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.numel():
        return True
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = a.abs()[a.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True)


def _line() -> str:
    frame = innermost(traceback.extract_stack(limit=MAX_DEPTH))
    text = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"{Path(frame.filename).name}:{frame.lineno}" + (f" ({text})" if text else "")
