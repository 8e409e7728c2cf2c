"""Networks and loops that break naive data parallelism: each equals one device, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.core import SettingsError, StrategyError, TaskError, read_events

from ..grouped_options import fit_options
from .problems import classify, generator

X = torch.randn(40, 12, generator=generator(0))
Y = torch.randint(0, 5, (40,), generator=generator(1))


def task(model: Callable[[], nn.Module], **changes: Any) -> mh.Task:
    made = mh.Task(
        model=model,
        loss=classify,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        data=(X, Y),
        batch_size=10,
    )
    return made.replace(**changes)


def fit(made: mh.Task, size: int, folder: Path, **settings: Any) -> mh.Run:
    on = "cpu" if size == 1 else f"cpu*{size}"
    spec = mh.Mirrored(size, precision="fp64")
    return mh.fit(made, spec, **fit_options(on=on, folder=folder, progress=False, timeout=60, epochs=2, **settings))


class Branching(nn.Module):
    """Which branch is taken depends on the samples, so replicas use different parameters; BatchNorm comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.left, self.right, self.never = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1] > 0
        h = self.norm(self.first(x))
        parts = []
        if chosen.any():
            parts.append(self.left(h) * chosen)
        if (~chosen).any():
            parts.append(self.right(h) * ~chosen)
        return torch.stack(parts).sum(0)


class Shared(nn.Module):
    """Tied weights, a layer used twice, activation checkpointing around BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh())
        self.again = nn.Linear(12, 12)
        self.again.weight = self.inner[0].weight
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=False)
        return self.head(self.again(self.inner(x)))


class FrozenNorm(nn.Module):
    """A BatchNorm that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.head = nn.LSTM(3, 6, batch_first=True), nn.GroupNorm(2, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.cell(x.view(-1, 4, 3))[0][:, -1]))


@pytest.mark.parametrize("model", [Branching, Shared, FrozenNorm, Recurrent])
def test_unusual_networks_equal_single_device(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    alone, three = fit(task(model), 1, tmp_path), fit(task(model), 3, tmp_path)
    assert three.losses == pytest.approx(alone.losses, rel=1e-9)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(three.state_dict()[name], value, rtol=0, atol=1e-9, msg=name)
    if model is FrozenNorm:
        assert int(three.state_dict()["norm.num_batches_tracked"]) == 0


class Thaw(mh.Callback):
    """Sets a layer free in the middle of training, as people do when they fine-tune."""

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == 3:
            hand.model[0].requires_grad_(True)


def test_parameters_unfrozen_during_training_are_synchronized(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))
        net[0].requires_grad_(False)
        return net

    alone, two = (fit(task(frozen), size, tmp_path, callbacks=[Thaw()]) for size in (1, 2))
    assert two.losses == pytest.approx(alone.losses, rel=1e-9)


class Activated(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


def test_batch_norm_subclass_with_custom_forward_is_rejected_by_name(tmp_path: Path) -> None:
    made = task(lambda: nn.Sequential(nn.Linear(12, 8), Activated(8), nn.Linear(8, 5)))
    with pytest.raises(StrategyError, match=r"got 1 \(Activated\), which has its own forward"):
        fit(made, 2, tmp_path)
    spec = mh.Mirrored(2, batch_stats="local")
    mh.fit(made, spec, on="cpu*2", folder=tmp_path, steps=2, options=mh.options.Display(progress=False))


class Copies(mh.Callback):
    """A copy of the network, as averaged weights are kept, must answer with its own parameters."""

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == 2:
            twin = copy.deepcopy(hand.model)
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            assert not twin(X[:4].double()).any(), "the copy used the original's parameters"


def test_deepcopied_network_uses_its_own_parameters(tmp_path: Path) -> None:
    fit(task(lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8))), 2, tmp_path, callbacks=[Copies()])


def test_double_backward_through_synchronized_batch_norm_is_rejected(tmp_path: Path) -> None:
    def step(hand: mh.Hand, batch: Any) -> None:
        x = batch[0].requires_grad_()
        y = hand.model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        hand.minimize(slope.square().mean())

    made = task(lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8)), loss=None, step=step)
    fit(made, 1, tmp_path)
    with pytest.raises(StrategyError, match="synchronized batch statistics do not support second-order gradients"):
        fit(made, 2, tmp_path)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        x = checkpoint(self.block, x, use_reentrant=True)
        return self.head(checkpoint(self.block, x, use_reentrant=True))


def test_reentrant_checkpointing_of_a_shared_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="Pass use_reentrant=False"):
        fit(task(Reentrant), 2, tmp_path)


def test_two_backwards_in_a_step_are_refused() -> None:
    def loop(hand: mh.Hand) -> None:
        net = nn.Linear(12, 5)
        model, _ = hand.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in hand.batches((X, Y), 10):
            hand.backward(F.cross_entropy(model(x), y))
            hand.backward(model(x).square().mean())

    for size in (1, 2):
        with pytest.raises(TaskError, match="a second one before hand.step.*Add the losses"):
            mh.launch(loop, mh.Mirrored(size), on=f"cpu*{size}", progress=False)


def test_an_optimizer_that_needs_a_closure_is_refused(tmp_path: Path) -> None:
    made = task(lambda: nn.Linear(12, 5), optimizer=lambda model: torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TaskError, match="LBFGS, which computes the loss several times in a step"):
        fit(made, 1, tmp_path)


def test_frozen_parameter_in_one_of_two_optimizers_equals_single_device(tmp_path: Path) -> None:
    def build() -> nn.Module:
        net = nn.ModuleDict({"a": nn.Linear(12, 5), "b": nn.Linear(12, 5)})
        net["a"].bias.requires_grad_(False)
        return net

    def step(hand: mh.Hand, batch: Any) -> None:
        for key in ("a", "b"):
            hand.minimize(lambda part, key=key: F.cross_entropy(hand.model[key](part[0]), part[1]), key)

    made = task(build, loss=None, step=step).replace(
        optimizer=lambda net: {key: torch.optim.SGD(net[key].parameters(), lr=0.1) for key in ("a", "b")}
    )
    alone, two = fit(made, 1, tmp_path), fit(made, 2, tmp_path)
    for key in ("a", "b"):
        assert list(two.history[key].values()) == pytest.approx(list(alone.history[key].values()), rel=1e-9)


class Drifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.detach().mean(0).to(self.seen.dtype), 0.5)
        return self.layer(x)


def test_unsynchronized_buffer_is_named_in_a_notice(tmp_path: Path) -> None:
    spec = mh.Mirrored(2, batch_stats="local")
    made = task(Drifting, valid=(X, Y))
    run = mh.fit(made, spec, on="cpu*2", folder=tmp_path, epochs=2, options=mh.options.Display(progress=False))
    notices = [entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "notice"]
    assert any("the buffer seen is not synchronized" in text for text in notices)
    assert len(run.losses) == 8


def test_padding_rows_do_not_affect_batch_statistics_in_evaluation(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5, track_running_stats=False))

    made = task(build, valid=(X[:3], Y[:3]))
    alone, four = fit(made, 1, tmp_path), fit(made, 4, tmp_path)
    assert four.metrics["valid_loss"] == pytest.approx(alone.metrics["valid_loss"], rel=1e-9)


def contrast(hand: mh.Hand, batch: Any) -> None:
    """Every sample is compared with every other of the global batch, wherever it is."""
    mine = F.normalize(hand.model(batch[0]), dim=1)
    rows, labels = hand.gather(mine), hand.gather(batch[1])
    same = labels[:, None] == labels[None, :]
    hand.minimize(F.binary_cross_entropy_with_logits(rows @ rows.T * 5, same.to(rows.dtype)))


def test_contrastive_loss_with_gather_equals_single_device(tmp_path: Path) -> None:
    made = task(lambda: nn.Linear(12, 6), loss=None, step=contrast, batch_size=11)
    alone, three = fit(made, 1, tmp_path), fit(made, 3, tmp_path)
    assert three.losses == pytest.approx(alone.losses, rel=1e-9)


def test_custom_loop_reshuffles_in_every_epoch() -> None:
    def loop(hand: mh.Hand) -> list[Any]:
        seen = []
        for _ in range(3):
            train = [row.tolist() for batch in hand.batches((X, Y), 10) for row in batch[1]]
            valid = sum(len(batch) for batch in hand.batches(X[:7], 4, shuffle=False))
            seen.append((train, valid))
        return seen

    (seen,) = mh.launch(loop, "single", on="cpu", progress=False)
    assert [len(train) for train, _ in seen] == [40, 40, 40]
    assert [valid for _, valid in seen] == [7, 7, 7]
    assert seen[0][0] != seen[1][0], "every epoch has an order of its own"
    assert sorted(seen[0][0]) == sorted(seen[1][0])


def test_default_dtype_and_matmul_precision_are_passed_to_ranks() -> None:
    def look(hand: mh.Hand) -> tuple[torch.dtype, str]:
        return torch.get_default_dtype(), torch.get_float32_matmul_precision()

    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    try:
        seen = mh.launch(look, "dp=2", on="cpu*2", progress=False)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert seen == [(torch.float64, "high")] * 2


def test_loss_available_only_in_training_mode_is_supported(tmp_path: Path) -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 5)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return {"loss": F.cross_entropy(self.layer(x), y)} if self.training else self.layer(x)

    made = task(Detector, loss=lambda model, batch: model(*batch)["loss"])
    run = fit(made, 2, tmp_path)
    assert len(run.losses) == 8


def test_locked_run_cannot_be_resumed_by_a_second_process(tmp_path: Path) -> None:
    import fcntl

    run = fit(task(lambda: nn.Linear(12, 5)), 1, tmp_path, name="held")
    with (run.path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SettingsError, match="only one program at a time can train a run"):
            fit(task(lambda: nn.Linear(12, 5)), 1, tmp_path, name="held", resume=True)


def test_drop_last_of_a_data_loader_is_respected(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16, drop_last=True)
    made = task(lambda: nn.Linear(12, 5), data=loader, batch_size=None)
    assert len(fit(made, 1, tmp_path).losses) == len(fit(made, 2, tmp_path).losses) == 2 * 2
