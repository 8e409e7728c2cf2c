"""Differences that the first two steps do not show: other branches, terms and updates that start later, ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.strategies import is_by_element, is_by_tensor

from .test_idioms import X, Y, fit, sgd, task


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Late(nn.Module):
    """A term that couples the rows of a batch joins after some calls."""

    def __init__(self, counts_in_buffer: bool) -> None:
        super().__init__()
        self.net, self.calls = mlp(), 0
        self.counts_in_buffer = counts_in_buffer
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        count = int(self.step) if self.counts_in_buffer else self.calls
        if self.training:
            self.step += 1
            self.calls += 1
        return out - out.mean(0) if count > 50 else out


class Converging(nn.Module):
    """Iterates until the batch has converged."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.cell, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.inputs(x), x.new_zeros(len(x), 8)
        with torch.no_grad():
            for _ in range(30):
                after = torch.tanh(0.8 * self.cell(z) + u)
                if (after - z).norm() < 1e-2 * after.norm():
                    break
                z = after
        return self.head(torch.tanh(0.8 * self.cell(z) + u))


@pytest.mark.parametrize("in_buffer", [False, True])
def test_a_term_that_starts_after_many_calls_is_a_difference(in_buffer: bool) -> None:
    verdict = mh.check(task(lambda: Late(in_buffer)), mh.Single(accumulate=2), on="cpu")
    assert verdict.outcome == "different"
    assert "of the network (Late) at test_later_steps.py" in verdict.why


def test_a_branch_that_depends_on_the_whole_batch_is_refused() -> None:
    data = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    verdict = mh.check(task(Converging, data=data), mh.Single(accumulate=2), on="cpu")
    assert verdict.outcome == "different"
    assert "norm of the network (Converging)" in verdict.why


def test_counters_and_values_that_are_only_recorded_are_no_reason_to_refuse() -> None:
    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls, self.last = mlp(), 0, ""

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out = self.net(x)
            self.last = f"{out.mean().item():.3f} after {self.calls}"
            return out * (1 - 0.5**self.calls)

    assert mh.check(task(Recording), mh.Single(accumulate=2), on="cpu").outcome == "equal"


class _EveryTenth(torch.optim.SGD):
    """Gives rows of matrices the same length in every tenth step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["taken"] = self.state[p].get("taken", 0) + 1
                if p.ndim == 2 and self.state[p]["taken"] % 10 == 0:
                    p.div_(p.norm(dim=1, keepdim=True))
        return value


def test_an_update_that_reads_rows_in_some_steps_only_is_not_elementwise() -> None:
    optimizer = _EveryTenth(mlp().parameters(), lr=0.1)
    assert not is_by_element(optimizer)
    assert is_by_tensor(optimizer)


def test_tensor_parallel_saves_shared_attention_equal_under_each_name(tmp_path: Path) -> None:
    class Albert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.embed, self.layers, self.head = nn.Linear(1, 8), nn.ModuleList([attend] * 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x[..., None])
            for attend in self.layers:
                x = x + attend(x, x, x)[0]
            return self.head(x[:, 0])

    alone = fit(task(Albert), tmp_path / "alone").state_dict()
    split = fit(task(Albert), tmp_path / "split", mh.TensorParallel(2)).state_dict()
    assert split.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(split[name], value, rtol=1e-3, atol=1e-5)


def test_workers_know_which_draws_belong_to_samples(tmp_path: Path) -> None:
    """Six numbers for each batch look like two for each of a worker's three samples."""

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0] * torch.rand(6)), batch[1])

    made = mh.Task(model=mlp, loss=loss, optimizer=sgd, data=(X, Y), batch_size=6, shuffle=False)
    options = [mh.options.Display(progress=False), mh.options.Equality(deterministic=True)]
    alone = mh.fit(made, mh.Single(), on="cpu", folder=tmp_path / "alone", options=options)
    split = mh.fit(made, mh.ParameterServer(workers=2), on="cpu*2", folder=tmp_path / "split", options=options)
    torch.testing.assert_close(torch.tensor(split.losses), torch.tensor(alone.losses), rtol=1e-4, atol=1e-6)
