"""Rules for operations that change shapes or choose items: views of this rank's tokens, without communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from .elements import dims_of, wrapped
from .partition import SequencePartition
from .split_tensor import SequenceDim, SplitTensor, is_split, reshaped, resplit, same_memory, take, whole_shape


def _sizes(given: tuple[Any, ...]) -> list[int] | None:
    """Return sizes that are given as arguments or as one sequence."""
    sizes = list(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else list(given)
    return sizes if sizes and all(isinstance(size, int) for size in sizes) else None


def view(func: Any, input: Any, *shape: Any, **kwargs: Any) -> Any:
    """Reshape, if the sequence stays within one dim."""
    sizes = _sizes(shape or tuple(kwargs.values()))
    if type(input) is not SplitTensor or sizes is None:
        return NotImplemented
    before = whole_shape(input)
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = math.prod(before) // max(1, -math.prod(sizes))
    if math.prod(sizes) != math.prod(before):
        raise RuntimeError(f"shape {sizes} is invalid for a tensor of shape {list(before)}")
    place = reshaped(input.place, before, sizes)
    if place is None:
        return NotImplemented
    sizes[place.dim] = place.outer * place.partition.counts[input.ranks.rank] * place.inner
    # A view of the whole may need a copy of a part, whose memory has other strides.
    local = input.local.reshape(sizes)
    is_copy = input.is_copy or (func.__name__ == "view" and not same_memory(local, input.local))
    return SplitTensor.of(local, place, input.ranks, is_copy=is_copy)


def view_as(func: Any, input: Any, other: Tensor) -> Any:
    """Reshape to the shape of another tensor."""
    return input.reshape(list(whole_shape(other)))


def flatten(func: Any, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Join adjacent dims."""
    if type(input) is not SplitTensor:
        return NotImplemented
    shape = list(whole_shape(input))
    start, end = start_dim % len(shape), end_dim % len(shape)
    return input.reshape([*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def unflatten(func: Any, input: Any, dim: int, sizes: Any) -> Any:
    """Split a dim into several."""
    if type(input) is not SplitTensor:
        return NotImplemented
    shape, found = list(whole_shape(input)), list(sizes)
    dim %= len(shape)
    if found.count(-1) == 1:
        found[found.index(-1)] = shape[dim] // max(1, -math.prod(found))
    return input.reshape([*shape[:dim], *found, *shape[dim + 1 :]])


def _moved(input: SplitTensor, local: Tensor, dim: int) -> SplitTensor:
    return SplitTensor.of(local, input.place.at(dim), input.ranks, is_copy=input.is_copy)


def permute(func: Any, input: Any, *dims: Any) -> Any:
    """Reorder dims."""
    order = _sizes(dims)
    if type(input) is not SplitTensor or order is None:
        return NotImplemented
    order = [dim % len(order) for dim in order]
    return _moved(input, input.local.permute(order), order.index(input.place.dim))


def transpose(func: Any, input: Any, first: int = -2, second: int = -1) -> Any:
    """Exchange two dims."""
    if type(input) is not SplitTensor:
        return NotImplemented
    order = list(range(len(whole_shape(input))))
    order[first], order[second] = order[second], order[first]
    return permute(func, input, order)


def reverse_dims(func: Any, input: SplitTensor) -> Any:
    """Reverse the order of all dims."""
    return permute(func, input, list(reversed(range(len(whole_shape(input))))))


def movedim(func: Any, input: Any, source: Any, destination: Any) -> Any:
    """Move dims to other positions."""
    if type(input) is not SplitTensor:
        return NotImplemented
    num_dims = len(whole_shape(input))
    sources, targets = dims_of(source, num_dims), dims_of(destination, num_dims)
    if sources is None or targets is None:
        return NotImplemented
    rest = iter(dim for dim in range(num_dims) if dim not in sources)
    order = [sources[targets.index(dim)] if dim in targets else next(rest) for dim in range(num_dims)]
    return permute(func, input, order)


def unsqueeze(func: Any, input: Any, dim: int) -> Any:
    """Insert a dim of size 1."""
    if type(input) is not SplitTensor:
        return NotImplemented
    dim %= len(whole_shape(input)) + 1
    return _moved(input, input.local.unsqueeze(dim), input.place.dim + (dim <= input.place.dim))


def squeeze(func: Any, input: Any, dim: Any = None) -> Any:
    """Remove dims of size 1, unless the sequence is there."""
    if type(input) is not SplitTensor:
        return NotImplemented
    shape = whole_shape(input)
    dims = dims_of(dim, len(shape))
    if dims is None:
        return NotImplemented
    gone = [each for each in dims if shape[each] == 1]
    if input.place.dim in gone:
        return NotImplemented
    local = input.local.squeeze(gone) if gone else input.local
    return _moved(input, local, input.place.dim - sum(each < input.place.dim for each in gone))


def expand(func: Any, input: Any, *sizes: Any, **kwargs: Any) -> Any:
    """Repeat dims of size 1, unless the sequence is there."""
    wanted = _sizes(sizes or tuple(kwargs.values()))
    if type(input) is not SplitTensor or wanted is None:
        return NotImplemented
    place = input.place.at(input.place.dim + len(wanted) - len(whole_shape(input)))
    if wanted[place.dim] not in (-1, place.size):
        return NotImplemented
    wanted[place.dim] = -1
    return _moved(input, input.local.expand(wanted), place.dim)


def expand_as(func: Any, input: Any, other: Tensor) -> Any:
    """Repeat dims of size 1 to the shape of another tensor."""
    return input.expand(list(whole_shape(other)))


def repeat(func: Any, input: Any, *counts: Any) -> Any:
    """Repeat the tensor along dims other than the sequence."""
    times = _sizes(counts)
    if type(input) is not SplitTensor or times is None:
        return NotImplemented
    place = input.place.at(input.place.dim + len(times) - len(whole_shape(input)))
    if times[place.dim] != 1:
        return NotImplemented
    return SplitTensor.of(input.local.repeat(times), place, input.ranks)


def repeat_interleave(func: Any, input: Any, repeats: Any, dim: int | None = None, **kwargs: Any) -> Any:
    """Repeat every item of a dim."""
    if type(input) is not SplitTensor or not isinstance(repeats, int) or dim is None or kwargs:
        return NotImplemented
    place = input.place
    if dim % len(whole_shape(input)) == place.dim:
        place = SequenceDim(place.dim, place.partition, place.outer, place.inner * repeats)
    return SplitTensor.of(input.local.repeat_interleave(repeats, dim), place, input.ranks)


def getitem(func: Any, input: Any, index: Any) -> Any:
    """Choose by integers, slices, None and an ellipsis; other indices only if the sequence comes before them whole."""
    if type(input) is not SplitTensor:
        return NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    kinds = (int, slice, EllipsisType, type(None))
    if not all(isinstance(item, kinds) and not isinstance(item, bool) for item in items):
        return NotImplemented
    shape, place = whole_shape(input), input.place
    used = sum(isinstance(item, (int, slice)) for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (len(shape) - used)
    # Where the sequence's own index is among the others, of which None has no dim.
    number = [at for at, item in enumerate(items) if item is not None][place.dim]
    found = sum(item is None or isinstance(item, slice) for item in items[:number])
    item, local, dim = items[number], list(items), place.dim
    if isinstance(item, int):
        return _one(input, items, number)
    start, stop, step = item.indices(shape[dim])
    if (start, stop, step) == (0, shape[dim], 1):
        return SplitTensor.of(input.local[tuple(local)], place.at(found), input.ranks, is_copy=input.is_copy)
    if step != 1 or not place.is_plain:
        return NotImplemented
    stop = max(start, stop)
    local[number] = place.partition.local_slice(input.ranks.rank, start, stop)
    kept = SequenceDim(found, place.partition.sliced(start, stop))
    return SplitTensor.of(input.local[tuple(local)], kept, input.ranks, is_copy=input.is_copy)


def _one(input: SplitTensor, items: Sequence[Any], number: int) -> Any:
    """Return one item of the sequence on all ranks: the rank that has it adds it to the zeros of the others."""
    place, ranks = input.place, input.ranks
    if not place.is_plain or not (input.local.is_floating_point() or input.local.dtype in (torch.int64, torch.int32)):
        return NotImplemented
    at = range(place.size)[items[number]]
    local = list(items)
    local[number] = place.partition.local_slice(ranks.rank, at, at + 1)
    held = input.local[tuple(local)]
    exact = held.float() if held.dtype in (torch.float16, torch.bfloat16) else held
    dim = sum(item is None or isinstance(item, slice) for item in items[:number])
    return ranks.sum(exact.sum(dim, dtype=exact.dtype)).to(held.dtype)


def narrow(func: Any, input: Any, dim: int, start: int, length: int) -> Any:
    """Choose consecutive items of a dim."""
    if type(input) is not SplitTensor or not isinstance(start, int):
        return NotImplemented
    start %= max(1, whole_shape(input)[dim])
    return input[_index(input, dim, slice(start, start + length))]


def select(func: Any, input: Any, dim: int, index: Any) -> Any:
    """Choose one item of a dim."""
    if type(input) is not SplitTensor or not isinstance(index, int):
        return NotImplemented
    return input[_index(input, dim, index)]


def _index(input: SplitTensor, dim: int, item: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * (dim % len(whole_shape(input))), item)


def split_sections(func: Any, input: Any, size: Any = 1, dim: int = 0, **kwargs: Any) -> Any:
    """Split a tensor into sections."""
    if type(input) is not SplitTensor:
        return NotImplemented
    size = kwargs.get("split_size", kwargs.get("split_size_or_sections", kwargs.get("chunks", size)))
    count = whole_shape(input)[dim]
    if func.__name__ == "chunk":
        size = max(1, -(-count // size))
    sizes = [min(size, count - at) for at in range(0, count, size)] if isinstance(size, int) else list(size)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(narrow(func, input, dim, start, length) if length else input[_index(input, dim, slice(start, start))]
                 for start, length in zip(starts, sizes, strict=True))  # fmt: skip


def unbind(func: Any, input: Any, dim: int = 0) -> Any:
    """Return the items of a dim."""
    if type(input) is not SplitTensor or dim % len(whole_shape(input)) == input.place.dim:
        return NotImplemented
    return tuple(select(func, input, dim, number) for number in range(whole_shape(input)[dim]))


def cat(func: Any, tensors: Any, dim: Any = 0, **kwargs: Any) -> Any:
    """Concatenate; along the sequence, each rank concatenates its own parts without communication."""
    dim = kwargs.pop("axis", dim)
    # torch skips empty tensors of one dim, with which key/value caches start.
    filled = [tensor for tensor in tensors if whole_shape(tensor) != (0,)]
    found = next((tensor for tensor in filled if type(tensor) is SplitTensor), None)
    if found is None or kwargs:
        return NotImplemented
    place, ranks, num_dims = found.place, found.ranks, len(whole_shape(found))
    if dim % num_dims != place.dim:
        local = [resplit(tensor, place, ranks) for tensor in filled]
        return SplitTensor.of(torch.cat(local, dim), place, ranks)
    if not all(not is_split(t) or (t.place.is_plain and t.place.dim == place.dim) for t in filled):
        return NotImplemented
    count = len(place.partition.ranges)
    places = [
        tensor.place
        if type(tensor) is SplitTensor
        else SequenceDim(place.dim, SequencePartition.balanced(tensor.shape[place.dim], count))
        for tensor in filled
    ]
    local = [
        tensor.local if type(tensor) is SplitTensor else take(tensor, each, ranks)
        for tensor, each in zip(filled, places, strict=True)
    ]
    joined = SequencePartition.concatenated([each.partition for each in places])
    return SplitTensor.of(torch.cat(local, place.dim), SequenceDim(place.dim, joined), ranks)


def stack(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Concatenate along a new dim."""
    found = next((tensor for tensor in tensors if type(tensor) is SplitTensor), None)
    if found is None:
        return NotImplemented
    place, ranks = found.place, found.ranks
    dim %= len(whole_shape(found)) + 1
    local = torch.stack([resplit(tensor, place, ranks) for tensor in tensors], dim)
    return SplitTensor.of(local, place.at(place.dim + (dim <= place.dim)), ranks)


def pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """Pad dims other than the sequence."""
    if type(input) is not SplitTensor:
        return NotImplemented
    from_end = len(whole_shape(input)) - 1 - input.place.dim
    around = list(pad)[2 * from_end : 2 * from_end + 2]
    if mode != "constant" or any(around) or not all(isinstance(each, int) for each in pad):
        return NotImplemented
    return SplitTensor.of(func(input.local, pad, mode, value), input.place, input.ranks)


def gather(func: Any, input: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Any:
    """Choose items of a dim by an index of the same shape in all others."""
    found = input if is_split(input) else index
    if type(found) is not SplitTensor:
        return NotImplemented
    shapes = [whole_shape(tensor) for tensor in (input, index)]
    place, ranks = found.place, found.ranks
    dim %= len(shapes[0])
    if dim == place.dim or any(shape[place.dim] != place.size for shape in shapes) or args or kwargs:
        return NotImplemented
    return SplitTensor.of(func(resplit(input, place, ranks), dim, resplit(index, place, ranks)), place, ranks)


def scatter(func: Any, input: Any, dim: int, index: Any, source: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Write items of a dim, other than the sequence, at an index of the same shape in all others."""
    if type(input) is not SplitTensor or args or not isinstance(dim, int):
        return NotImplemented
    place, ranks, is_changed = input.place, input.ranks, func.__name__.endswith("_")
    source = kwargs.pop("src", kwargs.pop("value", source))
    tensors = [tensor for tensor in (index, source) if isinstance(tensor, Tensor) and whole_shape(tensor)]
    same = all(whole_shape(tensor)[place.dim] == place.size for tensor in tensors)
    if dim % len(whole_shape(input)) == place.dim or not same or kwargs or (is_changed and input.is_copy):
        return NotImplemented
    given = [resplit(t, place, ranks) if isinstance(t, Tensor) and whole_shape(t) else t for t in (index, source)]
    made = func(input.local, dim, *given)
    return input if is_changed else SplitTensor.of(made, place, ranks)


def index_select(func: Any, input: Any, dim: int, index: Any) -> Any:
    """Choose items of a dim other than the sequence."""
    if type(input) is not SplitTensor or is_split(index) or dim % len(whole_shape(input)) == input.place.dim:
        return NotImplemented
    return wrapped(func(input.local, dim, index), input.place, input.ranks)
