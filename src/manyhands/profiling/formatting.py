"""Readable formatting of times and sizes."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time with its unit.

    >>> duration(0.0123), duration(3.2), duration(4e-5)
    ('12.3 ms', '3.2 s', '40 µs')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def size(num_bytes: float) -> str:
    """Return a number of bytes with its unit.

    >>> size(1536), size(3 * 2**30)
    ('1.5 KiB', '3 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.3g} {unit}"
