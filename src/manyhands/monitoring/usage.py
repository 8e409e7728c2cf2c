"""Usage of a host over time: its processors, memory, network and GPUs, for charts of the dashboard."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import psutil

from ..core import Event, event

INTERVAL = 10.0
"""Seconds between two samples: a week of training adds about 8 MB to the event log before compression."""


class HostUsage:
    """Samples of this host: `take` returns one as an event if the last one is at least `interval` seconds old.

    Shares are those of the time since the previous sample. Other programs on the host are included.

    Args:
        with_gpus: Whether to sample the GPUs that the NVIDIA driver lists, which needs nvidia-ml-py.
        interval: Seconds between two samples.

    >>> usage = HostUsage(interval=0.0)
    >>> sample = usage.take()
    >>> sample["kind"], sample["memory"] > 0
    ('usage', True)
    """

    def __init__(self, *, with_gpus: bool = False, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._at = time.monotonic()
        self._gpus = _gpus() if with_gpus else []
        self._sent, self._received = _traffic()
        psutil.cpu_percent(None)  # the first call begins the interval of the next one

    def take(self) -> Event | None:
        """Return a sample as an event, or None if it is too early."""
        now = time.monotonic()
        passed = now - self._at
        if passed < self._interval:
            return None
        self._at = now
        sent, received = _traffic()
        rates = {
            "sent": (sent - self._sent) / max(passed, 1e-3),
            "received": (received - self._received) / max(passed, 1e-3),
        }
        self._sent, self._received = sent, received
        found: dict[str, Any] = {
            "host": socket.gethostname(),
            "cpu": psutil.cpu_percent(None),
            "memory": int(psutil.virtual_memory().used),
            **{name: round(rate, 1) for name, rate in rates.items()},
        }
        gpus = self._sample_gpus()
        return event("usage", **found, **({"gpus": gpus} if gpus else {}))

    def _sample_gpus(self) -> list[dict[str, float]]:
        found: list[dict[str, float]] = []
        with contextlib.suppress(Exception):
            import pynvml as nvml

            for gpu in self._gpus:
                used = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
                found.append({"used": used, "memory": nvml.nvmlDeviceGetMemoryInfo(gpu).used})
        return found


def _traffic() -> tuple[int, int]:
    """Return the bytes that this host has sent and received, over all its network interfaces; zeros if not known."""
    with contextlib.suppress(OSError):
        counters = psutil.net_io_counters()
        if counters is not None:
            return int(counters.bytes_sent), int(counters.bytes_recv)
    return 0, 0


def _gpus() -> list[Any]:
    """Return NVML's handles of the GPUs of this host; none without a driver or nvidia-ml-py."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()  # for the rest of the process: initializing it again takes long
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except Exception:
        return []
