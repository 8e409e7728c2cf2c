"""Formatting of bytes, durations and rates as text, and escaping of unprintable characters."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: float, digits: int | None = None) -> str:
    """Return a number of bytes with its unit, rounded to one decimal place or to `digits` significant digits.

    >>> format_bytes(3 * 2**30), format_bytes(1536), format_bytes(10)
    ('3.0 GiB', '1.5 KiB', '10 B')
    >>> format_bytes(3 * 2**30, digits=3), format_bytes(1023 * 2**20, digits=3)
    ('3 GiB', '1023 MiB')
    """
    power = 0
    while num_bytes >= 1024 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    if power == 0 or (digits is not None and num_bytes >= 10**digits):
        return f"{num_bytes:.0f} {_UNITS[power]}"
    return f"{num_bytes:.1f} {_UNITS[power]}" if digits is None else f"{num_bytes:.{digits}g} {_UNITS[power]}"


def format_duration(seconds: float) -> str:
    """Return a duration in microseconds, milliseconds or seconds, with the unit.

    >>> format_duration(0.0123), format_duration(3.2), format_duration(4e-5)
    ('12.3 ms', '3.2 s', '40 µs')
    >>> format_duration(0.9999), format_duration(1234)
    ('1 s', '1234 s')
    """
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def format_rate(bytes_per_second: float) -> str:
    """Return the bandwidth of a network link in bits per second, as vendors state it, with the unit.

    >>> format_rate(12.5e6), format_rate(3e9), format_rate(2e3)
    ('100 Mbit/s', '24 Gbit/s', '0.016 Mbit/s')
    """
    megabits = 8 * bytes_per_second / 1e6
    return f"{megabits:.3g} Mbit/s" if megabits < 999.5 else f"{megabits / 1e3:.3g} Gbit/s"


def format_rough_duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, rounded as for an estimate.

    >>> format_rough_duration(12.3), format_rough_duration(75), format_rough_duration(5400)
    ('12 s', '1 min', '1.5 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def printable(text: str, keep: str = "") -> str:
    """Return a text with its unprintable characters escaped, except those in `keep`.

    >>> printable("a\\x1b[2Jb"), printable("a\\nb"), printable("a\\nb", keep="\\n")
    ('a\\\\x1b[2Jb', 'a\\\\x0ab', 'a\\nb')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else f"\\x{ord(c):02x}" for c in text)


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, or all of its whole digits, and no power of ten if it is large.

    >>> format_number(1234.56), format_number(0.012345), format_number(7.0), format_number(999.7)
    ('1,235', '0.0123', '7', '1,000')
    """
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "trial"), counted(1200, "step"), counted(2, "process", "processes")
    ('1 trial', '1,200 steps', '2 processes')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
