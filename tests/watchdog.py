"""Time limit of tests that does not depend on signals: ends the process when pytest-timeout could not end the test."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Generator
from typing import Any

import psutil
import pytest

GRACE_SECONDS = 30.0
"""How long a test may take beyond its limit, for fixtures that clean up after pytest-timeout has failed it."""
_LAST_RESORT_SECONDS = 2.0


class Watchdog:
    """Ends this process when a test exceeds its limit, so that the run fails with the test's name and all stacks.

    pytest-timeout raises an exception from SIGALRM. That has no effect while C code blocks the main thread, when a test
    ignores the signal or when the exception is caught, and its limit does not cover the fixtures that clean up after a
    failure. Under xdist the controller reports the test as failed and starts another worker.
    """

    def __init__(self) -> None:
        # Tests run with descriptor 2 replaced, so that pytest captures what they write.
        self._stderr = os.dup(2)
        self._timer: threading.Timer | None = None

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """Start the limit together with that of pytest-timeout."""
        seconds = settings.timeout + GRACE_SECONDS
        self._timer = threading.Timer(seconds, self._end, (item.nodeid, seconds))
        self._timer.daemon = True
        self._timer.start()
        # A thread in C: it runs also when the main thread never releases the GIL.
        faulthandler.dump_traceback_later(seconds + _LAST_RESORT_SECONDS, exit=True, file=self._stderr)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        """Stop the limit when the test and its fixtures have ended."""
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _end(self, nodeid: str, seconds: float) -> None:
        os.write(self._stderr, f"\n{nodeid} did not end within {seconds:g} seconds; all stacks:\n".encode())
        faulthandler.dump_traceback(self._stderr)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(1)
