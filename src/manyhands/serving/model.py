"""A model: its versions, which of them answers, and what labels mean."""

from __future__ import annotations

import time

from ..core import RequestRefused
from .folder import LABEL, VersionPolicy
from .options import Rollout
from .rollout_guard import Judge
from .version import AVAILABLE, END, LOADING, Version


class Unknown(RequestRefused):
    """Raised for a model, version or label that is not served; each protocol has its own message."""

    def __init__(
        self, model: str, version: int | None = None, label: str | None = None, *, is_empty: bool = False
    ) -> None:
        self.model, self.version, self.label, self.is_empty = model, version, label, is_empty
        """`is_empty`: the model exists, but has no version that answers."""
        if label is not None:
            super().__init__("INVALID_ARGUMENT", f"Unrecognized servable version label: {label}")
        elif version is not None:
            super().__init__("NOT_FOUND", f"Servable not found for request: Specific({model}, {version})")
        else:
            super().__init__("NOT_FOUND", f"Servable not found for request: Latest({model})")


class Model:
    """The versions of one model name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[int, Version] = {}
        self.labels: dict[str, int] = {}
        self.rejected: set[int] = set()
        """Versions that were rolled back; they are not loaded again until a client requests it."""
        self.asked: set[int] = set()
        """Versions loaded on request, regardless of the version policy."""
        self.policy: VersionPolicy | None = None
        """The model's own version policy; None for the server's."""
        self.is_unloaded = False
        """Whether the model was unloaded on request."""
        self.is_awaited = False
        """Whether the server is not ready until this model answers."""
        self.taken_over = 0.0
        """When the current version became current."""
        self._current: int | None = None
        self._judge = Judge()

    @property
    def current(self) -> Version | None:
        """The version that answers requests without a version."""
        version = self.versions.get(self._current) if self._current is not None else None
        return version if version is not None and version.state == AVAILABLE else None

    @property
    def is_alive(self) -> bool:
        """Whether the current version has a replica."""
        return self.current is not None and bool(self.current.replicas)

    @property
    def before(self) -> Version | None:
        """The version that would answer after a rollback of the current one."""
        current = self.current
        older = [] if current is None else [v for v in self.available if v.number < current.number]
        return next((version for version in reversed(older) if version.number not in self.rejected), None)

    @property
    def available(self) -> list[Version]:
        """Versions that can answer, ascending."""
        return [self.versions[number] for number in sorted(self.versions) if self.versions[number].is_available]

    def find(self, version: int | None = None, label: str | None = None) -> Version:
        """Return the version for a request; raises Unknown if there is none."""
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
        """Make the newest available version that was not rolled back the current one; return whether it changed."""
        fit = [version.number for version in self.available if version.number not in self.rejected]
        if not fit or fit[-1] == self._current:
            return False
        self._judge.dismiss()
        self._current, self.taken_over = fit[-1], time.monotonic()
        return True

    def set_label(self, label: str, version: int | None) -> None:
        """Assign a label to a loaded version; None removes the label."""
        if not LABEL.fullmatch(label):
            rule = "a label must consist of letters, digits, dots, dashes and underscores, at most 64 characters"
            raise RequestRefused("INVALID_ARGUMENT", f"{rule}, but got {label[:64]!r}")
        if version is None:
            self.labels.pop(label, None)
        else:
            self.require(version)
            self.labels[label] = version

    def require(self, version: int | None) -> None:
        """Raise RequestRefused if a version is not loaded: labels and traffic splits do not load versions."""
        if version is None:
            self.find()
        elif version not in self.versions or not self.versions[version].is_available:
            loaded = ", ".join(str(one.number) for one in self.available) or "none"
            raise RequestRefused(
                "FAILED_PRECONDITION",
                f"labels and splits must name loaded versions (of {self.name}: {loaded}), but got {version}; load it "
                f"with manyhands models load {self.name} {version}, or keep two with serve --versions latest:2",
            )

    def forget_ended(self) -> None:
        """Remove ended versions; a failed one stays, with its error, until it is retried."""
        for number, version in list(self.versions.items()):
            if version.state == END and not version.error:
                del self.versions[number]

    def verdict(self, rule: Rollout) -> str:
        """Return why the current version should be rolled back to the previous one; empty if it should not."""
        current, before = self.current, self.before
        if current is None or before is None or time.monotonic() - self.taken_over > rule.probation:
            self._judge.dismiss()
            return ""
        return self._judge.verdict(rule, current, before)
