"""Replacements of torch's random operations for layout-free randomness, one function for each."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import TaskError

if TYPE_CHECKING:
    from .layout_free import LayoutFree, Shape

Replacement = Callable[..., Any]
_is_stacked: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor


def replacements() -> _Replacements:
    """Return the replacement for every operation of torch that draws."""
    return _Replacements(_TABLE)


class _Replacements(dict[Any, Replacement]):
    """Known replacements, and those of functions written in Python, which are analysed on first use."""

    def get(self, func: Any, default: Any = None) -> Any:
        found = super().get(func, default)
        if found is None and isinstance(func, types.FunctionType) and _is_torch(func) and _may_draw(func):
            found = self[func] = functools.partial(_inside, without_own_check(func))
        return found


# -- functions written in Python, such as multi-head attention ---------------------------------------------------------


def _inside(composite: Callable[..., Any], draws: LayoutFree, *args: Any, **kwargs: Any) -> Any:
    """Run a function so that the operations it calls are replaced too."""
    with draws:
        return composite(*args, **kwargs)


def _multi_head(draws: LayoutFree, *args: Any, **kwargs: Any) -> Any:
    """Run multi-head attention; inside, rows and heads share the first dim, whatever sizes the others have."""
    with draws.samples_first():
        return _inside(_MULTI_HEAD, draws, *args, **kwargs)


@functools.cache
def _may_draw(func: types.FunctionType) -> bool:
    """Return whether a function of torch calls a random operation, at any depth."""
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
    """Return a copy that skips the __torch_function__ check, which would lead to infinite recursion."""
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
        # Members of an ensemble have separate probabilities, between 0 and 1.
        scale: Any = (1.0 / (1.0 - p)).to(input.dtype)
        keep = draws.kept(shape, p, input.device, input)
    else:
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        keep = draws.keep(shape, 1.0 - p, input.device, input)
    if inplace:
        return input.masked_fill_(~keep, 0.0).mul_(scale)
    return torch.where(keep, input, 0.0).mul(scale)


def _is_zero(p: Any) -> bool:
    """Return whether nothing is dropped, so that nothing is drawn."""
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
    """Set dropped elements to SELU's saturation value, and preserve mean and variance."""
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
            samples = draws.uniform((rows, input.shape[-dims - 1], dims), input.device, _real(input.dtype))
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
    """Compute attention step by step if weights are dropped, because a fused kernel draws its own numbers."""
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
    """Return how much each query attends to each key, and the values with as many heads as there are queries."""
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
    """Return a softmax with zeros in fully masked rows, as in torch's own attention; their gradient is zero too."""
    empty = (weights == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(weights.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)


def _recurrent(operation: Callable[..., Any], num_states: int) -> Replacement:
    """Return a replacement that runs a recurrent network layer by layer, to draw the dropout between layers."""

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
        raise _unknown("dropout in a recurrent network over packed sequences", "pad them, or use dropout=0")
    return operation(data, *args)


# -- tensors of random numbers -----------------------------------------------------------------------------------------


def _factory(fill: Callable[..., Tensor]) -> Replacement:
    """Return a replacement for torch.rand and similar functions, which take a size and tensor options."""

    def make(draws: LayoutFree, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        kwargs.pop("names", None), kwargs.pop("generator", None)
        size, rest = _size(args, kwargs)
        empty = torch.empty(size, **kwargs) if out is None else out.resize_(size)
        values = fill(draws, empty, *rest)
        return _made(values, empty) if out is None else _filled(values, empty)

    return make


def _like(fill: Callable[..., Tensor]) -> Replacement:
    """Return a replacement for torch.rand_like and similar functions; draws for a parameter ignore the sample."""

    def make(draws: LayoutFree, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bounds = [kwargs.pop(name) for name in ("low", "high") if name in kwargs]
        kwargs.pop("generator", None)
        empty = torch.empty_like(input, **kwargs)
        return _made(fill(draws, empty, *args, *bounds, owner=input), empty)

    return make


def _inplace(fill: Callable[..., Tensor]) -> Replacement:
    """Return a replacement for Tensor.uniform_ and similar methods."""

    def make(draws: LayoutFree, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("generator", None)
        return input.copy_(fill(draws, input, *args, owner=input, **kwargs))

    return make


def _initial(fill: Callable[..., Tensor], draws: LayoutFree, tensor: Tensor, *args: float) -> Tensor:
    return _filled(fill(draws, tensor, *args, owner=tensor), tensor)


def _given(values: Tensor, out: Tensor | None) -> Tensor:
    """Return values in the `out` tensor, if one was given."""
    return values if out is None else _filled(values, out.resize_(values.shape))


def _made(values: Tensor, empty: Tensor) -> Tensor:
    """Return values as a new tensor like `empty`; under vmap they stay separate for each member."""
    if _is_stacked(values) and not _is_stacked(empty):
        return values.to(empty.dtype)
    return _filled(values, empty)


def _filled(values: Tensor, empty: Tensor) -> Tensor:
    with torch.no_grad():
        return empty.copy_(values)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Shape, list[Any]]:
    """Return the size among a factory's arguments, and the bounds before it."""
    if "size" in kwargs:
        size, rest = kwargs.pop("size"), list(args)
    elif args and isinstance(args[-1], Sequence):
        size, rest = args[-1], list(args[:-1])
    else:
        size, rest = args, []
    return size, [*rest, *(kwargs.pop(name) for name in ("low", "high") if name in kwargs)]


def _real(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        raise _unknown(f"random numbers in {dtype}", "draw two real tensors and join them by torch.complex")
    return dtype if dtype in (torch.float64, torch.float16, torch.bfloat16) else torch.float32


def _fill_uniform(
    draws: LayoutFree, out: Tensor, from_: float = 0.0, to: float = 1.0, *, owner: Tensor | None = None, **named: float
) -> Tensor:
    low = named.get("from", from_)
    drawn = draws.uniform(out.shape, out.device, _real(out.dtype), owner)
    return drawn if (low, to) == (0.0, 1.0) else drawn.mul_(to - low).add_(low)


def _fill_normal(
    draws: LayoutFree, out: Tensor, mean: float = 0.0, std: float = 1.0, *, owner: Tensor | None = None
) -> Tensor:
    drawn = draws.normal(out.shape, out.device, _real(out.dtype), owner)
    return drawn if (mean, std) == (0.0, 1.0) else drawn.mul_(std).add_(mean)


def _fill_log_normal(
    draws: LayoutFree, out: Tensor, mean: float = 1.0, std: float = 2.0, *, owner: Tensor | None = None
) -> Tensor:
    return _fill_normal(draws, out, mean, std, owner=owner).exp_()


def _fill_exponential(draws: LayoutFree, out: Tensor, lambd: float = 1.0, *, owner: Tensor | None = None) -> Tensor:
    return draws.exponential(out.shape, out.device, _real(out.dtype), owner).div_(lambd)


def _fill_cauchy(
    draws: LayoutFree, out: Tensor, median: float = 0.0, sigma: float = 1.0, *, owner: Tensor | None = None
) -> Tensor:
    drawn = draws.uniform(out.shape, out.device, _real(out.dtype), owner)
    return drawn.sub_(0.5).mul_(torch.pi).tan_().mul_(sigma).add_(median)


def _fill_geometric(draws: LayoutFree, out: Tensor, p: float, *, owner: Tensor | None = None) -> Tensor:
    return draws.exponential(out.shape, out.device, owner=owner).div_(-math.log1p(-p)).ceil_()


def _fill_bernoulli(draws: LayoutFree, out: Tensor, p: Any = 0.5, *, owner: Tensor | None = None) -> Tensor:
    if isinstance(p, Tensor):
        return draws.uniform(out.shape, out.device, _real(p.dtype), owner) < p
    return draws.keep(out.shape, p, out.device, owner)


def _fill_integers(draws: LayoutFree, out: Tensor, *bounds: Any, owner: Tensor | None = None, **named: Any) -> Tensor:
    low, high = (0, *bounds) if len(bounds) == 1 else bounds
    return draws.integers(out.shape, int(low), int(high), out.device, owner)


def _fill_random(
    draws: LayoutFree, out: Tensor, *bounds: Any, to: Any = None, owner: Tensor | None = None, **named: Any
) -> Tensor:
    """Replace Tensor.random_: integers below a bound, by default all that the dtype represents exactly."""
    given = [named["from"]] if "from" in named else []
    given = [*bounds, *given, *([] if to is None else [to])]
    if not given:
        digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(out.dtype)
        given = [2**digits if digits else torch.iinfo(out.dtype).max]
    return _fill_integers(draws, out, *given, owner=owner)


def _integers(draws: LayoutFree, *args: Any, **kwargs: Any) -> Tensor:
    kwargs["dtype"] = kwargs.get("dtype") or torch.int64
    return _factory(_fill_integers)(draws, *args, **kwargs)  # type: ignore[no-any-return]


def _normal(
    draws: LayoutFree, mean: Any, std: Any = 1.0, size: Any = None, *, out: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Replace torch.normal, for numbers with a size or for tensors."""
    if size is not None:
        return _factory(_fill_normal)(draws, mean, std, size, out=out, **kwargs)  # type: ignore[no-any-return]
    shape = torch.broadcast_shapes(*(value.shape for value in (mean, std) if isinstance(value, Tensor)))
    like: Tensor = mean if isinstance(mean, Tensor) else std
    return _given(draws.normal(shape, like.device, _real(like.dtype)).mul(std).add(mean), out)


def _bernoulli(
    draws: LayoutFree, input: Tensor, p: float | None = None, *, generator: None = None, out: Tensor | None = None
) -> Tensor:
    chance = input if p is None else p
    return _given(_fill_bernoulli(draws, input, chance, owner=input).to(input.dtype), out)


def _multinomial(
    draws: LayoutFree,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: None = None,
    out: Tensor | None = None,
) -> Tensor:
    if not replacement:
        race = draws.exponential(input.shape, input.device, _real(input.dtype))
        return _given((input / race).topk(num_samples, -1).indices, out)
    sums = input.double().cumsum(-1)
    drawn = draws.uniform((*input.shape[:-1], num_samples), input.device, torch.float64) * sums[..., -1:]
    return _given(torch.searchsorted(sums, drawn, right=True).clamp(max=input.shape[-1] - 1), out)


def _permutation(draws: LayoutFree, n: int, **kwargs: Any) -> Tensor:
    """Return a permutation that is equal on all replicas: one of a replica's samples would depend on the split."""
    kwargs.pop("generator", None)
    kwargs["dtype"] = kwargs.get("dtype") or torch.int64
    empty = torch.empty(n, **kwargs)
    return empty.copy_(draws.words((n,), empty.device, shared=True).argsort())


def _refused(name: str) -> Replacement:
    def refuse(draws: LayoutFree, *args: Any, **kwargs: Any) -> Any:
        raise _unknown(name, "use another distribution, pass a generator=, or leave deterministic=True out")

    return refuse


def _unknown(what: str, remedy: str) -> TaskError:
    return TaskError("deterministic=True needs layout-free random operations", got=what, remedy=remedy)


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
    torch.rand: _factory(_fill_uniform),
    torch.randn: _factory(_fill_normal),
    torch.randint: _integers,
    torch.randperm: _permutation,
    torch.rand_like: _like(_fill_uniform),
    torch.randn_like: _like(_fill_normal),
    torch.randint_like: _like(_fill_integers),
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    _T.bernoulli: _bernoulli,
    _T.multinomial: _multinomial,
    _T.bernoulli_: _inplace(_fill_bernoulli),
    _T.uniform_: _inplace(_fill_uniform),
    _T.normal_: _inplace(_fill_normal),
    _T.log_normal_: _inplace(_fill_log_normal),
    _T.exponential_: _inplace(_fill_exponential),
    _T.cauchy_: _inplace(_fill_cauchy),
    _T.geometric_: _inplace(_fill_geometric),
    _T.random_: _inplace(_fill_random),
    nn.init.uniform_: lambda draws, tensor, a=0.0, b=1.0, generator=None: _initial(_fill_uniform, draws, tensor, a, b),
    nn.init.normal_: lambda draws, tensor, mean=0.0, std=1.0, generator=None: _initial(
        _fill_normal, draws, tensor, mean, std
    ),
    torch.poisson: _refused("torch.poisson"),
    torch.binomial: _refused("torch.binomial"),
    torch._standard_gamma: _refused("a gamma, beta or Student's t distribution"),
    torch._sample_dirichlet: _refused("a Dirichlet distribution"),
}
for _walk in (_T.backward, torch.autograd.backward, torch.autograd.grad):
    # Backward may recompute a forward pass, whose draws must be replaced too.
    _TABLE[_walk] = functools.partial(_inside, without_own_check(_walk))
_NAMES = {func.__name__ for func in _TABLE}
"""The names under which functions written in Python call these operations."""
