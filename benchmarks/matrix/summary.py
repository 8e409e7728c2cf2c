"""The result of a run: checks, a table with one letter per cell, a plot, and the page of the documentation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.report import Check, Report

from .cell import CRASHED, DIFFERS, HUNG, LEFT_OUT, OUTCOMES, REFUSED, SAME, Cell

LETTERS = {SAME: "=", REFUSED: "r", DIFFERS: "D", CRASHED: "C", HUNG: "H", LEFT_OUT: " "}
COLOURS = {
    SAME: "#4c9f70",
    REFUSED: "#d9c86c",
    DIFFERS: "#c0392b",
    CRASHED: "#6c3483",
    HUNG: "#1b2631",
    LEFT_OUT: "#eee",
}
MIN_CELLS = 1500
WITHOUT_SEQUENCE = "needs a network with attention over the sequence"
"""What context parallelism says of networks that it has nothing to do with."""
PAGE = Path(__file__).parents[2] / "docs" / "equality.md"
BEGIN, END = "<!-- begin: written by benchmarks.matrix -->", "<!-- end -->"


class Table:
    """Cells by network and strategy."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.cells = {(cell.network, cell.strategy): cell for cell in cells}
        self.networks = sorted({network for network, _ in self.cells})
        self.strategies = list(dict.fromkeys(strategy for _, strategy in self.cells))

    @property
    def counted(self) -> list[Cell]:
        """Cells of networks that the plain loop can train, and for context parallelism only those with sequences."""
        return [cell for cell in self.cells.values() if cell.outcome != LEFT_OUT and WITHOUT_SEQUENCE not in cell.text]

    @property
    def left_out(self) -> dict[str, str]:
        """Networks that the plain loop cannot train, with the reason."""
        return {cell.network: cell.text for cell in self.cells.values() if cell.outcome == LEFT_OUT}

    def counts(self, strategy: str) -> Counter[str]:
        """Return how often each outcome occurs under a strategy."""
        return Counter(cell.outcome for cell in self.counted if cell.strategy == strategy)

    def letters(self, network: str) -> str:
        """Return the outcomes of a network as one letter per strategy; a dot where it was not run."""
        found = (self.cells.get((network, strategy)) for strategy in self.strategies)
        return "".join("." if cell is None else LETTERS[cell.outcome] for cell in found)

    def same_share(self, strategy: str) -> float:
        """Return the share of a strategy's cells that have the result of one device."""
        counts = self.counts(strategy)
        return counts[SAME] / max(1, counts.total())

    def refusals(self) -> dict[str, list[Cell]]:
        """Return refused cells by reason, the most frequent reason first; numbers and names are left out of it."""
        by_reason: dict[str, list[Cell]] = {}
        for cell in self.counted:
            if cell.outcome == REFUSED:
                by_reason.setdefault(_reason(cell.text), []).append(cell)
        return dict(sorted(by_reason.items(), key=lambda pair: -len(pair[1])))


def checks(table: Table, *, whole: bool) -> dict[str, Check]:
    """Return the figures and their bars; a part of the matrix is not judged by the number of its cells."""
    counts = Counter(cell.outcome for cell in table.counted)
    asked = [cell.check_agrees for cell in table.counted if cell.check_agrees is not None]
    found = {
        DIFFERS: Check(value=counts[DIFFERS], at_most=0),
        CRASHED: Check(value=counts[CRASHED], at_most=0),
        HUNG: Check(value=counts[HUNG], at_most=0),
    }
    if whole:
        shares = [table.same_share(strategy) for strategy in table.strategies]
        found["cells"] = Check(value=counts.total(), at_least=MIN_CELLS)
        found["same_share"] = Check(value=counts[SAME] / max(1, counts.total()), at_least=0.85)
        found["lowest_same_share"] = Check(value=min(shares, default=0.0), at_least=0.6)
    if asked:
        found["check_agrees"] = Check(value=sum(asked) / len(asked), at_least=1.0)
    return found


def report(table: Table, *, quick: bool, seed: int) -> Report:
    """Return the report of a run."""
    made = Report("matrix", quick)
    made.checks = checks(table, whole=not quick)
    made.picture = picture(table)
    made.notes = {"seed": seed, "letters": _legend(), "strategies": ",".join(table.strategies)}
    made.notes["torch"] = ", ".join(sorted({cell.torch for cell in table.counted}))
    made.notes["verified by fit"] = sum(cell.verdict.startswith("verified") for cell in table.counted)
    made.notes |= {f"counts {name}": _said(table.counts(name)) for name in table.strategies}
    made.notes |= {f"left out {name}": text[:200] for name, text in table.left_out.items()}
    made.notes |= {name: table.letters(name) for name in table.networks if name not in table.left_out}
    if quick:
        made.notes["quick"] = "a fixed sample: cells, same_share and lowest_same_share need the whole matrix"
    return made


def lines(table: Table) -> list[str]:
    """Return the table as text."""
    width = max(map(len, table.networks), default=0)
    head = [f"{number:2} {name}: {_said(table.counts(name))}" for number, name in enumerate(table.strategies, 1)]
    body = [f"{name:{width}}  {table.letters(name)}" for name in table.networks if name not in table.left_out]
    return [_legend(), *head, "", *body]


def picture(table: Table) -> str:
    """Return the counts of each strategy as stacked bars, as SVG."""
    bars = []
    for number, strategy in enumerate(table.strategies):
        counts, left, top = table.counts(strategy), 180.0, 36 + 20 * number
        bars.append(f'<text x="172" y="{top + 12}" text-anchor="end">{escape(strategy)}</text>')
        for outcome in OUTCOMES:
            wide = 460 * counts[outcome] / max(1, counts.total())
            bars.append(f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="16" fill="{COLOURS[outcome]}"/>')
            left += wide
        bars.append(f'<text x="648" y="{top + 12}">{_said(counts)}</text>')
    keys = "".join(f'<tspan fill="{COLOURS[outcome]}">{"■"}</tspan><tspan> {outcome}  </tspan>' for outcome in OUTCOMES)
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="960"'
    size = f'height="{46 + 20 * len(table.strategies)}" font-family="sans-serif" font-size="11">'
    title = f'<text x="8" y="20" font-size="13">{keys}</text>'
    return "\n".join([f"{head} {size}", '<rect width="100%" height="100%" fill="white"/>', title, *bars, "</svg>\n"])


def write_page(table: Table) -> None:
    """Put the tables into the documentation, between two marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{page(table)}\n{END}{after}", encoding="utf-8")


def page(table: Table) -> str:
    """Return the tables of the page as Markdown."""
    rows = ["| strategy | same | refused | differs | crashed | hung |", "|---|---|---|---|---|---|"]
    for strategy in table.strategies:
        counts = table.counts(strategy)
        rows.append(f"| `{strategy}` | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " |")
    reasons = ["", "## Reasons for refusals", "", "| cells | strategies | reason |", "|---|---|---|"]
    for reason, cells in table.refusals().items():
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(cell.strategy for cell in cells))
        reasons.append(f"| {len(cells)} | {names} | {_plain(reason)} |")
    letters = ["", "## Every network", "", "```text", *lines(table), "```"]
    return "\n".join(["", *rows, *reasons, *letters, ""])


def _reason(text: str) -> str:
    """Return the rule of a refusal, without the values that were given."""
    return re.split(r", but got |\. (?=[A-Z])", text.partition(": ")[2])[0]


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _legend() -> str:
    return ", ".join(f"{LETTERS[outcome]} {outcome}" for outcome in OUTCOMES)


def _said(counts: Mapping[str, int]) -> str:
    shown: Sequence[str] = [f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts.get(outcome)]
    return ", ".join(shown)
