"""Fit: resuming, stopping, callbacks, events, files of a run, and refusals."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import (
    CheckpointError,
    DataError,
    DeviceError,
    LossNotFinite,
    ReplicasDiffer,
    SendError,
    SettingsError,
    StrategyError,
    TaskError,
    WorkerFailed,
    read_events,
)

from ..grouped_options import fit_options
from .problems import generator, problem


def noisy(dropout: float = 0.3, **changes: Any) -> mh.Task:
    """An MLP with dropout, a schedule, and shuffled data that does not divide."""
    task = mh.Task(
        model=lambda: nn.Sequential(nn.Linear(12, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 5)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=(torch.randn(50, 12, generator=generator(0)), torch.randint(0, 5, (50,), generator=generator(1))),
        valid=(torch.randn(23, 12, generator=generator(2)), torch.randint(0, 5, (23,), generator=generator(3))),
        metrics={"accuracy": lambda outputs, batch: (outputs.argmax(1) == batch[1]).float().mean()},
        schedule=lambda step, total: 1 - step / total,
        batch_size=8,
    )
    return task.replace(**changes)


class StopAt(mh.Callback):
    """Ends a run after some steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == self.step - 1:
            hand.stop()  # the wish travels with the next step


class RaiseAt(mh.Callback):
    """Ends a run in its middle."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == self.step:
            raise RuntimeError("enough")


class Ledger(mh.Callback):
    """Writes the sample ids of every step to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, hand: mh.Hand) -> None:
        assert hand.batch is not None
        name = f"{hand.num_steps:04d}-{hand.size}-{hand.rank}.json"
        (self.folder / name).write_text(json.dumps(hand.batch.ids.tolist()))


def fit(task: Any, strategy: Any = None, size: int = 1, **settings: Any) -> mh.Run:
    on = "cpu" if size == 1 else f"cpu*{size}"
    return mh.fit(task, strategy or mh.Mirrored(size), **fit_options(on=on, progress=False, timeout=60, **settings))


@pytest.mark.parametrize("size", [1, 2])
def test_resume_on_same_layout_is_bitwise_identical(size: int, tmp_path: Path) -> None:
    whole = fit(noisy(), size=size, epochs=3, folder=tmp_path, name="whole")
    stopped = fit(noisy(), size=size, epochs=3, folder=tmp_path, name="parts", callbacks=[StopAt(10)])
    assert stopped.stopped
    assert stopped.num_steps == len(stopped.losses) in (9, 10)
    resumed = fit(noisy(), size=size, epochs=3, folder=tmp_path, name="parts", resume=True)
    assert resumed.losses == whole.losses
    assert resumed.num_steps == whole.num_steps == 21
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert resumed.metrics == whole.metrics


def test_resume_on_other_layouts_repeats_and_skips_no_samples(tmp_path: Path) -> None:
    task = noisy(dropout=0.0)
    whole = fit(task, epochs=2, folder=tmp_path, name="whole")
    (tmp_path / "ledger").mkdir()
    ledger = Ledger(tmp_path / "ledger")
    for size, stop in ((2, 3), (3, 6), (4, 9), (1, None)):
        callbacks = [ledger, *([StopAt(stop)] if stop else [])]
        run = fit(
            task, size=size, epochs=2, folder=tmp_path, name="changing", resume=(tmp_path / "changing").exists(),
            callbacks=callbacks,
        )  # fmt: skip
    np.testing.assert_allclose(run.losses, whole.losses, rtol=1e-5)
    steps: dict[int, list[int]] = {}
    for path in sorted((tmp_path / "ledger").iterdir()):
        steps.setdefault(int(path.name.split("-")[0]), []).extend(json.loads(path.read_text()))
    assert sorted(steps) == list(range(1, 15))
    for epoch in range(2):
        seen = [i for step in range(epoch * 7 + 1, epoch * 7 + 8) for i in steps[step]]
        assert sorted(seen) == list(range(50))


def test_resume_accepts_a_run_object_or_its_path(tmp_path: Path) -> None:
    whole = fit(noisy(schedule=None), epochs=2, folder=tmp_path)
    first = fit(noisy(schedule=None), epochs=1, folder=tmp_path)
    assert fit(noisy(schedule=None), epochs=2, resume=first).losses == whole.losses
    assert fit(noisy(schedule=None), epochs=2, resume=str(first.path)).num_steps == whole.num_steps


def test_refused_resume_does_not_advise_to_resume(tmp_path: Path) -> None:
    run = fit(noisy(), epochs=1, folder=tmp_path)
    other = noisy().replace(model=lambda: torch.nn.Sequential(noisy().model()))  # parameters have other names
    with pytest.raises(CheckpointError) as refused:
        fit(other, epochs=2, resume=run)
    assert not getattr(refused.value, "__notes__", [])
    assert run.path.exists()


def test_resume_auto_starts_a_new_run_or_resumes_it(tmp_path: Path) -> None:
    whole = fit(noisy(schedule=None), epochs=2, folder=tmp_path)
    for epochs in (1, 2):
        run = fit(noisy(schedule=None), epochs=epochs, folder=tmp_path, name="one", resume="auto")
    assert run.losses == whole.losses
    for number in range(6):
        (tmp_path / f"z{number}").mkdir()
    with pytest.raises(SettingsError, match=r"""z5 and 3 more, but got 'no'[.] .*resume="auto" to start it"""):
        fit(noisy(), folder=tmp_path, name="no", resume=True)
    with pytest.raises(SettingsError, match="resume needs the name of the run"):
        fit(noisy(), folder=tmp_path, resume="auto")


class Terminated(mh.Callback):
    """Send a signal to the program while it trains."""

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == 3:
            signal.raise_signal(signal.SIGTERM)


def test_sigterm_saves_a_checkpoint_before_exit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        mh.fit(noisy(), mh.Single(), on="cpu", epochs=9, folder=tmp_path, name="cut", callbacks=[Terminated()])
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "SIGTERM received" in capfd.readouterr().err
    assert list(read_events(tmp_path / "cut" / "events.jsonl"))[-1]["stopped"]
    assert mh.Run(tmp_path / "cut").num_steps == 4
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        again = mh.fit(noisy(), mh.Single(), on="cpu", epochs=9, folder=tmp_path, callbacks=[Terminated()])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (again.stopped, heard) == (True, [signal.SIGTERM]), "the program's own handler decides what follows"


def test_failed_run_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    task = noisy(dropout=0.0)
    whole = fit(task, epochs=2, folder=tmp_path, name="whole")
    with pytest.raises(WorkerFailed, match=r"rank . on .* enough"):
        fit(task, size=2, epochs=2, folder=tmp_path, name="failed", save_every=3, callbacks=[RaiseAt(5)])
    kinds = [entry["kind"] for entry in read_events(tmp_path / "failed" / "events.jsonl")]
    assert kinds[-1] == "failed"
    resumed = fit(task, size=3, epochs=2, folder=tmp_path, name="failed", resume=True)
    np.testing.assert_allclose(resumed.losses, whole.losses, rtol=1e-5)


def test_ctrl_c_stops_training_and_returns_the_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, manyhands as mh\n"
        "class Say(mh.Callback):\n"
        "    def on_step(self, hand):\n"
        "        if hand.num_steps == 3 and hand.is_first:\n"
        "            print('going', file=sys.stderr, flush=True)\n"
        "class Rows:\n"
        "    def __len__(self): return 400\n"
        "    def __getitem__(self, index): return torch.ones(4)\n"
        "task = mh.Task(model=lambda: torch.nn.Linear(4, 1), batch_size=4, workers=1,\n"
        "    loss=lambda model, batch: model(batch).square().mean(), data=Rows(),\n"
        "    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01))\n"
        "for on in ('cpu', 'cpu*2'):\n"
        "    run = mh.fit(task, mh.Mirrored(), on=on, epochs=100_000, folder='runs', callbacks=[Say()])\n"
        "    print('stopped', run.stopped, run.num_steps > 2, len(run.losses) == run.num_steps)\n"
    )
    command = [sys.executable, str(script)]
    pipe = subprocess.PIPE
    program = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert program.stderr is not None
    seen = ""
    for _ in range(2):
        while "going" not in (line := program.stderr.readline()):
            assert line, "the program ended early"
            seen += line
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does, to the processes that read data too
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err
    assert out.splitlines() == ["stopped True True True"] * 2, err
    assert (seen + err).count("Ctrl-C again") == 2, seen + err


def test_fit_works_with_functions_defined_on_stdin_or_in_a_notebook(tmp_path: Path) -> None:
    """Classes and functions that have no file, as in a REPL or a notebook cell."""
    program = (
        "import torch, manyhands as mh\n"
        "scale = 2.0\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.layer = torch.nn.Linear(4, 1)\n"
        "    def forward(self, x): return self.layer(x) * scale\n"
        "def loss(model, batch): return model(batch).square().mean()\n"
        "task = mh.Task(model=Net, loss=loss, data=torch.ones(8, 4), batch_size=4,\n"
        "    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01))\n"
        "run = mh.fit(task, mh.Mirrored(2), on='cpu*2')\n"
        "print(type(run.model()).__name__, run.num_steps)\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=program, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "Net 2", done.stderr


def test_single_device_fit_runs_in_process_and_keeps_rng_state(tmp_path: Path) -> None:
    pids = []
    task = noisy()
    before = torch.get_rng_state()
    fit(task.replace(model=lambda: (pids.append(os.getpid()), task.model())[1]), mh.Single(), folder=tmp_path)
    assert pids == [os.getpid()]
    assert torch.equal(torch.get_rng_state(), before)


class Moments(mh.Callback):
    """Notes every moment in a file per rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, hand: mh.Hand, text: str) -> None:
        with (self.folder / f"moments-{hand.rank}").open("a") as file:
            file.write(text + "\n")

    def on_start(self, hand: mh.Hand) -> None:
        self.note(hand, "start")

    def on_step(self, hand: mh.Hand) -> None:
        self.note(hand, f"step {hand.num_steps}")

    def on_epoch(self, hand: mh.Hand, metrics: Mapping[str, float]) -> None:
        self.note(hand, f"epoch {sorted(metrics)}")

    def on_end(self, hand: mh.Hand) -> None:
        self.note(hand, "end")


def test_callbacks_run_on_every_replica(tmp_path: Path) -> None:
    fit(noisy(), size=2, steps=2, folder=tmp_path, callbacks=[Moments(tmp_path)])
    fit(noisy(batch_size=25), size=2, folder=tmp_path, callbacks=[Moments(tmp_path)])
    moments = ["start", "step 1", "step 2", "epoch ['valid_accuracy', 'valid_loss']", "end"]
    for rank in range(2):
        assert (tmp_path / f"moments-{rank}").read_text().splitlines() == moments * 2


def test_event_log_contains_all_steps_epochs_and_checkpoints_in_order(tmp_path: Path) -> None:
    run = fit(noisy(), size=2, epochs=2, folder=tmp_path, name="story")
    entries = list(read_events(run.path / "events.jsonl"))
    kinds = [entry["kind"] for entry in entries]
    assert kinds[:2] == ["notice", "start"], "dropout under replicas is worth a notice"
    assert kinds[-1] == "end"
    assert kinds.count("epoch") == 2
    assert kinds.count("checkpoint") == 2
    assert {entry["rank"] for entry in entries if entry["kind"] == "waits"} == {0, 1}
    assert all(entry["v"] == 1 for entry in entries)
    steps = [step for entry in entries if entry["kind"] == "steps" for step in entry["steps"]]
    assert steps == list(range(1, 15))
    first = [entry["t"] for entry in entries if entry.get("rank") != 1 and entry["kind"] != "end"]
    assert first == sorted(first), "what one replica reports stays in order"
    record = json.loads((run.path / "run.json").read_text())
    assert record["spec"] == {"replicas": 2}
    assert record["devices"] == ["cpu#0", "cpu#1"]


def test_run_predicts_evaluates_and_exports(tmp_path: Path) -> None:
    run = fit(noisy(), size=2, epochs=3, folder=tmp_path, name="answers")
    again = mh.Run(run.path, noisy())
    assert again.metrics == run.metrics
    inputs = torch.randn(11, 12)
    expected = run.model()(inputs)
    torch.testing.assert_close(mh.predict(run, inputs), expected)
    torch.testing.assert_close(mh.predict(run, inputs, mh.Mirrored(3), on="cpu*3"), expected)
    torch.testing.assert_close(run.predictor()(inputs), expected)
    alone, split = mh.evaluate(run), mh.evaluate(run, None, mh.Mirrored(2), on="cpu*2")
    assert alone.keys() == split.keys() == {"loss", "accuracy"}
    for name, value in alone.items():
        assert value == pytest.approx(split[name], rel=1e-5)
        assert value == pytest.approx(run.metrics[f"valid_{name}"], rel=1e-5)
    first, second = run.export(tmp_path / "models"), run.export(tmp_path / "models")
    assert (first.name, second.name) == ("1", "2")
    archive = mh.load(tmp_path / "models")
    torch.testing.assert_close(archive(inputs), expected.detach())
    assert archive.meta["run"] == "answers"
    weights = run.export(tmp_path / "plain.safetensors", weights_only=True)
    from safetensors.torch import load_file

    assert set(load_file(weights)) == set(run.model().state_dict())


def test_best_checkpoint_is_kept_beyond_keep_limit(tmp_path: Path) -> None:
    worse = noisy(schedule=lambda step, total: 1.0 if step < 7 else 50.0)
    run = fit(worse, epochs=4, folder=tmp_path, keep=1)
    values = run.history["valid_loss"]
    best = min(values, key=values.__getitem__)
    assert best != max(values), "the schedule must make it worse"
    found = mh.evaluate(run)["loss"], F.cross_entropy(run.model(best=True)(worse.valid[0]), worse.valid[1]).item()
    assert found[0] == pytest.approx(values[max(values)], rel=1e-5)
    assert found[1] == pytest.approx(values[best], rel=1e-5)


# -- what goes wrong ------------------------------------------------------------------------------------------------


class Corrupt(mh.Callback):
    """Changes a weight on one replica only."""

    def on_step(self, hand: mh.Hand) -> None:
        if hand.rank == 1 and hand.num_steps == 2:
            with torch.no_grad():
                hand.model[0].weight[3, 2] += 1e-3


def test_diverged_replica_is_reported_with_tensor_and_rank(tmp_path: Path) -> None:
    with pytest.raises(ReplicasDiffer, match=r"differ in 0.weight \(on rank 1\)"):
        fit(noisy(), size=3, steps=4, folder=tmp_path, callbacks=[Corrupt()])


def test_nan_loss_stops_the_run_and_keeps_last_checkpoint(tmp_path: Path) -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 5)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            return self.layer(x) * (float("nan") if self.calls > 5 else 1.0)

    for size in (1, 2):
        with pytest.raises(
            LossNotFinite, match="loss became nan at step 6; lower the learning rate, .*or look at samples"
        ) as caught:
            fit(noisy(model=Bad), size=size, save_every=2, folder=tmp_path, name=f"nan{size}")
        assert "saved at step 4" in caught.value.__notes__[0]
        run = mh.Run(tmp_path / f"nan{size}")
        assert run.num_steps == 4
        assert all(value.isfinite().all() for value in run.state_dict().values())


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    similar = model(batch[0]) @ model(batch[0]).T
    return F.cross_entropy(similar, torch.arange(len(similar)))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a dataset smaller than a batch": (
        {"batch_size": 64},
        DataError,
        "50 samples for a batch of 64. Pass batch_size=50",
    ),
    "no batch size": ({"batch_size": None}, DataError, "batch_size is required"),
    "a loss that is no scalar": (
        {"loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")},
        TaskError,
        r"a loss must be a scalar.*got a tensor of shape \(8,\). End it with .mean\(\)",
    ),
    "a loss that is no tensor": ({"loss": lambda model, batch: 1.0}, TaskError, "got float. Return the loss tensor"),
    "a loss that is NaN": (
        {"loss": lambda model, batch: model(batch[0]).mean() * float("nan")},
        TaskError,
        "the loss must be finite at the start, but got nan",
    ),
    "an optimizer of parameters": (
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)},
        TaskError,
        "optimizer must be a function of the model, but got a function of parameters",
    ),
    "an optimizer of frozen parameters alone": (
        {"optimizer": lambda model: torch.optim.SGD(model[0].requires_grad_(False).parameters(), lr=0.1)},
        TaskError,
        "must hold a trainable parameter, but got none of 3.weight, 3.bias. Create it from model.parameters",
    ),
    "an optimizer of another model": (
        {"optimizer": lambda model: torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1)},
        TaskError,
        "this model's parameters only, but got 2 of another model",
    ),
    "no optimizer at all": ({"optimizer": lambda model: None}, TaskError, "must return a torch optimizer"),
    "a model on another device": (
        {"model": lambda: nn.Linear(12, 5, device="meta")},
        TaskError,
        "must build on the CPU .*got weight on meta. Remove .to",
    ),
    "a model that is none": ({"model": lambda: 3}, TaskError, "must return an nn.Module, but got int"),
    "arrays of different lengths": ({"data": (torch.ones(9, 12), torch.ones(8))}, DataError, "9.*8"),
    "a loss without a gradient": (
        {"loss": lambda model, batch: model(batch[0]).detach().mean()},
        TaskError,
        "must depend on the model's trainable parameters",
    ),
    "a metric that is no number": (
        {"metrics": {"wrong": lambda outputs, batch: outputs}},
        TaskError,
        r"the metric 'wrong' must be a number.*got \(8, 5\)",
    ),
    "a loss that samples share, split": ({"loss": contrastive}, TaskError, "a loss must be a mean over the batch's"),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_task_is_rejected_with_rule_value_and_remedy(what: str, tmp_path: Path) -> None:
    changes, error, text = BAD[what]
    with pytest.raises(error, match=text):
        fit(noisy(**changes), size=2, folder=tmp_path)
    if "split" not in what:
        with pytest.raises(error, match=text):
            fit(noisy(**changes), size=1, folder=tmp_path)


def test_contrastive_loss_logs_only_a_notice_on_one_device(tmp_path: Path) -> None:
    run = fit(noisy(loss=contrastive), steps=2, folder=tmp_path)
    notices = [entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "notice"]
    assert len(notices) == 1
    assert "on one device this is fine" in notices[0]


def test_invalid_settings_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="the strategy needs 3 devices, but got 2"):
        mh.fit(noisy(), mh.Mirrored(3), on="cpu*2", folder=tmp_path / "runs")
    with pytest.raises(StrategyError, match="a strategy must be one of single, mirrored"):
        mh.fit(noisy(), "telepathic", folder=tmp_path / "runs")
    with pytest.raises(StrategyError, match="the axis 'expert' is reserved and not implemented yet"):
        mh.fit(noisy(), "ep=2", folder=tmp_path / "runs")
    with pytest.raises(SettingsError, match="epochs must be a whole number of at least 1, but got 0"):
        mh.fit(noisy(), epochs=0, folder=tmp_path / "runs")
    with pytest.raises(SettingsError, match="resume needs the name of the run"):
        mh.fit(noisy(), resume=True, folder=tmp_path / "runs")
    with pytest.raises(SettingsError, match="the name of a run must consist of letters"):
        mh.fit(noisy(), name="../escape", folder=tmp_path / "runs")
    with pytest.raises(SettingsError, match="epochs must be a whole number of at least 1, but got 2.5"):
        mh.fit(noisy(), epochs=2.5, folder=tmp_path / "runs")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="callbacks must be a list, but got Ledger"):
        mh.fit(noisy(), callbacks=Ledger(tmp_path), folder=tmp_path / "runs")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="an instance of a subclass of mh.Callback, but got the class Corrupt"):
        mh.fit(noisy(), callbacks=[Corrupt], folder=tmp_path / "runs")  # type: ignore[list-item]
    with pytest.raises(SettingsError, match="a run to resume must exist; .* has no runs, but got 'misspelt'"):
        mh.fit(noisy(), name="misspelt", resume=True, folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


class Misspelt(mh.Callback):
    def on_epoch_end(self, hand: mh.Hand) -> None:
        raise AssertionError


def test_callback_with_misspelled_method_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="must be among on_start, .* but got on_epoch_end. Rename the method"):
        fit(noisy(), folder=tmp_path, callbacks=[Misspelt()])


def test_model_function_returning_a_trained_network_is_rejected(tmp_path: Path) -> None:
    net = nn.Linear(12, 5)
    fit(noisy(model=lambda: net), steps=1, folder=tmp_path)
    with pytest.raises(TaskError, match="must build a new network each time, but got Linear that was trained before"):
        fit(noisy(model=lambda: net), steps=1, folder=tmp_path)


def test_a_failure_before_the_first_step_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(TaskError):
        fit(noisy(loss=lambda model, batch: 1.0), folder=tmp_path / "runs")
    assert not any((tmp_path / "runs").iterdir())


def test_unpicklable_task_value_is_named(tmp_path: Path) -> None:
    handle = (tmp_path / "open").open("w")
    task = noisy(loss=lambda model, batch: (handle, F.cross_entropy(model(batch[0]), batch[1]))[1])
    with pytest.raises(SendError, match=r"task → loss → captured variable 'handle', of type TextIOWrapper"):
        fit(task, size=2, folder=tmp_path / "runs")
    handle.close()


def test_run_is_never_overwritten_and_mismatched_checkpoint_not_loaded(tmp_path: Path) -> None:
    run = fit(noisy(), steps=2, folder=tmp_path, name="mine")
    with pytest.raises(SettingsError, match=r"must not exist yet.*Pass resume=True"):
        fit(noisy(), folder=tmp_path, name="mine")
    before = {path: path.read_bytes() for path in run.path.rglob("*.safetensors")}
    with pytest.raises(CheckpointError, match=r"must contain the tensors of Linear.*missing.*unexpected"):
        fit(noisy(model=lambda: nn.Linear(12, 5)), folder=tmp_path, name="mine", resume=True)
    assert {path: path.read_bytes() for path in run.path.rglob("*.safetensors")} == before
    with pytest.raises(CheckpointError, match=r"a run must be a folder with a run.json"):
        mh.Run(tmp_path)


def test_corrupt_checkpoint_falls_back_to_previous_one_with_a_notice(tmp_path: Path) -> None:
    whole = fit(noisy(), epochs=2, folder=tmp_path, name="whole")
    fit(noisy(), epochs=2, folder=tmp_path, name="hurt", save_every=3, keep=3, callbacks=[StopAt(7)])
    newest = sorted((tmp_path / "hurt" / "checkpoints").iterdir())[-1] / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    run = fit(noisy(), epochs=2, folder=tmp_path, name="hurt", resume=True)
    notices = [e["text"] for e in read_events(run.path / "events.jsonl") if e["kind"] == "notice"]
    assert any("skipped a corrupt checkpoint" in text for text in notices)
    assert run.losses == whole.losses


def test_schedule_on_a_stream_needs_number_of_steps(tmp_path: Path) -> None:
    def stream() -> Any:
        yield from zip(*noisy().data, strict=True)

    with pytest.raises(TaskError, match="a schedule needs to know the number of steps"):
        fit(noisy(data=stream), folder=tmp_path)
    run = fit(noisy(data=stream), size=2, steps=9, epochs=5, folder=tmp_path)
    assert run.num_steps == 9


def test_input_wait_time_is_measured(tmp_path: Path) -> None:
    class Slow(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return torch.ones(12), torch.tensor(index % 5)

    run = fit(noisy(data=Slow()), size=2, folder=tmp_path)
    assert run.seconds["input"] >= 0.07, "two batches of four samples each sleep 0.04 s at the least"


def test_fit_records_parameters_of_a_partial_task_function(tmp_path: Path) -> None:
    def task(optimizer: str = "sgd", rows: int = 41) -> mh.Task:
        return problem("mlp", optimizer, rows)

    run = fit(functools.partial(task, rows="20", optimizer="adamw"), steps=1, folder=tmp_path)
    assert run.record["params"] == {"rows": 20, "optimizer": "adamw"}
    assert run.name.startswith("test_fit-")
    with pytest.raises(SettingsError, match="a parameter of the task must be one of optimizer, rows, but got 'width'"):
        fit(functools.partial(task, width=3), folder=tmp_path)
    with pytest.raises(SettingsError, match="rows must be of type int, but got 'many'"):
        fit(functools.partial(task, rows="many"), folder=tmp_path)


class Texts(torch.utils.data.Dataset[Any]):
    """Sequences of several lengths, sorted, so that every batch pads to another length."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.arange(1, 3 + index // 2), torch.tensor(index % 5)


def padded(samples: list[Any]) -> Any:
    return nn.utils.rnn.pad_sequence([s for s, _ in samples], batch_first=True), torch.stack([y for _, y in samples])


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def test_variable_length_sequences_are_predicted_and_exported(tmp_path: Path) -> None:
    task = mh.Task(
        model=Tagger,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).mean(1), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=Texts(),
        collate=padded,
        batch_size=4,
    )
    run = fit(task, folder=tmp_path)
    answers = mh.predict(run, Texts())
    assert [len(answer) for answer in answers] == [max(3 + (i // 4 * 4 + 3) // 2 - 1, 0) for i in range(20)]
    tokens = torch.randint(1, 12, (3, 25))
    expected = run.model()(tokens)
    torch.testing.assert_close(mh.predict(run, tokens), expected)
    run.export(tmp_path / "models")
    archive = mh.load(tmp_path / "models")
    assert str(archive.signature.inputs["tokens"]) == "int64[*, *]"
    torch.testing.assert_close(archive(tokens), expected.detach())
    torch.testing.assert_close(run.predictor()(tokens), expected.detach())


def test_predict_accepts_lists_of_rows(tmp_path: Path) -> None:
    run = fit(problem("mlp"), steps=1, folder=tmp_path)
    rows = torch.randn(3, 12)
    torch.testing.assert_close(mh.predict(run, rows.tolist()), mh.predict(run, rows))
    with pytest.raises(DataError, match="one row for each row.*of shape .* for 12 rows"):
        mh.predict(run, [rows[0], rows[1]])


def test_run_reopens_with_its_task_function_and_saved_params(tmp_path: Path) -> None:
    def task(rows: int = 41) -> mh.Task:
        return problem("mlp", rows=rows)

    run = fit(functools.partial(task, rows=20), steps=2, folder=tmp_path)
    again = mh.Run(run.path, task)
    assert again.task is not None
    assert len(again.task.data[0]) == 20
