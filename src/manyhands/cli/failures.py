"""Display of errors, and their exit codes."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer

from ..core import ManyhandsError, UsageError
from .screen import stderr

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130
_OURS = (str(Path(__file__).parents[1]) + os.sep, str(Path(typer.__file__).parent) + os.sep, "<")
_LIBRARIES = (*_OURS, sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("purelib") + os.sep)
_debug = [False]


def debug(wanted: bool) -> None:
    """Set whether errors are printed with the whole traceback."""
    _debug[0] = wanted


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command so that its errors are printed to stderr and it exits with the error's exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, BrokenPipeError):
            raise
        except (Exception, KeyboardInterrupt) as error:
            print_error(error)
            raise typer.Exit(exit_code(error)) from None

    return run


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error: 2 if the user can correct it, 130 for Ctrl-C, else 1.

    An error with an attribute `exit_code`, such as that of a script or 143 for a SIGTERM, exits with that code.
    """
    usual = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, UsageError) else 1
    return int(getattr(error, "exit_code", usual))


def print_error(error: BaseException) -> None:
    """Print an error to stderr: one line if that is sufficient, else the user's part of the traceback."""
    if _debug[0]:
        _print("".join(traceback.format_exception(error)))
    elif isinstance(error, KeyboardInterrupt):
        _print("\n  ".join(["interrupted", *getattr(error, "__notes__", ())]), style="yellow")
    elif isinstance(error, ManyhandsError) or (isinstance(error, OSError) and not _where(error)):
        _print_one_line(error)
    else:
        _print(short_traceback(error))


def _print_one_line(error: Exception) -> None:
    first, _, rest = str(error).partition("\n")
    if not first:
        return
    stderr().print(f"[bold red]error:[/] {_escaped(first)}", highlight=False, soft_wrap=True)
    where = _where(error)
    if where and not rest:
        _print(f"  at {where}", style="dim")
    if rest:
        _print(rest)
    for text in getattr(error, "__notes__", ()):
        _print(f"  {text}", style="dim")


def short_traceback(error: BaseException) -> str:
    """Return the traceback from the first line of user code on; the whole one if it contains no user code."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error))
    whole = traceback.TracebackException.from_exception(error)
    names = [frame.filename for frame in whole.stack]
    starts = (i for skipped in (_LIBRARIES, _OURS) for i, name in enumerate(names) if not name.startswith(skipped))
    whole.stack = traceback.StackSummary.from_list(whole.stack[next(starts, 0) :])
    return "".join(whole.format())


def _where(error: BaseException) -> str:
    """Return file and line of the innermost user code in an error's traceback, in this process or a worker; else ""."""
    # Frames of compiled libraries name sources that are not installed, such as uvloop/loop.pyx.
    theirs = [place for place in _places(error) if not place.startswith(_LIBRARIES) and ".pyx:" not in place]
    return theirs[-1] if theirs else ""


def _places(error: BaseException) -> Iterator[str]:
    """Yield file and line of each frame of an error's traceback, and of the worker's traceback that caused it."""
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"{frame.filename}:{frame.lineno}"
    text = getattr(error.__cause__, "traceback", "")
    for name, line in re.findall(r'^  File "(.+)", line (\d+)', text, re.MULTILINE):
        yield f"{name}:{line}"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _print(text: str, style: str = "") -> None:
    stderr().print(text.rstrip("\n"), style=style, markup=False, highlight=False, soft_wrap=True)
