"""Comparison of plans for several clusters side by side: time, price, energy and the error of the prediction."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import event, format_duration, format_number, format_rough_duration, html_lines, html_table, keep_event
from .plan import Pick, Plan
from .report import EVIDENCE
from .target import SAMPLES

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("cluster", "devices", "strategy", "step", "samples/s", "time", "price", "energy", "error", "evidence")
"""Columns of the table; time, price and energy are those of a million samples."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plans of one task for several clusters, fastest first."""

    plans: tuple[Plan, ...]

    @property
    def best(self) -> Pick:
        """The recommended strategy of the fastest plan."""
        return self.plans[0].best

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table with a row for each cluster, fastest first."""
        return [_cells(plan) for plan in self.plans]

    def lines(self) -> list[str]:
        """Return lines of text: which cluster is fastest and why, which is cheapest, and which needs least energy."""
        first, *others = self.plans
        lines = []
        for other in others:
            ratio = _each(other) / _each(first)
            a, b = first.best.option.estimate.parts(), other.best.option.estimate.parts()
            cause = max(b, key=lambda name: b[name] - a[name])
            text = f"{first.cluster} is {ratio:.2f} times as fast as {other.cluster}, which loses most in {cause}"
            error = max(plan.summary()["error"] for plan in (first, other))
            if ratio < 1 + error:
                text += f" (less than the error of {error:.0%}: measure both before you decide)"
            lines.append(text)
        priced = [plan for plan in self.plans if plan.cluster.price is not None]
        if len(priced) > 1 and len({plan.cluster.currency for plan in priced}) == 1:
            cheap = min(priced, key=lambda plan: plan.cost(plan.best.option) or 0.0)
            costs = [f"{_money(plan)} on {plan.cluster}" for plan in priced]
            lines.append(f"a million samples cost {', '.join(costs)}: {cheap.cluster} is the cheapest")
        known = [plan for plan in self.plans if plan.cluster.chip.watts is not None]
        if len(known) > 1:
            least = min(known, key=lambda plan: plan.energy(plan.best.option) or 0.0)
            lines.append(f"{least.cluster} needs the least energy, at the thermal design power of its devices")
        for plan in self.plans:
            batch = plan.recommended_batch()
            if batch is not None:
                lines.append(
                    f"to the loss that a million samples reach, a batch of {batch.batch_size} on {batch.num_devices} "
                    f"{plan.cluster.chip.name} needs {format_rough_duration(3600 * batch.hours)} instead of "
                    f"{format_rough_duration(3600 * plan.hours(plan.best.option))}"
                )
        return lines

    def why(self) -> str:
        """Return a text that says which cluster is fastest, where the others lose time, and which is cheapest."""
        return "; ".join(self.lines())

    def with_noise(self, noise: float) -> Comparison:
        """Return the comparison with a gradient noise scale in samples; see `Plan.with_noise`."""
        return replace(self, plans=tuple(plan.with_noise(noise) for plan in self.plans))

    def show(self, *, console: Console | None = None) -> None:
        """Print the best strategies for each cluster, then all clusters side by side, and which is fastest and why."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        out = console or Console()
        if not out.is_terminal and console is None:
            out = Console(width=160)
        for plan in self.plans:
            plan.show(most=3)
        table = Table(title=_title(self), title_justify="left")
        for column in COLUMNS:
            left = column in ("cluster", "strategy", "evidence")
            table.add_column(column, justify="left" if left else "right", overflow="fold")
        for place, row in enumerate(self.rows()):
            table.add_row(*map(Text, row), style="bold green" if place == 0 else "")
        out.print(table)
        for line in self.lines():
            out.print(line, markup=False, highlight=False)

    def save_html(self, path: str | Path) -> None:
        """Write a standalone HTML page with all clusters side by side, and the plan for each."""
        from .html_report import comparison_page

        Path(path).write_text(comparison_page(self), encoding="utf-8")

    def log(self, folder: str | Path) -> None:
        """Append all plans to the event log in `folder`; the dashboard shows them side by side."""
        group = secrets.token_hex(4)
        for plan in self.plans:
            keep_event(folder, event("plan", **plan.to_dict(), compared=group))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready data."""
        return {"why": self.why(), "plans": [plan.to_dict() for plan in self.plans]}

    def _repr_html_(self) -> str:
        return html_table(_title(self), self.rows(), COLUMNS) + html_lines(self.lines())


def compare(plans: Sequence[Plan]) -> Comparison:
    """Return a comparison of plans, ranked by the seconds per sample of their recommended strategies."""
    return Comparison(plans=tuple(sorted(plans, key=_each)))


def _title(comparison: Comparison) -> str:
    return f"{comparison.plans[0].name}: clusters side by side; time, price and energy of {SAMPLES:,.0f} samples"


def _each(plan: Plan) -> float:
    return plan.best.seconds / plan.workload.batch_size


def _money(plan: Plan) -> str:
    cost = plan.cost(plan.best.option)
    return "-" if cost is None else f"{plan.cluster.currency}{format_number(cost)}"


def _cells(plan: Plan) -> tuple[str, ...]:
    best, found = plan.best.option, plan.summary()
    energy = found["energy_per_million_samples"]
    measured = best.measured is not None
    return (
        str(plan.cluster),
        str(found["devices"]),
        str(best.spec),
        f"{'' if measured else '~'}{format_duration(best.seconds)}",
        format_number(found["samples_per_second"], 4),
        format_rough_duration(3600 * found["hours_per_million_samples"]),
        _money(plan),
        "-" if energy is None else f"{format_number(energy)} kWh",
        f"±{found['error']:.0%}",
        "measured" if measured else EVIDENCE[plan.evidence],
    )
