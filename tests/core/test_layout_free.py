"""Layout-free randomness: the same numbers for any split of the samples, and their statistical quality."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyhands.core import LayoutFree, TaskError

CPU = torch.device("cpu")
ROWS = 6


def draws_of(ids: Any, step: int = 0, seed: int = 0) -> LayoutFree:
    draws = LayoutFree(CPU)
    draws.load(seed, step, np.asarray(ids, dtype=np.int64))
    return draws


def drawn(function: Callable[[slice], Any], ids: Any, step: int = 0, seed: int = 0) -> Any:
    """What a function of some rows gives when these are samples `ids`."""
    with draws_of(ids, step, seed).drawing():
        return function(slice(ids[0], ids[-1] + 1))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = torch.randn(ROWS, 7, 8, generator=generator())
IMAGES = torch.randn(ROWS, 8, 6, 6, generator=generator())
torch.manual_seed(0)
LSTM, GRU = nn.LSTM(8, 5, 3, dropout=0.4, bidirectional=True), nn.GRU(8, 5, 2, dropout=0.4, batch_first=True)
HEADS, HEADS_TIME_FIRST = nn.MultiheadAttention(8, 2, 0.3, batch_first=True), nn.MultiheadAttention(8, 2, 0.3)

OPERATIONS: dict[str, Callable[[slice], Tensor]] = {
    "dropout": lambda rows: F.dropout(X[rows], 0.3),
    "dropout, in place": lambda rows: F.dropout(X[rows].clone(), 0.3, inplace=True),
    "torch.dropout": lambda rows: torch.dropout(X[rows], 0.3, True),
    "native_dropout": lambda rows: torch.native_dropout(X[rows], 0.3, True)[0],
    "dropout1d": lambda rows: F.dropout1d(X[rows], 0.3),
    "dropout2d": lambda rows: nn.Dropout2d(0.3)(IMAGES[rows]),
    "alpha_dropout": lambda rows: F.alpha_dropout(X[rows], 0.3, training=True),
    "feature_alpha_dropout": lambda rows: F.feature_alpha_dropout(IMAGES[rows], 0.3, training=True),
    "rrelu": lambda rows: F.rrelu(X[rows], training=True),
    "fractional_max_pool2d": lambda rows: F.fractional_max_pool2d(IMAGES[rows], 2, 4),
    "gumbel_softmax": lambda rows: F.gumbel_softmax(X[rows]),
    "attention": lambda rows: F.scaled_dot_product_attention(X[rows], X[rows], X[rows], dropout_p=0.3),
    "multi-head": lambda rows: HEADS(X[rows], X[rows], X[rows])[0],
    "multi-head, no weights": lambda rows: HEADS(X[rows], X[rows], X[rows], need_weights=False)[0],
    "multi-head, time first": lambda rows: HEADS_TIME_FIRST(*[X[rows].transpose(0, 1)] * 3)[0].transpose(0, 1),
    "lstm, time first": lambda rows: LSTM(X[rows].transpose(0, 1))[0].transpose(0, 1),
    "gru": lambda rows: GRU(X[rows])[0],
    "rand": lambda rows: torch.rand(len(X[rows]), 4),
    "rand in float64": lambda rows: torch.rand((len(X[rows]), 4), dtype=torch.float64),
    "randn": lambda rows: torch.randn([len(X[rows]), 3, 2]),
    "randn, size by name": lambda rows: torch.randn(size=(len(X[rows]), 3), dtype=torch.bfloat16),
    "randint": lambda rows: torch.randint(5, 50, (len(X[rows]),)),
    "randint, one bound": lambda rows: torch.randint(50, (len(X[rows]), 9)),
    "randint, wide": lambda rows: torch.randint(0, 2**60, (len(X[rows]),)),
    "rand_like": lambda rows: torch.rand_like(X[rows]),
    "randn_like": lambda rows: torch.randn_like(X[rows], dtype=torch.float64),
    "randint_like": lambda rows: torch.randint_like(X[rows], 3, 90),
    "normal": lambda rows: torch.normal(X[rows], 2.0),
    "normal of a size": lambda rows: torch.normal(1.0, 2.0, (len(X[rows]), 5)),
    "bernoulli": lambda rows: torch.bernoulli(X[rows].sigmoid()),
    "multinomial": lambda rows: torch.multinomial(X[rows, 0].exp(), 5),
    "multinomial, put back": lambda rows: torch.multinomial(X[rows, 0].exp(), 20, replacement=True),
    "bernoulli_": lambda rows: X[rows].clone().bernoulli_(0.4),
    "uniform_": lambda rows: X[rows].clone().uniform_(-1, 1),
    "normal_": lambda rows: X[rows].clone().normal_(0.5, std=2.0),
    "log_normal_": lambda rows: X[rows].clone().log_normal_(),
    "exponential_": lambda rows: X[rows].clone().exponential_(2.0),
    "cauchy_": lambda rows: X[rows].clone().cauchy_(),
    "geometric_": lambda rows: X[rows].clone().geometric_(0.1),
    "random_": lambda rows: X[rows].clone().random_(100),
    "nn.init": lambda rows: nn.init.normal_(X[rows].clone(), std=2.0),
    "a distribution": lambda rows: torch.distributions.Laplace(X[rows], 1.0).rsample(),
    "rows and heads in one dim": lambda rows: F.dropout(X[rows].flatten(0, 1), 0.3).view(-1, 7, 8),
    "time first": lambda rows: F.dropout(X[rows].transpose(0, 1), 0.3).transpose(0, 1),
}


@pytest.mark.parametrize("operation", list(OPERATIONS.values()), ids=list(OPERATIONS))
def test_random_draws_of_batch_parts_equal_those_of_the_whole_batch(operation: Callable[[slice], Tensor]) -> None:
    whole = drawn(operation, range(ROWS))
    for cuts in ([0, 2, 6], [0, 1, 4, 6]):
        parts = torch.cat([drawn(operation, range(start, stop)) for start, stop in pairwise(cuts)])
        torch.testing.assert_close(parts, whole)
    assert not torch.equal(drawn(operation, range(ROWS), step=1), whole)
    assert not torch.equal(drawn(operation, range(ROWS), seed=1), whole)


@pytest.mark.parametrize(
    ("operation", "plain"),
    [
        (lambda: F.dropout(X, 0.0), X),
        (lambda: F.dropout(X, 0.5, training=False), X),
        (lambda: F.dropout(X, 1.0), torch.zeros_like(X)),
        (lambda: F.rrelu(X), F.rrelu(X)),
        (lambda: F.alpha_dropout(X, 0.5), X),
        (lambda: nn.Dropout2d(0.5).eval()(IMAGES), IMAGES),
    ],
    ids=["p=0", "evaluation", "p=1", "rrelu in evaluation", "alpha in evaluation", "dropout2d in evaluation"],
)
def test_operations_without_randomness_are_unchanged(operation: Callable[[], Tensor], plain: Tensor) -> None:
    with draws_of(range(ROWS)).drawing():
        torch.testing.assert_close(operation(), plain)


def test_draws_not_tied_to_a_sample_are_equal_on_all_replicas() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))

    def shared() -> list[Tensor]:
        return [torch.rand(()), torch.rand(7), torch.randn_like(weight), torch.randperm(9), F.dropout(weight + 1)[:0]]

    with draws_of([0, 1]).drawing():
        first = [*shared(), torch.tensor(np.random.rand())]
    with draws_of([5, 8, 9]).drawing():
        second = [*shared(), torch.tensor(np.random.rand())]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert first[3].sort().values.tolist() == list(range(9))


def test_padding_row_gets_dropout_and_explicit_generators_are_respected() -> None:
    with draws_of([]).drawing():
        assert F.dropout(torch.ones(1, 100)).unique().tolist() == [0.0, 2.0]
        own = torch.rand(4, generator=generator(3))
    assert torch.equal(own, torch.rand(4, generator=generator(3)))


def test_draws_differ_between_calls_and_passes_and_follow_micro_batches() -> None:
    draws = draws_of(range(4))
    with draws.drawing():
        first, second = torch.rand(4, 3), torch.rand(4, 3)
    draws.begin()
    draws.select(0, 4)
    with draws.drawing():
        other = torch.rand(4, 3)
        draws.select(2, 2)
        part = torch.rand(2, 3)
    assert torch.equal(part, other[2:])
    assert len({float(t.sum()) for t in (first, second, other)}) == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forward_repeats_its_random_draws(reentrant: bool) -> None:
    layer = nn.Linear(8, 8)

    def block(x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(layer(x) + torch.randn_like(x)), 0.4)

    def gradient(again: bool) -> Tensor:
        x = X.clone().requires_grad_()
        draws = draws_of(range(ROWS))
        with draws.drawing():
            for _ in range(2):
                x = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
            x = F.dropout(x)
        with draws.drawing():
            x.square().sum().backward()
        result, layer.weight.grad = layer.weight.grad, None
        assert result is not None
        return result

    torch.testing.assert_close(gradient(True), gradient(False))


def test_draws_work_under_vmap_and_autocast_and_keep_global_rng_state() -> None:
    draws, before = draws_of(range(ROWS)), torch.get_rng_state()
    stacked = torch.stack([X, 2 * X])
    with draws.drawing():
        members = torch.func.vmap(lambda x: F.dropout(x, 0.5))(stacked)
    draws.load(0, 0, np.arange(ROWS))
    with draws.drawing(), torch.autocast("cpu", dtype=torch.bfloat16):
        alone = F.dropout(X, 0.5)
        low = F.scaled_dot_product_attention(*[HEADS.out_proj(X)] * 3, dropout_p=0.3)
    assert torch.equal(members[0], alone)
    assert torch.equal(members[1], 2 * alone)
    assert low.dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_with_negligible_dropout_equals_torch_attention() -> None:
    """With p=1e-12 no weight is dropped, so masks, scale and grouped heads must give what torch gives."""
    q, k = torch.randn(2, 4, 5, 8, generator=generator()), torch.randn(2, 2, 5, 8, generator=generator(1))
    mask = torch.randn(5, 5, generator=generator(2))
    for settings in (
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": mask > -1},
        {"scale": 0.3},
        {"enable_gqa": True},
    ):
        keys = k if "enable_gqa" in settings else q * 2
        expected = F.scaled_dot_product_attention(q, keys, keys, **settings)
        with draws_of([0, 1]).drawing():
            found = F.scaled_dot_product_attention(q, keys, keys, dropout_p=1e-12, **settings)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("added", [False, True], ids=["a mask of flags", "a mask that is added"])
def test_fully_masked_attention_row_is_zero(added: bool) -> None:
    """As torch's own attention has it; padding is masked so."""
    flags = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    flags[0, 0, 1] = False
    mask = torch.zeros(flags.shape).masked_fill(~flags, -torch.inf) if added else flags
    q = torch.randn(2, 1, 3, 4, generator=generator()).requires_grad_()
    with draws_of([0, 1]).drawing():
        found = F.scaled_dot_product_attention(q, q, q, mask, dropout_p=1e-12)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q, mask))
    assert found[0, 0, 1].tolist() == [0.0] * 4
    found.square().sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.parametrize(
    ("draw", "dtype"),
    [
        (partial(torch.bernoulli, torch.full((ROWS, 9), 0.5)), torch.float32),
        (partial(torch.normal, torch.zeros(ROWS, 9), torch.ones(ROWS, 9)), torch.float32),
        (partial(torch.normal, 0.0, 1.0, (ROWS, 9)), torch.float32),
        (partial(torch.multinomial, torch.ones(ROWS, 12), 9), torch.int64),
        (partial(torch.multinomial, torch.ones(ROWS, 4), 9, True), torch.int64),
        (partial(torch.rand, ROWS, 9), torch.float32),
        (partial(torch.randperm, 9), torch.int64),
    ],
    ids=["bernoulli", "normal", "normal of a size", "multinomial", "multinomial, put back", "rand", "randperm"],
)
def test_out_argument_is_filled(draw: Callable[..., Tensor], dtype: torch.dtype) -> None:
    with draws_of(range(ROWS)).drawing():
        expected = draw()
    given = torch.empty(0, dtype=dtype)
    with draws_of(range(ROWS)).drawing():
        assert draw(out=given) is given
    assert torch.equal(given, expected)


def test_unsupported_random_operations_are_rejected() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(X, torch.full((ROWS,), 7), batch_first=True)
    with draws_of(range(ROWS)).drawing():
        with pytest.raises(
            TaskError, match="layout-free random operations, but got torch.poisson. Use another distribution"
        ):
            torch.poisson(X.abs())
        with pytest.raises(TaskError, match="got random numbers in torch.complex64. Draw two real tensors"):
            torch.randn(ROWS, dtype=torch.complex64)
        with pytest.raises(TaskError, match=r"over packed sequences\. Pad them"):
            GRU(packed)
        with pytest.raises(ValueError, match="between 0 and 1, but got 1.5"):
            F.dropout(X, 1.5)


# -- quality -----------------------------------------------------------------------------------------------------------

N, E = 256, 1024


def words(calls: int = 1, step: int = 0, seed: int = 0, shape: tuple[int, ...] = (N, E)) -> list[Tensor]:
    draws = draws_of(range(N), step, seed)
    with draws.drawing():
        return [draws.words(shape, CPU) for _ in range(calls)]


def bits(values: Tensor) -> Tensor:
    """The upper 24 bits as ±1, in rows."""
    return torch.stack([values >> place & 1 for place in range(31, 7, -1)]).flatten(1).float() * 2 - 1


def test_random_bits_are_unbiased_and_neighbours_are_uncorrelated() -> None:
    """Every pair of bits of two neighbours: in place, sample, call, step, seed, and of differences between them."""
    (a, b), (other_step,), (other_seed,) = words(2), words(step=1), words(seed=1)
    (cube,) = words(shape=(N, 32, 32))
    limit = 5.0  # standard errors; 576 pairs of bits reach it once in 3,000 runs of good numbers
    assert (bits(a).mean(1) * a.numel() ** 0.5).abs().max() < limit
    for first, second in (
        (a[:, :-1], a[:, 1:]),
        (a[:, :-64], a[:, 64:]),
        (a[:-1], a[1:]),
        (a, b),
        (a, other_step),
        (a, other_seed),
        (cube[:, :-1], cube[:, 1:]),
        (cube[:, :-1, :-1], cube[:, 1:, 1:]),
        (a[:-1, :-1] ^ a[1:, :-1], a[:-1, 1:] ^ a[1:, 1:]),
    ):
        products = bits(first) @ bits(second).T / first.numel() ** 0.5
        assert products.abs().max() < limit


def test_random_bytes_pairs_and_triples_are_uniform() -> None:
    (a,) = words()

    def z(values: Tensor, kinds: int) -> float:
        counts = torch.bincount(values.flatten(), minlength=kinds).double()
        expected = counts.sum() / kinds
        return float(((counts - expected).square() / expected).sum() - (kinds - 1)) / (2 * (kinds - 1)) ** 0.5

    wide = a.long() + 2**31
    assert all(abs(z(wide >> shift & 255, 256)) < 4.5 for shift in (24, 16, 8))
    assert abs(z((wide[:, :-1] >> 28) * 16 + (wide[:, 1:] >> 28), 256)) < 4.5
    assert abs(z((wide[:, :-2] >> 29) * 64 + (wide[:, 1:-1] >> 29) * 8 + (wide[:, 2:] >> 29), 512)) < 4.5


def test_sums_over_calls_and_steps_have_the_expected_variance() -> None:
    for stack in (
        torch.stack(words(300, shape=(N, 16))),
        torch.stack([words(step=s, shape=(N, 16))[0] for s in range(300)]),
    ):
        sums = stack.double().sum(0) / 2**32 / (300 / 12) ** 0.5
        assert abs(float(sums.square().mean()) - 1) < 5 * (2 / sums.numel()) ** 0.5
        assert abs(float(sums.mean())) < 5 / sums.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_distributions_have_the_expected_moments(dtype: torch.dtype) -> None:
    draws = draws_of(range(N))
    with draws.drawing():
        shape, count = (N, E), N * E
        uniform, normal = (draw(shape, CPU, dtype).double() for draw in (draws.uniform, draws.normal))
        exponential = draws.exponential(shape, CPU, dtype).double()
        kept = draws.keep(shape, 0.3, CPU).double()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    coarse = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11 if dtype is torch.float16 else 0.0
    near = 5 / count**0.5 + coarse
    assert abs(uniform.mean() - 0.5) < near
    assert abs(uniform.var() * 12 - 1) < 3 * near
    assert abs(normal.mean()) < near
    assert abs(normal.var() - 1) < 3 * near
    assert abs((normal.abs() > 3).double().mean() - 0.0026998) < near
    assert abs(normal.pow(4).mean() - 3) < 12 * near
    assert exponential.min() > 0
    assert abs(exponential.mean() - 1) < 2 * near
    assert abs(kept.mean() - 0.3) < near
