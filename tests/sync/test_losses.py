"""Recovery with sync policies: error feedback, shared state, and samples of diverged replicas are not lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import manyhands as mh
from manyhands.distributed import World
from manyhands.strategies.mirrored import odd_ones
from manyhands.sync import Agreement, DiLoCo, PolicyState
from manyhands.testing import run_threads

from ..grouped_options import fit_options
from ..training.problems import problem
from .test_local import sgd, train
from .test_training import QUIET, events, notices


def task(rows: int = 640) -> mh.Task:
    """One epoch of 40 steps, in which all that changes is linear in the samples' order of magnitude."""
    inputs = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=sgd,
        data=(inputs, inputs.sum(1, keepdim=True)),
        batch_size=16,
    )


class Dies(mh.Callback):
    """The last rank is killed once after a step; all write down what they learn from, and what a policy remembers."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_start(self, hand: mh.Hand) -> None:
        if hand.num_steps == self.step:
            self.write(hand)

    def on_step(self, hand: mh.Hand) -> None:
        generation = hand.world.rank_info.generation
        assert hand.batch is not None
        with (self.folder / f"{hand.world.rank}.{generation}.ids").open("a") as file:
            file.write(f"{hand.num_steps} {' '.join(map(str, hand.batch.ids.tolist()))}\n")
        if hand.num_steps == self.step and generation == 0:
            self.write(hand)
            if hand.world.rank == hand.world.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def write(self, hand: mh.Hand) -> None:
        remembered = {name: tensor.clone() for name, tensor in hand.replica.own_policy_state().items()}
        save_file(remembered, self.folder / f"{hand.world.rank}.{hand.world.rank_info.generation}.safetensors")

    def remembered(self, rank: int, generation: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{rank}.{generation}.safetensors")

    def ids(self, rank: int, generation: int) -> dict[int, list[int]]:
        lines = (self.folder / f"{rank}.{generation}.ids").read_text().splitlines()
        return {int(step): [int(i) for i in ids] for step, *ids in (line.split() for line in lines)}


def hit(sync: Any, tmp_path: Path, step: int = 20, **settings: Any) -> tuple[mh.Run, Dies]:
    dies = Dies(tmp_path, step)
    spec = mh.Mirrored(2, sync=sync, precision="fp64")
    run = mh.fit(
        task(), spec, **fit_options(on="cpu*2", folder=tmp_path, callbacks=[dies], name="hit", **settings, **QUIET)
    )
    return run, dies


@pytest.mark.parametrize("sync", ["topk(0.02)", "powersgd(1)"])
def test_surviving_ranks_keep_their_error_feedback_after_recovery(sync: str, tmp_path: Path) -> None:
    run, dies = hit(sync, tmp_path)
    (recovered,) = events(run, "recovered")
    assert (recovered["step"], recovered["source"]) == (20, "the memory of rank 0")
    assert "starts fresh" not in notices(run)
    before, after = (dies.remembered(0, generation) for generation in (0, 1))
    assert sum(float(tensor.norm()) for name, tensor in before.items() if name.startswith("feedback/")) > 0
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    newcomer = dies.remembered(1, 1)
    assert newcomer["steps"] == 20, "a warm-up does not come again"
    for name, tensor in newcomer.items():
        torch.testing.assert_close(tensor, torch.zeros_like(tensor) if name.startswith("feedback/") else before[name])


def calm(sync: Any, tmp_path: Path, **settings: Any) -> mh.Run:
    spec = mh.Mirrored(2, sync=sync, precision="fp64")
    return mh.fit(task(), spec, **fit_options(on="cpu*2", folder=tmp_path, name="calm", **settings, **QUIET))


@pytest.mark.parametrize("sync", ["localsteps(8)", "diloco(8,outer_lr=1.0,momentum=0.3)"])
def test_local_sgd_recovers_from_the_last_synchronization_after_rank_failure(sync: str, tmp_path: Path) -> None:
    """SGD has no state of a replica's own, so the run is the undisturbed one, with every sample in one step."""
    run, dies = hit(sync, tmp_path, step=21)
    (recovered,) = events(run, "recovered")
    assert (recovered["step"], recovered["source"]) == (16, "the memory of rank 0")
    wanted = calm(sync, tmp_path)
    np.testing.assert_allclose(run.losses, wanted.losses, rtol=1e-10)
    torch.testing.assert_close(run.state_dict(), wanted.state_dict(), rtol=0, atol=1e-9)
    counted = [i for rank in (0, 1) for step, ids in dies.ids(rank, 0).items() if step <= 16 for i in ids]
    counted += [i for rank in (0, 1) for ids in dies.ids(rank, 1).values() for i in ids]
    assert sorted(counted) == list(range(640))


def go_by_hand(world: World, forced: bool) -> list[float]:
    """Eight steps with an outer one after every fourth; a checkpoint after the sixth asks for the mean."""
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    policy = DiLoCo(4, outer_lr=0.5, momentum=0.5)
    agreement = Agreement(policy, world, {"w": weight}, list)
    found = []
    for step in range(1, 9):
        with torch.no_grad():
            weight += 1.0 + world.rank
        row = torch.tensor([10.0, 1.0 + 2 * world.rank, 0.0], dtype=torch.float64)
        assert agreement.note(row) == (step % 4 == 0)
        if step % 4 == 0:
            agreement.meet()
            found.append(weight.item())
        elif forced and step == 6:
            agreement.meet()
            assert weight.item() == found[0] + 2 * (1 * 1 + 3 * 2) / 4, "the mean way of two steps, and no more"
            # A run that resumes needs the weights from which the outer step is taken.
            state, before = PolicyState.of(agreement.state().tensors()), weight.item()
            weight = nn.Parameter(torch.tensor([before], dtype=torch.float64))
            agreement = Agreement(policy, world, {"w": weight}, list)
            agreement.restart()
            agreement.take_over(state)
    return found


def test_forced_synchronization_does_not_add_outer_momentum() -> None:
    assert run_threads(partial(go_by_hand, forced=True), 2) == run_threads(partial(go_by_hand, forced=False), 2)


def test_between_hosts_policy_is_a_no_op_on_one_host(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    exact = run_ranks(partial(train, name="mlp", sync="allreduce", accumulate=1), 2)
    for sync in ("diloco(5,between=hosts)", "topk(0.01,between=hosts)"):
        alone = run_ranks(partial(train, name="mlp", sync=sync, accumulate=1), 2)
        assert alone[0][0] == exact[0][0]
        torch.testing.assert_close(alone[0][1], exact[0][1], rtol=0, atol=0)
    run = mh.fit(
        problem("mlp"),
        mh.Mirrored(2, sync="diloco(5,between=hosts)"),
        **fit_options(on="cpu*2", folder=tmp_path, **QUIET),
    )
    assert "there is one host, so sync=diloco(5,between=hosts) has nothing to do" in notices(run)


def compare(world: World) -> list[str]:
    spoilt = torch.zeros(3)
    spoilt[2] = float(world.rank == 1)
    return odd_ones(world, {"spoilt": spoilt, "sound": torch.ones(2)})


def test_divergence_without_a_majority_names_all_replicas() -> None:
    assert run_threads(compare, 2)[0] == ["spoilt (ranks 0, 1: no majority agrees)"]
    assert run_threads(compare, 3)[0] == ["spoilt (on rank 1)"]


@pytest.mark.parametrize(
    ("spec", "step"),
    [
        (mh.Sharded(2, replicas=2, sync="topk(0.02)"), 20),
        (mh.Pipeline(2) * mh.Mirrored(2, sync="topk(0.02)"), 20),
        (mh.Sharded(2, replicas=2, sync="diloco(8,outer_lr=1.0,momentum=0.3)"), 16),
    ],
    ids=str,
)
def test_sharded_ranks_keep_policy_state_after_recovery(spec: mh.StrategySpec, step: int, tmp_path: Path) -> None:
    dies = Dies(tmp_path, step)
    small = task(400).replace(data=tuple(part.float() for part in task(400).data))
    run = mh.fit(small, spec, **fit_options(on="cpu*4", folder=tmp_path, callbacks=[dies], **QUIET))
    (recovered,) = events(run, "recovered")
    assert recovered["step"] == step
    assert recovered["source"].startswith("the memory of ranks")
    assert "starts fresh" not in notices(run)
    assert run.num_steps == 25
    for rank in range(3):
        before, after = (dies.remembered(rank, generation) for generation in (0, 1))
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert before["steps"] == step
