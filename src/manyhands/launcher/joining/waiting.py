"""Periodic reports of a host that waits for others: for which hosts it waits, why, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable

AGAIN_SECONDS = 10.0
"""Seconds between two reports of the same wait."""


class Wait:
    """A wait with a time limit, which is reported after `delay` seconds and then every `AGAIN_SECONDS`.

    Args:
        reason: Function that returns for which hosts this host waits, and why.
        seconds: Time limit.
        notify: Called with the text of each report.
        delay: Seconds before the first report; hosts that start together wait for each other only for a moment.
    """

    def __init__(
        self, reason: Callable[[], str], seconds: float, notify: Callable[[str], None], delay: float = 0.0
    ) -> None:
        self._reason, self._notify = reason, notify
        now = time.monotonic()
        self._end, self._next = now + seconds, now + delay

    @property
    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() > self._end

    @property
    def seconds_to_report(self) -> float:
        """Seconds until the next report or the time limit."""
        return max(0.0, min(self._next, self._end) - time.monotonic())

    def report(self) -> None:
        """Report the wait if that is due."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + AGAIN_SECONDS
            left = max(0.0, self._end - now)
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
            self._notify(f"{self._reason()}; gives up at {until}, in {left:.0f} s")
