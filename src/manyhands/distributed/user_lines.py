"""Find the lines of user code in stacks and in the tracebacks of errors."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

_NOT_THEIRS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    str(Path(torch.__file__).parents[1] / "keras"),
    sysconfig.get_path("stdlib"),
    "<",
)


def culprit(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback, as `file.py:12: source text`.

    >>> try:
    ...     exec(compile("x = 1\\nx / 0", "train.py", "exec"))
    ... except ZeroDivisionError as error:
    ...     culprit(error)
    'train.py:2'
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    frame = innermost(frames)
    if frame.name == "_engine_run_backward":
        # The stacks of autograd's threads contain no user code.
        return "the backward pass"
    return _shown(frame)


def line_in(stack: str) -> str:
    """Return the innermost line of user code in a formatted stack, as `file.py:12: text`; "" if it has no lines.

    >>> line_in('File "train.py", line 3, in forward\\n    return self.head(x)')
    'train.py:3: return self.head(x)'
    """
    found = re.findall(r'File "(.+)", line (\d+), in (.+)(?:\n +(.*))?', stack)
    frames = [traceback.FrameSummary(file, int(line), name, line=text) for file, line, name, text in found]
    return _shown(innermost(frames)) if frames else ""


def calling_line() -> str:
    """Return the innermost line of user code in the current stack, as `file.py:12: text`."""
    return _shown(innermost(traceback.extract_stack()))


def _shown(frame: traceback.FrameSummary) -> str:
    text = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{place}: {text}" if text else place


def caller_lines() -> list[str]:
    """Return the lines of user code in the current stack as `file.py:12`, which are equal on hosts with equal code."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    theirs = [frame for frame in frames if not frame.f_code.co_filename.startswith(_NOT_THEIRS)]
    return [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" for frame in reversed(theirs)]


def innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the last frame that is not of torch, Keras, Python or manyhands; else the last frame of all."""
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    return (theirs or frames)[-1]
