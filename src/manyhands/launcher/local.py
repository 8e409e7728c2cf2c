"""The local engine: one process per device on this machine, forked from one zygote."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..core import DeviceError
from ..distributed import DEFAULT_TIMEOUT, Device, World, this_host
from .coordinator import Coordinator, LocalHost, Rendezvous
from .engine import AfterLoss, Engine, OnEvent, OnOutput, RunningJob, ignore
from .local_service import LocalService
from .pickles import pack, require_unpacked
from .rank import Assignment
from .service import Make, Service
from .zygote import ZygoteHandle

_PRELOAD = ["manyhands.launcher", "cloudpickle", "numpy"]


class LocalEngine(Engine):
    """Forks ranks from a zygote, a process with torch imported, which it starts once per program."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = [*_PRELOAD, *preload]
        self._zygote: ZygoteHandle | None = None
        self._starting = threading.Lock()

    def warm_up(self) -> ZygoteHandle:
        """Start the zygote, which takes as long as importing torch, without waiting for it."""
        with self._starting:
            if self._zygote is None:
                self._zygote = ZygoteHandle(self._preload)
            self._zygote.revive()
            return self._zygote

    def start(
        self,
        fn: Callable[[World], Any],
        devices: Sequence[Device],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        after_loss: AfterLoss = "end",
        unit: int = 1,
    ) -> RunningJob:
        _require_linux()
        require_unpacked()
        pickle_fd = pack(Assignment.here(fn, devices, timeout, after_loss == "regroup"))
        try:
            here = LocalHost(this_host(), devices, self.warm_up(), pickle_fd)
            job = Coordinator(here, Rendezvous(), after_loss=after_loss, timeout=timeout, unit=unit)
            job.call()
            return job
        finally:
            os.close(pickle_fd)

    def start_service(
        self,
        make: Make,
        device: Device,
        *,
        on_event: OnEvent = ignore,
        on_output: OnOutput = ignore,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Service:
        _require_linux()
        require_unpacked()
        return LocalService(make, device, self.warm_up(), on_event=on_event, on_output=on_output, timeout=timeout)

    def close(self) -> None:
        """Stop the zygote and every process that still runs under it."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


def _require_linux() -> None:
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        raise DeviceError(
            "running several processes needs Linux",
            got=sys.platform,
            remedy="use one device on this machine: mh.Single()",
        )
