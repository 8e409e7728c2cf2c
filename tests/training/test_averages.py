"""The moving average of the weights: its formula, on any number of replicas, saved, restored and used."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import manyhands as mh
from manyhands.core import TaskError, read_events
from manyhands.storage import CheckpointStore
from manyhands.training.weight_averages import Averages

from ..grouped_options import fit_options
from .problems import gan_step, generator, problem
from .test_fit import StopAt, noisy

INPUTS = torch.randn(44, 6, generator=generator(0))
LABELS = torch.randint(0, 6, (44,), generator=generator(1))


class Tied(nn.Module):
    """Two names for one weight, batch statistics, a frozen layer, a counter and a mask with infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.still = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("mask", torch.full((6,), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.still(self.norm(self.first(x))))


def task(**changes: Any) -> mh.Task:
    return mh.Task(
        model=Tied,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data=(INPUTS, LABELS),
        valid=(INPUTS, LABELS),
        batch_size=10,
        shuffle=False,
        ema=0.8,
    ).replace(**changes)


def fit(made: mh.Task, folder: Path, on: str = "cpu", **settings: Any) -> mh.Run:
    return mh.fit(made, **fit_options(on=on, folder=folder, progress=False, timeout=60, **settings))


def by_the_book(first: dict[str, Tensor], epochs: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The plain loop: the last weights, and their averages."""
    model = Tied()
    model.load_state_dict(first)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    average = copy.deepcopy(model)
    for _ in range(epochs):
        for inputs, labels in zip(INPUTS.split(10), LABELS.split(10), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            with torch.no_grad():
                for name in ("first.weight", "norm.weight", "norm.bias", "last.bias", "norm.running_mean"):
                    average.state_dict()[name].mul_(0.8).add_(model.state_dict()[name], alpha=0.2)
                average.norm.running_var.mul_(0.8).add_(model.norm.running_var, alpha=0.2)  # type: ignore[union-attr, arg-type]
    average.norm.num_batches_tracked.copy_(model.norm.num_batches_tracked)  # type: ignore[union-attr, arg-type]
    return model.state_dict(), average.state_dict()


class Keep(mh.Callback):
    """Writes the first weights to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, hand: mh.Hand) -> None:
        if hand.is_first:
            torch.save(hand.model.state_dict(), self.path)


@pytest.mark.parametrize("on", ["cpu", "cpu*3"])
def test_ema_equals_reference_implementation(on: str, tmp_path: Path) -> None:
    run = fit(task(), tmp_path, on, epochs=3, callbacks=[Keep(tmp_path / "first.pt")])
    raw, average = by_the_book(torch.load(tmp_path / "first.pt"), epochs=3)
    torch.testing.assert_close(dict(run.model(averaged=False).state_dict()), dict(raw), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dict(run.model().state_dict()), dict(average), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(raw["first.weight"], average["first.weight"], rtol=1e-3)
    torch.testing.assert_close(run.state_dict(), dict(average), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(run.state_dict(averaged=False), dict(raw), rtol=1e-4, atol=1e-6)


def test_validation_prediction_and_export_use_averaged_weights(tmp_path: Path) -> None:
    run = fit(task(), tmp_path, epochs=2)
    with torch.no_grad():
        average, raw = (
            float(F.cross_entropy(model(INPUTS), LABELS)) for model in (run.model(), run.model(averaged=False))
        )
        answers = run.model()(INPUTS)
    assert run.metrics["valid_loss"] == pytest.approx(average, rel=1e-5)
    assert raw != pytest.approx(average, rel=1e-3)
    assert mh.evaluate(run)["loss"] == pytest.approx(average, rel=1e-5)
    torch.testing.assert_close(mh.predict(run, INPUTS), answers)
    torch.testing.assert_close(run.predictor()(INPUTS), answers)
    run.export(tmp_path / "model")
    torch.testing.assert_close(mh.load(tmp_path / "model")(INPUTS), answers)


@pytest.mark.parametrize("size", [1, 2])
def test_resumed_run_has_bitwise_identical_average(size: int, tmp_path: Path) -> None:
    made, on = noisy(ema=0.9), "cpu" if size == 1 else "cpu*2"
    whole = fit(made, tmp_path, on, epochs=3, name="whole")
    assert fit(made, tmp_path, on, epochs=3, name="parts", callbacks=[StopAt(10)]).stopped
    parts = fit(made, tmp_path, on, epochs=3, name="parts", resume=True)
    assert parts.num_steps == whole.num_steps == 21
    assert parts.metrics == whole.metrics
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name
        assert name not in dict(whole.model().named_parameters()) or not torch.equal(
            value, whole.state_dict(averaged=False)[name]
        )


def test_resume_without_saved_average_starts_it_from_checkpoint_weights(tmp_path: Path) -> None:
    fit(task(ema=None), tmp_path, epochs=1, name="it")
    assert CheckpointStore(tmp_path / "it" / "checkpoints").load().averages == {}
    run = fit(task(), tmp_path, epochs=2, name="it", resume=True)
    texts = [entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "notice"]
    assert "the checkpoint has no averaged weights: their average starts from its weights" in texts
    assert CheckpointStore(tmp_path / "it" / "checkpoints").load().averages.keys() >= {"first.weight", "last.weight"}
    fit(task(ema=None), tmp_path, epochs=3, name="it", resume=True)
    assert CheckpointStore(tmp_path / "it" / "checkpoints").load().averages == {}


def test_each_optimizer_updates_averages_of_its_own_parameters_only(tmp_path: Path) -> None:
    def step(hand: mh.Hand, batch: Any) -> None:
        if hand.num_steps % 2 == 0:
            gan_step(hand, batch)
        else:
            hand.minimize(lambda part: hand.model.critic(part[1]).square().mean(), "critic")

    class Watch(mh.Callback):
        def on_step(self, hand: mh.Hand) -> None:
            assert hand.averages is not None
            name = "generator.0.weight"
            hand.log(generator=hand.averages.tensors[name].sum(), critic=hand.averages.tensors["critic.0.weight"].sum())

    run = fit(problem("gan").replace(step=step, ema=0.5), tmp_path, on="cpu*2", epochs=2, callbacks=[Watch()])
    logged = [entry["values"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "log"]
    moved = [[a[key] != b[key] for a, b in itertools.pairwise(logged)] for key in ("generator", "critic")]
    assert moved == [[False, True, False, True, False], [True] * 5]


def test_local_batch_statistics_average_is_identical_on_all_replicas(tmp_path: Path) -> None:
    class Compare(mh.Callback):
        def on_epoch(self, hand: mh.Hand, metrics: Any) -> None:
            assert hand.averages is not None
            gathered = hand.gather(hand.averages.tensors["norm.running_mean"].unsqueeze(0))
            assert torch.equal(gathered[0], gathered[1])

    run = fit(task(), tmp_path, "cpu*2", strategy="mirrored,batch_stats=local", epochs=2, callbacks=[Compare()])
    with torch.no_grad():
        assert run.metrics["valid_loss"] == pytest.approx(float(F.cross_entropy(run.model()(INPUTS), LABELS)), rel=1e-5)


def test_masked_average_update_is_skipped_and_keeps_tensor_storage() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16())
    averages = Averages(model, {"": dict(model.named_parameters())}, decay=0.9)
    places = {name: tensor.data_ptr() for name, tensor in averages.tensors.items()}
    first = {name: tensor.clone() for name, tensor in averages.tensors.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    averages.update("", mask=torch.tensor(False))
    assert all(torch.equal(averages.tensors[name], tensor) for name, tensor in first.items())
    averages.update("", mask=torch.tensor(True))
    masked = {name: tensor.clone() for name, tensor in averages.tensors.items()}
    averages.load(first)
    averages.update("")
    torch.testing.assert_close(averages.tensors, masked)
    torch.testing.assert_close(averages.tensors["0.weight"], first["0.weight"] + 0.1)
    # In bfloat16 a thousandth of the way is lost; the average is kept wide and arrives.
    assert averages.tensors["1.weight"].dtype == torch.float32
    slow = Averages(model, {"": dict(model.named_parameters())}, decay=0.999)
    with torch.no_grad():
        model[1].weight.add_(1.0)
    before = slow.tensors["1.weight"].clone()
    slow.update("")
    assert bool((slow.tensors["1.weight"] != before).all())
    with slow.in_place():
        assert torch.equal(model[0].weight, slow.tensors["0.weight"])
    slow.restart()
    assert torch.equal(slow.tensors["1.weight"], model[1].weight.float())
    assert {name: tensor.data_ptr() for name, tensor in averages.tensors.items()} == places


def test_weights_are_restored_when_validation_raises() -> None:
    model = nn.Linear(2, 2)
    averages = Averages(model, {"": dict(model.named_parameters())}, decay=0.9)
    with torch.no_grad():
        model.weight.add_(1.0)
    own = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), averages.in_place():
        model(torch.ones(1, 3))
    assert torch.equal(model.weight, own)


@pytest.mark.parametrize("value", [0.0, 1.0, 1.5, -0.1, 1, True, float("nan"), "0.9"])
def test_invalid_ema_decay_is_rejected(value: Any) -> None:
    with pytest.raises(TaskError, match="ema must be a decay between 0 and 1, or None, but got"):
        task(ema=value)


def test_ema_window_longer_than_the_run_logs_a_notice(tmp_path: Path) -> None:
    run = fit(task(ema=0.999), tmp_path)
    texts = [entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "notice"]
    assert any("ema=0.999 looks back about 1000 steps and the run has 5" in text for text in texts)


@pytest.mark.parametrize("masked", [False, True])
def test_average_update_needs_no_host_synchronization(masked: bool) -> None:
    """Tensors without values refuse to be read, as a CUDA graph does while it is captured."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, dtype=torch.bfloat16))
        averages = Averages(model, {"": dict(model.named_parameters())}, decay=0.9)
        averages.update("", torch.ones((), dtype=torch.bool) if masked else None)
        with pytest.raises(DataDependentOutputException):
            float(averages.tensors["0.weight"].sum())


@pytest.mark.gpu
def test_average_update_can_be_captured_in_a_cuda_graph() -> None:
    model = nn.Linear(3, 3).cuda()
    averages = Averages(model, {"": dict(model.named_parameters())}, decay=0.5)
    mask = torch.ones((), dtype=torch.bool, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        averages.update("", mask)
    averages.restart()
    first = averages.tensors["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    graph.replay()
    torch.testing.assert_close(averages.tensors["weight"], first + 0.5)
    mask.zero_()
    graph.replay()
    torch.testing.assert_close(averages.tensors["weight"], first + 0.5)
