"""`manyhands evaluate`, `predict` and `export`: using a trained run from the shell."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import manyhands as mh

from .conftest import Invoke


@pytest.fixture
def first(invoke: Invoke) -> mh.Run:
    trained = invoke("fit", "small_task.py", "width=4", "--on", "cpu", "--name", "first", "--epochs", "2", "-q")
    assert trained.exit_code == 0, trained.output
    return mh.Run("runs/first")


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(20, 4)).astype("float32")


def expected(run: mh.Run, inputs: np.ndarray) -> np.ndarray:
    """The outputs of the network of the file, computed by hand from the weights of the run."""
    weights = run.state_dict()
    hidden = (torch.tensor(inputs) @ weights["layers.0.weight"].T + weights["layers.0.bias"]).relu()
    outputs: np.ndarray = (hidden @ weights["layers.2.weight"].T + weights["layers.2.bias"]).numpy()
    return outputs


def test_evaluate_prints_the_losses_of_the_run(first: mh.Run, invoke: Invoke) -> None:
    found = json.loads(invoke("evaluate", "first", "small_task.py", "--on", "cpu", "--json").stdout)
    assert found["loss"] == pytest.approx(first.metrics["valid_loss"], rel=1e-6)
    inputs, wanted = rows(), rows().sum(1, keepdims=True)
    np.savez("held.npz", inputs, wanted)
    result = invoke(
        "evaluate", "first", "small_task.py", "--data", "held.npz", "--strategy", "mirrored", "--on", "cpu*2"
    )
    assert result.exit_code == 0, result.output
    loss = float(((expected(first, inputs) - wanted) ** 2).mean())
    assert float(result.stdout.split()[-1]) == pytest.approx(loss, rel=1e-4)


def test_predictions_of_runs_and_exports_are_equal_in_every_format(first: mh.Run, invoke: Invoke) -> None:
    np.save("rows.npy", rows())
    wanted = expected(first, rows())
    exported = invoke("export", "first", "small_task.py", "models/small", "--json")
    assert exported.exit_code == 0, exported.output
    model = json.loads(exported.stdout)["path"]
    for source in (["first", "small_task.py", "--on", "cpu"], [model]):
        for out in ("out.npy", "out.npz", "out.csv", "out.json"):
            result = invoke("predict", *source, "--data", "rows.npy", "--out", out)
            assert result.exit_code == 0, result.output
            np.testing.assert_allclose(read(Path(out)), wanted, rtol=1e-5, atol=1e-6)
        printed = invoke("predict", *source, "--data", "rows.npy", "--json")
        np.testing.assert_allclose(next(iter(json.loads(printed.stdout).values())), wanted, rtol=1e-5, atol=1e-6)


def read(path: Path) -> np.ndarray:
    if path.suffix == ".csv":
        return np.asarray([[float(cell) for cell in line] for line in list(csv.reader(path.open()))[1:]])
    if path.suffix == ".json":
        return np.asarray(next(iter(json.loads(path.read_text()).values())))
    held = np.load(path)
    return held if isinstance(held, np.ndarray) else next(iter(held.values()))


def test_export_writes_plain_weights(first: mh.Run, invoke: Invoke) -> None:
    assert invoke("export", "first", "small_task.py", "small.safetensors", "--weights-only").exit_code == 0
    from safetensors.torch import load_file

    assert all(torch.equal(value, first.state_dict()[name]) for name, value in load_file("small.safetensors").items())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["first", "small_task.py"], "predict needs --data"),
        (["first", "--data", "rows.npy"], "need the file of its task"),
        (["first", "small_task.py", "--data", "damaged.npy"], "must be a file of arrays, but got damaged.npy"),
        (["first", "small_task.py", "--data", "rows.npy", "--out", "out.txt"], "--out must be a path ending in .npy"),
        (["first", "small_task.py", "--data", "rows.npy", "--out", "no/out.npy"], "whose folder does not exist"),
        (["unknown", "small_task.py", "--data", "rows.npy"], "a run must be a folder with a run.json"),
    ],
)
def test_wrong_arguments_of_predict_exit_with_code_2(
    first: mh.Run, invoke: Invoke, words: list[str], text: str
) -> None:
    np.save("rows.npy", rows())
    Path("damaged.npy").write_bytes(b"no array")
    result = invoke("predict", *words)
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.stderr.split())
    assert not Path("out.txt").exists()
