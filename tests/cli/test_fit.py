"""`manyhands fit`: what it trains, what it prints, what it refuses, and how it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from manyhands import Run
from manyhands.core import EVENTS, read_events

from .conftest import Invoke

TARGET = "small_task.py"


def test_fit_command_trains_on_two_devices(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("fit", TARGET, "width=12", "--on", "cpu*2", "--epochs", 2, "--name", "first")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert Run("runs/first").state_dict()["layers.0.weight"].shape == (12, 4)
    assert "valid loss" in out
    assert "steps          8" in out
    assert "manyhands fit small_task.py width=12 --on 'cpu*2' --epochs 4 --name first --resume true" in out
    assert "settings: on=cpu*2 (argument), epochs=2 (argument), name=first (argument)" in err


def test_json_output_is_a_single_object(invoke: Invoke) -> None:
    result = invoke("fit", TARGET, "lr=3e-4", "--on", "cpu*2", "--name", "a", "--json")
    told = json.loads(result.stdout)
    assert told["run"] == "runs/a"
    assert told["steps"] == 4
    assert told["stopped"] is False
    assert told["params"] == {"lr": 3e-4}
    assert told["settings"]["on"] == "cpu*2"
    assert told["sources"]["on"] == "argument"
    assert set(told["metrics"]) == {"loss", "valid_loss"}
    assert told["seconds"]["total"] > 0
    assert "making the task" in result.stderr
    assert "epoch 1" in result.stderr


def test_resume_continues_the_run(invoke: Invoke) -> None:
    invoke("fit", TARGET, "--on", "cpu", "--name", "a", "-q")
    result = invoke("fit", TARGET, "--on", "cpu", "--name", "a", "--epochs", 3, "--resume", "true", "--json")
    assert json.loads(result.stdout)["steps"] == 12
    assert "resumed at step 4" in result.stderr


def test_memory_limit_and_deterministic_options_are_applied(invoke: Invoke) -> None:
    result = invoke("fit", TARGET, "--on", "cpu*2", "--deterministic", "--memory", "2GiB", "--name", "a")
    assert result.exit_code == 0, result.stderr
    assert Run("runs/a").record["spec"] == {"replicas": 2, "deterministic": True}
    assert "--memory 2GiB --deterministic --epochs 2 --name a --resume true" in result.stdout
    refused = invoke("fit", TARGET, "--on", "cpu", "--memory", "plenty")
    assert refused.exit_code == 2
    assert "number of bytes above zero, but got 'plenty'" in refused.stderr


def test_quiet_prints_only_the_result(invoke: Invoke) -> None:
    result = invoke("fit", TARGET, "--on", "cpu", "-q")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "runs/small_task-" in result.stdout


def test_arguments_override_the_config_file_which_overrides_the_environment(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.toml").write_text("epochs = 2\nkeep = 1\n[task]\nwidth = 5\nlr = 1\n")
    monkeypatch.setenv("MANYHANDS_EPOCHS", "9")
    monkeypatch.setenv("MANYHANDS_ON", "cpu")
    result = invoke("fit", TARGET, "lr=0.5", "--config", "run.toml", "--keep", 3)
    assert "settings: on=cpu (MANYHANDS_ON), epochs=2 (run.toml), keep=3 (argument)" in result.stderr
    (folder,) = Path("runs").iterdir()
    record = json.loads((folder / "run.json").read_text())
    assert record["epochs"] == 2
    assert record["params"] == {"width": 5, "lr": 0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py"], "the first argument must be a Python file, but got none.py, which does not exist"),
        ([f"{TARGET}:nope"], "must have a task of that name, but got 'nope'"),
        ([TARGET, "lr=quick"], "lr must be of type float, but got 'quick'"),
        ([TARGET, "speed=1"], "but got 'speed'. Correct the name"),
        ([TARGET, "0.1"], "a parameter of the task must be written key=value"),
        ([TARGET, "--strategy", "zigzag"], "but got 'zigzag'"),
        ([TARGET, "--on", "tpu"], "but got tpu"),
        ([TARGET, "--epochs", "0"], "epochs must be a whole number of at least 1"),
        ([TARGET, "--epochs", "few"], "valid int"),
        ([TARGET, "--timeout", "0"], "timeout must be above 0, but got 0.0. Pass a number of seconds"),
        (
            [TARGET, "--save-every", "0"],
            "--save-every must be a whole number of at least 1, but got 0. Pass --save-every 1",
        ),
        ([TARGET, "--resume", "true"], "resume needs the name of the run. Pass --name ..."),
        ([TARGET, "--patience", "valid_los:3"], "but got 'valid_los'. Did you mean valid_loss?"),
        ([TARGET, "--patience", "valid_loss:3:up"], "mode of Patience must be auto, min or max, but got 'up'"),
        ([TARGET, "--config", "none.toml"], "must be readable"),
        ([TARGET, "--name", "a/b"], "the name of a run must consist of letters"),
        ([TARGET, "rows=8", "batch=16", "--on", "cpu*2"], "batch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_print_one_line_error_without_traceback(
    words: list[str], message: str, invoke: Invoke
) -> None:
    result = invoke("fit", *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not Path("runs").exists()


def test_import_error_traceback_starts_in_the_user_file(invoke: Invoke) -> None:
    Path("broken.py").write_text("import torch\ntorch.nn.Linear(1)\n")
    result = invoke("fit", "broken.py")
    assert result.exit_code == 2
    traceback = result.stderr[result.stderr.index("Traceback") :]
    assert "broken.py" in traceback.splitlines()[1]


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_training_error_traceback_starts_in_user_code(on: str, invoke: Invoke) -> None:
    text = Path(TARGET).read_text().replace("x, y = batch", "x, y = batch[0].reshape(1, 3), 0")
    Path(TARGET).write_text(text)
    result = invoke("fit", TARGET, "--on", on)
    assert result.exit_code == 1
    first = result.stderr[result.stderr.index("Traceback") :].splitlines()[1]
    assert "small_task.py" in first
    assert "in loss" in first


def test_unwritable_folder_prints_an_error_without_traceback(invoke: Invoke) -> None:
    result = invoke("fit", TARGET, "--on", "cpu", "--folder", "small_task.py/runs")
    assert result.exit_code == 2
    assert "small_task.py/runs (Not a directory)" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_debug_shows_the_whole_traceback(invoke: Invoke) -> None:
    result = invoke("--debug", "fit", TARGET, "lr=quick", "--on", "cpu")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "SettingsError" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_run_with_a_checkpoint_and_leaves_no_process(
    number: signal.Signals,
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("fit", TARGET, "pause=0.01", "--on", "cpu*2", "--epochs", 10_000, "--name", "long")
    _wait_for_steps(process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert "(stopped)" in out
    assert "stopping after this step" in err
    assert Run("runs/long").num_steps > 0
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_run_stopped_by_its_own_step_exits_with_code_0(invoke: Invoke) -> None:
    own = "\n\ndef step(hand, batch):\n    hand.minimize(loss(hand.model, batch))\n    hand.stop()\n"
    text = Path(TARGET).read_text().replace("loss=loss", "step=step")
    Path(TARGET).write_text(text + own)
    result = invoke("fit", TARGET, "--on", "cpu")
    assert result.exit_code == 0, result.output
    assert "1 (stopped)" in result.stdout


def _wait_for_steps(process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if any(entry["kind"] == "steps" for entry in read_events(Path("runs/long") / EVENTS)):
            return
        time.sleep(0.05)
    raise AssertionError("no step was taken")


def test_patience_stops_a_run_early(invoke: Invoke) -> None:
    words = ("--on", "cpu", "--epochs", 9, "--name", "a", "--patience", "valid_loss:2,loss:1:max")
    result = invoke("fit", TARGET, "lr=1e-3", *words)
    assert result.exit_code == 0, result.stderr
    assert "out of patience at step 8: loss has not got better than" in result.stderr
    assert "--patience valid_loss:2,loss:1:max" in result.stdout.replace("\n", "")
    wrong = invoke("fit", TARGET, "--on", "cpu", "--patience", "valid_loss")
    assert wrong.exit_code == 2
    assert (
        "NAME:EPOCHS or NAME:EPOCHS:MODE, but got 'valid_loss'. Write for example valid_loss:5"
        in wrong.stderr.replace("\n", "")
    )


def test_start_from_initializes_weights_from_another_run(invoke: Invoke) -> None:
    assert invoke("fit", TARGET, "--on", "cpu", "--name", "a", "-q").exit_code == 0
    result = invoke("fit", TARGET, "lr=1e-9", "--on", "cpu*2", "--name", "b", "--start-from", "runs/a")
    assert result.exit_code == 0, result.stderr
    assert "starts from" in result.stderr
    before, after = Run("runs/a").state_dict(), Run("runs/b").state_dict()
    assert all(after[name].allclose(tensor, atol=1e-5) for name, tensor in before.items())
    wrong = invoke("fit", TARGET, "width=4", "--on", "cpu", "--start-from", "runs/a")
    assert wrong.exit_code == 2
    assert "of another shape (layers.0.weight is (8, 4) and should be (4, 4)" in wrong.stderr.replace("\n", "")


def test_resume_auto_starts_a_run_and_then_resumes_it(invoke: Invoke) -> None:
    words = ("fit", TARGET, "--on", "cpu", "--name", "a", "--resume", "auto", "--json", "--epochs")
    assert json.loads(invoke(*words, 1).stdout)["steps"] == 4
    result = invoke(*words, 2)
    assert "resumed at step 4" in result.stderr
    assert json.loads(result.stdout)["steps"] == 8
    result = invoke("fit", TARGET, "--on", "cpu", "--name", "b", "--resume", "true")
    assert "or pass --resume auto to start it" in result.stderr


def test_existing_run_error_suggests_the_resume_option(invoke: Invoke) -> None:
    Path("runs/a").mkdir(parents=True)
    result = invoke("fit", TARGET, "--on", "cpu", "--name", "a")
    assert result.exit_code == 2
    assert "got runs/a, which exists. Pass --resume true to resume it, or another name" in result.stderr


def test_patience_on_a_custom_metric_requires_a_mode(invoke: Invoke) -> None:
    text = (
        Path(TARGET).read_text().replace("valid=", 'metrics={"score": lambda outputs, batch: outputs.mean()}, valid=')
    )
    Path(TARGET).write_text(text)
    result = invoke("fit", TARGET, "--on", "cpu", "--patience", "valid_score:3")
    assert result.exit_code == 2
    assert "Write --patience valid_score:3:max or valid_score:3:min" in result.stderr
    assert invoke("fit", TARGET, "--on", "cpu", "--patience", "valid_score:3:max").exit_code == 0


def test_extra_parameters_are_passed_to_keyword_arguments_of_the_task(invoke: Invoke) -> None:
    Path("open_task.py").write_text(
        "import small_task\n\ndef task(lr: float = 0.1, **kw: int):\n    return small_task.task(lr=lr, **kw)\n"
    )
    told = invoke("fit", "open_task.py", "lr=0.5", "width=3", "--on", "cpu", "--name", "a", "--json")
    assert json.loads(told.stdout)["params"] == {"lr": 0.5, "width": 3}
    assert Run("runs/a").state_dict()["layers.0.weight"].shape == (3, 4)
