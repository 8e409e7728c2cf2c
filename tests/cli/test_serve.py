"""`manyhands serve` and `manyhands models` from the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.core import RequestRefused
from manyhands.storage import export

from .conftest import Invoke

OWN = """
import manyhands as mh
predictor = mh.load("models/digits/1")
"""

PYTHON = """
class Predictor:
    inputs = {"text": "string[*]"}
    outputs = {"text": "string[*]"}

    def predict(self, inputs):
        return [text + "!" for text in inputs["text"]]
"""


def exported(number: int) -> None:
    """The next version of a model that adds its own number."""
    export(torch.nn.Identity(), lambda model, x: x + number, {"x": torch.ones(2, 3)}, Path("models/digits"))


def addresses(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving on (\S+) .*managed on (\S+)", line):
            return found[1], found[2]
    raise AssertionError("it did not start")


def when_found(ask: Callable[[], list[str]]) -> list[str]:
    """A folder with Python code is loaded once it has not changed for some seconds."""
    until = time.monotonic() + 60
    while True:
        try:
            return ask()
        except RequestRefused as refusal:
            if refusal.code not in ("NOT_FOUND", "UNAVAILABLE") or time.monotonic() > until:
                raise
            time.sleep(0.1)


def test_serve_manages_versions_and_shuts_down_cleanly(
    start: Callable[..., subprocess.Popen[str]], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server that shares two cores with other tests may take more than the default two seconds to answer.
    monkeypatch.setattr("manyhands.cli.models.REACH_SECONDS", 60.0)
    exported(1)
    exported(2)
    process = start("serve", "models", "--http", 0, "--grpc", 0, "--manage", 0, "--versions", "all", "--log", "log")
    url, manage = addresses(process)
    client = mh.serving.Client(url, manage=manage)
    rows = torch.zeros(2, 3)
    np.testing.assert_array_equal(client("digits", rows), np.full((2, 3), 2.0, np.float32))
    np.testing.assert_array_equal(client("digits", {"x": rows}, version=1), np.ones((2, 3), np.float32))

    def models(*words: object) -> dict[str, object]:
        done = invoke("models", *words, "--server", manage, "--json")
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.stdout))

    assert models("label", "digits", "stable=1", "old=1") == {"labels": {"stable": 1, "old": 1}}
    assert models("label", "digits", "old=") == {"labels": {"stable": 1}}
    assert models("split", "digits", "1=1")["shares"] == [{"model": "digits", "version": 1, "weight": 1.0}]
    assert client("digits", rows)[0, 0] == 1
    assert models("split", "digits") == {"shares": []}
    assert models("rollback", "digits") == {"current": 1}
    missing = invoke("models", "split", "digits", "1=1", "7=1", "--server", manage)
    assert "(of digits: 1, 2), but got 7; load it with manyhands models load digits 7" in " ".join(
        missing.output.split()
    )
    monkeypatch.setattr("manyhands.cli.models.LOOK_SECONDS", 0.01)
    assert "digits" in invoke("models", "list", "--server", manage).stdout
    assert models("load", "digits", 2) == {"current": 2}
    assert invoke("models", "load", "nothing", "--server", manage).exit_code == 1
    assert "the address of the management port" in " ".join(invoke("models", "list", "--server", url).output.split())
    taken = invoke("serve", "models", "--http", url.rpartition(":")[2])
    assert "the port must be free" in taken.output
    assert ".pyx" not in taken.output
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    kinds = [json.loads(line)["kind"] for line in Path("log/events.jsonl").read_text().splitlines()]
    assert kinds[-2:] == ["stopping", "stopped"]
    assert "rolled_back" in kinds
    lines = [json.loads(line) for line in Path("log/access.jsonl").read_text().splitlines()]
    assert {"method": "POST", "path": "/v2/models/digits/infer", "status": 200}.items() <= lines[1].items()
    assert not client.is_ready()


def test_custom_predictor_from_a_file_is_served(start: Callable[..., subprocess.Popen[str]]) -> None:
    exported(1)
    Path("own.py").write_text(OWN)
    process = start("serve", "own.py:predictor", "--http", 0, "--grpc", 0, "--manage", 0)
    url, _ = addresses(process)
    # float32, and the types of numbers without a chosen type.
    for rows in (np.zeros((1, 3), np.float32), np.zeros((1, 3)), [[0, 0, 0]]):
        assert mh.serving.Client(url)("model", rows).tolist() == [[1.0, 1.0, 1.0]]
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0


def test_python_predictor_and_a_trusted_folder_are_served(start: Callable[..., subprocess.Popen[str]]) -> None:
    Path("models/words/1").mkdir(parents=True)
    Path("models/words/1/predictor.py").write_text(PYTHON)
    for words in (["models", "--trust-python"], ["models/words/1/predictor.py:Predictor"]):
        process = start("serve", *words, "--http", 0, "--grpc", 0, "--manage", 0)
        url, _ = addresses(process)
        name = "words" if "--trust-python" in words else "model"
        client = mh.serving.Client(url)
        found = when_found(lambda client=client, name=name: client(name, ["a"]).tolist())
        assert found == ["a!"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_unreachable_server_error_names_its_address(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.cli.models.REACH_SECONDS", 0.01)
    done = invoke("models", "list", "--server", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "http://127.0.0.1:9 cannot be reached" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["serve", "nowhere"], "a folder of models"),
        (["serve", "small_task.py:task"], "an mh.Predictor"),
        (["serve", ".", "--host", "0.0.0.0"], "needs a token"),
        (["serve", ".", "--versions", "newest"], "versions must be latest"),
        (["serve", ".", "--sizes", "a"], "--sizes must be values of type int, separated by commas"),
        (["serve", ".", "--max-rows", "0"], "--max-rows must be a whole number of at least 1, but got 0"),
        (["models", "dance"], "the action must be one of list"),
        (["models", "load"], "a model name is required"),
        (["models", "split", "a", "b=c"], "a traffic share must be written"),
        (["models", "list", "--server", "nowhere"], "http://host:port"),
        (["models", "list", "--server", "127.0.0.1:8502"], "Write http://127.0.0.1:8502"),
        (
            ["serve", "--router", "--backends", "a:8500", "--precision", "bf16", "--warmup", "w"],
            "a router does not serve models itself",
        ),
        (
            ["serve", "models", "--router", "--backends", "a:8500"],
            "but got models. Omit it, or pass it to the backends",
        ),
        (["serve", "models", "--backends", "a:8500"], "only a router has backends, but got --backends"),
    ],
)
def test_invalid_arguments_exit_with_code_2(words: list[str], error: str, invoke: Invoke) -> None:
    done = invoke(*words)
    assert done.exit_code == 2
    assert error in done.output
