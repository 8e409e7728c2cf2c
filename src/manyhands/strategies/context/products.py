"""Rules for matrix products: rows of tokens stay where they are, and the other operand is gathered if it is split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .elements import aligned, wrapped
from .exchange import ContextRanks
from .findings import count_attention
from .split_tensor import SequenceDim, SplitTensor, is_split, resplit, whole, whole_shape


def linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    """Apply a matrix to this rank's tokens."""
    if type(input) is not SplitTensor or is_split(weight) or is_split(bias):
        return NotImplemented
    if input.place.dim == len(whole_shape(input)) - 1:
        return NotImplemented
    return SplitTensor.of(func(input.local, weight, bias), input.place, input.ranks)


def _role(tensor: Tensor, *, is_left: bool) -> str:
    """Return what the sequence is in a matrix product: batch, a row or column of the result, or the inner dim."""
    if type(tensor) is not SplitTensor:
        return ""
    from_end = tensor.place.dim - len(whole_shape(tensor))
    if from_end < -2:
        return "batch"
    return "inner" if (from_end == -1) == is_left else "outer"


def _operands(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, SequenceDim | None, ContextRanks]:
    """Return the local operands of a matrix product, and where the sequence is in the result; None for a sum."""
    roles = _role(left, is_left=True), _role(right, is_left=False)
    num_dims = max(len(whole_shape(left)), len(whole_shape(right)))
    chosen = _chosen(left, right, roles)
    assert isinstance(chosen, SplitTensor)
    place, ranks = chosen.place, chosen.ranks
    from_end = place.dim - len(whole_shape(chosen))
    role = roles[0] if chosen is left else roles[1]
    if role == "batch":
        at = place.at(num_dims + from_end)
        return aligned(left, at, num_dims, ranks), aligned(right, at, num_dims, ranks), at, ranks
    if any(
        roles[number] in ("outer", "inner") and is_split(t) for number, t in ((0, left), (1, right)) if t is not chosen
    ):
        # Queries and keys, weights and values, or sums over the sequence.
        count_attention()
    if role == "outer":
        other = whole(right if chosen is left else left)
        operands = (chosen.local, other) if chosen is left else (other, chosen.local)
        return *operands, place.at(num_dims + from_end), ranks
    first = resplit(left, place.at(len(whole_shape(left)) - 1), ranks)
    second = resplit(right, place.at(len(whole_shape(right)) - 2), ranks)
    return first, second, None, ranks


def _chosen(left: Tensor, right: Tensor, roles: tuple[str, str]) -> Tensor:
    """Return the operand whose split the result keeps: a batch dim, else rows, else columns, else the inner dim."""
    order = [("batch", left, 0), ("batch", right, 1), ("outer", left, 0), ("outer", right, 1)]
    for role, tensor, number in order:
        if roles[number] == role and not (role == "batch" and _is_broadcast(tensor, left, right)):
            return tensor
    return left if roles[0] == "inner" else right


def _is_broadcast(tensor: Any, left: Tensor, right: Tensor) -> bool:
    """Return whether the split batch dim of an operand is broadcast to a larger one."""
    other = whole_shape(right if tensor is left else left)
    from_end = tensor.place.dim - len(whole_shape(tensor))
    return bool(len(other) >= -from_end and tensor.place.size == 1 != other[from_end])


def _can_multiply(left: Any, right: Any) -> bool:
    return all(isinstance(t, Tensor) and len(whole_shape(t)) >= 2 for t in (left, right)) and not any(
        type(t) is SplitTensor and _is_broadcast(t, left, right) and _role(t, is_left=t is left) == "batch"
        for t in (left, right)
    )


def matmul(func: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Multiply matrices."""
    if kwargs:
        return NotImplemented
    if type(left) is SplitTensor and isinstance(right, Tensor) and len(whole_shape(right)) == 1:
        is_inner = left.place.dim == len(whole_shape(left)) - 1
        if is_inner or is_split(right):
            return NotImplemented
        return SplitTensor.of(func(left.local, right), left.place, left.ranks)
    if not _can_multiply(left, right):
        return NotImplemented
    first, second, place, ranks = _operands(left, right)
    product = func(first, second)
    return ranks.sum(product) if place is None else SplitTensor.of(product, place, ranks)


def reversed_matmul(func: Any, right: Any, left: Any) -> Any:
    """Compute `left @ right` for `__rmatmul__`."""
    return matmul(torch.matmul, left, right)


def added_product(func: Any, input: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Multiply matrices and add a tensor, as `addmm` and `baddbmm` do."""
    if not _can_multiply(left, right) or not (is_split(left) or is_split(right)) or "out" in kwargs:
        return NotImplemented
    first, second, place, ranks = _operands(left, right)
    if place is None:
        return NotImplemented
    num_dims = max(len(whole_shape(left)), len(whole_shape(right)))
    added = aligned(input, place, num_dims, ranks)
    return wrapped(func(added, first, second, **kwargs), place, ranks)


def added_product_method(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute `added_product` where the operands have the names of torch's arguments."""
    names = ("batch1", "batch2") if "bmm" in func.__name__ else ("mat1", "mat2")
    given = [*args, *(kwargs.pop(name) for name in names[len(args) :] if name in kwargs)]
    return added_product(func, input, *given, **kwargs) if len(given) == 2 else NotImplemented


def einsum(func: Any, equation: Any, *operands: Any) -> Any:
    """Compute an einsum on one split index; the sum over the ranks if the index is summed over."""
    given = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return NotImplemented
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    splits = [(term, t) for term, t in zip(terms, given, strict=True) if type(t) is SplitTensor]
    candidates = [(term[t.place.dim], t) for term, t in splits if len(set(term)) == len(term)]
    if not candidates or len(set(result)) != len(result) or any(len(set(term)) != len(term) for term in terms):
        return NotImplemented
    # An index that is in the result needs no sum over the ranks.
    letter, found = next((pair for pair in candidates if pair[0] in result), candidates[0])
    place, ranks = found.place, found.ranks
    if len(splits) > 1:
        count_attention()
    local = [
        resplit(tensor, place.at(term.index(letter)), ranks) if letter in term else whole(tensor)
        for term, tensor in zip(terms, given, strict=True)
    ]
    product = torch.einsum(equation, *local)
    return wrapped(product, place.at(result.index(letter)), ranks) if letter in result else ranks.sum(product)
