"""`manyhands tune`."""

from __future__ import annotations

import json

import pytest

import manyhands as mh
from manyhands.cli.tune import show

from .conftest import Invoke

SPACE = ("--space", "width=choice:2,4", "--on", "cpu")


def test_a_study_is_told_and_goes_on(invoke: Invoke, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tune", "small_task.py", *SPACE, "--objective", "loss", "--name", "first")
    result = invoke(*words, "--trials", "2")
    assert result.exit_code == 0, result.output
    assert "2 finished" in result.stdout
    assert "manyhands fit small_task.py width=" in result.stdout
    assert "to go on" not in result.stdout
    show(mh.Study("studies/first", stopped=True), "small_task.py")
    assert "the same command with --name first --resume" in " ".join(capsys.readouterr().out.split())
    told = json.loads(invoke(*words, "--trials", "4", "--resume", "--json").stdout)
    assert told["trials"] == {"finished": 4}
    assert told["best"]["params"]["width"] in (2, 4)


def test_mistakes_are_said(invoke: Invoke) -> None:
    for words, said in (
        (["--space", "width"], "a range is written NAME=RANGE"),
        (["--space", "width=uniform:4..2"], "goes from low to high"),
        (["--space", "depth=choice:1,2"], "parameters of the task"),
        (["--space", "width=choice:2,4"], "a study has an end"),
        (["--space", "width=choice:2,4", "--trials", "2", "--search", "luck"], "search is tpe"),
    ):
        wrong = invoke("tune", "small_task.py", "--on", "cpu", *words)
        assert wrong.exit_code == 2
        assert said in " ".join(wrong.stderr.split())
