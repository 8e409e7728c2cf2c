"""Local SGD: replicas are equal whenever they synchronize, and every checkpoint has one network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import LossNotFinite, StrategyError, TaskError
from manyhands.data import as_source
from manyhands.distributed import World, resolve
from manyhands.launcher import LocalEngine
from manyhands.storage import CheckpointStore
from manyhands.sync import Agreement, DiLoCo, LocalSteps, make_policy
from manyhands.testing import NamespaceHosts, run_threads
from manyhands.training import Hand

from ..grouped_options import fit_options
from ..training.problems import problem
from .test_training import QUIET, events, notices, spirals, take


def plain_sgd(name: str) -> mh.Task:
    """One step of SGD is linear in the gradient, so that averaging afterwards is averaging before."""
    task = problem(name)
    if name == "gan":
        return task.replace(clip=None, optimizer=lambda m: {k: sgd(getattr(m, k)) for k in ("critic", "generator")})
    return task.replace(clip=None, optimizer=sgd)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(world: World, name: str, sync: str, accumulate: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    spec = mh.Mirrored(world.size, sync=sync, batch_stats="local", precision="fp64", accumulate=accumulate)
    task = plain_sgd(name)
    hand = Hand(world, spec)
    hand.build(task)
    feed = hand.reader.make_feed(as_source(task.data), 16, shuffle=True)
    losses = []
    for _ in range(2):
        for batch in hand.reader.one_epoch(feed):
            take(hand, task, batch)
            losses.append(hand.loss)
    assert hand.replica.differences() == []
    feed.close()
    hand.close()
    return losses, {name: tensor.clone() for name, tensor in hand.model.named_parameters()}


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "gan"])
def test_local_steps_of_one_with_sgd_equals_allreduce(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    """Three replicas and a last batch of 9 samples: parts of different sizes, one micro-batch with padding rows."""
    exact = run_ranks(partial(train, name=name, sync="allreduce", accumulate=2), 3)
    local = run_ranks(partial(train, name=name, sync="localsteps(1)", accumulate=2), 3)
    for (wanted, weights), (found, others) in zip(exact, local, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10)
        torch.testing.assert_close(others, weights, rtol=0, atol=1e-9)


def agree_by_hand(world: World) -> list[list[float]]:
    """Two meetings of a single number, with 1 and 3 samples; beside it a statistic and a counter."""
    weight = nn.Parameter(torch.tensor([1.0]))
    statistic, counter = torch.tensor([0.0]), torch.tensor([world.rank])
    agreement = Agreement(DiLoCo(2, outer_lr=0.5, momentum=0.5), world, {"w": weight}, lambda: [statistic, counter])
    found = []
    for meeting in range(2):
        for _ in range(2):
            with torch.no_grad():
                weight += 1.0 + world.rank
            row = torch.tensor([10.0, 1.0 + 2 * world.rank, 0.0], dtype=torch.float64)
            is_due = agreement.note(row)
        assert is_due
        statistic.fill_(4.0 * (world.rank + meeting))
        agreement.meet()
        assert agreement.is_reached
        assert row.tolist() == [20.0, 4.0, 0.0]
        found.append([weight.item(), statistic.item(), counter.item()])
    return found


def test_outer_update_weights_replicas_by_samples_and_applies_momentum() -> None:
    # The mean way is (1 * 2 + 3 * 4) / 4 = 3.5, twice. Velocities are 3.5, then 0.5 * 3.5 + 3.5 = 5.25; the outer steps
    # are 0.5 * (3.5 + 0.5 * velocity).
    first = 1 + 0.5 * (3.5 + 0.5 * 3.5)
    second = first + 0.5 * (3.5 + 0.5 * 5.25)
    assert run_threads(agree_by_hand, 2) == [[[first, 3.0, 0], [second, 7.0, 0]]] * 2


def one_long_epoch() -> mh.Task:
    """Replicas agree at the end of every epoch, so that short ones would hide the policy."""
    task = spirals()
    points, arms = task.data
    return task.replace(data=(points.repeat(50, 1), arms.repeat(50)))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> mh.Run:
    return mh.fit(
        one_long_epoch(), mh.Mirrored(2), **fit_options(on="cpu*2", folder=tmp_path_factory.mktemp("exact"), **QUIET)
    )


@pytest.mark.parametrize(
    ("policy", "factor", "share"),
    [("localsteps(8)", 1.6, 0.13), ("localsteps(8,by=int8)", 1.6, 0.04), ("diloco(10,warmup=20)", 2.0, 0.11)],
)
def test_local_sgd_reaches_near_exact_loss_with_few_bytes(
    policy: str, factor: float, share: float, exact: mh.Run, tmp_path: Path
) -> None:
    run = mh.fit(one_long_epoch(), mh.Mirrored(2, sync=policy), **fit_options(on="cpu*2", folder=tmp_path, **QUIET))
    last, wanted = np.mean(run.losses[-8:]), np.mean(exact.losses[-8:])
    assert len(run.losses) == 200
    assert last < factor * wanted
    looks = events(run, "sync")
    assert looks[0]["num_lossy"] == 1
    assert looks[-1]["bytes"] < share * looks[-1]["exact_bytes"]
    assert f"sync={policy} changes the mathematics: replicas train independently" in notices(run)
    assert f"sync={policy}: the update of a replica differed" in notices(run)


@pytest.mark.parametrize("policy", ["localsteps(3)", "diloco(5,by=int8)"])
def test_resumed_local_sgd_run_equals_an_uninterrupted_one(policy: str, tmp_path: Path) -> None:
    task = problem("cnn", "adamw", rows=64).replace(ema=0.9)
    spec = mh.Mirrored(sync=policy)
    settings: dict[str, Any] = {"save_every": 2, "keep": 9, "folder": tmp_path, **QUIET}
    whole = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=2, name="whole", **settings))
    mh.fit(task, spec, **fit_options(on="cpu*2", steps=2, name="cut", **settings))
    again = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=2, name="cut", resume=True, **settings))
    assert again.losses == whole.losses
    saved = [CheckpointStore(tmp_path / name / "checkpoints").load() for name in ("whole", "cut")]
    torch.testing.assert_close(saved[1].model, saved[0].model, rtol=0, atol=0)
    torch.testing.assert_close(saved[1].averages, saved[0].averages, rtol=0, atol=0)
    assert ("shared/velocity/head.weight" in saved[0].policy) == policy.startswith("diloco")
    other = mh.fit(task, spec, **fit_options(on="cpu*3", epochs=3, name="cut", resume=True, **settings))
    assert len(other.losses) == 12
    assert "starts fresh" not in notices(other)


def test_sharded_replicas_with_diloco_equal_mirrored_replicas(tmp_path: Path) -> None:
    task = problem("gpt", "adamw", rows=64)
    settings: dict[str, Any] = {"on": "cpu*4", "folder": tmp_path, **QUIET}
    spec = mh.Sharded(2, replicas=2, sync="diloco(2,outer_lr=1.0,momentum=0.1)")
    whole = mh.fit(task, spec, **fit_options(epochs=2, name="whole", **settings))
    mh.fit(task, spec, **fit_options(epochs=1, name="cut", **settings))
    again = mh.fit(task, spec, **fit_options(epochs=2, name="cut", resume=True, **settings))
    np.testing.assert_allclose(again.losses, whole.losses, rtol=1e-6)
    assert "starts fresh" not in notices(again)
    single = mh.fit(
        task,
        mh.Mirrored(2, sync="diloco(2,outer_lr=1.0,momentum=0.1)"),
        **fit_options(epochs=2, on="cpu*2", folder=tmp_path, **QUIET),
    )
    np.testing.assert_allclose(whole.losses, single.losses, rtol=1e-4)


def poisoned(**settings: Any) -> mh.Task:
    """One sample of 48 is not a number, so one replica's gradient is not finite in one step of three."""
    task = problem("cnn", "adamw", rows=48)
    inputs, labels = task.data
    inputs[7, 0, 0, 0] = float("nan")
    return task.replace(data=(inputs, labels), **settings)


def test_non_finite_loss_ends_the_run_on_all_replicas(tmp_path: Path) -> None:
    with pytest.raises(LossNotFinite, match="loss became nan at step"):
        mh.fit(
            poisoned(), mh.Mirrored(sync="localsteps(4)"), **fit_options(on="cpu*2", epochs=3, folder=tmp_path, **QUIET)
        )


def test_replica_skips_a_step_with_non_finite_loss(tmp_path: Path) -> None:
    run = mh.fit(
        poisoned(not_finite="skip"),
        mh.Mirrored(sync="localsteps(3)"),
        **fit_options(on="cpu*2", epochs=3, folder=tmp_path, **QUIET),
    )
    assert len(run.losses) == 9, "the other replica took the step"
    assert np.isfinite(run.losses).all()
    assert all(tensor.isfinite().all() for tensor in run.state_dict().values())


class Stopper(mh.Callback):
    """One replica alone wishes to stop."""

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == 5 and hand.rank == 1:
            hand.stop()


def test_stop_request_takes_effect_at_the_next_synchronization(tmp_path: Path) -> None:
    run = mh.fit(
        one_long_epoch(),
        mh.Mirrored(sync="localsteps(4)"),
        **fit_options(on="cpu*2", callbacks=[Stopper()], folder=tmp_path, **QUIET),
    )
    assert run.num_steps == 8
    assert run.stopped


def test_validation_uses_synchronized_weights(tmp_path: Path) -> None:
    task = spirals()
    task = task.replace(valid=task.data, ema=0.5)
    run = mh.fit(
        task, mh.Mirrored(sync="localsteps(16)"), **fit_options(on="cpu*2", epochs=3, folder=tmp_path, **QUIET)
    )
    assert run.num_steps == 12
    measured = mh.evaluate(run, task.data, on="cpu")
    assert measured["loss"] == pytest.approx(run.metrics["valid_loss"], rel=1e-6)


def test_frozen_parameters_are_not_synchronized_until_unfrozen() -> None:
    def work(world: World) -> list[float]:
        frozen, free = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        agreement = Agreement(LocalSteps(1), world, {"a": frozen, "b": free}, list)
        frozen.requires_grad_(False)
        found = []
        for _ in range(3):
            with torch.no_grad():
                free += 1.0 + world.rank
                frozen += frozen.requires_grad * (1.0 + world.rank)
            agreement.note(torch.tensor([0.0, 1.0, 0.0]))
            agreement.meet()
            found += [frozen.item(), free.item()]
            frozen.requires_grad_(True)
        return found

    assert run_threads(work, 2) == [[0.0, 1.5, 1.5, 3.0, 3.0, 4.5]] * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("localsteps(0)", "every must be a whole number of at least 1, but got 0"),
        ("diloco(outer_lr=0)", "outer_lr must be above 0, but got 0"),
        ("diloco(momentum=1)", "momentum must be at least 0 and below 1, but got 1"),
        ("localsteps(4,by=diloco)", "by must be a policy that exchanges gradients, but got 'diloco'"),
        ("localsteps(4,by=pigeon)", "sync must be one of"),
    ],
)
def test_invalid_local_step_settings_are_rejected(text: str, said: str) -> None:
    with pytest.raises(StrategyError) as raised:
        mh.launch(lambda hand: None, mh.Mirrored(2, sync=text), on="cpu*2")
    assert said in str(raised.value)


def test_nested_policy_round_trips_through_text() -> None:
    spec = mh.Mirrored(2, sync=mh.sync.LocalSteps(8, by=mh.sync.TopK(0.1, warmup=2)))
    assert spec.sync == "localsteps(8,by=topk(0.1,warmup=2))"
    assert mh.StrategySpec.parse(str(spec)) == spec
    assert make_policy(spec.sync) == LocalSteps(8, by="topk(0.1,warmup=2)")


def test_complex_parameters_are_rejected_by_name() -> None:
    def work(world: World) -> None:
        Agreement(LocalSteps(), world, {"w": nn.Parameter(torch.ones(2, dtype=torch.complex64))}, list)

    with pytest.raises(TaskError, match=r"localsteps.16. needs parameters with a floating-point dtype, but got w of"):
        run_threads(work, 2)


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_replicas_on_one_host_stay_synchronized_between_host_rounds(
    name: str, run_ranks: Callable[..., list[Any]]
) -> None:
    exact = run_ranks(partial(train, name=name, sync="allreduce", accumulate=1), 2)
    hosts = run_ranks(partial(train, name=name, sync="localsteps(2,between=hosts)", accumulate=1), 2)
    for (wanted, weights), (found, others) in zip(exact, hosts, strict=True):
        np.testing.assert_allclose(found[1::2], wanted[1::2], rtol=1e-10)
        torch.testing.assert_close(others, weights, rtol=0, atol=1e-9)


@pytest.mark.root
def test_local_steps_between_hosts_synchronize_ranks_within_each_host(engine: LocalEngine) -> None:
    """Four replicas on two hosts: with SGD and every step the exact sum; else each host by itself, its ranks as one."""
    found = {}
    with NamespaceHosts(2) as hosts:
        for sync in ("allreduce", "localsteps(1,between=hosts)", "localsteps(4,between=hosts)"):
            work = hosts.joined(partial(train, name="gpt", sync=sync, accumulate=1))
            job = engine.start(work, resolve("cpu*4")[0], timeout=60)
            found[sync] = job.wait(lambda rank, entry: None, lambda *_: None)
    exact, every, apart = found.values()
    for rank in range(4):
        np.testing.assert_allclose(every[rank][0], exact[rank][0], rtol=1e-10)
        torch.testing.assert_close(every[rank][1], exact[rank][1], rtol=0, atol=1e-9)
    assert apart[0][0] == apart[2][0] != apart[1][0], "ranks 0 and 2 are on one host, 1 and 3 on the other"


def sparse_task() -> mh.Task:
    table = torch.randint(0, 50, (64, 3), generator=torch.Generator().manual_seed(0))
    return mh.Task(
        model=lambda: nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=table,
        batch_size=16,
    )


def test_sparse_gradients_work_with_local_steps_and_are_rejected_by_allreduce(tmp_path: Path) -> None:
    run = mh.fit(
        sparse_task(), mh.Mirrored(sync="localsteps(2)"), **fit_options(on="cpu*2", epochs=3, folder=tmp_path, **QUIET)
    )
    assert run.losses[-1] < run.losses[0]
    with pytest.raises(TaskError, match=r"must be dense .* but got 0 with sparse=True. .*LocalSteps"):
        mh.fit(sparse_task(), mh.Mirrored(), **fit_options(on="cpu*2", folder=tmp_path, **QUIET))
