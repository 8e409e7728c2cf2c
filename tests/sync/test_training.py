"""Sync policies in training: they converge, replicas stay equal, checkpoints resume, and runs report what changed."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import manyhands as mh
from manyhands.core import PeerLost, TaskError
from manyhands.data import as_source
from manyhands.distributed import World
from manyhands.storage import CheckpointStore
from manyhands.sync import Buckets, Coded, Int8, Policy, TopK, buckets, make_policy
from manyhands.testing import Faults, run_threads
from manyhands.training import Hand

from ..grouped_options import fit_options
from ..training.problems import problem

QUIET: dict[str, Any] = {"progress": False, "timeout": 60}
LOSSY = ["bf16", "fp16", "int8(warmup=1)", "topk(0.1,warmup=1)", "powersgd(2,warmup=1)"]


def spirals() -> mh.Task:
    """Three classes that no straight line parts."""
    torch.manual_seed(0)
    turn, arm = torch.rand(384), torch.arange(384) % 3
    angle = 4 * turn + arm * 2.1
    points = torch.stack([turn * angle.sin(), turn * angle.cos()], 1) + 0.02 * torch.randn(384, 2)
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=5e-3),
        data=(points, arm),
        batch_size=96,
    )


def events(run: mh.Run, kind: str) -> list[dict[str, Any]]:
    lines = (run.path / "events.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def notices(run: mh.Run) -> str:
    return "\n".join(entry["text"] for entry in events(run, "notice"))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> mh.Run:
    return mh.fit(
        spirals(),
        mh.Mirrored(2),
        **fit_options(on="cpu*2", epochs=50, folder=tmp_path_factory.mktemp("exact"), **QUIET),
    )


@pytest.mark.parametrize(
    ("policy", "factor", "share"),
    [
        ("bf16", 1.1, 0.52),
        ("fp16", 1.1, 0.52),
        ("int8", 1.2, 0.27),
        ("topk(0.05)", 2.0, 0.12),
        ("powersgd(4)", 1.3, 0.25),
    ],
)
def test_lossy_policy_reaches_near_exact_loss_with_fewer_bytes(
    policy: str, factor: float, share: float, exact: mh.Run, tmp_path: Path
) -> None:
    run = mh.fit(spirals(), mh.Mirrored(2, sync=policy), **fit_options(on="cpu*2", epochs=50, folder=tmp_path, **QUIET))
    first, last, wanted = run.losses[0], np.mean(run.losses[-8:]), np.mean(exact.losses[-8:])
    assert wanted < 0.3 * first, "the exact run must have learnt something"
    assert last < factor * wanted
    looks = events(run, "sync")
    assert [look["num_lossy"] for look in looks] == [1, 10, 100]
    assert all(0 < look["relative_error"] < 3 and look["policy"] == policy for look in looks)
    # Top-k begins with more.
    settled = looks[-1:] if policy.startswith("topk") else looks
    assert all(look["bytes"] < share * look["exact_bytes"] for look in settled)
    assert f"sync={policy} changes the mathematics" in notices(run)
    assert f"sync={policy}: the mean gradient differed" in notices(run)


def train_all(world: World, accumulate: int) -> dict[str, dict[str, list[float]]]:
    """A few steps of every odd network under every policy, in buckets of few parameters."""
    buckets.FIRST_BYTES = Policy.bucket_bytes = Coded.bucket_bytes = 600
    return {policy: train_networks(world, policy, accumulate) for policy in ("allreduce", *LOSSY)}


def train_networks(world: World, policy: str, accumulate: int) -> dict[str, list[float]]:
    """The losses of each; the replicas must end equal."""
    losses = {}
    for name in ("mlp", "cnn", "gpt", "gan"):
        task = problem(name, "adamw")
        hand = Hand(world, mh.Mirrored(world.size, sync=policy, accumulate=accumulate, precision="fp64"))
        hand.build(task)
        feed = hand.reader.make_feed(as_source(task.data), 16, shuffle=True)
        losses[name] = []
        for batch in hand.reader.one_epoch(feed):
            take(hand, task, batch)
            losses[name].append(hand.loss)
        assert hand.replica.differences() == []
        assert hand.replica.num_bytes > 0
        feed.close()
        hand.close()
    return losses


def take(hand: Hand, task: mh.Task, batch: Any) -> None:
    if task.step is not None:
        task.step(hand, batch.data)
        return
    assert task.loss is not None
    for micro in hand.accumulate(batch.data):
        hand.backward(task.loss(hand.model, micro))
    hand.step()


@pytest.mark.parametrize(("size", "accumulate"), [(2, 3), (4, 1)])
def test_lossy_policies_keep_replicas_identical(size: int, accumulate: int, run_ranks: Any) -> None:
    found, *others = run_ranks(partial(train_all, accumulate=accumulate), size)
    assert all(other == found for other in others)
    for policy in LOSSY:
        for name, losses in found["allreduce"].items():
            # The first step is taken before any gradient, the second after one that was exact or nearly so.
            np.testing.assert_allclose(found[policy][name][:2], losses[:2], rtol=1e-2, err_msg=f"{policy} {name}")
            assert found[policy][name] != losses, f"{policy} must have changed something in {name}"


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> mh.Run:
    folder = tmp_path_factory.mktemp("in_parts")
    return mh.fit(problem("gpt", "adamw"), mh.Sharded(2, replicas=2), **fit_options(on="cpu*4", folder=folder, **QUIET))


@pytest.mark.parametrize("policy", ["int8", "topk(0.2,warmup=1)"])
def test_sharded_gradients_are_reduced_by_the_policy(policy: str, in_parts: mh.Run, tmp_path: Path) -> None:
    task = problem("gpt", "adamw")
    spec = mh.Sharded(2, replicas=2, sync=policy)
    run = mh.fit(task, spec, **fit_options(on="cpu*4", folder=tmp_path, name="lossy", **QUIET))
    np.testing.assert_allclose(run.losses, in_parts.losses, rtol=2e-2)
    assert run.losses != in_parts.losses
    assert f"sync={policy}: the mean gradient differed" in notices(run)
    saved = CheckpointStore(tmp_path / "lossy" / "checkpoints").load().policy
    assert saved["steps"] == len(run.losses)
    assert saved["feedback/tokens.weight"].shape == (2, 20, 16), "of both replicas, each parameter whole"
    whole = mh.fit(task, spec, **fit_options(on="cpu*4", epochs=2, folder=tmp_path, name="whole", **QUIET))
    again = mh.fit(task, spec, **fit_options(on="cpu*4", epochs=2, folder=tmp_path, name="lossy", resume=True, **QUIET))
    assert "starts fresh" not in notices(again)
    np.testing.assert_allclose(again.losses, whole.losses, rtol=1e-6)


@pytest.mark.parametrize("policy", ["int8", "topk(0.1,warmup=1)", "powersgd(2,warmup=1)"])
def test_resume_restores_error_feedback(policy: str, tmp_path: Path) -> None:
    task = problem("mlp", "adamw", rows=64)
    spec = mh.Mirrored(sync=policy)
    whole = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=2, folder=tmp_path, name="whole", **QUIET))
    mh.fit(task, spec, **fit_options(on="cpu*2", steps=3, folder=tmp_path, name="cut", **QUIET))
    saved = CheckpointStore(tmp_path / "cut" / "checkpoints").load().policy
    assert saved["steps"] == 3
    assert saved["feedback/0.weight"].shape == (2, 24, 12)
    assert all(saved["feedback/0.weight"].flatten(1).any(1))
    again = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=2, folder=tmp_path, name="cut", resume=True, **QUIET))
    assert again.losses == whole.losses
    other = mh.fit(task, spec, **fit_options(on="cpu*3", epochs=3, folder=tmp_path, name="cut", resume=True, **QUIET))
    assert len(other.losses) == 12
    assert "starts fresh" not in notices(other)
    left = mh.fit(
        task, mh.Mirrored(), **fit_options(on="cpu*2", epochs=4, folder=tmp_path, name="cut", resume=True, **QUIET)
    )
    assert "had not sent yet are dropped" in notices(left)
    without = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=5, folder=tmp_path, name="cut", resume=True, **QUIET))
    assert f"the checkpoint has no state of sync={policy}, which starts fresh" in notices(without)


@dataclass(frozen=True)
class Signs(Policy):
    """A custom policy: the sign of each number, and one scale for all of them."""

    name = "signs"
    strength: float = 1.0

    def reduce(self, wire: Any, gradient: Any, memory: Any) -> Any:
        sent = gradient.sign() * gradient.abs().mean() * self.strength
        memory.feedback.copy_(gradient - sent)
        gradient.copy_(sent)
        yield wire.all_reduce(gradient)


def test_custom_policy_is_available_in_every_process(tmp_path: Path) -> None:
    spec = mh.Mirrored(2, sync=Signs(0.5))
    assert spec.sync == "signs(0.5)"
    run = mh.fit(spirals(), spec, **fit_options(on="cpu*2", epochs=1, folder=tmp_path, **QUIET))
    look = events(run, "sync")[0]
    assert look["policy"] == "signs(0.5)"
    assert 0.1 < look["relative_error"] < 1


def test_policy_is_a_no_op_with_one_replica(tmp_path: Path) -> None:
    run = mh.fit(problem("mlp"), mh.Mirrored(sync="int8"), **fit_options(on="cpu", folder=tmp_path, **QUIET))
    assert "there is one replica, so sync=int8 has nothing to do" in notices(run)


def test_check_reports_that_the_policy_is_lossy() -> None:
    verdict = mh.check(problem("mlp"), mh.Mirrored(2, sync="int8"), on="cpu*2")
    assert not verdict
    assert any("sync=int8 changes the mathematics" in note for note in verdict.notes)


def one_step(made: Buckets, loss: torch.Tensor) -> None:
    made.arm()
    loss.backward()
    made.finish()


def test_error_feedback_of_an_unused_parameter_is_kept_until_it_is_used() -> None:
    def work(world: World) -> list[torch.Tensor | None]:
        parts = nn.ModuleDict({"a": nn.Linear(20, 1, bias=False), "b": nn.Linear(20, 1, bias=False)})
        made = Buckets(dict(parts.named_parameters()), world, TopK(0.1, warmup=0))
        total = torch.zeros(1, 20)
        found: list[torch.Tensor | None] = []
        # `b` is used once; then only `a`, whose gradient is small, so that what is owed to `b` travels; then both.
        for step in range(40):
            parts.zero_grad()
            x = torch.linspace(1, 2, 20).unsqueeze(0)
            loss = parts["a"](x).sum() * 1e-3
            if step == 0:
                loss = loss + parts["b"](x).sum()
            elif step > 10:
                loss = loss + 0 * parts["b"](x).sum()
            one_step(made, loss)
            gradient = parts["b"].weight.grad
            found.append(gradient)
            if gradient is not None:
                total += gradient
        made.close()
        assert [gradient is None for gradient in found[:13]] == [False, *[True] * 10, False, False]
        return [total]

    for (total,) in run_threads(work, 2):
        torch.testing.assert_close(total, 2 * torch.linspace(1, 2, 20).unsqueeze(0))


@pytest.mark.parametrize("policy", ["allreduce", *LOSSY])
def test_deferred_exchange_equals_overlapped_exchange(policy: str) -> None:
    """As in a recorded step, whose exchange runs by itself between two graphs."""

    first = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 20))

    def work(world: World, is_deferred: bool) -> list[torch.Tensor]:
        layers = deepcopy(first)
        made = Buckets(dict(layers.named_parameters()), world, make_policy(policy))
        made.deferred = is_deferred
        found = []
        for step in range(3):
            layers.zero_grad()
            assert made.piggybacked is not None
            made.piggybacked.fill_(world.rank + 0.5)
            made.arm()
            layers(torch.full((2, 12), 0.1 * world.rank + step)).square().sum().backward()
            if is_deferred:
                made.pack()
                made.exchange()
            made.finish()
            assert made.piggybacked.tolist() == [2.0] * 3
            found += [p.grad.clone() for p in layers.parameters() if p.grad is not None]
        made.close()
        return found

    for one, other in zip(
        *(run_threads(partial(work, is_deferred=is_deferred), 2)[0] for is_deferred in (False, True)), strict=True
    ):
        assert torch.equal(one, other)


def test_error_feedback_survives_a_memory_format_change() -> None:
    first, x = nn.Conv2d(3, 4, 3, bias=False), torch.randn(2, 3, 5, 5)

    def work(world: World, is_moved: bool) -> torch.Tensor:
        layer = deepcopy(first)
        made = Buckets(dict(layer.named_parameters()), world, TopK(0.1, warmup=0))
        for step in range(3):
            layer.zero_grad()
            if step == 1 and is_moved:
                layer.to(memory_format=torch.channels_last)
                made.rebuild_layout()
            one_step(made, layer(x).square().sum())
        made.close()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone(memory_format=torch.contiguous_format)

    plain = run_threads(partial(work, is_moved=False), 2)[0]
    torch.testing.assert_close(run_threads(partial(work, is_moved=True), 2)[0], plain)


def test_rank_failure_between_two_rounds_is_named() -> None:
    def work(world: World) -> None:
        layer = nn.Linear(4, 4)
        made = Buckets(dict(layer.named_parameters()), world, Int8())
        one_step(made, layer(torch.ones(1, 4)).sum())

    outcomes = run_threads(work, 2, faults=Faults().fail_at(rank=1, operation=2))
    assert isinstance(outcomes[0], PeerLost)
    assert "rank 1" in str(outcomes[0])


def test_complex_gradients_are_rejected_by_name() -> None:
    def work(world: World) -> None:
        Buckets({"w": nn.Parameter(torch.ones(2, dtype=torch.complex64))}, world, make_policy("int8"))

    with pytest.raises(TaskError, match="int8 needs parameters with a floating-point dtype, but got w of torch.c"):
        run_threads(work, 2)
