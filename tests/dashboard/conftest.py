"""A real Chromium, and pages of the dashboard in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from manyhands.dashboard import Dashboard

from .browsing import WAIT


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium")
    assert found, "these tests need Debian's chromium: make system, as root"
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        # Its helpers come with the first page, and stay.
        page = browser.new_page()
        page.goto("data:text/html,<title>first</title>")
        page.close()
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens a page of the dashboard for this test's folders; fails on errors, and on requests to other hosts."""
    wrong: list[str] = []
    closing: list[Any] = []

    def opened(page: str = "", **options: Any) -> Page:
        folders = [path for path in tmp_path.iterdir() if path.is_dir()]
        dashboard = Dashboard(folders, servers=options.pop("servers", ()))
        context = browser.new_context(viewport={"width": 1200, "height": 800}, **options)
        closing.extend([context, dashboard])
        tab = context.new_page()
        tab.set_default_timeout(WAIT)
        tab.on("console", lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", lambda dialog: wrong.append(dialog.message))
        tab.on("request", lambda r: None if r.url.startswith(dashboard.url) else wrong.append(r.url))
        tab.goto(f"{dashboard.url}#/{page}")
        expect(tab.locator("main h1")).to_be_visible()
        return tab

    yield opened
    for one in closing:
        one.close()
    assert not wrong, wrong
