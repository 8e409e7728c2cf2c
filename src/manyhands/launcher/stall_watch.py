"""Stacks of a job's ranks: they explain a hang, and show whether a job that was asked to stop is going to stop."""

from __future__ import annotations

import time

from ..core import Event
from ..distributed import STEP, HangReport
from .rank_group import RankGroup, RankHandle

STOP_RESPONSE_SECONDS = 5.0
"""Seconds that ranks asked to stop may run without checking the stop flag, or stay blocked in one collective."""


class StallWatch:
    """Requests the stacks of all ranks when one reports a stall, or when the job was asked to stop."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self.is_stopping = False
        self._ends_at = 0.0
        """Time at which the job is interrupted, unless some rank is expected to obey the request to stop."""
        self._hang: HangReport | None = None
        self._hung = -1
        """The number of the last collective that was reported as hanging."""

    def begin_generation(self) -> None:
        """Forget the hang of the previous generation, whose collectives were numbered separately."""
        self._hang, self._hung = None, -1

    def on_stalled(self, entry: Event) -> None:
        """Request the stacks of all ranks, unless they were already requested for this hang."""
        if self._hang is None and entry["number"] > self._hung:
            self._hung = entry["number"]
            self._hang = HangReport(entry["number"], len(self._ranks))
            self._ranks.broadcast({"stacks": True})

    def on_stack(self, member: RankHandle, entry: Event) -> None:
        """Store the stack that a rank returned, and whether the rank is expected to stop by itself."""
        is_blocked = entry["operation"] not in ("", STEP) and entry["seconds"] > STOP_RESPONSE_SECONDS
        member.will_stop = entry["listens"] and not is_blocked
        if self._hang is not None:
            self._hang.answers[member.rank] = entry

    def take_report(self) -> HangReport | None:
        """Return the report about a hang when it is due, once; None otherwise."""
        report = self._hang
        if report is None or not report.is_due:
            return None
        self._hang = None
        return report

    def stop(self) -> None:
        """Ask all ranks to stop."""
        self.is_stopping = True
        self._ranks.broadcast({"stop": True})
        self._request_stop_status()

    def _request_stop_status(self) -> None:
        """Request the stacks of all ranks, which show whether any rank is going to stop by itself."""
        self._ends_at = time.monotonic() + STOP_RESPONSE_SECONDS
        for member in self._ranks.members:
            member.will_stop = False
        self._ranks.broadcast({"stacks": True})

    def check_stop_status(self) -> None:
        """Raise KeyboardInterrupt if no rank of a user's script will stop by itself.

        The script may never check the stop flag, or may be blocked where it cannot.
        """
        if not self.is_stopping or time.monotonic() < self._ends_at:
            return
        running = [member for member in self._ranks.members if member.is_running]
        if running and not any(member.will_stop for member in running):
            raise KeyboardInterrupt
        self._request_stop_status()
