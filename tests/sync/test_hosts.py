"""Policies between hosts: exact sums within a host, few bytes between hosts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import StrategyError, UsageError
from manyhands.distributed import NullWorld, World, resolve
from manyhands.launcher import LocalEngine
from manyhands.sync import BucketExchange, make_policy
from manyhands.testing import NamespaceHosts

pytestmark = pytest.mark.root
SUMS, INT8 = "allreduce(between=hosts)", "int8(between=hosts)"
SHAPES = {"a": (30, 40), "b": (17,)}


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def exchange(world: World, policy: str, num_steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """What comes of some steps on one rank: results, feedback, and the bytes of the last."""
    bucket_exchange = BucketExchange(make_policy(policy), world, gradients(0, 0))
    results, owed = [], []
    for step in range(num_steps):
        sent = torch.cat([flat(gradients(world.rank, step)), torch.tensor([1.0, 2.0])])
        bucket_exchange.begin(sent)
        while bucket_exchange.advance():
            pass
        assert sent[-2:].tolist() == [4.0, 8.0]
        results.append(sent[:-2].clone())
        feedback = [part.reshape(-1) for part in bucket_exchange.state().feedback.values()]
        owed.append(torch.cat(feedback).clone() if feedback else torch.zeros(len(sent) - 2))
    return results, owed, bucket_exchange.num_bytes


def run(engine: LocalEngine, work: Any, ranks: int) -> list[Any]:
    with NamespaceHosts(2) as hosts:
        job = engine.start(hosts.joined(work), resolve(f"cpu*{ranks}")[0], timeout=60)
        return job.wait(lambda rank, entry: None, lambda *_: None)


def all_of(world: World) -> dict[str, Any]:
    policies = (
        "allreduce",
        "allreduce(between=hosts)",
        "int8(between=hosts)",
        "int8",
        "powersgd(2,warmup=1,between=hosts)",
    )
    return {policy: exchange(world, policy, 4) for policy in policies}


def test_intra_host_sums_are_exact_and_inter_host_error_feedback_is_kept(engine: LocalEngine) -> None:
    found = run(engine, all_of, 4)
    wanted = [
        sum(torch.cat([g.reshape(-1) for g in gradients(rank, step).values()]) for rank in range(4))
        for step in range(4)
    ]
    for policy in found[0]:
        assert all(torch.equal(found[0][policy][0][i], found[r][policy][0][i]) for r in range(4) for i in range(4)), (
            policy
        )
        owed: Any = 0.0
        for step in range(4):
            after = sum(found[rank][policy][1][step] for rank in range(4))
            torch.testing.assert_close(found[0][policy][0][step] + after, wanted[step] + owed, rtol=0, atol=1e-12)
            owed = after
    numbers = 8 * wanted[0].numel()
    assert found[0]["allreduce(between=hosts)"][2] <= 0.51 * numbers + 32, (
        "half of the gradient crosses for each of two"
    )
    assert found[0][INT8][2] < 0.1 * numbers
    error = (found[0][INT8][0][0] - wanted[0]).norm() / wanted[0].norm()
    assert 0 < error < 0.02


def uneven(world: World) -> str:
    with pytest.raises(UsageError) as raised:
        world.by_hosts()
    return str(raised.value)


def test_hosts_with_different_rank_counts_are_rejected(engine: LocalEngine) -> None:
    assert "every host must have the same number of ranks, but got 2 on host1, 1 on host2" in run(engine, uneven, 3)[0]


def fit(world: World, sync: str) -> list[float]:
    from manyhands.training import Hand

    from .test_local import plain_sgd, take

    task = plain_sgd("cnn")
    hand = Hand(world, mh.Mirrored(world.size, sync=sync, precision="fp64"))
    hand.build(task)
    feed = hand.reader.make_feed(mh.data.as_source(task.data), 16, shuffle=True)
    losses = []
    for batch in hand.reader.one_epoch(feed):
        take(hand, task, batch)
        losses.append(hand.loss)
    assert hand.replica.differences() == []
    feed.close()
    hand.close()
    return losses


def test_hierarchical_allreduce_has_the_losses_of_plain_allreduce(engine: LocalEngine) -> None:
    plain, by_hosts = (run(engine, partial(fit, sync=sync), 4)[0] for sync in ("allreduce", SUMS))
    assert by_hosts == pytest.approx(plain, rel=1e-12)


def test_null_world_is_one_host_with_one_rank() -> None:
    assert [world.size for world in NullWorld().by_hosts()] == [1, 1]


def test_between_hosts_is_rejected_unless_shards_match_devices_per_host() -> None:
    with pytest.raises(StrategyError, match="as many shards as a host has devices"):
        mh.launch(lambda hand: None, mh.Sharded(2, replicas=2, sync="int8(between=hosts)"), on="cpu*4")
