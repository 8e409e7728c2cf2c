"""Usage of the first host of a run over time: processors, memory, network and GPUs."""

from __future__ import annotations

from typing import Any

from .series import Series

MOST_GPUS = 64
"""Maximum number of GPUs whose usage is kept."""


class RunUsage:
    """Curves of the samples that the coordinator takes of its host."""

    def __init__(self) -> None:
        self.host = ""
        self._curves: dict[str, dict[str, Series]] = {"share": {}, "memory": {}, "network": {}}
        """By group: shares of processors and GPUs in percent, bytes of memory, and bytes per second of the network."""

    def on_usage(self, entry: dict[str, Any]) -> None:
        self.host = entry.get("host") or self.host
        t = entry["t"]
        self._add("share", "CPU", t, entry["cpu"])
        self._add("memory", "memory", t, entry["memory"])
        self._add("network", "sent", t, entry.get("sent"))
        self._add("network", "received", t, entry.get("received"))
        for number, gpu in enumerate((entry.get("gpus") or [])[:MOST_GPUS]):
            self._add("share", f"GPU {number}", t, gpu["used"])
            self._add("memory", f"GPU {number}", t, gpu["memory"])

    def _add(self, group: str, name: str, t: float, value: float | None) -> None:
        self._curves[group].setdefault(name, Series()).add(t, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the curves by group and name."""
        return {
            group: {name: series.to_dict() for name, series in curves.items() if len(series)}
            for group, curves in self._curves.items()
        } | {"host": self.host}
