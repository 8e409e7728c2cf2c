"""Tracing: counts equal torch's own on real tensors, blocks are traced once, and what cannot be traced is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import manyhands as mh
from manyhands.costs import CannotTrace, Network, trace
from manyhands.costs.trace import pieces_of
from manyhands.graph import kept_bytes, lives

from .networks import GPT, classes, cnn_task, gpt_task, mlp_task, task

ROWS = 8


def first_rows(data: Any, count: int = ROWS) -> Any:
    return tuple(part[:count] for part in data) if isinstance(data, tuple) else data[:count]


@pytest.mark.parametrize("make", [mlp_task, cnn_task, gpt_task])
def test_traced_flops_and_activation_bytes_match_a_real_step(make: Any) -> None:
    made = make()
    batch = first_rows(made.data)
    network = trace(made, first_rows(made.data, 2), rows=ROWS)
    model = made.model()
    with FlopCounterMode(display=False) as counter:
        made.loss(model, batch).backward()
    counted = counter.get_total_flops()
    attention = 0.0
    if make is gpt_task:
        # 2 products forward, 5 backward, 4 blocks; half of each is masked. Newer versions of torch count the whole.
        whole = 4 * 7 * 2 * ROWS * 16 * 16 * 32
        attends = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        attention = -whole / 2 if attends in counter.flop_registry else whole / 2
    assert network.flops_per_sample * ROWS == pytest.approx(counted + attention)
    kept = sum(kept_bytes(lives(model, lambda: made.loss(model, batch))).values())
    assert network.kept_per_sample * ROWS == pytest.approx(kept, rel=0.05)
    assert network.params == sum(p.numel() for p in model.parameters())
    assert network.state_bytes == pytest.approx(2 * network.param_bytes, rel=0.01)


def test_costs_per_sample_are_independent_of_the_batch_size() -> None:
    made = gpt_task()
    small, large = (trace(made, made.data[:2], rows=rows) for rows in (2, 64))
    assert large.flops_per_sample == pytest.approx(small.flops_per_sample)
    assert large.kept_per_sample == pytest.approx(small.kept_per_sample, rel=0.02)


def test_identical_blocks_are_traced_once() -> None:
    calls: list[int] = []

    class Counting(GPT):
        def __init__(self) -> None:
            super().__init__(layers=12)
            for block in self.blocks:
                block.mlp.register_forward_hook(lambda *_: calls.append(1))

    network = trace(task(Counting, gpt_task().loss, None), gpt_task().data, rows=2)
    assert len(calls) == 1
    blocks = [piece for piece in network.pieces if piece.is_repeated]
    assert [piece.name for piece in blocks] == [f"blocks.{index}" for index in range(12)]
    assert {piece.products for piece in blocks} == {4}
    assert len({piece.forward for piece in blocks}) == 1


def test_autocast_reduces_activation_bytes_and_keeps_flops() -> None:
    made = gpt_task(width=64, length=64)
    plain, mixed = (trace(made, made.data, rows=8, precision=precision) for precision in ("fp32", "bf16"))
    assert mixed.kept_per_sample < 0.85 * plain.kept_per_sample
    assert mixed.flops_per_sample == pytest.approx(plain.flops_per_sample)
    assert [p.products for p in mixed.pieces if p.is_repeated] == [4] * 4
    assert any(piece.copies for piece in mixed.pieces)


def test_tied_weights_count_once() -> None:
    made = gpt_task()
    network = trace(made, made.data, rows=2)
    by_name = dict(network.named())
    assert by_name["head"].params == 0
    assert by_name["tokens"].params == 100 * 32


def test_tracing_a_large_network_allocates_no_parameters() -> None:
    network = trace(
        gpt_task(width=4096, layers=32, heads=32, words=50000, length=1024), torch.zeros(1, 1025).long(), rows=1
    )
    assert 6e9 < network.params < 7e9


def test_data_dependent_code_is_named_in_the_error() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (2 if x.sum().item() > 0 else 1)

    with pytest.raises(CannotTrace, match=r"x\.sum\(\)\.item\(\)"):
        trace(task(Looks, classes, None), first_rows(mlp_task().data), rows=2)


def test_network_with_data_dependent_constructor_is_built_for_real() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 10)
            self.scale = 1 / float(self.layer.weight.detach().abs().max())

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    network = trace(task(Scaled, classes, None), first_rows(mlp_task().data), rows=4)
    assert network.flops_per_sample == 2 * 2 * 12 * 10


def test_custom_step_cannot_be_traced() -> None:
    made = mh.Task(model=GPT, step=lambda hand, batch: None, optimizer=lambda m: None, data=[1])
    with pytest.raises(CannotTrace, match="measured"):
        trace(made, torch.zeros(1, 17).long(), rows=1)


def test_tracing_keeps_the_random_state() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trace(mlp_task(), first_rows(mlp_task().data), rows=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_pieces_of_wrapped_and_flat_networks() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GPT(layers=2)
            self.head = nn.Linear(2, 2)

    names = list(pieces_of(Outer()))
    assert names[:4] == ["inner.tokens", "inner.places", "inner.blocks.0", "inner.blocks.1"]
    assert list(pieces_of(nn.Linear(2, 2))) == [""]


def test_grouping_pieces_preserves_the_totals() -> None:
    network = trace(gpt_task(), gpt_task().data, rows=2)
    grouped = network.grouped(3)
    assert isinstance(grouped, Network)
    assert len(grouped.pieces) == 3
    assert grouped.params == network.params
    assert grouped.flops_per_sample == pytest.approx(network.flops_per_sample)


def _attending(dropout: float, groups: int = 4) -> mh.Task:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 8 * (4 + 2 * groups))

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(x).view(x.shape[0], x.shape[1], -1, 8).transpose(1, 2)
            q, k, v = parts.split((4, groups, groups), 1)
            enable = groups < 4
            return nn.functional.scaled_dot_product_attention(q, k, v, None, dropout, enable_gqa=enable)

    return task(Attending, lambda model, batch: model(batch).square().mean(), None)


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_with_dropout_is_one_operation(groups: int) -> None:
    batch = torch.zeros(2, 64, 32)
    plain, dropped = (trace(_attending(dropout, groups), batch, rows=2) for dropout in (0.0, 0.1))
    assert dropped.pieces == plain.pieces
    assert sum(piece.forward.attention for piece in dropped.pieces) == 2 * 2 * 2 * 4 * 64 * 64 * 8
    assert dropped.kept_per_sample < 4 * 64 * 64 * 4  # no scores are kept


def test_fused_operations_write_only_what_products_and_other_pieces_read() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(torch.tanh(x.sin().cos()))

    made = task(lambda: nn.ModuleDict({"one": Chain()}), lambda model, batch: model["one"](batch).sum(), None)
    size = 32 * 16 * 4
    forward = next(piece.forward for piece in trace(made, torch.zeros(32, 16), rows=32).pieces if piece.params)
    assert forward.alone(fused=False) == 6 * size  # three operations read and write
    assert forward.alone(fused=True) == 2 * size
    assert (forward.launches(fused=False), forward.launches(fused=True)) == (5, 3)


def test_losses_read_single_elements_of_the_log_probabilities() -> None:
    made = task(lambda: nn.Sequential(nn.Linear(4, 1000)), classes, None)
    own = trace(made, (torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)), rows=4).pieces[-1].forward
    assert own.moved < 2.1 * 4 * 1000 * 4  # log_softmax reads and writes, the loss gathers


def test_convolutions_in_fp32_are_computed_in_tf32_as_torch_does_by_default() -> None:
    made = cnn_task()
    batch = first_rows(made.data, 2)
    convolutions, linear = ([p for p in trace(made, batch, rows=2).pieces if p.name in names] for names in ("03", "7"))
    assert all(piece.forward.tf32 == piece.forward.flops > 0 for piece in convolutions)
    assert [piece.forward.tf32 for piece in linear] == [0.0]
    assert sum(p.backward.tf32 for p in trace(made, batch, rows=2, precision="bf16").pieces) == 0.0
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert all(p.backward.tf32 == p.backward.flops for p in trace(made, batch, rows=2).pieces)
    finally:
        torch.set_float32_matmul_precision(before)


def test_norms_read_their_inputs_again_where_their_sums_need_all_rows() -> None:
    made = task(
        lambda: nn.ModuleDict({"batch": nn.BatchNorm2d(8), "rows": nn.LayerNorm(16)}),
        lambda model, batch: model["rows"](model["batch"](batch)).sum(),
        None,
    )
    size = 4 * 4 * 8 * 16 * 16
    batch, rows, _ = trace(made, torch.zeros(4, 8, 16, 16), rows=4).pieces
    assert batch.forward.moved == pytest.approx(3 * size, rel=0.01)
    assert batch.backward.moved == pytest.approx(5 * size, rel=0.01)
    assert rows.forward.moved == pytest.approx(2 * size, rel=0.1)
    assert rows.backward.moved == pytest.approx(5 * size, rel=0.05)


@pytest.mark.parametrize("width", [1, 2, 7])
def test_costs_are_never_negative_where_activations_have_the_shapes_of_parameters(width: int) -> None:
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2)]
    made = task(lambda: nn.Sequential(*blocks), lambda model, batch: model(batch).sum(), None)
    for piece in trace(made, torch.zeros(1, width), rows=1).pieces:
        for cost in (piece.forward, piece.backward):
            assert min(value for value in vars(cost).values() if value is not None) >= 0, piece.name
