"""Buckets: sums over replicas, in any layout of parameters, used or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from manyhands.core import StrategyError, TaskError
from manyhands.distributed import World
from manyhands.sync import AllReduce, Buckets, Policy, buckets, make_policy
from manyhands.testing import run_threads


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"a": nn.Linear(4, 8), "b": nn.Linear(8, 2), "unused": nn.Linear(3, 3), "some": nn.Linear(2, 2)}
    )


def gradients_after(world: World, model: nn.Module) -> dict[str, Any]:
    made = Buckets(dict(model.named_parameters()), world, AllReduce())
    x = torch.full((5, 4), float(world.rank + 1))
    y = model["b"](model["a"](x))
    if world.rank == 1:
        y = model["some"](y)
    made.arm()
    y.sum().backward()
    made.finish()
    made.close()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("first_bytes", [1, 1 << 20])
def test_gradients_are_all_reduced_and_unused_parameters_keep_none(
    first_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "FIRST_BYTES", first_bytes)
    monkeypatch.setattr(Policy, "bucket_bytes", first_bytes)
    model = network()
    for rank in range(3):
        y = model["b"](model["a"](torch.full((5, 4), float(rank + 1))))
        (model["some"](y) if rank == 1 else y).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    models = [network() for _ in range(3)]
    for found in run_threads(lambda world: gradients_after(world, models[world.rank]), 3):
        for name, gradient in expected.items():
            if gradient is None:
                assert found[name] is None, f"{name} was not used"
            else:
                torch.testing.assert_close(found[name], gradient, msg=name)


def test_micro_batch_gradients_are_accumulated_before_the_all_reduce() -> None:
    def accumulate(world: World) -> torch.Tensor:
        layer = nn.Linear(2, 1, bias=False)
        made = Buckets({"w": layer.weight}, world, AllReduce())
        for micro in range(3):
            if micro == 2:
                made.arm()
            layer(torch.full((1, 2), float(world.rank + micro))).sum().backward()
        made.finish()
        made.divide(torch.tensor(2.0))
        assert layer.weight.grad is not None
        return layer.weight.grad

    expected = sum(rank + micro for rank in range(2) for micro in range(3)) / 2
    for gradient in run_threads(accumulate, 2):
        assert gradient.tolist() == [[expected, expected]]


def test_sparse_gradient_is_rejected_by_parameter_name() -> None:
    def work(world: World) -> None:
        table = nn.Embedding(10, 2, sparse=True)
        made = Buckets({"table.weight": table.weight}, world, AllReduce())
        made.arm()
        table(torch.tensor([1])).sum().backward()
        made.finish()

    with pytest.raises(TaskError, match="a sparse gradient of table.weight. Build its layer with sparse=False"):
        run_threads(work, 2)


def test_buckets_do_not_mix_dtypes() -> None:
    def work(world: World) -> list[torch.dtype]:
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
        made = Buckets(dict(model.named_parameters()), world, AllReduce())
        made.arm()
        (model[0](torch.ones(1, 2)).sum() + model[1](torch.ones(1, 2).double()).sum()).backward()
        made.finish()
        return [p.grad.dtype for p in model.parameters() if p.grad is not None]

    assert run_threads(work, 2)[0] == [torch.float32] * 2 + [torch.float64] * 2


def test_unknown_policy_is_rejected() -> None:
    with pytest.raises(StrategyError, match="sync must be one of allreduce"):
        make_policy("telepathy")
