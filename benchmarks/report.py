"""Reports: what every benchmark shares. Interleaved rounds, medians and noise, a table, a plot, and the result file."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from xml.sax.saxutils import escape

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
SAME = " again"
"""A contender that runs twice has this behind its second name; how far the two differ is the run's noise."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A figure that must stay on one side of its bar."""

    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def holds(self) -> bool:
        """Whether it does."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def to_dict(self) -> dict[str, float]:
        """The value and the bar that it has, with enough digits to show one miss in a hundred thousand."""
        bars = {"value": round(self.value, 6), "at_most": self.at_most, "at_least": self.at_least}
        return {name: bar for name, bar in bars.items() if bar is not None}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender of a case: its median time, and over the baseline by rounds that ran side by side."""

    case: str
    name: str
    seconds: float
    ratio: float
    low: float
    high: float
    """Quartiles of the ratio."""

    def doubt(self, rounds: int) -> float:
        """Two standard errors of the median ratio, from its quartiles."""
        return float(2 * 0.93 * (self.high - self.low) / rounds**0.5)

    @property
    def extra_us(self) -> float:
        """Microseconds more than the baseline."""
        return self.seconds * (1 - 1 / self.ratio) * 1e6


@dataclass
class Report:
    """Collects rows and checks; prints and writes them."""

    name: str
    quick: bool
    rows: list[Row] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    """By case: how far a contender is from itself, or may be by chance, as a ratio less 1."""
    notes: dict[str, float | str] = field(default_factory=dict)
    """Values other than times, by name."""
    picture: str = ""
    """An SVG, where bars of times would show nothing."""
    is_part: bool = False
    """Whether only a part was measured: it is printed and not written."""

    def add(self, case: str, times: Mapping[str, Sequence[float]], baseline: str) -> dict[str, Row]:
        """A case's contenders against one of them; returns their rows by name."""
        rows = {name: _row(case, name, values, times[baseline]) for name, values in times.items()}
        self.rows += rows.values()
        for name in times:
            if name.endswith(SAME):
                again = _row(case, name, times[name], times[name.removesuffix(SAME)])
                self.noise[case] = round(max(abs(again.ratio - 1), again.doubt(len(times[name]))), 4)
        return rows

    def save(self) -> str:
        """Writes the files with what there is so far; returns the result as one line."""
        line = json.dumps(self.to_dict())
        if self.is_part:
            return line
        RESULTS.mkdir(exist_ok=True)
        stem = f"{self.name}.quick" if self.quick else self.name
        (RESULTS / f"{stem}.json").write_text(line + "\n")
        (RESULTS / f"{stem}.svg").write_text(self.picture or plot(self.name, self.rows))
        return line

    def finish(self) -> None:
        """Writes the files, prints the table, and prints the result as the last line."""
        line = self.save()
        console = Console(width=110)
        if self.rows:
            console.print(self._table())
        for name, check in self.checks.items():
            console.print(f"{'holds ' if check.holds else 'MISSED'} {name} {check.to_dict()}", highlight=False)
        print(line, flush=True)

    def to_dict(self) -> dict[str, Any]:
        """The result, JSON-ready."""
        return {
            "benchmark": self.name,
            "machine": machine(),
            "checks": {name: check.to_dict() for name, check in self.checks.items()},
            "noise": self.noise,
            **({"notes": self.notes} if self.notes else {}),
            "rows": [_rounded(row) for row in self.rows],
        }

    def _table(self) -> Table:
        table = Table("case", "contender", "ms", "over baseline", "quartiles", "extra µs", title=machine())
        case = ""
        for row in self.rows:
            if case not in ("", row.case):
                table.add_section()
            span = f"{row.low:.3f} to {row.high:.3f}"
            figures = (f"{row.seconds * 1e3:.3f}", f"{row.ratio:.3f}", span, f"{row.extra_us:.0f}")
            table.add_row("" if row.case == case else row.case, row.name, *figures)
            case = row.case
        return table


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measures every contender once per round, in a new random order each."""
    draw = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in draw.sample(list(contenders), len(contenders)):
            times[name].append(contenders[name]())
    return times


def machine() -> str:
    """The processor, its cores, a GPU where one is used, and torch."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_initialized() else ""
    return f"{gpu}{_processor()}, {os.cpu_count()} cores, torch {torch.__version__.split('+')[0]}"


def arguments(doc: str | None, *choices: str) -> argparse.Namespace:
    """What a benchmark is asked on its command line; `choices` are options that take names, separated by commas."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--quick", action="store_true", help="a short look: fewer rounds, no peers")
    for name in choices:
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=[], help="only these")
    return parser.parse_args()


def plot(title: str, rows: Sequence[Row]) -> str:
    """A bar for every row's ratio, as SVG."""
    scale = 300 / max((row.ratio for row in rows), default=1.0)
    bars = [_bar(row, 36 + 18 * index, scale) for index, row in enumerate(rows)]
    height = 46 + 18 * len(rows)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="700" height="{height}" font-family="sans-serif"'
    name = f'<text x="8" y="20" font-size="14">{escape(title)}: time over the baseline of each case</text>'
    return "\n".join(
        [f'{head} font-size="11">', '<rect width="100%" height="100%" fill="white"/>', name, *bars, "</svg>\n"]
    )


def _bar(row: Row, top: int, scale: float) -> str:
    label = escape(f"{row.case}: {row.name}")
    width = row.ratio * scale
    text = f'<text x="260" y="{top + 11}" text-anchor="end">{label}</text>'
    bar = f'<rect x="268" y="{top}" width="{width:.1f}" height="14" fill="#4878a8"/>'
    return f'{text}{bar}<text x="{272 + width:.1f}" y="{top + 11}">{row.ratio:.3f}</text>'


def _row(case: str, name: str, values: Sequence[float], baseline: Sequence[float]) -> Row:
    # A contender may have run in the first rounds only.
    ratios = [value / base for value, base in zip(values, baseline, strict=False)]
    low, _, high = quantiles(ratios) if len(ratios) > 1 else (ratios[0],) * 3
    return Row(case=case, name=name, seconds=median(values), ratio=median(ratios), low=low, high=high)


def _rounded(row: Row) -> dict[str, Any]:
    figures = {"seconds": round(row.seconds, 7), "ratio": round(row.ratio, 4)}
    return {"case": row.case, "name": row.name, **figures, "low": round(row.low, 4), "high": round(row.high, 4)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
