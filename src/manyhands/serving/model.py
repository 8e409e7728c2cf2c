"""A model: its versions, which of them answers, and what labels mean."""

from __future__ import annotations

import time

from ..core import RequestRefused
from .folder import VersionPolicy
from .rollout_guard import Judge, RolloutGuard
from .version import AVAILABLE, END, LOADING, Version


class Unknown(RequestRefused):
    """A model, version or label that is not served; every protocol has its own words for it."""

    def __init__(
        self, model: str, version: int | None = None, label: str | None = None, *, is_empty: bool = False
    ) -> None:
        self.model, self.version, self.label, self.is_empty = model, version, label, is_empty
        """A model that is empty is there, without a version that answers."""
        if label is not None:
            super().__init__("INVALID_ARGUMENT", f"Unrecognized servable version label: {label}")
        elif version is not None:
            super().__init__("NOT_FOUND", f"Servable not found for request: Specific({model}, {version})")
        else:
            super().__init__("NOT_FOUND", f"Servable not found for request: Latest({model})")


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
        self.policy: VersionPolicy | None = None
        """Which versions, where somebody said so for this model."""
        self.is_unloaded = False
        """Whether somebody asked for none."""
        self.is_awaited = False
        """Whether clients should not come before it answers."""
        self.taken_over = 0.0
        """When the current version began to answer."""
        self._current: int | None = None
        self._judge = Judge()

    @property
    def current(self) -> Version | None:
        """The version that answers where none is named."""
        version = self.versions.get(self._current) if self._current is not None else None
        return version if version is not None and version.state == AVAILABLE else None

    @property
    def before(self) -> Version | None:
        """The version that would answer if the current one was sent back."""
        current = self.current
        older = [] if current is None else [v for v in self.available if v.number < current.number]
        return next((version for version in reversed(older) if version.number not in self.rejected), None)

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
        if found is not None and found.state == AVAILABLE:
            return found
        if version is None and number is not None and any(v.state == LOADING for v in self.versions.values()):
            raise RequestRefused("UNAVAILABLE", f"{self.name} is being loaded", 1.0)
        raise Unknown(self.name, version, is_empty=version is None)

    def take_over(self) -> bool:
        """Lets the newest version answer that is available and was not sent back; whether that is another one."""
        fit = [version.number for version in self.available if version.number not in self.rejected]
        if not fit or fit[-1] == self._current:
            return False
        self._judge.dismiss()
        self._current, self.taken_over = fit[-1], time.monotonic()
        return True

    def set_label(self, label: str, version: int | None) -> None:
        """Points a label at a version that is loaded; at None, takes it away."""
        if version is None:
            self.labels.pop(label, None)
        else:
            self.require(version)
            self.labels[label] = version

    def require(self, version: int | None) -> None:
        """Refuses what cannot be answered with at once: labels and splits keep a version, and load none."""
        if version is None:
            self.find()
        elif version not in self.versions or not self.versions[version].is_available:
            loaded = ", ".join(str(one.number) for one in self.available) or "none"
            raise RequestRefused(
                "FAILED_PRECONDITION",
                f"labels and splits name versions that are loaded (of {self.name}: {loaded}), but got {version}; "
                f"manyhands models load {self.name} {version} loads it, serve --versions latest:2 keeps two loaded",
            )

    def forget_ended(self) -> None:
        """Versions that are gone; one that failed stays, with its reason, until it is tried again."""
        for number, version in list(self.versions.items()):
            if version.state == END and not version.error:
                del self.versions[number]

    def verdict(self, rule: RolloutGuard) -> str:
        """Why the current version should be sent back, compared with the one before; empty where it should not."""
        current, before = self.current, self.before
        if current is None or before is None or time.monotonic() - self.taken_over > rule.seconds:
            self._judge.dismiss()
            return ""
        return self._judge.verdict(rule, current, before)
