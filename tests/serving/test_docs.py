"""Run the commands of docs/serving.md unchanged."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .conftest import Start, publish

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
COMMANDS = [line.strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("    curl ")]


def test_every_documented_command_succeeds(adder: Path, tmp_path: Path, start: Start) -> None:
    publish(adder, tmp_path / "digits", 1)
    server = start(tmp_path)
    assert len(COMMANDS) == 10
    for command in COMMANDS:
        here = command.replace("127.0.0.1:8501", f"127.0.0.1:{server.http}")
        done = subprocess.run(f"{here} --silent --fail-with-body", shell=True, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("word", ["predict", "infer"])
def test_documentation_has_commands_for_both_protocols(word: str) -> None:
    assert any(word in command for command in COMMANDS)
