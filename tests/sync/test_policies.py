"""Every policy fulfils the contract, and invalid settings are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import manyhands as mh
from manyhands.core import StrategyError, StrategySpec, UsageError
from manyhands.sync import BF16, FP16, POLICIES, DiLoCo, Int8, LocalSteps, PowerSGD, TopK, make_policy
from manyhands.sync.topk import largest
from manyhands.testing import PolicyContract


class TestBF16(PolicyContract):
    policy = BF16()
    precision = 2**-8
    share = 0.51


class TestFP16(PolicyContract):
    policy = FP16()
    precision = 2**-10
    share = 0.51


class TestInt8(PolicyContract):
    policy = Int8()
    precision = 0.02
    share = 0.26


class TestTopK(PolicyContract):
    policy = TopK(0.1, warmup=0)
    precision = 1e-6
    share = 0.21

    def suiting(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Few numbers that are not zero."""
        whole = torch.zeros(math.prod(shape), dtype=torch.float64)
        whole[::20] = super().suiting(name, whole[::20].shape, generator)
        return whole.view(shape)


class TestAllNumbers(PolicyContract):
    policy = TopK(1.0, warmup=0)
    precision = 1e-6
    share = 2.01


class TestPowerSGD(PolicyContract):
    policy = PowerSGD(2, warmup=0)
    precision = 1e-5
    share = 0.03

    def suiting(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """A matrix of rank 1."""
        if len(shape) < 2:
            return super().suiting(name, shape, generator)
        left = super().suiting(name, shape[:1], generator)
        return torch.outer(left, super().suiting(name, (math.prod(shape[1:]),), generator)).view(shape)


class TestLocalSteps(PolicyContract):
    """How it sums the ways."""

    policy = LocalSteps(4, by="int8")
    precision = 0.02
    share = 0.26
    sizes = (1, 2)


class TestDiLoCo(PolicyContract):
    policy = DiLoCo(4)
    precision = 1e-6
    share = 1.01
    sizes = (1, 2)


def test_every_builtin_policy_has_a_contract_test() -> None:
    kept = {kit.policy.name for kit in PolicyContract.__subclasses__()}
    assert kept == {name for name, kind in POLICIES.items() if kind.__module__.startswith("manyhands.sync")} - {
        "allreduce",
        "auto",
    }


@pytest.mark.parametrize("spread", ["even", "at the end", "with nan"])
def test_threshold_top_k_equals_exact_top_k(spread: str) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(300_000)
    if spread == "at the end":
        numbers[-5000:] *= 100
    if spread == "with nan":
        numbers[7] = float("nan")
    for count in (1, 3000, 30_000):
        found = largest(numbers, count).sort().values
        assert torch.equal(found, numbers.abs().topk(count).indices.sort().values)


def test_powersgd_of_rank_4_is_exact_for_a_rank_4_gradient() -> None:
    torch.manual_seed(0)
    gradient = {"w": torch.randn(30, 4) @ torch.randn(4, 50)}

    class Kit(PolicyContract):
        policy = PowerSGD(4, warmup=0)

    sums = Kit()._exchange(2, [[gradient], [gradient]])[0][0]
    torch.testing.assert_close(sums.result.view(30, 50) / 2, gradient["w"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("telepathy", "sync must be one of allreduce, auto, bf16, diloco, fp16, int8, localsteps, powersgd"),
        ("topk(2)", "fraction must be above 0 and at most 1, but got 2"),
        ("topk(0)", "fraction must be above 0 and at most 1, but got 0"),
        ("topk(many)", "fraction must be above 0 and at most 1, but got 'many'"),
        ("powersgd(0)", "rank must be a whole number of at least 1, but got 0"),
        ("powersgd(rank=1.5)", "rank must be a whole number of at least 1, but got 1.5"),
        ("int8(warmup=-1)", "warmup must be a whole number of at least 0, but got -1"),
        ("int8(bits=4)", "the policy int8 must have the settings warmup"),
        ("bf16(", "sync must be one of"),
    ],
)
def test_invalid_policy_is_rejected_before_launch(text: str, said: str) -> None:
    with pytest.raises(StrategyError) as raised:
        make_policy(text)
    assert said in str(raised.value)
    with pytest.raises(StrategyError):
        mh.launch(lambda hand: None, mh.Mirrored(2, sync=text), on="cpu*2")


@pytest.mark.parametrize(
    ("sync", "said"),
    [
        ("bf8", "sync must be one of allreduce"),
        (3, "sync must be a policy or its name, but got 3"),
        (None, "sync must be a policy or its name, but got None"),
        (TopK, "but got the class TopK. Write for example mh.sync.TopK(...)"),
    ],
)
def test_invalid_sync_argument_is_rejected_by_the_strategy_constructor(sync: object, said: str) -> None:
    for make in (mh.Mirrored, mh.Sharded, mh.TensorParallel):
        with pytest.raises(StrategyError) as raised:
            make(2, sync=sync)
        assert said in str(raised.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Int8(bits=4), "the policy int8 must have the settings warmup=, between=, but got Int8(bits=4)"),
        (lambda: mh.sync.Auto(True), "but got Auto(True). Write for example auto(lossy=…)"),
        (lambda: mh.sync.Auto(lossy="yes"), "lossy must be True or False, but got 'yes'"),
        (
            lambda: mh.strategies.Embedding(10, 4, padding_idx=0),
            "a table can only have rows, dim, optimizer, std and seed, but got padding",
        ),
    ],
)
def test_unknown_policy_settings_are_named_in_the_error(make: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        make()
    assert said in str(raised.value)


def test_sync_package_exports_only_policies() -> None:
    known = ["AllReduce", "Auto", "BF16", "DiLoCo", "FP16", "Int8", "LocalSteps", "Policy", "PowerSGD", "TopK"]
    assert dir(mh.sync) == known


def test_policy_in_a_strategy_spec_round_trips_through_text() -> None:
    spec = mh.Mirrored(2, sync=mh.sync.PowerSGD(rank=8, warmup=3))
    assert spec.to_dict() == {"replicas": 2, "sync": "powersgd(8,warmup=3)"}
    assert StrategySpec.parse(str(spec)) == spec
    assert StrategySpec.parse("mirrored,sync=powersgd(rank=8,warmup=3),accumulate=2").accumulate == 2
    assert make_policy(" TopK( 0.5 , warmup = 1 ) ") == TopK(0.5, warmup=1)


def test_powersgd_is_rejected_with_sharding() -> None:
    with pytest.raises(StrategyError, match="powersgd.4. needs whole matrices.*replicas=2,shards=2"):
        mh.launch(lambda hand: None, mh.Sharded(2, replicas=2, sync="powersgd(4)"), on="cpu*4")
