"""What tests in a browser share: waiting, and the data of a drawn chart."""

from __future__ import annotations

from playwright.sync_api import Page, expect

WAIT = 30_000
"""Milliseconds for anything to appear: the machine may be busy."""
expect.set_options(timeout=WAIT)
PLOT = (
    "(title) => [...document.querySelectorAll('section.card')]"
    ".find((s) => s.querySelector('h3')?.textContent === title)"
)


def until(page: Page, condition: str) -> None:
    """Waits for an expression to hold; Playwright's own way would need a weaker security policy."""
    for _ in range(WAIT // 50):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"waited {WAIT} ms for {condition}")


def data_of(page: Page, title: str) -> list[list[float | None]]:
    """What a chart has drawn: x, and each curve."""
    until(page, f"Boolean(({PLOT})('{title}')?.plot)")
    return list(page.evaluate(f"({PLOT})('{title}').plot.data.map((column) => [...column])"))
