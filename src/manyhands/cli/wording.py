"""Wording: errors that speak of Python's arguments, said in the options of the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from ..core import UsageError


@contextlib.contextmanager
def in_options(settings: type[Any]) -> Iterator[None]:
    """Rewords the mistakes that are told inside: the fields of `settings` are options of the command."""
    names = [field.name for field in dataclasses.fields(settings)]
    try:
        yield
    except UsageError as error:
        told = UsageError(reworded(error.rule, names), got=error.got, remedy=reworded(error.remedy, names))
        error.args = told.args
        raise


def reworded(text: str, names: list[str]) -> str:
    """A text with options where it has arguments; words that may be anything else stay.

    >>> reworded('pass resume=True to go on, or name="..."', ["resume", "name"])
    'pass --resume to go on, or --name ...'
    >>> reworded("save_every must be a whole number of at least 1", ["save_every"])
    '--save-every must be a whole number of at least 1'
    """
    for name in names:
        option = f"--{name.replace('_', '-')}"
        text = re.sub(rf"(?<![\w.-]){name}=True\b", option, text)
        text = re.sub(rf'(?<![\w.-]){name}="\.\.\."', f"{option} ...", text)
        text = re.sub(rf"(?<![\w.-]){name}=(?=[\d\"'])", f"{option} ", text)
        if "_" in name:
            text = re.sub(rf"(?<![\w.-]){name}\b(?!=)", option, text)
    return text
