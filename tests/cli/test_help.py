"""Help: quick, without torch, and useful to a newcomer."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from importlib.metadata import version

import pytest

from manyhands.cli.app import VERBS

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


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_does_not_import_torch(words: list[str]) -> None:
    assert run(*words).stderr.strip() == "heavy: []"


def test_help_answers_quickly() -> None:
    """In CPU seconds, because other work on a shared machine stretches the clock's."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert statistics.median(seconds) < 0.5


def test_the_version_is_the_package_s(invoke: Invoke) -> None:
    assert invoke("--version").stdout.strip() == f"manyhands {version('manyhands')}"


def test_the_first_help_names_every_verb_and_nothing_beside_the_point(invoke: Invoke) -> None:
    text = invoke("--help").stdout
    assert all(verb in text for verb in VERBS)
    assert "--show-completion" not in text


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example(verb: str, invoke: Invoke) -> None:
    text = invoke(verb, "--help").stdout
    assert "Examples" in text
    assert f"manyhands {verb}" in text.split("Examples")[1]


def test_shell_completion_is_there() -> None:
    # The shell is named, because what started the tests need not be one.
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-c", PROGRAM, "--show-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=named)
    assert "complete" in done.stdout
