"""Sinks: the events sent to external tools, none of which can delay a run."""

from __future__ import annotations

import csv
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import Event, LossNotFinite, SettingsError, TaskError, event, read_events
from manyhands.distributed import World
from manyhands.monitoring import About, SinkDispatcher, make_sinks
from manyhands.monitoring.sinks import NumberSink, dispatcher
from manyhands.monitoring.sinks.names import numbers_of

from ..grouped_options import fit_options
from ..training.problems import generator


def task(lr: float = 0.05) -> mh.Task:
    rows = torch.randn(32, 4, generator=generator(0))
    return mh.Task(
        model=lambda: nn.Linear(4, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        data=(rows, rows.sum(1, keepdim=True)),
        valid=(rows[:8], rows[:8].sum(1, keepdim=True)),
        metrics={"error": lambda outputs, batch: (outputs - batch[1]).abs().mean()},
        batch_size=8,
    )


def fit(folder: Path, log_to: Any, lr: float = 0.05, **settings: Any) -> mh.Run:
    settings = {"on": "cpu", "epochs": 2, "name": "run", **settings}
    return mh.fit(
        functools.partial(task, lr=lr),
        **fit_options(folder=folder, log_to=log_to, progress=False, timeout=60, **settings),
    )


def notices(run_folder: Path) -> list[str]:
    return [entry["text"] for entry in read_events(run_folder / "events.jsonl") if entry["kind"] == "notice"]


class Faulty(mh.monitoring.Sink):
    """A sink that stores events, and raises or hangs on request."""

    def __init__(self, raise_at: str = "", hang_at: str = "") -> None:
        self.raise_at, self.hang_at = raise_at, hang_at
        self.released = threading.Event()
        self.heard: list[str] = []

    def start(self, about: About) -> None:
        self._hear("start of it")

    def take(self, entry: Event) -> None:
        self._hear(entry["kind"])

    def end(self, status: str) -> None:
        self._hear(status)

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.raise_at:
            raise OSError("the server is gone")
        if what == self.hang_at:
            self.released.wait(60)


@pytest.fixture
def hanging() -> Iterator[Faulty]:
    sink = Faulty(hang_at="start of it")
    yield sink
    sink.released.set()


def test_csv_sink_writes_every_loss_and_metric(tmp_path: Path) -> None:
    run = fit(tmp_path, "csv", on="cpu*2")
    with (run.path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["value"]) for row in rows if row["name"] == "train/loss"]
    assert losses == run.losses
    errors = {int(row["step"]): float(row["value"]) for row in rows if row["name"] == "valid/error"}
    assert errors == run.history["valid_error"]
    names = {row["name"] for row in rows}
    assert {"train/samples_per_second", "epoch", "time/rank0/compute", "time/rank1/sync", "valid/loss"} <= names


def test_tensorboard_sink_writes_one_curve_for_a_resumed_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class StopEarly(mh.Callback):
        def on_step(self, hand: mh.Hand) -> None:
            if hand.num_steps == 5:
                hand.stop()

    stopped = fit(tmp_path, ["tensorboard"], epochs=2, save_every=4, callbacks=[StopEarly()])
    assert stopped.stopped
    run = fit(tmp_path, ["tensorboard"], epochs=3, resume=True)
    board = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    board.Reload()
    curve = [(item.step, item.value) for item in board.Scalars("train/loss")]
    assert curve == [(step, pytest.approx(loss)) for step, loss in enumerate(run.losses, 1)]
    assert [item.step for item in board.Scalars("valid/error")] == [4, 8, 12]
    texts = {tag: b"".join(board.Tensors(tag)[0].tensor_proto.string_val) for tag in board.Tags()["tensors"]}
    assert b"| lr | 0.05 |" in texts["run/text_summary"]
    assert b"| strategy | replicas=1 |" in texts["run/text_summary"]
    assert b"resumed at step" in texts["notices/text_summary"]
    assert texts["status/text_summary"] == b"stopped"
    assert "_hparams_/session_start_info" in board.summary_metadata


BOTH = """
import functools, json, pathlib, struct, sys
import torch
import manyhands as mh

from manyhands.monitoring.sinks import dispatcher

sys.path.insert(0, sys.argv[1])
from tests.monitoring.test_sinks import task

dispatcher.CLOSE_SECONDS = 90  # however busy the machine is
run = mh.fit(
    functools.partial(task, lr=0.03), on="cpu", epochs=2, name="both",
    options=mh.options.Logging(log_to=["wandb", "mlflow"]),
)

# A run's finish() may return before wandb's own process has written the file; this waits for that process.
from wandb import teardown
teardown()

def records(path):
    # LevelDB's log format: blocks of 32 KiB, each record with a checksum, its length and its type.
    from wandb.proto import wandb_internal_pb2
    data, place, body = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        body += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(body)
            body = b""

wandb = {"rows": [], "config": {}, "exit": None}
for record in records(next(run.path.glob("wandb/offline-run-*/*.wandb"))):
    kind = record.WhichOneof("record_type")
    if kind == "history":
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        wandb["rows"].append(items)
    elif kind == "run":
        wandb["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        wandb["name"] = record.run.display_name
    elif kind == "exit":
        wandb["exit"] = record.exit.exit_code

from mlflow import MlflowClient
client = MlflowClient()
experiment = client.get_experiment_by_name("digits")
kept = client.search_runs([experiment.experiment_id])[0]
mlflow = {
    "loss": [(point.step, point.value) for point in client.get_metric_history(kept.info.run_id, "train/loss")],
    "params": kept.data.params, "status": kept.info.status, "name": kept.info.run_name, "metrics": kept.data.metrics,
}
print(json.dumps({"wandb": wandb, "mlflow": mlflow, "losses": run.losses, "metrics": run.metrics}))
"""


def test_wandb_and_mlflow_sinks_store_losses_metrics_and_params(tmp_path: Path) -> None:
    """The real packages, offline and with a store of files, in a program of its own, because wandb starts a server."""
    environ = {
        **os.environ, "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_EXPERIMENT_NAME": "digits", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", BOTH, root]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    rows = [row for row in told["wandb"]["rows"] if "train/loss" in row]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(i, v) for i, v in enumerate(told["losses"], 1)]
    assert [row["epoch"] for row in told["wandb"]["rows"] if "valid/error" in row] == [1, 2]
    assert told["wandb"]["config"]["lr"] == 0.03
    assert told["wandb"]["config"]["strategy"] == "replicas=1"
    assert (told["wandb"]["name"], told["wandb"]["exit"]) == ("both", 0)
    assert any("log_to wandb: offline; wandb sync" in text for text in notices(tmp_path / "runs" / "both"))
    assert told["mlflow"]["loss"] == [[i, v] for i, v in enumerate(told["losses"], 1)]
    assert told["mlflow"]["metrics"]["valid/error"] == told["metrics"]["valid_error"]
    assert told["mlflow"]["params"]["lr"] == "0.03"
    assert (told["mlflow"]["name"], told["mlflow"]["status"]) == ("both", "FINISHED")


def test_function_sink_receives_every_event(tmp_path: Path) -> None:
    heard: list[Event] = []
    fit(tmp_path, [heard.append, "csv"])
    assert heard == list(read_events(tmp_path / "run" / "events.jsonl"))
    assert heard[-1]["kind"] == "end"


@pytest.mark.parametrize("moment", ["start of it", "steps", "finished"])
def test_sink_that_raises_is_dropped_once_and_the_run_continues(moment: str, tmp_path: Path) -> None:
    sink = Faulty(raise_at=moment)
    run = fit(tmp_path, [sink, "csv"], on="cpu*2")
    assert run.num_steps == 8
    told = [text for text in notices(run.path) if "was dropped" in text]
    assert told == ["log_to Faulty was dropped, and the run continues without it: OSError: the server is gone"]
    assert sink.heard[-1] == moment
    assert "valid/loss" in (run.path / "metrics.csv").read_text()


def test_hanging_sink_does_not_block_the_run(tmp_path: Path, hanging: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "CLOSE_SECONDS", 0.3)
    monkeypatch.setattr(dispatcher, "QUIET_SECONDS", 0.1)
    run = fit(tmp_path, [hanging])
    assert run.num_steps == 8
    assert hanging.heard == ["start of it"]
    assert [text.split(":")[0] for text in notices(run.path)] == [
        "waiting for Faulty to write the last events, 0 s at most",
        "log_to Faulty was dropped, and the run continues without it",
    ]


def test_slow_sink_with_full_queue_is_dropped_during_the_run(
    tmp_path: Path, hanging: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_WAITING", 3)
    run = fit(tmp_path, [hanging])
    told = [entry for entry in read_events(run.path / "events.jsonl") if "dropped" in entry.get("text", "")]
    assert [entry["text"].split(": ")[1] for entry in told] == ["it is too slow, 3 events wait for it"]
    last = list(read_events(run.path / "events.jsonl"))[-1]
    assert last["kind"] == "end"


def test_sinks_receive_the_failure_of_a_run(tmp_path: Path) -> None:
    sink = Faulty()
    with pytest.raises(LossNotFinite):
        fit(tmp_path, [sink], lr=1e30)
    assert sink.heard[-2:] == ["failed", "failed"]


def test_run_that_failed_before_start_opens_no_sink(tmp_path: Path) -> None:
    sink = Faulty()
    outlet = SinkDispatcher([sink], About(name="run", folder=tmp_path))
    assert list(outlet.take(event("failed", reason="refused"))) == []
    outlet.close(lambda text: None)
    assert sink.heard == []


def test_rejected_run_closes_sinks_and_leaves_no_folder(tmp_path: Path) -> None:
    """The sinks have begun when the loss is tried; they close before the folder is taken away."""
    sums = task().replace(loss=lambda model, batch: model(batch[0]))
    heard: list[Event] = []
    with pytest.raises(TaskError, match="a loss must be a scalar"):
        mh.fit(
            sums,
            "mirrored",
            on="cpu",
            folder=tmp_path,
            options=[mh.options.Logging(log_to=["csv", heard.append]), mh.options.Display(progress=False)],
        )
    assert [heard[0]["kind"], heard[-1]["kind"]] == ["notice", "failed"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("log_to", ["nope", ["csv", "csv"], [3], [Faulty], "csv,nope"])
def test_invalid_log_to_is_rejected(log_to: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"log_to must be one of csv, tensorboard|a sink must be named once"):
        fit(tmp_path, log_to)
    assert list(tmp_path.iterdir()) == []


def test_sink_without_its_package_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SettingsError, match=r"pip install 'manyhands\[tensorboard\]'"):
        fit(tmp_path, "tensorboard")
    assert list(tmp_path.iterdir()) == []


def test_wandb_without_api_key_is_rejected_without_prompting(tmp_path: Path, run_ranks: Any) -> None:
    def refused(world: World) -> str:
        """In a process of its own, because wandb remembers what it found at first."""
        os.environ.update(HOME=str(tmp_path), NETRC=str(tmp_path / "none"), WANDB_CONFIG_DIR=str(tmp_path))
        for name in ("WANDB_API_KEY", "WANDB_MODE"):
            os.environ.pop(name, None)
        with pytest.raises(SettingsError) as raised:
            make_sinks("wandb")
        return str(raised.value)

    assert "log_to='wandb' needs the key of an account" in run_ranks(refused, 1)[0]


def test_extra_step_event_fields_become_named_scalars() -> None:
    """Learning rates and limits come from other parts; a sink needs no change for them."""
    entry = event(
        "steps", steps=[4, 5], losses={"loss": [1.0, None]}, epoch=0, samples_per_second=10.0, lr=[0.1, 0.05],
        limit="input", shares={"copy": 0.25},
    )  # fmt: skip
    assert list(numbers_of(entry, 3)) == [
        (4, {"train/loss": 1.0, "train/lr": 0.1}),
        (5, {"train/samples_per_second": 10.0, "train/lr": 0.05, "train/shares/copy": 0.25, "epoch": 0.0}),
    ]


def test_dispatching_events_does_not_block_on_a_hanging_sink(hanging: Faulty, tmp_path: Path) -> None:
    """A thousand events to a sink that hangs: all but the ones that fit wait nowhere."""
    outlet = SinkDispatcher([hanging], About(name="run", folder=tmp_path))
    done = threading.Event()

    def feed() -> None:
        for number in range(3 * dispatcher.MAX_WAITING):
            list(outlet.take(event("notice", text=str(number))))
        done.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    feeder.join(120)
    assert done.is_set()
    hanging.released.set()


class Slow(NumberSink):
    """Takes its time, as a server far away does."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def numbers(self, step: int, values: Any, at: float) -> None:
        time.sleep(0.02)
        self.steps.extend([step] if "train/loss" in values else [])


class Thin(Slow):
    """Takes a few steps of each event."""

    most = 5


def test_steps_are_downsampled_for_a_sink_with_a_step_limit() -> None:
    sink = Thin()
    sink.take(event("steps", steps=list(range(1, 501)), losses={"loss": [0.5] * 500}, epoch=0))
    assert sink.steps == [100, 200, 300, 400, 500]


def test_slow_sink_receives_every_step(tmp_path: Path) -> None:
    sink = Slow()
    run = fit(tmp_path, [sink])
    assert sink.steps == list(range(1, run.num_steps + 1))
    assert not notices(run.path)


def test_make_sinks_parses_comma_separated_names() -> None:
    assert [str(sink) for sink in make_sinks("csv, tensorboard")] == ["csv", "tensorboard"]
    assert make_sinks("") == make_sinks(()) == []


def test_logged_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    heard: list[Event] = []
    halving = task(lr=0.05).replace(schedule=lambda step, total: 0.5**step)
    mh.fit(
        halving,
        on="cpu",
        epochs=2,
        folder=tmp_path,
        options=[mh.options.Logging(log_to=heard.append), mh.options.Display(progress=False)],
    )
    rates = {
        step: values["train/lr"] for entry in heard for step, values in numbers_of(entry, 0) if "train/lr" in values
    }
    assert rates[8] == 0.05 * 0.5**7


def test_dropped_sink_is_printed_with_progress_disabled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Faulty(raise_at="epoch"))
    told = "log_to Faulty was dropped, and the run continues without it: OSError: the server is gone\n"
    assert capfd.readouterr().err == told


def test_make_sinks_accepts_none_and_suggests_a_misspelled_name() -> None:
    assert make_sinks(None) == []
    with pytest.raises(SettingsError, match="but got 'tensorbord'. Did you mean 'tensorboard'?"):
        make_sinks("csv,tensorbord")
