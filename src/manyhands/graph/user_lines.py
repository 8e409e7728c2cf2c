"""Finds the line of user code that an error came from."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

from ..distributed import innermost


def culprit(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback, as `file.py:12: text`.

    >>> try:
    ...     exec(compile("x = 1\\nx / 0", "train.py", "exec"))
    ... except ZeroDivisionError as error:
    ...     culprit(error)
    'train.py:2'
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    return _shown(innermost(frames))


def calling_line() -> str:
    """Return the innermost line of user code in the current stack, as `file.py:12: text`."""
    return _shown(innermost(traceback.extract_stack()))


def _shown(frame: traceback.FrameSummary) -> str:
    text = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{place}: {text}" if text else place
