"""Typical transformers under TensorParallel: equal to one device, or refused with the right reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import StrategyError, StrategySpec, TaskError
from manyhands.distributed import NullWorld, World
from manyhands.training.step_comparison import compare
from manyhands.training.trial_steps import plan_of, take_steps

from .tensor_networks import OPTIONS, Choice, choose, task_of

PLAIN: Choice = {name: options[0] for name, options in OPTIONS.items()} | {"repeat": "once"}
NETWORKS: dict[str, Choice] = {
    "an embedding that scales": {"embedding": "scaled", "head": "tied", "positions": "offset"},
    "attention of torch with dropout": {"qkv": "torch", "dropout": "yes"},
    "a mean squared error": {"loss": "pooled"},
    "one key for all heads, normed": {"qkv": "one", "extra": "normed", "score": "einsum"},
    "recomputed": {"qkv": "torch first", "checkpoint": "yes", "loss": "smooth", "mlp": "patched"},
    "weights that a hook computes": {"mlp": "old weight norm"},
    "own bias": {"mlp": "own bias", "repeat": "tied", "score": "sdpa", "dropout": "yes", "bias": "yes"},
}
"""Each was computed differently at some time."""
SEEDS = (3, 7)


def errors(world: World, choices: list[Choice], spec: StrategySpec) -> list[str]:
    """Return the first tensor of each network that differs from one device; empty where none does."""
    spec, found = spec.with_devices(world.size), []
    for choice in choices:
        task = task_of(choice)
        plan = plan_of(task, spec)
        parts = take_steps(world, task, spec, plan)
        if world.is_first:
            whole = take_steps(NullWorld(), task, mh.Single(), plan)
            found.append(next((f"{each.what} {each.error:.1e}" for each in compare(whole, parts) if each.is_real), ""))
        world.barrier()
    return found


def test_tensor_parallel_regression_networks_match_single_device(run_ranks: Any) -> None:
    choices = [PLAIN | changes for changes in NETWORKS.values()]
    found = run_ranks(partial(errors, choices=choices, spec=mh.TensorParallel(2)), 2)[0]
    assert dict(zip(NETWORKS, found, strict=True)) == dict.fromkeys(NETWORKS, "")


def test_random_networks_match_single_device_on_replicas_x_tensor(run_ranks: Any) -> None:
    spec = mh.Mirrored(2) * mh.TensorParallel(2)
    found = run_ranks(partial(errors, choices=[choose(seed) for seed in SEEDS], spec=spec), 4)[0]
    assert dict(zip(SEEDS, found, strict=True)) == dict.fromkeys(SEEDS, "")


def sparse(choice: str) -> mh.Task:
    layer = nn.Embedding if choice == "layer" else SparseLookup
    task = task_of(PLAIN)
    settings: dict[str, Any] = {"sparse": True} if choice == "layer" else {}
    return task.replace(
        model=lambda: nn.Sequential(layer(19, 8, **settings), nn.Linear(8, 19)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten()),
    )


class SparseLookup(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(count, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table, sparse=True)


@pytest.mark.parametrize(("choice", "got"), [("layer", "got 0 with sparse=True"), ("function", "got F.embedding with")])
def test_sparse_gradients_are_refused_before_training(choice: str, got: str) -> None:
    with pytest.raises(TaskError, match=rf"gradients must be dense .*{got}.*Build it with sparse=False"):
        mh.check(sparse(choice), mh.TensorParallel(2), on="cpu*2")


class ByType(nn.Module):
    """Computes something else where several ranks do."""

    def forward(self, x: Tensor) -> Tensor:
        return x if type(x) is Tensor else x * 2


def test_check_names_module_that_differs_under_tensor_parallel() -> None:
    task = task_of(PLAIN).replace(
        model=lambda: nn.Sequential(nn.Embedding(19, 8), nn.Linear(8, 8), ByType(), nn.Linear(8, 19)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten()),
    )
    verdict = mh.check(task, mh.TensorParallel(2), on="cpu*2")
    assert verdict.outcome == "different"
    assert "forward of 2 (ByType) at test_tensor_networks.py:" in verdict.why, verdict.why
    assert "2 ranks compute its layers together" in verdict.why
    assert "samples" not in f"{verdict.why} {verdict.remedy}"
    assert 'layout={"2": "replicate"}' in verdict.remedy


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_torchscript_is_refused_under_tensor_parallel() -> None:
    made = task_of(PLAIN).replace(
        model=lambda: torch.jit.trace(nn.Embedding(19, 19), torch.zeros(1, dtype=torch.long)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten()),
    )
    with pytest.raises(
        StrategyError, match="must consist of Python modules, but got the network, which is TorchScript"
    ):
        mh.check(made, mh.TensorParallel(2), on="cpu*2")
