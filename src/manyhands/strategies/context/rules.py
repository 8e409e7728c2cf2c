"""Rules: how each operation on split tensors is computed.

An operation with a rule runs on this rank's tokens. One without a rule gets whole tensors on every rank, which is
always right and is reported before training; what cannot even be computed so is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...core import StrategyError, without_own_check
from ...distributed import calling_line
from . import elements, losses, products, shapes
from .attention import attention
from .findings import note_gathered
from .split_tensor import SplitTensor, all_whole, is_split, take

_COMPOSED = ("torch.nn.functional", "torch.functional", "torch._tensor")
"""Modules of functions that are written in Python, and are computed as the operations that they call."""
_REFUSED = {
    "register_hook": "a hook on a tensor gets a part of its gradient",
    "retain_grad": "a tensor's gradient is split as the tensor is",
    "register_post_accumulate_grad_hook": "a hook on a tensor gets a part of its gradient",
    "backward": "a backward within the loss, or within another backward, computes a part of the gradient",
    "grad": "torch.autograd.grad within the loss, or within a backward, computes a part of the gradient",
    "__deepcopy__": "a split tensor cannot be copied with its history",
    "__reduce_ex__": "a split tensor cannot be sent",
    "data_ptr": "a split tensor has no memory of its own",
    "untyped_storage": "a split tensor has no memory of its own",
    "storage": "a split tensor has no memory of its own",
    "set_": "a split tensor has no memory of its own",
    "resize_": "a split tensor has no memory of its own",
}
_METADATA = (
    "size", "dim", "numel", "nelement", "ndimension", "stride", "is_floating_point", "is_complex", "is_signed",
    "element_size", "get_device", "is_contiguous", "is_same_size", "is_inference", "storage_offset", "is_conj",
    "is_neg", "__len__", "__hash__", "__dir__",
)  # fmt: skip


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation with at least one split tensor."""
    rule = _table().get(func)
    if rule is not None:
        result = rule(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return _attribute(func, name, args)
    if name in _REFUSED:
        raise _refusal(_REFUSED[name], name)
    if isinstance(func, FunctionType) and func.__module__ in _COMPOSED:
        return _composed(func)(*args, **kwargs)
    return _on_whole(func, name, args, kwargs)


def _on_whole(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on whole tensors, unless it changes a split one."""
    changes = name in ("__setitem__", *elements.IN_PLACE) or (name.endswith("_") and not name.endswith("__"))
    target = args[0] if changes and args else None
    if any(map(is_split, tree_leaves(kwargs.get("out")))) or (isinstance(target, SplitTensor) and target.is_copy):
        raise _refusal("an operation must not change a copy of a part of the tokens in place", name)
    if isinstance(target, SplitTensor):
        note_gathered(name)
        changed = all_whole(target).clone()
        func(changed, *all_whole(args[1:]), **all_whole(kwargs))
        target.local.copy_(take(changed, target.place, target.ranks))
        return target
    note_gathered(name)
    return func(*all_whole(args), **all_whole(kwargs))


def _refusal(rule: str, name: str) -> StrategyError:
    return StrategyError(
        f"under context parallelism {rule}",
        got=f"{name}, in {calling_line()}",
        remedy="use mh.Mirrored() or mh.Sharded(), which compute whole sequences",
    )


def refuse_backward(func: Any) -> None:
    """Raise for a loss that computes gradients itself, which would be those of this rank's tokens."""
    name = func.__name__
    raise _refusal(_REFUSED[name], name)


def _attribute(func: Any, kind: str, args: tuple[Any, ...]) -> Any:
    """Read or set an attribute of a split tensor."""
    tensor, name = args[0], func.__self__.__name__
    if not isinstance(tensor, SplitTensor):
        raise _refusal("an attribute must not be set to a split tensor", name)
    if kind == "__set__":
        if name == "requires_grad" and tensor.local.is_leaf:
            tensor.local.requires_grad = args[1]
            return None
        raise _refusal("an attribute of a split tensor must not be set", name)
    if name in ("requires_grad", "grad_fn", "is_leaf", "output_nr"):
        return getattr(tensor.local, name)
    if name in ("T", "mT", "H", "mH"):
        if name.endswith("H") and tensor.local.is_complex():
            return _on_whole(func, name, args, {})
        return shapes.transpose(func, tensor) if name.startswith("m") else shapes.reverse_dims(func, tensor)
    if name == "data":
        return tensor.detach()
    if name in ("real", "imag", "grad", "_grad"):
        return _on_whole(func, name, args, {}) if "grad" not in name else None
    return _of_wrapper(func, *args)


def _of_wrapper(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Read metadata, which are those of the whole tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _set_item(func: Any, target: Any, index: Any, value: Any) -> Any:
    """Assign to this rank's tokens, if the index leaves the sequence whole."""
    if type(target) is not SplitTensor or target.is_copy or any(map(is_split, tree_leaves(index))):
        return NotImplemented
    chosen = shapes.getitem(func, target, index)
    if chosen is NotImplemented or type(chosen) is not SplitTensor:
        return NotImplemented
    if isinstance(value, Tensor):
        return elements.in_place(Tensor.copy_, chosen, value)
    chosen.local.fill_(value)
    return None


def _requires_grad(func: Any, tensor: SplitTensor, requires_grad: bool = True) -> Any:
    tensor.local.requires_grad_(requires_grad)
    return tensor


@functools.cache
def _composed(func: Any) -> Callable[..., Any]:
    return without_own_check(func)


def _functions(names: Iterable[str]) -> list[Any]:
    """Return the functions of torch with these names."""
    holders = (torch, Tensor, F, torch._C._nn, torch._C._VariableFunctions, torch.special, torch.linalg)
    found = [getattr(holder, name, None) for holder in holders for name in names]
    return [function for function in found if callable(function)]


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    """Return the rule of every function that has one."""
    names: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(elements.BY_ELEMENT, elements.by_element),
        **dict.fromkeys([f"{name}_" for name in elements.BY_ELEMENT if "__" not in name], elements.in_place),
        **dict.fromkeys(elements.IN_PLACE, elements.in_place),
        **dict.fromkeys(elements.KEPT_DIMS, elements.along(1, -1)),
        **dict.fromkeys((*elements.REDUCTIONS, "max", "min"), elements.along(1, None)),
        **dict.fromkeys(elements.SECOND_DIMS, elements.along(2, -1)),
        "vector_norm": elements.along(2, None),
        **dict.fromkeys(("to", "type_as", "type"), elements.converted),
        **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"), elements.created),
        **dict.fromkeys(("layer_norm", "rms_norm"), elements.layer_norm),
        "glu": elements.glu,
        **dict.fromkeys(("dropout", "dropout_"), elements.dropout),
        "embedding": elements.embedding,
        "one_hot": elements.one_hot,
        "prelu": elements.prelu,
        **dict.fromkeys(("view", "reshape"), shapes.view),
        **dict.fromkeys(("view_as", "reshape_as"), shapes.view_as),
        "flatten": shapes.flatten,
        "unflatten": shapes.unflatten,
        "permute": shapes.permute,
        **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t"), shapes.transpose),
        **dict.fromkeys(("movedim", "moveaxis"), shapes.movedim),
        "unsqueeze": shapes.unsqueeze,
        "squeeze": shapes.squeeze,
        "expand": shapes.expand,
        "expand_as": shapes.expand_as,
        "repeat": shapes.repeat,
        "repeat_interleave": shapes.repeat_interleave,
        "__getitem__": shapes.getitem,
        "__setitem__": _set_item,
        "narrow": shapes.narrow,
        "select": shapes.select,
        **dict.fromkeys(("split", "split_with_sizes", "chunk"), shapes.split_sections),
        "unbind": shapes.unbind,
        **dict.fromkeys(("cat", "concat", "concatenate"), shapes.cat),
        "stack": shapes.stack,
        "pad": shapes.pad,
        "gather": shapes.gather,
        **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_"), shapes.scatter),
        "index_select": shapes.index_select,
        "linear": products.linear,
        **dict.fromkeys(("matmul", "bmm", "mm", "__matmul__"), products.matmul),
        "__rmatmul__": products.reversed_matmul,
        **dict.fromkeys(("addmm", "baddbmm"), products.added_product_method),
        "einsum": products.einsum,
        "scaled_dot_product_attention": attention,
        "requires_grad_": _requires_grad,
        **dict.fromkeys(_METADATA, _of_wrapper),
    }
    found = {function: rule for name, rule in names.items() for function in _functions([name])}
    # Those written in Python are computed as the operations that they call, whose signatures the rules have.
    written = [f for f in found if isinstance(f, FunctionType) and f.__module__ == F.__name__]
    for function in written:
        del found[function]
    found.update(losses.LOSSES)
    return found


SplitTensor.rule = staticmethod(dispatch)
