"""`manyhands tune`."""

from __future__ import annotations

import json

import pytest

import manyhands as mh
from manyhands.cli.tune import show

from .conftest import Invoke

SPACE = ("--space", "width=choice:2,4", "--on", "cpu")


def test_study_is_summarized_and_resumed(invoke: Invoke, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tune", "small_task.py", *SPACE, "--objective", "loss", "--name", "first")
    result = invoke(*words, "--trials", "2")
    assert result.exit_code == 0, result.output
    assert "2 finished" in result.stdout
    assert "manyhands fit small_task.py width=" in result.stdout
    assert "to resume" not in result.stdout
    show(mh.tuning.Study("studies/first", stopped=True), "small_task.py")
    assert "the same command with --name first --resume true" in " ".join(capsys.readouterr().out.split())
    told = json.loads(invoke(*words, "--trials", "4", "--resume", "true", "--json").stdout)
    assert told["trials"] == {"finished": 4}
    assert told["best"]["params"]["width"] in (2, 4)


def test_invalid_tune_arguments_exit_with_code_2(invoke: Invoke) -> None:
    for words, said in (
        (["--space", "width"], "a range must be written NAME=RANGE"),
        (["--space", "width=uniform:4..2"], "needs a lower and a higher bound"),
        (["--space", "depth=choice:1,2"], "parameters of the task"),
        (["--space", "width=choice:2,4"], "a study needs a limit"),
        (["--space", "width=choice:2,4", "--trials", "2", "--search", "luck"], "search must be one of tpe"),
    ):
        wrong = invoke("tune", "small_task.py", "--on", "cpu", *words)
        assert wrong.exit_code == 2
        assert said in " ".join(wrong.stderr.split())
