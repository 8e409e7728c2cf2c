"""Live view of a server in the terminal: request rate, latency percentiles, batch sizes and queues of each version."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

TITLES = (
    "model",
    "version",
    "routing",
    "state",
    "requests/s",
    "p50 ms",
    "p99 ms",
    "rows/batch",
    "queue",
    "refused",
    "replicas",
)


@dataclass(frozen=True)
class VersionRow:
    """A row of the table: the state of a model version and its activity since the previous query."""

    model: str
    version: str
    routing: str
    """Text with "current" for the current version, the version's labels, and its shares of traffic splits."""
    state: str
    rate: float
    p50: float
    p99: float
    rows: float
    queue: int
    refused: int
    replicas: str

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row as text."""
        rate = "" if math.isnan(self.rate) else f"{self.rate:,.0f}"
        numbers = (rate, _shown(1000 * self.p50), _shown(1000 * self.p99), _shown(self.rows))
        return (
            self.model,
            self.version,
            self.routing,
            self.state,
            *numbers,
            str(self.queue),
            str(self.refused),
            self.replicas,
        )


class ServingView:
    """Compute the rows of a table from a server's metrics and those of the previous query."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], Mapping[str, Any]] = {}
        self._time = time.monotonic()

    def rows(self, state: Mapping[str, Any]) -> list[VersionRow]:
        """Return a row for every version in a server's state, as `Server.state` returns it."""
        now = time.monotonic()
        seconds, self._time = max(now - self._time, 1e-6), now
        found, seen = [], {}
        for model in state["models"]:
            for version in model["versions"]:
                key = (model["name"], version["version"])
                seen[key] = version
                found.append(_row(model, version, state["splits"], self._before.get(key), seconds))
        self._before = seen
        return found

    def table(self, state: Mapping[str, Any]) -> Table:
        """Return the rows for a server's state as a table for the terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD)
        for title in TITLES:
            table.add_column(title, justify="left" if title in ("model", "routing", "state", "replicas") else "right")
        for row in self.rows(state):
            table.add_row(*row.cells())
        return table


def _row(
    model: Mapping[str, Any],
    version: Mapping[str, Any],
    splits: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    seconds: float,
) -> VersionRow:
    from ..serving import BOUNDS, Histogram

    latency = Histogram(BOUNDS)
    latency.counts = version["latency"]
    since = before["latency"] if before is not None else None
    batches = version["batches"] - (before["batches"] if before is not None else 0)
    computed = version["rows"] - (before["rows"] if before is not None else 0)
    return VersionRow(
        model=model["name"],
        version=str(version["version"]),
        routing=", ".join(_routing(model, version["version"], splits)),
        state=version["error"] or version["state"].lower(),
        rate=math.nan if before is None else (_answered(version) - _answered(before)) / seconds,
        p50=latency.percentile(0.5, since),
        p99=latency.percentile(0.99, since),
        rows=computed / batches if batches else math.nan,
        queue=version["queue"],
        refused=sum(num for code, num in version["requests"].items() if code != "OK"),
        replicas=", ".join(f"{replica['device']} ({replica['rows']})" for replica in version["replicas"]),
    )


def _routing(model: Mapping[str, Any], number: int, splits: Mapping[str, Any]) -> Iterator[str]:
    if number == model["current"]:
        yield "current"
    yield from (label for label, version in model["labels"].items() if version == number)
    for name, shares in splits.items():
        total = sum(share["weight"] for share in shares)
        for share in shares:
            version = model["current"] if share["version"] is None else share["version"]
            if (share["model"], version) == (model["name"], number):
                yield f"{100 * share['weight'] / total:.3g}% of {name}"


def _answered(version: Mapping[str, Any]) -> int:
    return int(version["requests"].get("OK", 0))


def _shown(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f}"
