"""`manyhands replay`."""

from __future__ import annotations

import json

from .conftest import Invoke


def test_replayed_step_matches_the_recorded_loss(invoke: Invoke) -> None:
    assert invoke("fit", "small_task.py", "width=4", "--on", "cpu", "--name", "first", "-q").exit_code == 0
    result = invoke("replay", "first@3", "small_task.py", "--on", "cpu")
    assert result.exit_code == 0, result.output
    assert "equal: step 3 of first had a loss of" in result.stdout
    told = json.loads(invoke("replay", "runs/first@4", "small_task.py", "--on", "cpu", "--json").stdout)
    assert told["equal"]
    assert len(told["samples"]) == 5


def test_invalid_replay_arguments_exit_with_code_2(invoke: Invoke) -> None:
    wrong = invoke("replay", "first", "small_task.py")
    assert wrong.exit_code == 2
    assert "RUN@STEP" in wrong.stderr
    missing = invoke("replay", "unknown@3", "small_task.py")
    assert missing.exit_code == 2
    assert "a run must be a folder with a run.json" in missing.stderr
