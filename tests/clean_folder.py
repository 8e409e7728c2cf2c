"""Check that a test run leaves no files in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PATTERNS = ("*", "runs/*", "benchmarks/**/*", "examples/**/*")
CACHES = {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}


class CleanFolder:
    """Fails a run whose tests left files in a folder, and lists the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._files()
        self._left: list[str] = []

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compare the folder with what it held before the first test."""
        self._left = sorted(self._files() - self._before)
        if self._left:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List the files."""
        if self._left:
            terminalreporter.section(f"files that tests left in {self._folder}", red=True)
            for name in self._left:
                terminalreporter.write_line(name)

    def _files(self) -> set[str]:
        paths = (path.relative_to(self._folder) for pattern in PATTERNS for path in self._folder.glob(pattern))
        return {str(path) for path in paths if not CACHES.intersection(path.parts)}
