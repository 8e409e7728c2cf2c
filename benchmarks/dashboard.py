"""The dashboard in a real browser: time to its first page, to a run with a million events, and an audit of every page.

`python -m benchmarks.dashboard [--quick]`. Needs Debian's chromium and the extra `dev` (playwright, axe-core).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from playwright.sync_api import Browser, Page, expect, sync_playwright

from manyhands.dashboard import Dashboard

from .dashboard_content import write_everything, write_long_run, write_runs
from .report import Check, Report, arguments

NUM_RUNS = 300
NUM_ROWS = 100
"""Rows that the list of runs has until the reader asks for all."""
NUM_EVENTS = 1_000_000
WAIT = 120_000
"""Milliseconds for anything to appear."""
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
AXE = files("axe_playwright_python") / "axe.min.js"
FIRST_PAINT = """
const look = () => {
  const count = [...document.querySelectorAll("main [role=status]")].some((one) => one.textContent === "%d runs");
  if (count && document.querySelectorAll("tbody tr").length >= %d) {
    requestAnimationFrame(() => setTimeout(() => { window.painted = performance.now(); }));
  } else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
"""Runs before the page does, and notes when the frame with the rows was drawn, in milliseconds since the navigation."""
OPEN_RUN = """
(id) => new Promise((resolve) => {
  const began = performance.now();
  location.hash = `#/run?id=${encodeURIComponent(id)}`;
  const look = () => {
    const cards = [...document.querySelectorAll("main section.card")];
    const drawn = ["Loss", "Compute time of a step, by rank", "Memory, by rank"].every((title) =>
      cards.find((card) => card.querySelector("h3")?.textContent === title)?.plot?.data[0].length > 0);
    if (drawn) requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - began)));
    else requestAnimationFrame(look);
  };
  look();
})
"""


def main() -> None:
    """Measures, audits and reports."""
    quick = arguments(__doc__).quick
    report = Report("dashboard", quick=quick)
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        folder = Path(name)
        first_paint(report, browser, folder / "runs", rounds=5 if quick else 15)
        million_events(report, browser, folder / "long", rounds=5 if quick else 15)
        audit(report, browser, folder / "everything")
    report.finish()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    found = shutil.which("chromium")
    if found is None:
        raise SystemExit("this benchmark needs Debian's chromium: make system, as root")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()


@contextmanager
def page_of(browser: Browser, **options: Any) -> Iterator[Page]:
    """A page in a context of its own, so without a cache."""
    context = browser.new_context(**{"viewport": {"width": WIDTHS[0], "height": 800}, **options})
    context.set_default_timeout(WAIT)
    yield context.new_page()
    context.close()


def first_paint(report: Report, browser: Browser, folder: Path, rounds: int, num_runs: int = NUM_RUNS) -> None:
    """From the navigation to the frame that shows the list of runs, in a browser without a cache."""
    write_runs(folder, num_runs)
    times, first = [], []
    with Dashboard([folder]) as dashboard:
        wait_for(lambda: is_read(dashboard, num_runs))
        for _ in range(rounds):
            with page_of(browser) as page:
                page.add_init_script(FIRST_PAINT % (num_runs, min(num_runs, NUM_ROWS)))
                page.goto(dashboard.url)
                times.append(painted(page, "window.painted"))
                first.append(painted(page, "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"))
    report.checks["first_paint_ms"] = Check(value=median(times), at_most=500)
    report.notes["first_paint_ms: slowest round"] = round(max(times), 1)
    report.notes["first contentful paint, ms"] = round(median(first), 1)


def painted(page: Page, expression: str) -> float:
    """The value of an expression, as soon as it has one."""
    found: list[float | None] = [None]

    def look() -> bool:
        found[0] = page.evaluate(expression)
        return found[0] is not None

    wait_for(look)
    return float(found[0] or 0.0)


def million_events(report: Report, browser: Browser, folder: Path, rounds: int, num_events: int = NUM_EVENTS) -> None:
    """From opening a run's page to the frame that shows its curves, once the dashboard has read the log.

    The time until it has read all of the log for the first time is a note.
    """
    write_long_run(folder / "long", num_events)
    report.notes["log of that run, MiB"] = round((folder / "long" / "events.jsonl").stat().st_size / 2**20, 1)
    times = []
    began = time.monotonic()
    with Dashboard([folder]) as dashboard, page_of(browser) as page:
        page.goto(dashboard.url)
        expect(page.get_by_role("link", name="long/long")).to_be_visible(timeout=WAIT)
        report.notes["first curves while the log is read, ms"] = round(page.evaluate(OPEN_RUN, "long/long"), 1)
        wait_for(lambda: is_read(dashboard, 1))
        report.notes["first read of the log, seconds"] = round(time.monotonic() - began, 1)
        for _ in range(rounds):
            page.goto(f"{dashboard.url}#/plans")
            expect(page.locator("h1")).to_have_text("Plans", timeout=WAIT)
            times.append(page.evaluate(OPEN_RUN, "long/long"))
    report.checks["million_events_ms"] = Check(value=median(times), at_most=500)
    report.notes["million_events_ms: slowest round"] = round(max(times), 1)


def audit(
    report: Report,
    browser: Browser,
    folder: Path,
    write: Callable[[Path], list[str]] = write_everything,
    schemes: Sequence[str] = SCHEMES,
) -> None:
    """Elements of all pages that break a rule of axe-core, in both themes and widths."""
    addresses = write(folder)
    found: dict[str, list[str]] = {}
    num_pages = 0
    with Dashboard([path for path in sorted(folder.iterdir()) if path.is_dir()]) as dashboard:
        wait_for(lambda: is_read(dashboard, 1))
        for scheme in schemes:
            for width in WIDTHS:
                with page_of(browser, color_scheme=scheme, viewport={"width": width, "height": 900}) as page:
                    page.goto(dashboard.url)
                    for address in addresses:
                        opened(page, dashboard.url, address)
                        num_pages += 1
                        for rule in violations(page):
                            found.setdefault(rule, []).append(f"{address}, {scheme}, {width}")
    report.checks["audit_violations"] = Check(value=float(sum(map(len, found.values()))), at_most=0)
    report.notes["pages that were audited"] = num_pages
    report.notes |= {rule: f"{len(where)}, first on {where[0]}" for rule, where in list(found.items())[:20]}


def opened(page: Page, url: str, address: str) -> None:
    """Opens another page of the dashboard and waits for its content."""
    page.evaluate("for (const one of document.querySelectorAll('main > div')) one.dataset.old = ''")
    page.goto(f"{url}#/{address}")
    page.wait_for_selector("main > div:not([data-old]) h1", timeout=WAIT)
    page.wait_for_selector("main :is(table, .card, .facts, .device, .empty):visible", timeout=WAIT)


def violations(page: Page) -> list[str]:
    """Each element of a page that breaks a rule of axe-core, as the rule and a part of the element.

    The script comes in over the browser's debugging protocol, because the page's policy refuses foreign scripts.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    result = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [f"{rule['id']}: {node['html'][:100]}" for rule in result["violations"] for node in rule["nodes"]]


def is_read(dashboard: Dashboard, at_least: int) -> bool:
    """Whether the dashboard has found so many sources and read all of them."""
    with dashboard.library.turn():
        sources: Sequence[Any] = [*dashboard.library.sources.values()]
        return len(sources) >= at_least and all(s.signature == s.has_read and not s.pending for s in sources)


def wait_for(condition: Callable[[], bool]) -> None:
    """Looks until a condition holds."""
    end = time.monotonic() + WAIT / 1e3
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {WAIT / 1e3:g} seconds")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
