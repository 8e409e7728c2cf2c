"""The examples run as a newcomer runs them, and the programs of a pair behave alike, also on two devices.

Every manyhands example runs once as a program; its plain counterpart runs in a fork that has torch imported.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from typer.testing import CliRunner

from manyhands.cli.app import app
from manyhands.storage import Checkpoint, CheckpointStore
from manyhands.training import Run

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> Iterator[None]:
    """Examples write into `runs`, `studies` and `models`, which git ignores, and nowhere else."""
    yield
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if not {"runs", "studies", "models"}.intersection(path.parts)] == []


def run_python(folder: Path, *args: str, epochs: int = 1) -> str:
    """Runs a program in a folder of its own, on one core; returns what it printed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "EPOCHS": str(epochs), "COLUMNS": "80"}
    done = subprocess.run([sys.executable, *args], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_command(folder: Path, *args: str, epochs: int = 1) -> str:
    """Runs a `manyhands` command in this process."""
    before = set(sys.modules)
    # What an example imports may set environment variables of its own.
    with mock.patch.dict(os.environ, EPOCHS=str(epochs)), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        done = CliRunner().invoke(app, args)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
            del sys.modules[name]
    assert done.exit_code == 0, done.output
    return done.output


Fork = Callable[..., str]


@pytest.fixture
def run_forked(run_ranks: Any) -> Fork:
    """Run a program that does not use manyhands in a fork; return what it printed."""

    def run(folder: Path, script: str, epochs: int = 1, **environ: str) -> str:
        def main(world: Any) -> str:
            os.chdir(folder)
            os.environ.update(environ, EPOCHS=str(epochs))
            with contextlib.redirect_stdout(io.StringIO()) as output:
                runpy.run_path(str(EXAMPLES / script), run_name="__main__")
            return output.getvalue()

        (output,) = run_ranks(main, 1)
        return str(output)

    return run


def printed(output: str, name: str) -> list[float]:
    """The values that a plain PyTorch example prints after a name."""
    return [float(value) for value in re.findall(rf"\b{name} ([\d.]+)", output)]


def only_run(folder: Path) -> Run:
    """The one run that a program left behind."""
    (path,) = (folder / "runs").iterdir()
    return Run(path)


def test_placed_towers_give_the_losses_of_one_device(tmp_path: Path, run_forked: Fork) -> None:
    """Each tower on a device of its own gives the losses of one device."""
    plain = run_forked(tmp_path, "two_towers_torch.py")
    said = run_python(tmp_path, str(EXAMPLES / "two_towers_manyhands.py"))
    assert "to 2 on cpu#0: " in said
    assert printed(plain, "loss")[-1] > 1.0
    placed = only_run(tmp_path)
    run_command(tmp_path / "runs", "fit", str(EXAMPLES / "two_towers_manyhands.py"), "--on", "cpu", "--epochs", "1")
    torch.testing.assert_close(placed.losses, only_run(tmp_path / "runs").losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "epochs", "loss"),
    [("image_classifier", 2, "loss"), ("char_gpt", 2, "loss"), ("gan", 1, "critic"), ("recommender", 4, "loss")],
)
def test_pair_behaves_like_plain_pytorch_and_equally_on_two_devices(
    name: str, epochs: int, loss: str, tmp_path: Path, run_forked: Fork
) -> None:
    """Ours on one device behaves as plain PyTorch does, and on two devices it gives the losses of one."""
    alone, split = tmp_path / "alone", tmp_path / "split"
    alone.mkdir()
    split.mkdir()
    ours = str(EXAMPLES / f"{name}_manyhands.py")
    run_python(alone, ours, epochs=epochs)
    plain = run_forked(alone, f"{name}_torch.py", epochs=epochs)
    run_command(split, "fit", ours, "--on", "cpu*2", "--epochs", str(epochs))
    one, two = only_run(alone), only_run(split)

    # The first weights and the order of the samples are others, so the values are alike and no more.
    curve = list(one.history[loss].values())
    assert curve[-1] == pytest.approx(printed(plain, loss)[-1], rel=0.3)
    if name != "gan":
        assert curve[-1] < 0.7 * curve[0]
    assert one.record["devices"] == ["cpu"]
    assert len(two.record["devices"]) == 2
    assert two.history.keys() == one.history.keys()
    for key, values in one.history.items():
        assert two.history[key] == pytest.approx(values, rel=1e-4), key


def test_huggingface_pair_learns_like_the_trainer_and_equally_on_two_devices(tmp_path: Path) -> None:
    """Ours learns what the Trainer learns, gives the same on two devices, and leaves a folder that they can read."""
    alone, split = tmp_path / "alone", tmp_path / "split"
    alone.mkdir()
    split.mkdir()
    ours = str(EXAMPLES / "huggingface_manyhands.py")
    with ThreadPoolExecutor(2) as both:
        theirs = both.submit(run_python, alone, str(EXAMPLES / "huggingface_torch.py"), epochs=2)
        both.submit(run_python, alone, ours, epochs=2).result()
    run_command(split, "fit", ours, "--on", "cpu*2", "--epochs", "2")
    one, two = only_run(alone), only_run(split)

    # Which words a network of random weights learns first differs, so what both have learned is compared.
    wanted = printed(theirs.result(), "accuracy")
    assert len(wanted) == len(one.history["valid_accuracy"]) == 2
    assert one.metrics["valid_accuracy"] == pytest.approx(wanted[-1], abs=0.15)
    assert min(one.metrics["valid_accuracy"], wanted[-1]) > 0.75
    assert len(two.record["devices"]) == 2
    for key, values in one.history.items():
        assert two.history[key] == pytest.approx(values, rel=1e-3, abs=1e-4), key
    assert {"config.json", "model.safetensors"} <= {path.name for path in (alone / "models" / "reviews").iterdir()}


def test_task_parameters_from_the_command_line(tmp_path: Path) -> None:
    """The task's own typed parameters can be set in the command."""
    file = str(EXAMPLES / "image_classifier_manyhands.py")
    run_command(tmp_path, "fit", file, "--on", "cpu*2", "--steps", "2", "lr=3e-3", "width=4", "batch_size=32")
    run = only_run(tmp_path)
    assert run.record["params"] == {"lr": 3e-3, "width": 4, "batch_size": 32}
    assert len(run.losses) == 2


def test_plan_example_works_in_python_and_as_a_command(tmp_path: Path) -> None:
    """A GPT is planned for hardware that is not here, in Python and from the command line."""
    output = run_python(tmp_path, str(EXAMPLES / "plan_gpt.py"))
    assert "it saturates at" in output
    assert "times as fast as" in output
    shown = run_command(tmp_path, "plan", str(EXAMPLES / "plan_gpt.py"), "layers=2", "--cluster", "8 A100", "--json")
    assert '"best": "' in shown


def test_profile_example_reports_starved_input(tmp_path: Path) -> None:
    """A run whose input is too slow gets a notice with the share of a step that it waits."""
    output = run_python(tmp_path, str(EXAMPLES / "profile_digits.py"))
    assert "starved input: " in output
    assert "waiting for data: " in output
    assert (tmp_path / "runs" / "profile.html").exists()


def test_own_loop_gives_the_same_network_alone_split_and_restarted(tmp_path: Path, run_forked: Fork) -> None:
    """Alone, on two devices under `launch`, and restarted on two after a start alone: the same network."""
    script = str(EXAMPLES / "own_loop_manyhands.py")
    folders = {name: tmp_path / name for name in ("alone", "two", "restarted")}
    for folder in folders.values():
        folder.mkdir()
    with ThreadPoolExecutor(2) as both:
        alone = both.submit(run_python, folders["alone"], script, epochs=4)
        both.submit(run_python, folders["restarted"], script, epochs=2).result()
    plain = run_forked(tmp_path, "own_loop_torch.py", epochs=4)
    two = run_command(folders["two"], "launch", script, "--on", "cpu*2", epochs=4)
    run_command(folders["restarted"], "launch", script, "--on", "cpu*2", epochs=4)

    losses = printed(two, "loss")
    assert len(losses) == 4
    assert losses[-1] == pytest.approx(printed(plain, "loss")[-1], rel=0.3)
    assert printed(two, "best accuracy") == pytest.approx(printed(alone.result(), "best accuracy"))
    wanted = _last_checkpoint(folders["alone"])
    assert wanted.step == 4 * 24
    for name in ("two", "restarted"):
        found = _last_checkpoint(folders[name])
        assert found.step == wanted.step
        torch.testing.assert_close(found.model, wanted.model, rtol=1e-4, atol=1e-6)


def _last_checkpoint(folder: Path) -> Checkpoint:
    return CheckpointStore(folder / "runs" / "own_loop_manyhands").load()


def test_char_gpt_spells_held_out_numbers(tmp_path: Path) -> None:
    """With its default settings it has learned something: numbers that were held out are spelled right."""
    output = run_python(tmp_path, str(EXAMPLES / "char_gpt_manyhands.py"), epochs=6)
    assert "786=seven hundred eighty-six\n" in output
    assert "161=one hundred sixty-one\n" in output


def test_serve_example_improves_and_rolls_back(tmp_path: Path) -> None:
    output = run_python(tmp_path, str(EXAMPLES / "serve_digits.py"))
    first, second, again = (float(value) for value in re.findall(r"version \d: ([\d.]+)", output))
    assert first == again
    assert second > 0.8


def test_demo_prints_five_figures_next_to_predictions(tmp_path: Path) -> None:
    """All acts of the demo measure what they claim, and leave only runs/ behind."""
    output = run_python(tmp_path, str(EXAMPLES / "demo.py"), "--quick")
    table = output[output.index("All figures") :]
    rows = {
        "speed of two processes": r"[\d.]+ x +[\d.]+ x",
        "H100 worth using, of 64": r"\d+ +none here",
        "from a kill to the next step": r"no restart +[\d.]+ s",
        "difference of the two losses": r"rounding +(\S+)",
        "100 networks as one program": r"[\d.]+ x +([\d.]+) x",
        "requests failed in a swap": r"0 +0 of ([\d,]+)",
        "on the dashboard": r"all of it +3 runs, 2 plans, 1 server",
    }
    found = {name: re.search(re.escape(name) + r" +" + row, table) for name, row in rows.items()}
    assert all(found.values()), output
    groups = {name: match[1].replace(",", "") for name, match in found.items() if match is not None and match.groups()}
    assert float(groups["difference of the two losses"]) < 1e-4
    assert float(groups["100 networks as one program"]) > 1
    assert int(groups["requests failed in a swap"]) > 20
    answered = re.search(r"([\d,]+)\s+answered\s+by\s+version\s+1\s+and\s+([\d,]+)\s+by\s+version\s+2", output)
    assert answered is not None, output
    assert all(int(count.replace(",", "")) > 0 for count in answered.groups())
    assert re.search(r"reported: process 1 was killed by signal 9 \(SIGKILL", output)
    assert "reported: resumed after step 15 of 30 with 2 processes" in output
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"dashboard runs/{folder.name}\n" in output
    assert {path.name for path in folder.glob("*.png")} == {"dashboard.png", "dashboard-kill.png"}
    paths = [line for line in output.splitlines() if folder.name in line]
    assert max(len(line) for line in output.splitlines() if line not in paths) <= 80


def test_demo_ends_at_ctrl_c_without_leaving_processes(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--quick"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "2  Kill a process" in line:
                break
        os.killpg(demo.pid, signal.SIGINT)
        rest = demo.stdout.read()
    assert demo.returncode == 130, rest
    assert "Interrupted. What was finished is in runs/demo-" in rest
    assert "Traceback" not in rest
    assert [process.pid for process in psutil.process_iter() if _folder_of(process) == str(tmp_path)] == []


def _folder_of(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


def test_many_networks_are_stacked_and_read_digits(tmp_path: Path) -> None:
    said = run_python(tmp_path, str(EXAMPLES / "many_networks.py"), epochs=4)
    assert "32 tasks go together" in said
    (accuracy,) = printed(said, "accuracy")
    assert accuracy > 0.85
    assert re.search(r"answers \[\d, \d, \d\]", said)


def test_tune_example_finds_a_good_network_and_a_calibrated_ensemble(tmp_path: Path, run_forked: Fork) -> None:
    """The same search by hand and by mh.tune; five networks say how sure they are better than one does."""
    plain = run_forked(tmp_path, "tune_digits_optuna.py", epochs=6, TRIALS="6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIALS", "6")
        ours = run_python(tmp_path, str(EXAMPLES / "tune_digits_manyhands.py"), epochs=6)
    assert printed(plain, "valid_loss")[-1] < 0.7
    assert printed(ours, "best valid_loss")[-1] < 0.7
    together, alone = printed(ours, "calibration error")
    assert together < alone


def test_notebook_cells_run(tmp_path: Path) -> None:
    """Every cell runs in a kernel, where functions live in no file."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    codes = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in codes), "outputs would be those of one machine"
    NotebookClient(book, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in codes for output in cell.outputs]
    results = [output["data"]["text/plain"] for output in outputs if output["output_type"] == "execute_result"]
    difference, metrics, answer = results
    assert float(difference) < 1e-4
    assert "valid_accuracy" in metrics
    assert answer.startswith("(tensor([")
