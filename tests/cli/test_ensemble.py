"""`manyhands ensemble`."""

from __future__ import annotations

import json

from .conftest import Invoke


def test_ensemble_is_trained_resumed_and_exported(invoke: Invoke) -> None:
    words = ("ensemble", "small_task.py", "width=4", "--members", "2", "--on", "cpu", "--name", "ensemble")
    result = invoke(*words, "--export", "models/ensemble")
    assert result.exit_code == 0, result.output
    assert "studies/ensemble" in result.stdout
    assert "manyhands serve models" in result.stdout
    told = json.loads(invoke(*words, "--resume", "true", "--json").stdout)
    assert told["members"] == ["00000", "00001"]
    assert told["combine"] == "mean"
    wrong = invoke("ensemble", "small_task.py", "--on", "cpu", "--combine", "best")
    assert wrong.exit_code == 2
    assert "combine must be one of mean, vote, weighted, stacked, but got 'best'" in " ".join(wrong.stderr.split())
