"""Metrics of a running server, which are polled as Prometheus does; the latest samples are kept."""

from __future__ import annotations

import http.client
import re
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

LINE = re.compile(r"^(manyhands_\w+)\{([^}]*)\} (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')
NUM_LOOKS = 900
"""Maximum number of samples that are kept."""
MOST_BYTES = 4 << 20
"""Maximum number of bytes of a response that are read."""
TIMEOUT = 1.0
"""Maximum seconds between two parts of a response, and for the whole response."""
MOST_VALUES = 500_000
"""Maximum number of values of a server that are kept, over all samples; if there are more, the oldest samples go."""
LONGEST_ERROR = 500
"""Maximum characters of an error that pages show."""


LONGEST_TEXT = 300
"""Maximum characters of a text about a version."""
_TEXTS: dict[str, Callable[[dict[str, str], float], str]] = {
    "manyhands_current": lambda labels, value: "current",
    "manyhands_label": lambda labels, value: f"label {labels.get('label', '')}",
    "manyhands_split_share": lambda labels, value: f"{100 * value:.3g}% of {labels.get('name', '')}",
    "manyhands_failed": lambda labels, value: labels.get("reason", ""),
}


@dataclass
class MetricsSample:
    """Metrics of a server at one moment; the keys of its dicts are pairs of model and version."""

    t: float
    requests: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """Number of requests by outcome: "OK", or the code of the error."""
    latency: dict[tuple[str, str], dict[float, float]] = field(default_factory=dict)
    """Cumulative latency histogram: number of requests by the seconds that they took at most."""
    gauges: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    texts: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Texts about a version: that it is current, its labels, its shares of traffic splits, and why it failed."""
    backends: dict[str, dict[str, float]] = field(default_factory=dict)
    """For a router, metrics by backend: whether it is up, and its requests in flight, answered and lost."""
    num_values: int = 0
    """Number of values in this sample."""

    @classmethod
    def parse(cls, text: str, t: float) -> MetricsSample:
        """Return the sample in a text of Prometheus' format that was received at time `t`.

        >>> look = MetricsSample.parse('manyhands_requests_total{model="m",version="1",code="OK"} 3', 0.0)
        >>> look.requests
        {('m', '1'): {'OK': 3.0}}
        """
        look = cls(t)
        for line in text.splitlines():
            match = LINE.match(line)
            if match is None:
                continue
            name, labels, value = match[1], dict(LABEL.findall(match[2])), float(match[3])
            who = labels.get("model", ""), labels.get("version", "")
            look.num_values += 1
            if name == "manyhands_requests_total":
                look.requests.setdefault(who, {})[labels.get("code", "")] = value
            elif name == "manyhands_request_seconds_bucket":
                look.latency.setdefault(who, {})[float(labels.get("le", "").replace("+Inf", "inf"))] = value
            elif "backend" in labels:
                figure = name.removeprefix("manyhands_backend_").removesuffix("_total")
                look.backends.setdefault(labels["backend"], {})[figure] = value
            elif name in ("manyhands_queue_rows", "manyhands_replicas", "manyhands_available"):
                look.gauges.setdefault(who, {})[name.removeprefix("manyhands_")] = value
            elif name in _TEXTS:
                look.texts.setdefault(who, []).append(_TEXTS[name](labels, value)[:LONGEST_TEXT])
        return look


class Metrics:
    """Poll the path `/metrics` of a server, and compute rates from its counters."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.error = "not asked yet"
        self._looks: deque[MetricsSample] = deque()
        self._num_values = 0

    def look(self) -> None:
        """Poll the server once; a failure is stored in `error`, which the page shows."""
        try:
            # The dashboard accepts only addresses of http and https.
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT) as answer:  # noqa: S310
                text = _read(answer).decode("utf-8", "replace")
            self._keep(MetricsSample.parse(text, time.time()))
            self.error = ""
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            self.error = f"{self.url} does not answer: {reason}"[:LONGEST_ERROR]

    def _keep(self, look: MetricsSample) -> None:
        """Keep a sample, and drop the oldest ones if there are too many samples or values."""
        self._looks.append(look)
        self._num_values += look.num_values
        while len(self._looks) > NUM_LOOKS or (self._num_values > MOST_VALUES and len(self._looks) > 1):
            self._num_values -= self._looks.popleft().num_values

    def to_dict(self) -> dict[str, Any]:
        """Return the data of the page: rates and latencies between consecutive samples, and the latest values."""
        looks = list(self._looks)
        who = sorted(looks[-1].requests.keys() | looks[-1].gauges.keys() | looks[-1].texts.keys()) if looks else []
        versions = []
        for one in who:
            pairs = list(pairwise(looks))
            found = {
                "x": [after.t for _, after in pairs],
                "rate": [_rate(before, after, one) for before, after in pairs],
                "p50": [_quantile(before, after, one, 0.5) for before, after in pairs],
                "p99": [_quantile(before, after, one, 0.99) for before, after in pairs],
            }
            about = {
                "codes": looks[-1].requests.get(one, {}),
                "marks": looks[-1].texts.get(one, []),
                **looks[-1].gauges.get(one, {}),
            }
            versions.append({"model": one[0], "version": one[1], **about, "series": found})
        return {"url": self.url, "error": self.error, "versions": versions, "backends": _backends(looks)}


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Return at most `MOST_BYTES` of a response; raise TimeoutError if reading takes longer than `TIMEOUT` in total."""
    end, found = time.monotonic() + TIMEOUT, b""
    while len(found) < MOST_BYTES and (piece := answer.read1(1 << 16)):
        found += piece
        if time.monotonic() > end:
            raise TimeoutError("the answer is not complete in time")
    return found[:MOST_BYTES]


def _backends(looks: list[MetricsSample]) -> list[dict[str, Any]]:
    """Return a router's backends with their latest values, and their answers per second between consecutive samples."""
    found = []
    for name, figures in sorted(looks[-1].backends.items()) if looks else []:
        pairs = [(a, b) for a, b in pairwise(looks) if name in a.backends and name in b.backends]
        rates = [_answered(before, after, name) for before, after in pairs]
        found.append({"backend": name, **figures, "series": {"x": [after.t for _, after in pairs], "rate": rates}})
    return found


def _answered(before: MetricsSample, after: MetricsSample, backend: str) -> float:
    """Return the requests per second that a backend has answered between two samples."""
    counts = [look.backends[backend].get("answered", 0.0) for look in (before, after)]
    return max(0.0, counts[1] - counts[0]) / max(1e-9, after.t - before.t)


def _rate(before: MetricsSample, after: MetricsSample, who: tuple[str, str]) -> float:
    """Return the requests per second of a model version between two samples, regardless of their outcome."""
    counts = [sum(look.requests.get(who, {}).values()) for look in (before, after)]
    return max(0.0, counts[1] - counts[0]) / max(1e-9, after.t - before.t)


def _quantile(before: MetricsSample, after: MetricsSample, who: tuple[str, str], share: float) -> float | None:
    """Return the seconds within which a share of a version's requests between two samples was answered.

    The result is None if there were no requests, or if it exceeds the largest bound of the histogram.
    """
    now, then = after.latency.get(who, {}), before.latency.get(who, {})
    counts = {bound: count - then.get(bound, 0.0) for bound, count in sorted(now.items())}
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    bound = next((bound for bound, count in counts.items() if count >= share * total), float("inf"))
    return bound if bound < float("inf") else None
