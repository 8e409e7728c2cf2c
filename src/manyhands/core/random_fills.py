"""Replacements of torch's operations that fill a tensor with random numbers, for layout-free randomness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import TaskError

if TYPE_CHECKING:
    from .layout_free import LayoutFree, Shape

Replacement = Callable[..., Any]
_is_stacked: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor


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
    """Return a replacement for torch.rand_like etc.; numbers for a parameter do not depend on the sample."""

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
    """Return values, copied to the tensor `out` if the user gave one."""
    return values if out is None else _filled(values, out.resize_(values.shape))


def _made(values: Tensor, empty: Tensor) -> Tensor:
    """Return values as a tensor like `empty`; under vmap, each network of the ensemble keeps its own values."""
    if _is_stacked(values) and not _is_stacked(empty):
        return values.to(empty.dtype)
    return _filled(values, empty)


def _filled(values: Tensor, empty: Tensor) -> Tensor:
    with torch.no_grad():
        return empty.copy_(values)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Shape, list[Any]]:
    """Return the size that a function such as torch.randint was given, and the arguments other than the size."""
    if "size" in kwargs:
        size, rest = kwargs.pop("size"), list(args)
    elif args and isinstance(args[-1], Sequence):
        size, rest = args[-1], list(args[:-1])
    else:
        size, rest = args, []
    return size, [*rest, *(kwargs.pop(name) for name in ("low", "high") if name in kwargs)]


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which random numbers for a tensor of this dtype are computed; refuse complex dtypes."""
    if dtype.is_complex:
        raise unsupported(f"random numbers in {dtype}", "draw two real tensors and join them by torch.complex")
    return dtype if dtype in (torch.float64, torch.float16, torch.bfloat16) else torch.float32


def _fill_uniform(
    draws: LayoutFree, out: Tensor, from_: float = 0.0, to: float = 1.0, *, owner: Tensor | None = None, **named: float
) -> Tensor:
    low = named.get("from", from_)
    drawn = draws.uniform(out.shape, out.device, real_dtype(out.dtype), owner)
    return drawn if (low, to) == (0.0, 1.0) else drawn.mul_(to - low).add_(low)


def _fill_normal(
    draws: LayoutFree, out: Tensor, mean: float = 0.0, std: float = 1.0, *, owner: Tensor | None = None
) -> Tensor:
    drawn = draws.normal(out.shape, out.device, real_dtype(out.dtype), owner)
    return drawn if (mean, std) == (0.0, 1.0) else drawn.mul_(std).add_(mean)


def _fill_log_normal(
    draws: LayoutFree, out: Tensor, mean: float = 1.0, std: float = 2.0, *, owner: Tensor | None = None
) -> Tensor:
    return _fill_normal(draws, out, mean, std, owner=owner).exp_()


def _fill_exponential(draws: LayoutFree, out: Tensor, lambd: float = 1.0, *, owner: Tensor | None = None) -> Tensor:
    return draws.exponential(out.shape, out.device, real_dtype(out.dtype), owner).div_(lambd)


def _fill_cauchy(
    draws: LayoutFree, out: Tensor, median: float = 0.0, sigma: float = 1.0, *, owner: Tensor | None = None
) -> Tensor:
    drawn = draws.uniform(out.shape, out.device, real_dtype(out.dtype), owner)
    return drawn.sub_(0.5).mul_(torch.pi).tan_().mul_(sigma).add_(median)


def _fill_geometric(draws: LayoutFree, out: Tensor, p: float, *, owner: Tensor | None = None) -> Tensor:
    return draws.exponential(out.shape, out.device, owner=owner).div_(-math.log1p(-p)).ceil_()


def _fill_bernoulli(draws: LayoutFree, out: Tensor, p: Any = 0.5, *, owner: Tensor | None = None) -> Tensor:
    if isinstance(p, Tensor):
        return draws.uniform(out.shape, out.device, real_dtype(p.dtype), owner) < p
    return draws.keep(out.shape, p, out.device, owner)


def _fill_integers(draws: LayoutFree, out: Tensor, *bounds: Any, owner: Tensor | None = None, **named: Any) -> Tensor:
    low, high = (0, *bounds) if len(bounds) == 1 else bounds
    return draws.integers(out.shape, int(low), int(high), out.device, owner)


def _fill_random(
    draws: LayoutFree, out: Tensor, *bounds: Any, to: Any = None, owner: Tensor | None = None, **named: Any
) -> Tensor:
    """Replace Tensor.random_: draw integers below a bound, by default all that the dtype represents exactly."""
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
    """Replace torch.normal, whose mean and std are numbers with a size, or tensors."""
    if size is not None:
        return _factory(_fill_normal)(draws, mean, std, size, out=out, **kwargs)  # type: ignore[no-any-return]
    shape = torch.broadcast_shapes(*(value.shape for value in (mean, std) if isinstance(value, Tensor)))
    like: Tensor = mean if isinstance(mean, Tensor) else std
    return _given(draws.normal(shape, like.device, real_dtype(like.dtype)).mul(std).add(mean), out)


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
        race = draws.exponential(input.shape, input.device, real_dtype(input.dtype))
        return _given((input / race).topk(num_samples, -1).indices, out)
    sums = input.double().cumsum(-1)
    drawn = draws.uniform((*input.shape[:-1], num_samples), input.device, torch.float64) * sums[..., -1:]
    return _given(torch.searchsorted(sums, drawn, right=True).clamp(max=input.shape[-1] - 1), out)


def _permutation(draws: LayoutFree, n: int, **kwargs: Any) -> Tensor:
    """Replace torch.randperm: return a permutation that is the same on all replicas and for all samples."""
    kwargs.pop("generator", None)
    kwargs["dtype"] = kwargs.get("dtype") or torch.int64
    empty = torch.empty(n, **kwargs)
    return empty.copy_(draws.words((n,), empty.device, shared=True).argsort())


def _refused(name: str) -> Replacement:
    def refuse(draws: LayoutFree, *args: Any, **kwargs: Any) -> Any:
        raise unsupported(name, "use another distribution, pass a generator=, or omit deterministic=True")

    return refuse


def unsupported(what: str, remedy: str) -> TaskError:
    """Return the error for a random operation without a layout-free replacement."""
    return TaskError("deterministic=True needs layout-free random operations", got=what, remedy=remedy)


_T = torch.Tensor
FILLS: dict[Any, Replacement] = {
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
"""Replacements of the operations that create or fill tensors, by operation."""
