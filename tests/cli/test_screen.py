"""Output of commands: untrusted texts cannot control the terminal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from manyhands.cli.screen import note, stderr, stdout

HOSTILE = "digits\x1b]0;owned\x07\x1b[2J\r\x9b31m\x00"


@pytest.mark.parametrize("console", [stdout, stderr])
@pytest.mark.parametrize("form", [str, Text, lambda text: Table(title=text, caption=text), lambda text: _table(text)])
def test_control_characters_of_others_are_shown_and_not_sent_to_the_terminal(
    console: Callable[[], Console], form: Callable[[str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    console().print(form(HOSTILE))
    note(HOSTILE)
    printed = "".join(capsys.readouterr())
    assert "digits" in printed
    assert "\\x1b" in printed
    assert all(character.isprintable() or character == "\n" for character in printed)


def test_colours_and_live_displays_still_control_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = stderr()
    console.print("red", style="red")
    with Progress(console=console) as progress:
        progress.add_task(HOSTILE, total=1)
    printed = capsys.readouterr().err
    assert "\x1b[31m" in printed, "the colour is rich's own"
    assert "\x1b]0;owned" not in printed


def _table(text: str) -> Table:
    table = Table(text)
    table.add_row(text)
    return table
