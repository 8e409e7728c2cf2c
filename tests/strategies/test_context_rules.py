"""Operations on split sequences: value and gradient of every rule are those of the whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from manyhands.core import StrategyError
from manyhands.distributed import World
from manyhands.strategies.context.exchange import ContextRanks
from manyhands.strategies.context.partition import SequencePartition
from manyhands.strategies.context.split_tensor import SequenceDim, SplitTensor, all_whole, split
from manyhands.testing import run_threads

ROWS, LENGTH, WIDTH = 2, 7, 6


def _of(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TOKENS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 5
MASK = torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH)[None]
PAIR = _of(LENGTH, LENGTH, seed=6)
CLASSES = TOKENS.masked_fill(TOKENS == 2, -100)
Rule = Callable[[Tensor], Any]


def _heads(x: Tensor) -> Tensor:
    return x.view(ROWS, LENGTH, 2, 3).transpose(1, 2)


def _attended(x: Tensor, **settings: Any) -> Tensor:
    return F.scaled_dot_product_attention(_heads(x), _heads(x * 2), _heads(x.sin()), **settings)


def _in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y += torch.arange(WIDTH)
    y.mul_(PAIR[:, :1])
    y[..., :2] = 0.5
    y[:, :, 3:4] = x[:, :, :1]
    return y.masked_fill_(PAIR[:, :WIDTH] > 1, 0.0).relu_()


def _across(x: Tensor) -> Tensor:
    y = x.cos()
    view = y.transpose(1, 2)
    y[:, ::2] = x[:, 1::2, :1].sum()
    y.index_add_(1, torch.tensor([5, 0]), x[:, 2:4])
    return view.transpose(1, 2) * 2


SPLIT: dict[str, Rule] = {
    "numbers": lambda x: (x * 2 + 1) / 3 - x**2,
    "reversed numbers": lambda x: 1 - x + 2 / (x.abs() + 1),
    "plain operands": lambda x: x + _of(LENGTH, WIDTH) * x + _of(ROWS, 1, WIDTH) + _of(WIDTH) + _of(LENGTH, 1),
    "where": lambda x: torch.where(PAIR[:, :WIDTH] > 0, x, x.cos()),
    "comparison": lambda x: x.masked_fill(x > 0.5, 0.0) * (x < 0.1),
    "clamp": lambda x: x.clamp(max=_of(WIDTH).abs()).clamp(-0.5),
    "activations": lambda x: (
        F.gelu(x) + F.silu(x) + F.relu(x) + F.softplus(x) + F.leaky_relu(x) + F.glu(x).repeat(1, 1, 2)
    ),
    "dtypes": lambda x: x.float().to(torch.float64).type_as(x).double(),
    "softmax": lambda x: F.softmax(x, dim=-1) + x.log_softmax(2) + torch.softmax(x, -1),
    "norms": lambda x: (
        F.layer_norm(x, (WIDTH,), _of(WIDTH), _of(WIDTH)) + F.rms_norm(x, (WIDTH,)) + F.normalize(x, dim=-1)
    ),
    "reductions of features": lambda x: (
        x.sum(-1) + x.mean(2) + x.amax(-1) + x.var(-1) + x.logsumexp(-1) + x.norm(dim=-1)
    ),
    "kept dims": lambda x: x - x.mean(-1, keepdim=True) + x.max(-1, keepdim=True).values + x.std(2, keepdim=True),
    "sorts": lambda x: x.sort(-1).values + x.topk(WIDTH, -1).values + x.cumsum(-1) + x.flip(-1).abs(),
    "flat tokens": lambda x: (
        x.view(-1, WIDTH).view(ROWS, LENGTH, WIDTH) + x.reshape(ROWS * LENGTH, 2, 3).flatten(1).view(ROWS, LENGTH, -1)
    ),
    "heads": lambda x: (
        _heads(x).permute(0, 2, 1, 3).contiguous().view(ROWS, LENGTH, -1) * x.unflatten(-1, (2, 3)).flatten(2)
    ),
    "sequence first": lambda x: x.transpose(0, 1).reshape(LENGTH * ROWS, WIDTH).view(LENGTH, ROWS, WIDTH),
    "moved dims": lambda x: x.movedim(1, -1).mT.unsqueeze(1).squeeze(1).permute(1, 0, 2).swapaxes(0, 1),
    "expanded": lambda x: x[:, :, None, :].expand(ROWS, LENGTH, 3, WIDTH).reshape(ROWS, LENGTH, -1) + x.repeat(1, 1, 3),
    "repeated": lambda x: (
        x.repeat_interleave(2, -1).sum(-1) + x.repeat_interleave(3, 1).view(ROWS, LENGTH, 3, WIDTH).sum((2, 3))
    ),
    "sections": lambda x: (
        torch.cat(x.chunk(3, -1)[::-1], -1)
        + torch.stack(x.split([2, 4], -1)[1].unbind(-1), -1).repeat(1, 1, 2)[..., :6]
    ),
    "slices of tokens": lambda x: x[:, 1:] * x[:, :-1] + x.narrow(1, 1, LENGTH - 1),
    "items": lambda x: x[..., 1:2] + x[:, :, None, 0] + x[0] + x.select(0, 1),
    "joined tokens": lambda x: torch.cat([_of(ROWS, 2, WIDTH), x, x[:, 2:5]], 1),
    "padded features": lambda x: F.pad(x, (1, 2)),
    "chosen features": lambda x: x.gather(-1, TOKENS[:, :, None]) + x.index_select(2, torch.tensor([3, 0])),
    "written": lambda x: torch.zeros_like(x).scatter(-1, TOKENS[:, :, None], x[..., :1]),
    "one hot": lambda x: F.one_hot((x[..., 0] > 0).long(), 3) * x[..., :3],
    "in place": _in_place,
    "in place across tokens": _across,
    "linear": lambda x: (
        F.linear(x, _of(4, WIDTH), _of(4)) + torch.addmm(_of(4), x.view(-1, WIDTH), _of(WIDTH, 4)).view(ROWS, LENGTH, 4)
    ),
    "product with a vector": lambda x: x @ _of(WIDTH),
    "scores": lambda x: _heads(x) @ _heads(x.cos()).transpose(-2, -1) + PAIR,
    "weights and values": lambda x: torch.softmax(_heads(x) @ _heads(x).mT, -1) @ _heads(x),
    "added scores": lambda x: torch.baddbmm(PAIR[None], x, x.transpose(1, 2), beta=0.5, alpha=2.0),
    "einsum": lambda x: torch.einsum("bthd,bshd->bhts", x.view(ROWS, LENGTH, 2, 3), x.cos().view(ROWS, LENGTH, 2, 3)),
    "einsum of features": lambda x: torch.einsum("btd,de->bte", x, _of(WIDTH, 4)),
    "attention": _attended,
    "causal attention": partial(_attended, is_causal=True),
    "masked attention": partial(_attended, attn_mask=MASK & (TOKENS != 3)[:, None, None]),
    "biased attention": partial(_attended, attn_mask=_of(2, LENGTH, LENGTH), scale=0.3),
    "attention of other lengths": lambda x: F.scaled_dot_product_attention(
        _heads(x), _heads(x)[:, :, 2:], _heads(x)[:, :, 2:], is_causal=True
    ),
    "grouped heads": lambda x: F.scaled_dot_product_attention(
        _heads(x), _heads(x)[:, :1], _heads(x)[:, :1] * 2, is_causal=True, enable_gqa=True
    ),
    "broadcast keys": lambda x: F.scaled_dot_product_attention(_heads(x), _heads(x)[:1], _heads(x)[:1]),
    "shapes of others": lambda x: _of(LENGTH, WIDTH).expand_as(x) * x.view_as(x) + _of(ROWS * LENGTH, WIDTH).view_as(x),
    "wide values": lambda x: F.scaled_dot_product_attention(x[..., :2], x[..., 2:4], x[..., 1:]),
    "masked completely": lambda x: _attended(x, attn_mask=(TOKENS > 2)[:, None, :, None] & MASK),
    "losses of elements": lambda x: F.mse_loss(x, x.cos(), reduction="none"),
}
"""Functions whose result is split."""
PLAIN: dict[str, Rule] = {
    "total": lambda x: x.sum(),
    "mean": lambda x: x.mean() + x.mean((0, 1)) + x.sum(1).mean(0),
    "pooled": lambda x: (x * (TOKENS > 0).unsqueeze(-1)).sum(1, keepdim=True) / (TOKENS > 0).sum(),
    "first token": lambda x: x[:, 0] + x[:, -2] * x.select(1, 3),
    "sum over tokens": lambda x: x.transpose(1, 2) @ x + torch.einsum("btd,bte->bde", x, x),
    "weighted tokens": lambda x: _of(3, LENGTH) @ x + (x.mT @ _of(LENGTH, 1)).mT,
    "cross entropy": lambda x: F.cross_entropy(x.view(-1, WIDTH), CLASSES.view(-1)),
    "smooth cross entropy": lambda x: F.cross_entropy(
        x.transpose(1, 2), CLASSES, weight=_of(WIDTH).abs(), label_smoothing=0.2
    ),
    "shifted cross entropy": lambda x: F.cross_entropy(
        x[:, :-1].flatten(0, 1), CLASSES[:, 1:].flatten(), reduction="sum"
    ),
    "probable cross entropy": lambda x: F.cross_entropy(x.flatten(0, 1), _of(ROWS * LENGTH, WIDTH).softmax(-1)),
    "likelihood": lambda x: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), CLASSES.flatten()),
    "squared error": lambda x: F.mse_loss(x, _of(ROWS, LENGTH, WIDTH)) + F.smooth_l1_loss(x, x.cos(), beta=0.5),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), _of(ROWS, LENGTH, WIDTH).softmax(-1), reduction="batchmean"),
    "binary": lambda x: F.binary_cross_entropy_with_logits(
        x, (PAIR[:, :WIDTH] > 0).double().expand_as(x), pos_weight=_of(WIDTH).abs()
    ),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), _of(4, WIDTH, 3), padding=1),
    "running sum": lambda x: x.cumsum(1),
    "reversed tokens": lambda x: x.flip(1) + x.roll(1, 1),
    "chosen tokens": lambda x: x[torch.arange(ROWS), torch.tensor([3, 5])],
    "blocks of tokens": lambda x: x[:, :6].unflatten(1, (2, 3)).sum(2),
    "every second token": lambda x: x[:, ::2],
}
"""Functions whose result all ranks have."""
FUNCTIONS = SPLIT | PLAIN


def computed(name: str, ranks: ContextRanks | None) -> tuple[list[Tensor], Tensor, bool]:
    """Return the results of a function, the gradient of its input, and whether the first result is split."""
    leaf = _of(ROWS, LENGTH, WIDTH, seed=1).requires_grad_()
    x: Tensor = leaf * 1.0
    if ranks is not None:
        x = split(x, SequenceDim(1, SequencePartition.balanced(LENGTH, ranks.size)), ranks)
    results = [leaf for leaf in tree_leaves(FUNCTIONS[name](x)) if isinstance(leaf, Tensor)]
    is_split = isinstance(results[0], SplitTensor)
    results = all_whole(results)
    weights = [_of(*result.shape, seed=9).to(result.dtype) for result in results]
    objective = sum((result * weight).sum() for result, weight in zip(results, weights, strict=True))
    size = 1 if ranks is None else ranks.size
    (gradient,) = torch.autograd.grad(objective / size, leaf)
    if ranks is not None:
        ranks.world.all_reduce(gradient)
    return [result.detach() for result in results], gradient, is_split


def on_rank(world: World, names: list[str]) -> dict[str, Any]:
    return {name: computed(name, ContextRanks(world)) for name in names}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_values_and_gradients_of_rules_are_those_of_whole_tensors(size: int) -> None:
    found = run_threads(partial(on_rank, names=list(FUNCTIONS)), size)
    for name in FUNCTIONS:
        expected, slope, _ = computed(name, None)
        for results, gradient, is_split in (each[name] for each in found):
            assert is_split == (name in SPLIT), name
            torch.testing.assert_close(
                results, expected, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )
            torch.testing.assert_close(
                gradient, slope, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"gradient of {name}: {text}"
            )


def test_fewer_tokens_than_ranks_leave_some_ranks_without_any() -> None:
    def short(world: World) -> Tensor:
        ranks = ContextRanks(world)
        x = split(_of(2, 2, 4), SequenceDim(1, SequencePartition.balanced(2, world.size)), ranks)
        return all_whole(F.scaled_dot_product_attention(x, x, x, is_causal=True)) + all_whole(x).mean()

    whole = _of(2, 2, 4)
    expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True) + whole.mean()
    for result in run_threads(short, 4):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.__setitem__((slice(None), 2), 0.0), "must not change a copy"),
        (lambda x: x.register_hook(print), "a hook on a tensor gets a part of its gradient"),
        (lambda x: x.data_ptr(), "no memory of its own"),
        (lambda x: x.add_(1.0), "must not change a copy"),
    ],
)
def test_what_a_part_cannot_do_is_refused(change: Callable[[Tensor], Any], reason: str) -> None:
    def refused(world: World) -> str:
        ranks = ContextRanks(world)
        x = split(_of(2, 6, 4), SequenceDim(1, SequencePartition.balanced(6, world.size)), ranks)
        with pytest.raises(StrategyError) as raised:
            change(x)
        return str(raised.value)

    assert all(reason in text for text in run_threads(refused, 2))


def test_metadata_is_that_of_the_whole_tensor() -> None:
    def shown(world: World) -> Any:
        x = split(_of(2, 6, 4), SequenceDim(1, SequencePartition.balanced(6, world.size)), ContextRanks(world))
        return (
            tuple(x.shape),
            x.size(1),
            x.dim(),
            len(x),
            x.numel(),
            x.dtype,
            x.device.type,
            x.requires_grad,
            x.is_contiguous(),
        )

    assert run_threads(shown, 2) == [((2, 6, 4), 6, 3, 2, 48, torch.float64, "cpu", False, True)] * 2
