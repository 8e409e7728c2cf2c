"""Replacements of torch's random operations, such as dropout and attention, for layout-free randomness."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .random_fills import FILLS, Replacement, real_dtype, unsupported

if TYPE_CHECKING:
    from .layout_free import LayoutFree, Shape

_is_stacked: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor


def replacements() -> _Replacements:
    """Return the replacements of torch's random operations, by operation."""
    return _Replacements(_TABLE)


class _Replacements(dict[Any, Replacement]):
    """Replacements of torch's random operations, by function.

    A function of torch that is written in Python is analysed at its first lookup, and added if it draws random numbers.
    """

    def get(self, func: Any, default: Any = None) -> Any:
        found = super().get(func, default)
        if found is None and isinstance(func, types.FunctionType) and _is_torch(func) and _may_draw(func):
            found = self[func] = functools.partial(_inside, without_own_check(func))
        return found


# -- functions written in Python, such as multi-head attention ---------------------------------------------------------


def _inside(composite: Callable[..., Any], draws: LayoutFree, *args: Any, **kwargs: Any) -> Any:
    """Run a function of torch that is written in Python, with the random operations that it calls replaced."""
    with draws:
        return composite(*args, **kwargs)


def _multi_head(draws: LayoutFree, *args: Any, **kwargs: Any) -> Any:
    """Run multi-head attention, in which the first dim of every draw holds rows and heads."""
    with draws.samples_first():
        return _inside(_MULTI_HEAD, draws, *args, **kwargs)


@functools.cache
def _may_draw(func: types.FunctionType) -> bool:
    """Return whether a function of torch that is written in Python calls a random operation, directly or indirectly."""
    seen: set[types.FunctionType] = set()
    todo = [func]
    while todo:
        current = todo.pop()
        seen.add(current)
        names = set(_names(current.__code__))
        if names & _NAMES:
            return True
        called = (current.__globals__.get(name) for name in names)
        todo += [f for f in called if isinstance(f, types.FunctionType) and _is_torch(f) and f not in seen]
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_torch(func: types.FunctionType) -> bool:
    return (func.__module__ or "").startswith(("torch.nn.functional", "torch.functional"))


def without_own_check(func: Any) -> types.FunctionType:
    """Return a copy of a function of torch without its __torch_function__ check, which would recurse infinitely."""
    quiet = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _nobody)
    namespace = {**func.__globals__, **quiet}
    copy = types.FunctionType(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _nobody(*_: Any) -> bool:
    return False


# -- dropout -----------------------------------------------------------------------------------------------------------


def _dropout(draws: LayoutFree, input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    _require_probability(p)
    if not training or _is_zero(p):
        return input
    return _masked(draws, input, p, input.shape, inplace)


def _torch_dropout(draws: LayoutFree, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
    return _dropout(draws, input, p, train, inplace)


def _feature_dropout(draws: LayoutFree, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
    _require_probability(p)
    if not train or p == 0.0:
        return input
    return _masked(draws, input, p, _channels(input), inplace)


def _masked(draws: LayoutFree, input: Tensor, p: Any, shape: Shape, inplace: bool) -> Tensor:
    if isinstance(p, Tensor):
        # The networks of a vectorized ensemble have separate probabilities, between 0 and 1.
        scale: Any = (1.0 / (1.0 - p)).to(input.dtype)
        keep = draws.kept(shape, p, input.device, input)
    else:
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        keep = draws.keep(shape, 1.0 - p, input.device, input)
    if inplace:
        return input.masked_fill_(~keep, 0.0).mul_(scale)
    return torch.where(keep, input, 0.0).mul(scale)


def _is_zero(p: Any) -> bool:
    """Return whether a dropout probability is the number 0, for which nothing is drawn."""
    return not isinstance(p, Tensor) and p == 0.0


def _native_dropout(draws: LayoutFree, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    keep = draws.keep(input.shape, 1.0 - p if train is not False else 1.0, input.device, input)
    scale = 1.0 / (1.0 - p) if train is not False and p < 1.0 else 1.0
    return torch.where(keep, input, 0.0) * scale, keep


def _alpha_dropout(draws: LayoutFree, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
    return _self_normalising(draws, input, p, train, inplace, input.shape)


def _feature_alpha_dropout(draws: LayoutFree, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
    return _self_normalising(draws, input, p, train, inplace, _channels(input))


def _self_normalising(draws: LayoutFree, input: Tensor, p: float, train: bool, inplace: bool, shape: Shape) -> Tensor:
    """Apply alpha dropout: set dropped elements to SELU's saturation value, and preserve mean and variance."""
    _require_probability(p)
    if not train or p == 0.0:
        return input
    alpha = 1.7580993408473766
    a = 0.0 if p == 1.0 else 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    keep = draws.keep(shape, 1.0 - p, input.device, input)
    dropped = torch.where(keep, input, -alpha) * a + a * alpha * p
    return input.copy_(dropped) if inplace else dropped


def _channels(input: Tensor) -> list[int]:
    return [*input.shape[:2], *([1] * (input.dim() - 2))]


def _require_probability(p: Any) -> None:
    if not isinstance(p, Tensor) and not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _rrelu(
    draws: LayoutFree,
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if training:
        slope = draws.uniform(input.shape, input.device, input.dtype).mul_(upper - lower).add_(lower)
    else:
        slope = input.new_tensor((lower + upper) / 2)
    result = torch.where(input >= 0, input, input * slope)
    return input.copy_(result) if inplace else result


def _fractional_pool(pool: Callable[..., Any], dims: int) -> Replacement:
    def run(draws: LayoutFree, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("_random_samples") is None:
            rows = 1 if input.dim() == dims + 1 else input.shape[0]
            samples = draws.uniform((rows, input.shape[-dims - 1], dims), input.device, real_dtype(input.dtype))
            kwargs["_random_samples"] = samples.to(input.dtype)
        return pool(input, *args, **kwargs)

    return run


# -- attention and recurrent networks ----------------------------------------------------------------------------------


def _attention(
    draws: LayoutFree,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replace scaled_dot_product_attention: with dropout, compute it in steps, as fused kernels draw by themselves."""
    if _is_zero(dropout_p):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    weights, value = attention_weights(query, key, value, attn_mask, **settings)
    return _dropout(draws, weights, dropout_p).to(value.dtype) @ value


def attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the attention weights of F.scaled_dot_product_attention, and the values that they weight.

    With `enable_gqa` the values are repeated to the number of heads of the queries.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        weights = weights + attn_mask
    return torch.softmax(weights, -1) if attn_mask is None else _safe_softmax(weights), value


def _safe_softmax(weights: Tensor) -> Tensor:
    """Return a softmax with zeros in fully masked rows, as torch's attention does; gradients are zero there too."""
    empty = (weights == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(weights.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)


def _recurrent(operation: Callable[..., Any], num_states: int) -> Replacement:
    """Return a replacement of torch.lstm and similar functions: run layer by layer, with dropout between the layers."""

    def run(draws: LayoutFree, input: Tensor, *args: Any) -> Any:
        if isinstance(args[1], Tensor) or len(args) != 8:
            return _packed(operation, input, *args)
        hidden, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
        if not train or dropout == 0.0:
            return operation(input, *args)
        states = hidden if num_states > 1 else (hidden,)
        directions = 2 if bidirectional else 1
        parts = [state.split(directions) for state in states]
        width = len(weights) // num_layers
        ends: list[Sequence[Tensor]] = []
        x = input
        for layer in range(num_layers):
            start = tuple(part[layer] for part in parts)
            own = weights[layer * width : (layer + 1) * width]
            given = start if num_states > 1 else start[0]
            x, *end = operation(x, given, own, has_biases, 1, 0.0, train, bidirectional, batch_first)
            ends.append(end)
            if layer < num_layers - 1:
                x = _dropout(draws, x, dropout)
        return x, *(torch.cat(same) for same in zip(*ends, strict=True))

    return run


def _packed(operation: Callable[..., Any], data: Tensor, *args: Any) -> Any:
    dropout, train = args[5], args[6]
    if train and dropout > 0.0:
        raise unsupported("dropout in a recurrent network over packed sequences", "pad them, or use dropout=0")
    return operation(data, *args)


_T = torch.Tensor
_MULTI_HEAD = without_own_check(F.multi_head_attention_forward)
_TABLE: dict[Any, Replacement] = {
    F.dropout: _dropout,
    F.rrelu: _rrelu,
    F.multi_head_attention_forward: _multi_head,
    F.fractional_max_pool2d: _fractional_pool(F.fractional_max_pool2d, 2),
    F.fractional_max_pool3d: _fractional_pool(F.fractional_max_pool3d, 3),
    F.scaled_dot_product_attention: _attention,
    torch.dropout: _torch_dropout,
    torch.dropout_: functools.partial(_torch_dropout, inplace=True),
    torch.feature_dropout: _feature_dropout,
    torch.feature_dropout_: functools.partial(_feature_dropout, inplace=True),
    torch.alpha_dropout: _alpha_dropout,
    torch.alpha_dropout_: functools.partial(_alpha_dropout, inplace=True),
    torch.feature_alpha_dropout: _feature_alpha_dropout,
    torch.feature_alpha_dropout_: functools.partial(_feature_alpha_dropout, inplace=True),
    torch.native_dropout: _native_dropout,
    torch.rrelu: _rrelu,
    torch.rrelu_: functools.partial(_rrelu, inplace=True),
    torch.lstm: _recurrent(torch.lstm, 2),
    torch.gru: _recurrent(torch.gru, 1),
    torch.rnn_tanh: _recurrent(torch.rnn_tanh, 1),
    torch.rnn_relu: _recurrent(torch.rnn_relu, 1),
    **FILLS,
}
for _walk in (_T.backward, torch.autograd.backward, torch.autograd.grad):
    # Backward may recompute a forward pass, whose draws must be replaced too.
    _TABLE[_walk] = functools.partial(_inside, without_own_check(_walk))
_NAMES = {func.__name__ for func in _TABLE}
"""The names under which functions written in Python call these operations."""
