"""`manyhands serve` and `manyhands models` as a person uses them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.storage import export

from .conftest import Invoke

OWN = """
import manyhands as mh
predictor = mh.load("models/digits/1")
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


def test_serve_manage_and_end(
    start: Callable[..., subprocess.Popen[str]], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(1)
    exported(2)
    process = start("serve", "models", "--http", 0, "--grpc", 0, "--manage", 0, "--versions", "all", "--log", "log")
    url, manage = addresses(process)
    client = mh.Client(url, manage=manage)
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
    assert "(of digits: 1, 2), but got 7; manyhands models load digits 7" in " ".join(missing.output.split())
    monkeypatch.setattr("manyhands.cli.models.LOOK_SECONDS", 0.01)
    assert "digits" in invoke("models", "list", "--server", manage).stdout
    assert models("load", "digits", 2) == {"current": 2}
    assert invoke("models", "load", "nothing", "--server", manage).exit_code == 1
    assert "names the port of management" in " ".join(invoke("models", "list", "--server", url).output.split())
    taken = invoke("serve", "models", "--http", url.rpartition(":")[2])
    assert "the port must be free" in taken.output
    assert ".pyx" not in taken.output
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    kinds = [json.loads(line)["kind"] for line in Path("log/events.jsonl").read_text().splitlines()]
    assert kinds[-2:] == ["stopping", "stopped"]
    assert "rolled_back" in kinds
    lines = [json.loads(line) for line in Path("log/access.jsonl").read_text().splitlines()]
    assert {"method": "POST", "path": "/v2/models/digits/infer", "status": 200}.items() <= lines[1].items()
    assert not client.is_ready()


def test_a_predictor_of_one_s_own(start: Callable[..., subprocess.Popen[str]]) -> None:
    exported(1)
    Path("own.py").write_text(OWN)
    process = start("serve", "own.py:predictor", "--http", 0, "--grpc", 0, "--manage", 0)
    url, _ = addresses(process)
    # float32, and what numbers are where nobody chose a type.
    for rows in (np.zeros((1, 3), np.float32), np.zeros((1, 3)), [[0, 0, 0]]):
        assert mh.Client(url)("model", rows).tolist() == [[1.0, 1.0, 1.0]]
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def test_a_server_that_is_not_there_is_said_with_its_address(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (["serve", ".", "--versions", "newest"], "versions are latest"),
        (["serve", ".", "--sizes", "a"], "sizes are numbers"),
        (["serve", ".", "--max-rows", "0"], "--max-rows must be at least 1"),
        (["models", "dance"], "models can list"),
        (["models", "load"], "a model must be named"),
        (["models", "split", "a", "b=c"], "a share is"),
        (["models", "list", "--server", "nowhere"], "http://host:port"),
        (["models", "list", "--server", "127.0.0.1:8502"], "write http://127.0.0.1:8502"),
        (
            ["serve", "--router", "--backends", "a:8500", "--precision", "bf16", "--warmup", "w"],
            "a router serves nothing itself",
        ),
        (
            ["serve", "models", "--router", "--backends", "a:8500"],
            "but got models; leave it out, or give it to the backends",
        ),
        (["serve", "models", "--backends", "a:8500"], "only a router has backends, but got --backends"),
    ],
)
def test_mistakes_are_told_before_anything_starts(words: list[str], error: str, invoke: Invoke) -> None:
    done = invoke(*words)
    assert done.exit_code == 2
    assert error in done.output
