"""The operators that a stored program may use: those of a closed list, with arguments that do not change the model.

This is the first of two layers of protection: a program cannot call a kernel that does not check its arguments. The
second is the sandboxed process of a serving replica. Only this file uses private attributes of torch, because an
operator's schema has no public interface.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core import ArchiveError
from .operator_list import ALLOWED

ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "floordiv",
    "truediv",
    "mod",
    "neg",
    "pow",
    "and_",
    "or_",
    "not_",
    "getitem",
)
COMPARISONS = ("lt", "le", "eq", "ne", "ge", "gt")
PYTHON: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in (*ARITHMETIC, *COMPARISONS)},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int", "sym_ite", "sym_sum")
        if hasattr(torch, name)
    },
}
"""Functions that are not torch operators, by stored name: arithmetic on sizes, and choosing one of several outputs."""

PORTABLE = {
    # A traced view depends on the strides of the traced device; another device may lay results out differently.
    "aten.view.default": "aten.reshape.default",
    # A program must not read uninitialized memory, which may contain data of other requests.
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
"""Operators of a traced network, and the operators that an export stores instead."""

UNDECLARED_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "dropout", "feature_dropout"),
        *("alpha_dropout", "feature_alpha_dropout", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors"),
        *("meshgrid", "type_as", "einsum", "chain_matmul", "conj_physical", "cartesian_prod", "diag", "diagflat"),
        *("matrix_power", "linalg_matrix_power", "combinations", "rrelu", "pad", "unflatten", "native_channel_shuffle"),
    )
)
"""Operators whose result may share memory with an argument although their schema does not declare it."""


def name_of(target: object) -> str:
    """Return the stored name of a traced operator; raise ArchiveError if programs may not use it."""
    for name, function in PYTHON.items():
        if function is target:
            return name
    name = PORTABLE.get(str(target), str(target))
    named(name)
    return name


@functools.cache
def named(name: str) -> Callable[..., Any]:
    """Return the operator with a stored name; raise ArchiveError if programs may not use it."""
    if name in PYTHON:
        return PYTHON[name]
    if name not in ALLOWED:
        raise _refused(name, "is not in the list of allowed ones")
    _, base, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, base, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise _refused(name, f"is not in torch {torch.__version__}")
    return found


def checked(name: str) -> Callable[..., Any]:
    """Return the function to call for an operator: one that validates its arguments if necessary, else the operator."""
    return VALIDATED.get(name) or _guarded(name)


@functools.cache
def _guarded(name: str) -> Callable[..., Any]:
    """Return an operator, wrapped to raise ValueError for arguments with which its kernel is unsafe."""
    function = named(name)
    guards = [guard for pattern, guard in _GUARDS if re.match(pattern, name)]
    if not guards or not isinstance(function, torch._ops.OpOverload):
        return function
    names = [one.name for one in function._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for guard in guards:
            guard(given)
        return function(*args, **kwargs)

    return call


def _small_integers(given: Mapping[str, Any]) -> None:
    """Reject large sizes, strides and dilations, whose products a kernel computes without overflow checks."""
    for name, value in given.items():
        each = value if isinstance(value, list | tuple) else (value,)
        if any(type(one) is int and abs(one) >= 1 << 31 for one in each):
            raise ValueError(f"{name} must be below 2**31, got {value}")


def _moderate_scales(given: Mapping[str, Any]) -> None:
    """Reject scales below 0.001 or above 1000: a kernel divides positions by them."""
    for name, value in given.items():
        each = value if isinstance(value, list | tuple) else (value,)
        if name.startswith("scale") and any(one is not None and not 1e-3 <= one <= 1e3 for one in each):
            raise ValueError(f"{name} must be between 0.001 and 1000, got {value}")


def _known_modes(given: Mapping[str, Any]) -> None:
    """Require a known sampling mode: with another one, the kernel returns uninitialized memory."""
    if given["interpolation_mode"] not in (0, 1, 2) or given["padding_mode"] not in (0, 1, 2):
        raise ValueError("the modes of grid_sampler must be 0, 1 or 2")
    if given["interpolation_mode"] == 2 and given["input"].dim() != 4:
        raise ValueError("bicubic sampling needs inputs of four dimensions")


def _keys_of_values(given: Mapping[str, Any]) -> None:
    """Require keys and values of the same length, which the attention kernel does not compare."""
    query, key, value = given["query"], given["key"], given["value"]
    if min(query.dim(), key.dim(), value.dim()) < 2 or key.shape[-2] != value.shape[-2]:
        raise ValueError("attention needs as many keys as values")
    if query.shape[-1] != key.shape[-1] or not query.dtype == key.dtype == value.dtype:
        raise ValueError("queries and keys must have the same width and dtype")
    if not query.dim() == key.dim() == value.dim() or key.shape[:-2] != value.shape[:-2]:
        raise ValueError("queries, keys and values must have the same batch and heads")


def _counted_repeats(given: Mapping[str, Any]) -> None:
    """Require that repeats add up to the size of the result: the kernel sums them without overflow checks."""
    repeats, size = given["repeats"], given.get("output_size")
    if isinstance(repeats, Tensor):
        total = sum(repeats.flatten().tolist())
        if repeats.numel() and (bool((repeats < 0).any()) or total >= 1 << 31):
            raise ValueError("repeats must not be negative, and their sum must be below 2**31")
        if size is not None and repeats.dim() == 1 and repeats.numel() > 1 and size != total:
            raise ValueError(f"output_size must be the sum of repeats, got {size}")
        if size is not None and repeats.numel() <= 1:
            raise ValueError("output_size must be omitted if repeats is a single number")


def _no_overflowing_quotient(given: Mapping[str, Any]) -> None:
    """Reject the division of the smallest integer by -1, which stops the process."""
    left, right = given["self"], given["other"]
    if left.device.type != "cpu" or torch.compiler.is_compiling() or given.get("rounding_mode") is None:
        return
    # The kernel converts both sides first, so a number without dimensions can become the smallest one.
    dtype = torch.result_type(left, right)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return
    lowest = torch.iinfo(dtype).min
    if lowest and bool((torch.as_tensor(right).to(dtype) == -1).any()) and bool((left.to(dtype) == lowest).any()):
        raise ValueError("the smallest integer must not be divided by -1")


def _no_lowest_integers(given: Mapping[str, Any]) -> None:
    """Reject the smallest integer, which has no absolute value: dividing by it stops the process."""
    if given["self"].device.type != "cpu" or torch.compiler.is_compiling():
        return
    dtype = torch.result_type(given["self"], given["other"])
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return
    lowest = torch.iinfo(dtype).min
    for name in ("self", "other"):
        if lowest and bool((given[name].to(dtype) == lowest).any()):
            raise ValueError(f"{name} must not contain the smallest integer of its dtype")


def _known_reduction(given: Mapping[str, Any]) -> None:
    """Require a known reduction: with another one, the kernel returns uninitialized memory."""
    if given.get("reduction", 1) not in (0, 1, 2):
        raise ValueError(f"reduction must be 0, 1 or 2, got {given['reduction']}")


_GUARDS: tuple[tuple[str, Callable[[Mapping[str, Any]], None]], ...] = (
    (r"aten\.\w*(pool|conv|unfold|im2col|col2im|upsample|pad|shuffle)", _small_integers),
    (r"aten\._?upsample", _moderate_scales),
    (r"aten\.grid_sampler", _known_modes),
    (r"aten\.scaled_dot_product_attention", _keys_of_values),
    (r"aten\.repeat_interleave", _counted_repeats),
    (r"aten\.div(ide)?_?\.\w+_mode", _no_overflowing_quotient),
    (r"aten\.lcm_?\.", _no_lowest_integers),
    (r"aten\.(\w*_loss(2d|_nd)?|binary_cross_entropy\w*|kl_div)\.", _known_reduction),
)
"""For patterns of operator names: functions that raise ValueError for unsafe arguments that torch accepts."""


def median_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the median along `dim` of a contiguous copy: the kernel writes out of bounds for an expanded tensor."""
    values, indices = torch.ops.aten.median.dim(self.contiguous(), dim, keepdim)
    return values, indices


def nanmedian_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the median without NaNs of a contiguous copy: the kernel writes out of bounds for an expanded tensor."""
    values, indices = torch.ops.aten.nanmedian.dim(self.contiguous(), dim, keepdim)
    return values, indices


def lstm(input: Tensor, hx: list[Tensor], params: list[Tensor], *rest: Any, **more: Any) -> tuple[Tensor, ...]:
    """Compute an LSTM after checking the number and shapes of its weights, which the kernel does not check."""
    _require_recurrent(4, input, hx, params, *rest, **more)
    return tuple(torch.ops.aten.lstm.input(input, hx, params, *rest, **more))


def gru(input: Tensor, hx: Tensor, params: list[Tensor], *rest: Any, **more: Any) -> tuple[Tensor, ...]:
    """Compute a GRU after checking the number and shapes of its weights, which the kernel does not check."""
    _require_recurrent(3, input, [hx], params, *rest, **more)
    return tuple(torch.ops.aten.gru.input(input, hx, params, *rest, **more))


def rnn_tanh(input: Tensor, hx: Tensor, params: list[Tensor], *rest: Any, **more: Any) -> tuple[Tensor, ...]:
    """Compute a tanh RNN after checking the number and shapes of its weights, which the kernel does not check."""
    _require_recurrent(1, input, [hx], params, *rest, **more)
    return tuple(torch.ops.aten.rnn_tanh.input(input, hx, params, *rest, **more))


def rnn_relu(input: Tensor, hx: Tensor, params: list[Tensor], *rest: Any, **more: Any) -> tuple[Tensor, ...]:
    """Compute a ReLU RNN after checking the number and shapes of its weights, which the kernel does not check."""
    _require_recurrent(1, input, [hx], params, *rest, **more)
    return tuple(torch.ops.aten.rnn_relu.input(input, hx, params, *rest, **more))


def _require_recurrent(
    gates: int,
    input: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> None:
    """Raise ValueError unless states and weights have the shapes and dtype of a recurrent layer with these settings.

    `gates` is the number of gates: 4 for LSTM, 3 for GRU, 1 for RNN.
    """
    sides = num_layers * (2 if bidirectional else 1)
    if input.dim() != 3 or not 0 < sides <= 1024 or len(hx) != (2 if gates == 4 else 1):
        raise ValueError("a recurrent layer needs batches of sequences and its initial states")
    rows, given = input.shape[0 if batch_first else 1], hx[0].shape[-1]
    hidden = hx[-1].shape[-1]
    is_projected = gates == 4 and given != hidden
    shapes: list[tuple[int, ...]] = []
    for side in range(sides):
        layer = side // (2 if bidirectional else 1)
        width = input.shape[-1] if layer == 0 else given * (2 if bidirectional else 1)
        shapes += [(gates * hidden, width), (gates * hidden, given)]
        shapes += [(gates * hidden,)] * 2 if has_biases else []
        shapes += [(given, hidden)] if is_projected else []
    wanted = [(sides, rows, given), (sides, rows, hidden)][: len(hx)] + shapes
    have = [*hx, *params]
    if [tuple(one.shape) for one in have] != wanted or len({one.dtype for one in (input, *have)}) != 1:
        raise ValueError("the weights of a recurrent layer must match its sizes and its dtype")


VALIDATED: dict[str, Callable[..., Any]] = {
    "aten.median.dim": median_dim,
    "aten.nanmedian.dim": nanmedian_dim,
    "aten.lstm.input": lstm,
    "aten.gru.input": gru,
    "aten.rnn_tanh.input": rnn_tanh,
    "aten.rnn_relu.input": rnn_relu,
}
"""Operators that are called through a function that validates their arguments."""


def arguments(function: Callable[..., Any]) -> list[tuple[str, str]] | None:
    """Return the names and kinds (values of `KINDS`, or "value") of an operator's arguments; None for arithmetic."""
    if not isinstance(function, torch._ops.OpOverload):
        return None
    # In the plain schema a dtype is an int, and torch converts a number to a dtype without a check.
    return [(one.name, _kind(str(one.real_type))) for one in function._schema.arguments]


KINDS = {
    "ScalarType": "dtype",
    "Layout": "layout",
    "MemoryFormat": "memory_format",
    "Device": "device",
    "Generator": "nothing",
    "str": "text",
    "bool": "flag",
}
"""The kind of an argument by its schema type; arguments of other types are numbers, tensors, or lists of these."""


def _kind(real_type: str) -> str:
    return next((kind for name, kind in KINDS.items() if name in real_type), "value")


def written(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that an operator changes in place."""
    if not isinstance(function, torch._ops.OpOverload):
        return set()
    return {one.name for one in function._schema.arguments if one.alias_info is not None and one.alias_info.is_write}


def shared(function: Callable[..., Any]) -> set[str] | None:
    """Return the names of the arguments with which an operator's result may share memory; None for all of them."""
    if not isinstance(function, torch._ops.OpOverload):
        return None
    if str(function).rpartition(".")[0] in UNDECLARED_VIEWS:
        return None
    return {one.name for one in function._schema.arguments if one.alias_info is not None}


def require_stateless(name: str, given: Mapping[str, Any]) -> None:
    """Raise ArchiveError for normalization that would update running statistics, which its schema does not declare."""
    flag = {"aten.batch_norm.default": "training", "aten.instance_norm.default": "use_input_stats"}.get(name)
    if flag is None or given.get(flag) is False:
        return
    if given.get("running_mean") is not None or given.get("running_var") is not None or given.get(flag) is not True:
        raise _refused(name, f"updates running statistics where {flag} is not false")


def _refused(name: str, why: str) -> ArchiveError:
    return ArchiveError(
        "a program must consist of the supported tensor operators",
        got=f"{name[:120]!r}, which {why}",
        remedy="export a model without this operator",
    )
