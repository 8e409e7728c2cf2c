"""Help: quick, without torch, and useful to a newcomer."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from manyhands.cli.app import COMMANDS

from .conftest import Invoke

PROGRAM = """
import sys
sys.argv = ["manyhands", *sys.argv[1:]]
from manyhands.cli import main
try:
    main()
finally:
    print("heavy:", sorted({"torch", "numpy", "rich.live"} & set(sys.modules)), file=sys.stderr)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)], ids=" ".join
)
def test_help_does_not_import_torch(words: list[str]) -> None:
    assert run(*words).stderr.strip() == "heavy: []"


def test_help_imports_few_modules() -> None:
    """Imports are most of the time that `--help` takes."""
    program = PROGRAM.replace("finally:", "finally:\n    print(len(sys.modules))")
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 450


def test_version_matches_the_installed_package(invoke: Invoke) -> None:
    assert invoke("--version").stdout.strip() == f"manyhands {version('manyhands')}"


def test_top_level_help_lists_every_command(invoke: Invoke) -> None:
    text = invoke("--help").stdout
    assert all(command in text for command in COMMANDS)
    assert "--show-completion" not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_help_has_an_example(command: str, invoke: Invoke) -> None:
    text = invoke(command, "--help").stdout
    assert "Examples" in text
    assert f"manyhands {command}" in text.split("Examples")[1]


def test_shell_completion_script_is_printed() -> None:
    # The shell is named, because what started the tests need not be one.
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-c", PROGRAM, "--show-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=named)
    assert "complete" in done.stdout
