"""A model: its versions, which of them answers, and what labels mean."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..core import RequestRefused
from .folder import Policy
from .version import AVAILABLE, END, Version


class Unknown(RequestRefused):
    """A model, version or label that is not served; every protocol has its own words for it."""

    def __init__(self, model: str, version: int | None = None, label: str | None = None) -> None:
        self.model, self.version, self.label = model, version, label
        if label is not None:
            super().__init__("INVALID_ARGUMENT", f"Unrecognized servable version label: {label}")
        elif version is not None:
            super().__init__("NOT_FOUND", f"Servable not found for request: Specific({model}, {version})")
        else:
            super().__init__("NOT_FOUND", f"Servable not found for request: Latest({model})")


@dataclass(frozen=True, kw_only=True)
class Probation:
    """When a new version is sent back: within so many seconds of its takeover, compared with the one before."""

    seconds: float = 30.0
    """0 lets the old version go at once."""
    num_requests: int = 20
    """Fewer say nothing."""
    max_failed: float = 0.1
    """The share of requests that the network itself failed."""
    max_slowdown: float = 5.0
    """The time within which nine of ten requests are answered, over the old version's; one hiccup says nothing."""


class Model:
    """The versions of one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[int, Version] = {}
        self.labels: dict[str, int] = {}
        self.rejected: set[int] = set()
        """Versions that were sent back; they are not loaded again until somebody asks."""
        self.asked: set[int] = set()
        """Versions that somebody asked for, whatever the policy says."""
        self.policy: Policy | None = None
        """Which versions, where somebody said so for this model."""
        self.is_unloaded = False
        """Whether somebody asked for none."""
        self.taken_over = 0.0
        """When the current version began to answer."""
        self._current: int | None = None

    @property
    def current(self) -> Version | None:
        """The version that answers where none is named."""
        version = self.versions.get(self._current) if self._current is not None else None
        return version if version is not None and version.state == AVAILABLE else None

    @property
    def available(self) -> list[Version]:
        """Versions that answer, ascending."""
        return [self.versions[number] for number in sorted(self.versions) if self.versions[number].is_available]

    def find(self, version: int | None = None, label: str | None = None) -> Version:
        """The version for a request."""
        if label is not None:
            number = self.labels.get(label)
            if number is None:
                raise Unknown(self.name, label=label)
        else:
            number = self._current if version is None else version
        found = self.versions.get(number) if number is not None else None
        if found is None or found.state != AVAILABLE:
            raise Unknown(self.name, version)
        return found

    def take_over(self) -> bool:
        """Lets the newest version answer that is available and was not sent back; whether that is another one."""
        fit = [version.number for version in self.available if version.number not in self.rejected]
        if not fit or fit[-1] == self._current:
            return False
        self._current, self.taken_over = fit[-1], time.monotonic()
        return True

    def set_label(self, label: str, version: int) -> None:
        """Points a label at a version that is loaded."""
        if version not in self.versions or not self.versions[version].is_available:
            raise RequestRefused("FAILED_PRECONDITION", f"a label points at an available version, but got {version}")
        self.labels[label] = version

    def forget_ended(self) -> None:
        """Versions that are gone; one that failed stays, with its reason, until it is tried again."""
        for number, version in list(self.versions.items()):
            if version.state == END and not version.error:
                del self.versions[number]

    def verdict(self, rule: Probation) -> str:
        """Why the current version should be sent back, compared with the one before; empty where it should not."""
        current = self.current
        older = [version for version in self.available if current is not None and version.number < current.number]
        if current is None or not older or time.monotonic() - self.taken_over > rule.seconds:
            return ""
        figures, before = current.figures, older[-1].figures
        num, failed = figures.num_requests, figures.codes["INTERNAL"]
        if num < rule.num_requests:
            return ""
        if failed / num > rule.max_failed and failed / num > 2 * before.codes["INTERNAL"] / max(1, before.num_requests):
            return f"{failed} of {num} requests failed"
        if before.num_requests >= rule.num_requests and figures.latency.num >= rule.num_requests:
            now, then = figures.latency.percentile(0.9), before.latency.percentile(0.9)
            if now > rule.max_slowdown * then:
                return f"p90 is {1000 * now:.1f} ms instead of {1000 * then:.1f}"
        return ""
