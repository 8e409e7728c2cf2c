"""Terminal report of a profile: time by rank, module and operation; memory; advice."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..core import counted, format_bytes, format_duration, format_number

if TYPE_CHECKING:
    from rich.console import Console

    from .operations import ModuleTime
    from .profile import Profile

NUM_ROWS = 10
COLOURS = {
    "input": "yellow",
    "copy": "bright_yellow",
    "forward": "green",
    "backward": "bright_green",
    "captured": "green",
    "communication": "red",
    "optimizer": "blue",
    "idle": "bright_black",
}
BAR = 40


def show(profile: Profile, console: Console | None = None) -> None:
    """Print a profile as tables to a console, by default to stdout."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = console or Console()
    if not out.is_terminal and console is None:
        out = Console(width=140)
    out.print(headline(profile), style="bold", markup=False, highlight=False)
    names = [name for name, seconds in profile.phases.items() if seconds]
    table = Table("rank", "step", *names, "", title="where a step's time goes", title_justify="left")
    for one in profile.ranks:
        parts = one.parts
        whole = sum(parts.seconds.values()) or 1e-9
        bar = Text()
        for name in names:
            bar.append("█" * round(BAR * parts.seconds.get(name, 0.0) / whole), style=COLOURS.get(name, "white"))
        cells = [
            f"{format_duration(parts.seconds.get(name, 0.0))} {parts.seconds.get(name, 0.0) / whole:.0%}"
            for name in names
        ]
        slow = " (slow)" if any(one.rank == straggler.rank for straggler in profile.stragglers) else ""
        table.add_row(f"{one.rank}{slow}", format_duration(one.breakdown.total), *cells, bar)
    out.print(table)
    _print_rows(out, "modules, first rank", ("module", "forward", "backward"), module_rows(profile))
    _print_rows(out, "operations, first rank", ("operation", "times a step", "seconds"), operation_rows(profile))
    _print_rows(out, "peak memory, by rank", *memory_rows(profile))
    for line in closing(profile):
        out.print(line, markup=False, highlight=False)


def _print_rows(out: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def headline(profile: Profile) -> str:
    """Return the first line of a report: the task, its strategy and its speed."""
    rate = f"{profile.samples_per_second:,.0f} a second"
    speed = f"{format_duration(profile.seconds)} a step of {counted(profile.batch_size, 'sample')}, {rate}"
    used = "" if profile.mfu is None else f", MFU {profile.mfu:.0%} (of the rate in large matrix products here)"
    return f"{profile.name}, {profile.strategy}: {speed}{used}"


def module_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Return the name, forward and backward time of the slowest modules as text; repeated blocks are merged."""
    watched = profile.ranks[0].watched
    if watched is None:
        return []
    return [
        (name, format_duration(forward), format_duration(backward))
        for name, forward, backward in grouped(watched.modules)[:NUM_ROWS]
    ]


def grouped(modules: tuple[ModuleTime, ...]) -> list[tuple[str, float, float]]:
    """Return name, forward and backward seconds of modules, summed over those whose names differ only in numbers.

    >>> from .operations import ModuleTime
    >>> grouped((ModuleTime("blocks.0.mlp", 1.0, 2.0), ModuleTime("blocks.1.mlp", 1.0, 2.0), ModuleTime("head", 1, 1)))
    [('blocks.*.mlp x2', 2.0, 4.0), ('head', 1, 1)]
    """
    found: dict[str, list[ModuleTime]] = {}
    for module in modules:
        found.setdefault(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", module.name), []).append(module)
    rows = []
    for pattern, members in found.items():
        name = f"{pattern} x{len(members)}" if len(members) > 1 else members[0].name or "the network's own lines"
        rows.append((name, sum(m.forward for m in members), sum(m.backward for m in members)))
    return sorted(rows, key=lambda row: -row[1] - row[2])


def operation_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Return the name, calls per step and time of the slowest operations as text."""
    watched = profile.ranks[0].watched
    if watched is None:
        return []
    return [(one.name, format_number(one.count), format_duration(one.seconds)) for one in watched.operations[:NUM_ROWS]]


def memory_rows(profile: Profile) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns of the memory table, and its rows, one for each rank."""
    held = [(one.rank, one.memory) for one in profile.ranks if one.memory is not None]
    if not held:
        return (), []
    kinds = tuple(held[0][1].peak)
    rows = [
        (
            str(rank),
            *(format_bytes(memory.peak[kind], 3) for kind in kinds),
            format_bytes(max(memory.totals), 3),
            memory.peak_phase,
        )
        for rank, memory in held
    ]
    return ("rank", *kinds, "all", "peak in"), rows


def closing(profile: Profile) -> list[str]:
    """Return the last lines of a report: notes and advice."""
    lines = list(profile.notes)
    if any(one.plain is not None for one in profile.ranks):
        lines.append("steps run as CUDA graphs; what they consist of was timed on plain ones")
    if not profile.advice:
        return [*lines, "no advice: most of the time is spent in the network"]
    return [*lines, "advice:", *(f"  {number}. {one}" for number, one in enumerate(profile.advice, 1))]
