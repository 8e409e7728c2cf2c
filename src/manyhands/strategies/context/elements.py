"""Rules for operations that work on every element or along one dim: computed on each rank's own tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .exchange import ContextRanks
from .split_tensor import SequenceDim, SplitTensor, is_split, resplit, same_memory, whole, whole_shape


def _names(text: str) -> list[str]:
    return text.split()


BY_ELEMENT = _names("""
abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min clip clone conj copysign cos cosh deg2rad
detach digamma div divide eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac ge
greater greater_equal gt heaviside hypot i0 isclose isfinite isinf isnan isneginf isposinf ldexp le lerp less
less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
masked_fill maximum minimum mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal ones_like polygamma
positive pow rad2deg reciprocal relu remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub
subtract tan tanh true_divide trunc where xlogy zeros_like full_like empty_like bfloat16 bool byte char contiguous cpu
cuda double float half int long short celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid
mish relu6 selu silu softplus softshrink tanhshrink threshold __and__ __eq__ __ge__ __gt__ __invert__ __le__ __lt__
__ne__ __neg__ __or__ __pow__ __xor__ __rpow__ __abs__ __pos__ __add__ __radd__ __sub__ __mul__ __rmul__ __truediv__
__mod__ __lshift__ __rshift__
""")
"""Names of operations of which each element of the result depends on one element of each operand, broadcast."""
IN_PLACE = _names("""
__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__ __iand__ __ior__ __ixor__ __imod__ copy_ fill_ zero_
""")
KEPT_DIMS = _names("""
softmax log_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort softmin
""")
"""Operations along a dim, the second argument, that keep the shape."""
REDUCTIONS = _names("""
sum mean amax amin prod std var var_mean std_mean logsumexp all any argmax argmin median nanmean nansum
""")
SECOND_DIMS = ["topk", "kthvalue"]
"""Operations whose dim is the third argument, by default the last one."""


def wrapped(result: Any, place: SequenceDim, ranks: ContextRanks) -> Any:
    """Return a result with its tensors wrapped as parts of split ones."""
    if isinstance(result, Tensor):
        return SplitTensor.of(result, place, ranks)
    if isinstance(result, (list, tuple)):
        parts = [wrapped(part, place, ranks) for part in result]
        # Named tuples of torch take one sequence.
        return tuple(parts) if type(result) is tuple else type(result)(parts)
    return result


def broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the shape of an operation by element on tensors of these shapes.

    >>> broadcast([(4, 1, 3), (5, 1)])
    [4, 5, 3]
    """
    num_dims = max(map(len, shapes))
    padded = [[*[1] * (num_dims - len(shape)), *shape] for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)]


def reference(tensors: Sequence[Tensor], shape: Sequence[int]) -> SplitTensor | None:
    """Return the largest split tensor whose sequence is not broadcast to the given shape; the others follow it."""
    found: SplitTensor | None = None
    for tensor in tensors:
        if type(tensor) is not SplitTensor or tensor.place.size != shape[tensor.place.dim - len(whole_shape(tensor))]:
            continue
        if found is None or math.prod(whole_shape(tensor)) > math.prod(whole_shape(found)):
            found = tensor
    return found


def aligned(tensor: Any, place: SequenceDim, num_dims: int, ranks: ContextRanks) -> Any:
    """Return this rank's part of an operand that is broadcast to a result of `num_dims` dims, split at a place."""
    if not isinstance(tensor, Tensor):
        return tensor
    shape, from_end = whole_shape(tensor), place.dim - num_dims
    if len(shape) < -from_end or (shape[from_end] == 1 and place.size != 1):
        return whole(tensor)
    if place.size == 1 and not is_split(tensor):
        return tensor
    return resplit(tensor, place.at(len(shape) + from_end), ranks)


def by_element(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute on this rank's tokens: whole operands are split like the result, others are gathered if necessary."""
    tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
    shape = broadcast([whole_shape(tensor) for tensor in tensors])
    found = reference(tensors, shape)
    is_search = getattr(func, "__name__", "") == "where" and len(args) == 1
    if found is None or "out" in kwargs or is_search:
        return NotImplemented
    place = found.place.at(found.place.dim + len(shape) - len(whole_shape(found)))
    local = [aligned(arg, place, len(shape), found.ranks) for arg in args]
    settings = {name: aligned(value, place, len(shape), found.ranks) for name, value in kwargs.items()}
    result = func(*local, **settings)
    if found.is_copy and isinstance(result, Tensor) and same_memory(result, found.local):
        return SplitTensor.of(result, place, found.ranks, is_copy=True)
    return wrapped(result, place, found.ranks)


def in_place(func: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Change this rank's tokens of a split tensor; return NotImplemented if the change would be lost in a copy."""
    if type(target) is not SplitTensor or target.is_copy:
        return NotImplemented
    place, num_dims, ranks = target.place, len(whole_shape(target)), target.ranks
    local = [aligned(arg, place, num_dims, ranks) for arg in args]
    settings = {name: aligned(value, place, num_dims, ranks) for name, value in kwargs.items()}
    func(target.local, *local, **settings)
    return target


def converted(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `to` and `type_as`, whose other tensor only gives a dtype and a device."""
    local = [arg.local if type(arg) is SplitTensor else arg for arg in args]
    settings = {name: value.local if type(value) is SplitTensor else value for name, value in kwargs.items()}
    if type(tensor) is not SplitTensor:
        return func(tensor, *local, **settings)
    made = func(tensor.local, *local, **settings)
    if not isinstance(made, Tensor):
        return made
    return SplitTensor.of(made, tensor.place, tensor.ranks, is_copy=tensor.is_copy and made is tensor.local)


def created(func: Any, tensor: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `new_zeros` and the like, whose tensor only names a dtype and a device."""
    return func(tensor.local, *args, **kwargs)


def along(position: int, default: Any) -> Callable[..., Any]:
    """Return the rule of operations along dims, the argument at a position."""

    def rule(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is not SplitTensor:
            return NotImplemented
        given = kwargs.get("dim", kwargs.get("axis", args[position - 1] if len(args) >= position else default))
        if isinstance(given, Tensor):
            return by_element(func, input, *args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented
        num_dims = len(whole_shape(input))
        dims = dims_of(given, num_dims)
        if dims is None:
            return NotImplemented
        if input.place.dim in dims:
            name = getattr(func, "__name__", "")
            return summed(name, input, dims, args, kwargs) if name in ("sum", "mean") else NotImplemented
        place = input.place
        result = func(input.local, *args, **kwargs)
        first = next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if first.dim() != num_dims:
            place = place.at(place.dim - sum(dim < place.dim for dim in dims))
        return wrapped(result, place, input.ranks)

    return rule


def dims_of(given: Any, num_dims: int) -> list[int] | None:
    """Return non-negative dims: all of them for None; return None if `given` does not name dims."""
    if given is None or given == ():
        return list(range(num_dims))
    dims = [given] if isinstance(given, int) else list(given) if isinstance(given, (list, tuple)) else None
    if dims is None or not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims):
        return None
    return [dim % num_dims for dim in dims]


def summed(name: str, input: SplitTensor, dims: Sequence[int], args: Any, kwargs: Any) -> Any:
    """Compute a sum or a mean over the sequence as a sum over the ranks."""
    keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    dtype = kwargs.get("dtype")
    local = input.local if dtype is None else input.local.to(dtype)
    exact = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    total = input.ranks.sum(exact.sum(list(dims), keepdim=bool(keepdim)))
    if name == "sum":
        return total.to(local.dtype) if exact is not local else total
    count = math.prod(whole_shape(input)[dim] for dim in dims)
    return (total / count).to(local.dtype)


def layer_norm(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a norm over the last dims, if they do not contain the sequence."""
    sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if type(input) is not SplitTensor or input.place.dim >= len(whole_shape(input)) - len(sizes):
        return NotImplemented
    if any(is_split(value) for value in (*args, *kwargs.values())):
        return NotImplemented
    return SplitTensor.of(func(input.local, normalized_shape, *args, **kwargs), input.place, input.ranks)


def glu(func: Any, input: Any, dim: int = -1) -> Any:
    """Compute a gated linear unit along a dim that is not the sequence."""
    if type(input) is not SplitTensor or dim % len(whole_shape(input)) == input.place.dim:
        return NotImplemented
    return SplitTensor.of(func(input.local, dim), input.place, input.ranks)


def dropout(func: Any, input: Any, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Draw different random numbers on every rank; afterwards all ranks continue with the same random state."""
    if type(input) is not SplitTensor:
        return NotImplemented
    training = kwargs.pop("train", training)
    if not training or p == 0.0:
        return input
    is_changed = func.__name__.endswith("_")
    if is_changed and input.is_copy:
        return NotImplemented
    with drawing(input.ranks, input.local.device):
        made = func(input.local, p, True, *args, **kwargs)
    return input if is_changed else SplitTensor.of(made, input.place, input.ranks)


@contextmanager
def drawing(ranks: ContextRanks, device: torch.device) -> Iterator[None]:
    """Draw different random numbers on each rank inside this context; afterwards generators have the same state."""
    seed = int(torch.empty((), dtype=torch.int64).random_()) ^ (ranks.rank + 1) * 0x9E3779B97F4A7C1
    is_cpu = device.type == "cpu"
    devices = [] if is_cpu else [torch.get_device_module(device.type).current_device()]
    with torch.random.fork_rng(devices, device_type="cuda" if is_cpu else device.type):
        torch.manual_seed(seed % 2**63)
        yield


def embedding(func: Any, weight: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    """Look up this rank's tokens."""
    if type(indices) is not SplitTensor or is_split(weight):
        return NotImplemented
    return SplitTensor.of(func(weight, indices.local, *args, **kwargs), indices.place, indices.ranks)


def one_hot(func: Any, input: Any, num_classes: int = -1) -> Any:
    """Encode this rank's tokens, if the number of classes does not depend on the others."""
    if num_classes < 0 or type(input) is not SplitTensor:
        return NotImplemented
    return SplitTensor.of(func(input.local, num_classes), input.place, input.ranks)


def prelu(func: Any, input: Any, weight: Any) -> Any:
    """Compute a learned slope by channel, the second dim."""
    if type(input) is not SplitTensor or is_split(weight) or (input.place.dim == 1 and weight.numel() > 1):
        return NotImplemented
    return SplitTensor.of(func(input.local, weight), input.place, input.ranks)
