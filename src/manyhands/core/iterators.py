"""Copies of iterators, such as `itertools.count()`, which a network may keep in an attribute and advance."""

from __future__ import annotations

import warnings
from typing import Any

_BUILT_IN = (enumerate, zip, map, filter, reversed, *map(type, map(iter, ((), [], {}, range(0), ""))))


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator of Python's own that may be copied; generators cannot be.

    >>> import itertools
    >>> is_iterator(itertools.count()), is_iterator([]), is_iterator(n for n in ())
    (True, False, False)
    """
    return type(value).__module__ == "itertools" or isinstance(value, _BUILT_IN)


def copied_iterator(value: Any) -> Any:
    """Return an iterator that continues as the given one does, over the same items; the given one if it has no state.

    >>> import itertools
    >>> turns = itertools.cycle("ab")
    >>> other = copied_iterator(turns)
    >>> next(turns), next(turns), next(other)
    ('a', 'b', 'a')
    """
    try:
        make, arguments, state = _reduced(value)
        made = make(*map(_own, arguments))
        if state is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                made.__setstate__(tuple(map(_own, state)) if isinstance(state, tuple) else state)
        return made
    except (TypeError, AttributeError):
        return value


def iterator_state(value: Any) -> Any:
    """Return something that is equal for two iterators that continue alike, over the same items.

    >>> import itertools
    >>> turns = itertools.cycle("ab")
    >>> before = iterator_state(turns)
    >>> next(turns), iterator_state(turns) == before
    ('a', False)
    """
    if isinstance(value, tuple | list):
        return tuple(map(iterator_state, value))
    if is_iterator(value):
        try:
            return tuple(map(iterator_state, _reduced(value)))
        except (TypeError, AttributeError):
            return id(value)
    return value if isinstance(value, int | float | str | range | None) else id(value)


def _reduced(value: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """Return the type of an iterator, its arguments, and its state or None."""
    with warnings.catch_warnings():
        # From Python 3.14 on, these iterators have no state that can be read.
        warnings.simplefilter("ignore", DeprecationWarning)
        make, arguments, *state = value.__reduce__()
    return make, arguments, state[0] if state else None


def _own(value: Any) -> Any:
    """Return a copy of what an iterator advances or extends itself: another iterator, or the items that it keeps."""
    if is_iterator(value):
        return copied_iterator(value)
    return value.copy() if type(value) is list else value
