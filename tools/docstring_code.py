"""Extension of the reference: shows doctests and `Example:` blocks of docstrings as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
_EXAMPLE = re.compile(r"^Example:\n((?:[ \t]+.*(?:\n|\Z)|\n)+)", re.MULTILINE)


class DocstringCode(griffe.Extension):
    """Put fences around code in docstrings, which Markdown would show as quotes or as one paragraph."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object after it was read."""
        if obj.docstring is not None:
            obj.docstring.value = with_fences(obj.docstring.value)


def with_fences(text: str) -> str:
    """Return a docstring with its code in fences."""
    text = _EXAMPLE.sub(lambda match: f"```python\n{_dedented(match[1])}\n```\n", text)
    return _DOCTEST.sub(lambda match: f"```python\n{match[0].rstrip()}\n```", text)


def _dedented(block: str) -> str:
    lines = block.strip("\n").split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[margin:] for line in lines)
