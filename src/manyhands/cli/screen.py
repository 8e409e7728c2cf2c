"""Output of commands: results go to stdout, everything else to stderr, with colours only in a terminal."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..core import format_bytes, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

PIPE_WIDTH = 160
"""Width of the output in columns if it is not a terminal, so that tables are not truncated in logs."""


def stdout() -> Console:
    """Return the console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """Return the console for notices and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    made = _console_class()
    console = made(stderr=stderr)
    return console if console.is_terminal else made(stderr=stderr, width=PIPE_WIDTH)


@functools.cache
def _console_class() -> type[Console]:
    """Return a subclass of rich's Console that escapes control characters in texts.

    Names and errors may come from a server, another host or another user's file, and could otherwise control the
    terminal. rich is imported on the first call only.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                # rich itself makes control segments, such as cursor movements of live displays.
                yield segment if segment.control else Segment(printable(segment.text, keep="\n\t"), segment.style)

    return PrintableConsole


def note(text: str) -> None:
    """Print a dim line to stderr."""
    stderr().print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value to stdout as one line of JSON; NaN and infinities become null."""
    sys.stdout.write(json.dumps(finite(value), default=str) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """Context that redirects stdout to stderr if `wanted`, so that stdout contains only the JSON result."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def amount(num_bytes: int) -> str:
    """Return a number of bytes as text with a unit; empty for 0, which means that the number is unknown.

    >>> amount(150_000_000_000)
    '139.7 GiB'
    """
    return format_bytes(num_bytes) if num_bytes else ""


def finite(value: Any) -> Any:
    """Return JSON-ready data in which NaN and infinities are replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
