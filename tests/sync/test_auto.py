"""sync="auto": the predicted time, the explained choice, and the revision of a wrong choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import StrategyError
from manyhands.data import as_source
from manyhands.distributed import World, resolve
from manyhands.launcher import LocalEngine
from manyhands.sync import Links, choose, forecasts, measure_links
from manyhands.testing import NamespaceHosts
from manyhands.training import Hand

from ..grouped_options import fit_options
from .test_training import QUIET, notices, spirals, take

NETWORK = {"a": torch.zeros(1024, 512), "b": torch.zeros(1024)}
MEGABIT = 1e6 / 8


def chosen(bandwidth: float, *, lossy: bool, alone: float = 0.02) -> str:
    """What is chosen where the exact sum takes as long as its bytes need."""
    links = Links(0.0005, bandwidth)
    exact = alone + max(0.0, links.seconds(4 * 1024 * 513) - 0.4 * alone)
    return str(choose(forecasts(links, NETWORK, 2, exact=exact, alone=alone, lossy=lossy)).policy)


def test_slow_links_choose_compression_and_fast_links_choose_allreduce() -> None:
    assert chosen(100_000 * MEGABIT, lossy=True) == "allreduce"
    assert chosen(100 * MEGABIT, lossy=True) != "allreduce"
    assert chosen(1 * MEGABIT, lossy=True).startswith(("localsteps", "powersgd"))


def test_auto_chooses_allreduce_unless_lossy_is_allowed() -> None:
    for bandwidth in (1, 100, 100_000):
        assert chosen(bandwidth * MEGABIT, lossy=False) == "allreduce"


def test_complex_gradients_fall_back_to_allreduce() -> None:
    odd = {"w": torch.zeros(10, dtype=torch.complex64)}
    found = forecasts(Links(1.0, 1.0), odd, 2, exact=9.0, alone=0.1, lossy=True)
    assert [str(forecast.policy) for forecast in found] == ["allreduce"]


def test_link_measurements_are_identical_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    first, *others = run_ranks(measure_links, 3)
    assert first.bandwidth > 1e6
    assert 0 < first.latency < 1
    assert others == [first, first]


def test_auto_without_lossy_has_the_losses_of_allreduce(tmp_path: Path) -> None:
    exact, auto = (
        mh.fit(
            spirals(),
            mh.Mirrored(2, sync=sync),
            **fit_options(on="cpu*2", epochs=3, folder=tmp_path, name=sync, **QUIET),
        )
        for sync in ("allreduce", "auto")
    )
    assert auto.losses == exact.losses
    assert "sync=allreduce is kept: " in notices(auto)


def switch(world: World, policies: list[str]) -> list[float]:
    """Trains under one policy after another."""
    hand, task = Hand(world, mh.Mirrored(world.size)), spirals()
    hand.build(task)
    feed = hand.reader.make_feed(as_source(task.data), 96, shuffle=True)
    losses = []
    for policy in policies:
        hand.follow_policy(policy)
        assert hand.spec.sync == policy
        for batch in hand.reader.one_epoch(feed):
            take(hand, task, batch)
        hand.agree()
        losses.append(hand.loss)
        assert hand.replica.differences() == []
    feed.close()
    hand.close()
    return losses


def test_training_continues_after_switching_the_sync_policy(run_ranks: Callable[..., list[Any]]) -> None:
    policies = ["localsteps(3)", "int8", "allreduce", "powersgd(2,warmup=0)", "diloco(4,momentum=0.1)", "allreduce"] * 3
    first, second = run_ranks(partial(switch, policies=policies), 2)
    assert first == second
    assert first[-1] < 0.8 * first[0]


def trial(world: World, exact: float) -> tuple[str, bool]:
    """A policy on trial, with a given duration of the exact step."""
    hand, task = Hand(world, mh.Mirrored(world.size, sync="auto(lossy=True)")), spirals()
    hand.build(task)
    choosing = hand.current.choosing
    assert choosing is not None
    feed = hand.reader.make_feed(as_source(task.data), 96, shuffle=True)
    for _ in range(12):
        for batch in hand.reader.one_epoch(feed):
            take(hand, task, batch)
            if hand.num_steps == 2:
                hand.follow_policy("localsteps(3)")
                choosing._steps, choosing._is_trying, choosing._wanted, choosing._window = [], True, 10, 5
                choosing._exact = exact
    feed.close()
    hand.close()
    return hand.spec.sync, hand.current.choosing is None


@pytest.mark.parametrize(("exact", "kept"), [(1e9, "localsteps(3)"), (0.0, "allreduce")])
def test_policy_that_is_not_faster_is_reverted(exact: float, kept: str, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(partial(trial, exact=exact), 2) == [(kept, True)] * 2


class Tracking(nn.Module):
    """A layer that keeps a running mean of its inputs, and whose gradient is masked by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.layer.weight.register_hook(lambda gradient: gradient * torch.tensor([[1.0, 0.0, 1.0, 0.0]]))
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * inputs.detach().mean(0))
        return self.layer(inputs)


def change_policy(world: World, policy: str) -> tuple[list[float], list[float]]:
    """The masked weights and the running mean after steps with a policy that was chosen after the first two."""
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    task = mh.Task(
        model=Tracking,
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=rows,
        batch_size=8,
    )
    hand = Hand(world, mh.Mirrored(world.size, sync="auto"))
    hand.build(task)
    hand.current.choosing = None
    before = hand.model.layer.weight.detach().clone()
    feed = hand.reader.make_feed(as_source(task.data), 8, shuffle=False)
    for batch in hand.reader.one_epoch(feed):
        take(hand, task, batch)
        if hand.num_steps == 2:
            hand.follow_policy(policy)
    change = hand.model.layer.weight.detach() - before
    feed.close()
    hand.close()
    return change[0, 1::2].tolist(), hand.model.mean.tolist()


def test_chosen_policy_keeps_gradient_hooks_and_shared_buffers(run_ranks: Callable[..., list[Any]]) -> None:
    exact, _ = run_ranks(partial(change_policy, policy="allreduce"), 2)
    (masked, mean), second = run_ranks(partial(change_policy, policy="bf16"), 2)
    assert masked == [0.0, 0.0]
    assert mean == second[1] == exact[1]


def test_auto_is_rejected_for_sharded_networks() -> None:
    with pytest.raises(StrategyError, match=r"chosen automatically for whole networks.*name the policy"):
        mh.launch(lambda hand: None, mh.Sharded(2, replicas=2, sync="auto"), on="cpu*4")


def over_a_slow_link(world: World) -> tuple[str, float]:
    hand = Hand(world, mh.Mirrored(world.size, sync=mh.sync.Auto(lossy=True)))
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    hand.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in hand.batches(torch.randn(2000, 256), 20):
        hand.backward(hand.model(batch).square().mean())
        hand.step()
        if hand.spec.sync != "auto(lossy=True)":
            break
    hand.agree()
    hand.close()
    return hand.spec.sync, hand.world.waited


@pytest.mark.root
def test_auto_chooses_a_lossy_policy_between_hosts_on_a_slow_link(engine: LocalEngine) -> None:
    said: list[str] = []
    with NamespaceHosts(2, rate="10mbit") as hosts:
        job = engine.start(hosts.joined(over_a_slow_link), resolve("cpu*2")[0], timeout=60)
        found = job.wait(lambda rank, entry: said.append(entry.get("text", "")), lambda *_: None)
    assert found[0][0] == found[1][0] != "allreduce"
    reason = next(text for text in said if "was chosen for links of" in text)
    assert "changes the mathematics" in reason
    megabits = float(reason.split("links of ")[1].split(" Mbit/s")[0])
    assert 3 < megabits < 15
