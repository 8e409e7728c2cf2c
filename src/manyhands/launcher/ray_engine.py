"""The Ray engine: one actor per host of a Ray cluster, each with one rank per device; the caller runs the coordinator.

Ray reserves the hosts (a placement group with one bundle each) and reports when one fails. Everything else works as on
one machine: ranks are forked from a zygote, failed ranks are replaced, and the run resumes from a peer's memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from ..core import DeviceError, SettingsError, WorkerFailed
from ..distributed import DEFAULT_TIMEOUT, LOOPBACK, Device, World
from .coordinator import Coordinator, LocalHost, ProcessExit
from .engine import AfterLoss, Engine, OnEvent, OnOutput, RunningJob, ignore
from .rank_group import RankHost
from .ray_service import READY_SECONDS, RayService, brief, pickled
from .rendezvous import RendezvousInfo
from .service import Make, Service

if TYPE_CHECKING:
    from .ray_host import News

NEWS_SECONDS = 1.0
PRELOAD = ("manyhands.api.fit", "cloudpickle", "numpy", "torch._dynamo")


class RayEngine(Engine):
    """Runs ranks on the hosts of a Ray cluster: "ray://head:10001", or "ray" for the cluster of this machine."""

    def __init__(self, address: str) -> None:
        self._address = address

    def devices(self, on: Any, num_wanted: int | None, arithmetic: str = "") -> tuple[list[Device], list[str]]:
        """Return all GPUs of the cluster, or `num_wanted` of them, and no notices.

        In a cluster without GPUs, return one CPU of every host, or `num_wanted` CPUs. Raise DeviceError if there are
        fewer; `arithmetic` explains how their number was computed.
        """
        hosts = _hosts(self._connected())
        found = [
            Device("cuda", index, host=host) for host, has in hosts.items() for index in range(int(has.get("GPU", 0)))
        ]
        if not found:
            found = _cpus(hosts, num_wanted)
        if num_wanted is not None and num_wanted > len(found):
            raise DeviceError(
                f"the strategy needs {num_wanted} devices{arithmetic}",
                got=f"{len(found)} in the Ray cluster at {self._address} ({', '.join(map(str, found)) or 'none'})",
                remedy="use fewer replicas, or add hosts with ray start",
            )
        return found[:num_wanted], []

    def start(
        self,
        fn: Callable[[World], Any],
        devices: Sequence[Device],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        after_loss: AfterLoss = "end",
        unit: int = 1,
    ) -> RunningJob:
        return RayJob(self._connected(), pickled(fn), devices, timeout=timeout, after_loss=after_loss, unit=unit)

    def start_service(
        self,
        make: Make,
        device: Device,
        *,
        on_event: OnEvent = ignore,
        on_output: OnOutput = ignore,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Service:
        ray = self._connected()
        return RayService(
            ray,
            pickled(make),
            device,
            _nodes(ray)[device.host]["NodeID"] if device.host else None,
            _require_alike,
            on_event=on_event,
            on_output=on_output,
            timeout=timeout,
        )

    def _connected(self) -> Any:
        """Return the ray module, connected to this engine's cluster; an existing connection is kept."""
        try:
            import ray
        except ImportError:
            raise SettingsError(
                f"on={self._address!r} needs Ray, which is not installed",
                remedy="install it with pip install 'manyhands[ray]'",
            ) from None
        if ray.is_initialized():
            return ray
        address = self._address if "://" in self._address else os.environ.get("RAY_ADDRESS", "auto")
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="manyhands")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise SettingsError(
                f"on={self._address!r} needs a reachable Ray cluster",
                got=brief(error),
                remedy="start one with ray start --head, or correct the address",
            ) from None
        if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
            # Ray's handler would exit with its own exit code, so restore the program's handler.
            signal.signal(signal.SIGTERM, on_sigterm)
        return ray


class RayJob(Coordinator):
    """The coordinator of ranks on hosts of a Ray cluster; the caller gets the results of all ranks."""

    def __init__(
        self, ray: Any, work: bytes, devices: Sequence[Device], *, timeout: float, after_loss: AfterLoss, unit: int
    ) -> None:
        self._ray, self._alone_since, self._is_ending = ray, 0.0, False
        self._work = ray.put(work)
        self._group: Any = None
        rendezvous = _RayRendezvous(self)
        super().__init__(_Nowhere(), rendezvous, after_loss=after_loss, timeout=timeout, unit=unit)  # type: ignore[arg-type]
        counts = Counter(device.host for device in devices)
        kind = devices[0].kind
        try:
            self._group = _placed(ray, list(counts.values()), kind)
            self.places = [
                _RayPlace(self, bundle, [Device(kind, index, host=host) for index in range(count)], after_loss != "end")
                for bundle, (host, count) in enumerate(counts.items())
            ]
            for place in self.places:
                place.open()
            for place in self.places:
                place.wait_until_ready()
                self.admit(place)
            self.call()
        except BaseException:
            self.finish()
            raise

    @property
    def ray(self) -> Any:
        return self._ray

    def is_mine(self, place: RankHost) -> bool:
        return True

    def dismiss(self, place: RankHost, reason: str) -> None:
        lost = [member for member in self._ranks.members if member.place is place and member.is_running]
        if lost and self._after_loss == "end":
            for member in lost:
                member.is_running = False
            self._record_failure(lost[0], reason)
        else:
            super().dismiss(place, reason)

    def tick(self) -> None:
        super().tick()
        if self._ranks.members or self._ranks.newcomers or self._failed is not None:
            self._alone_since = 0.0
        elif not self._alone_since:
            self._alone_since = time.monotonic()
        elif time.monotonic() > self._alone_since + READY_SECONDS or self._after_loss == "end":
            self._failed = WorkerFailed(0, self.places[0].host, "all hosts of the job have failed")

    def finish(self) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        for place in getattr(self, "places", ()):
            place.close()
        super().finish()
        if self._group is not None:
            from ray.util import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._group)

    def _is_over(self) -> bool:
        return super()._is_over() and (bool(self._ranks.members) or self._failed is not None)

    def start_actor(self, bundle: int, num_devices: int, kind: str) -> Any:
        """Create an actor for a host in a bundle of the placement group; Ray starts it when resources are available."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from .ray_host import RayHost

        made = self._ray.remote(concurrency_groups={"commands": 1, "news": 1})(RayHost)
        placed = made.options(
            num_cpus=num_devices if kind == "cpu" else 1,
            num_gpus=0 if kind == "cpu" else num_devices,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
        )
        return placed.remote(list(sys.path), os.getcwd(), PRELOAD)

    def prepare(self, actor: Any, devices: Sequence[Device]) -> Any:
        """Send an actor the function and the settings of its ranks."""
        return actor.prepare.remote(self._work, devices, self._timeout, self._after_loss == "regroup")


class _RayPlace(RankHost):
    """A host of the Ray cluster; when it fails, Ray is asked for another host in the same bundle."""

    def __init__(self, job: RayJob, bundle: int, devices: Sequence[Device], returns: bool) -> None:
        self.host, self.devices = devices[0].host, devices
        self._job, self._bundle, self._returns = job, bundle, returns
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self.actor: Any = None
        self._is_closed = False
        self._queued: deque[Callable[[], None]] = deque()
        self._awake, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name=f"ray-{self.host}", daemon=True)

    def open(self) -> None:
        """Start the thread that receives the host's reports."""
        self._job.selector.register(self._awake, selectors.EVENT_READ, self._drain)
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Wait until the host can start ranks; raise WorkerFailed or SettingsError if it cannot."""
        if not self._ready.wait(READY_SECONDS) or self._problem is not None:
            reason = str(self._problem).splitlines()[0] if self._problem else f"no answer within {READY_SECONDS:.0f} s"
            if isinstance(self._problem, SettingsError):
                raise self._problem
            raise WorkerFailed(0, self.host, f"a host of the Ray cluster could not be used: {reason}")

    @property
    def is_ready(self) -> bool:
        """Return whether the host has an actor that answers."""
        return self._ready.is_set() and self._problem is None

    def meet(self) -> tuple[str, int]:
        """Start the store for the rendezvous on this host; return its address and port."""
        address = LOOPBACK if len(self._job.places) == 1 else self._address
        return address, int(self._job.ray.get(self.actor.meet.remote(address), timeout=READY_SECONDS))

    def start(self, slot: int, info: RendezvousInfo) -> None:
        self._do("start", slot, info.to_dict())

    def send_message(self, slot: int, message: dict[str, Any]) -> None:
        self._do("tell", slot, message)

    def kill(self, slot: int | None = None) -> None:
        self._do("kill", slot)

    def close(self) -> None:
        """Kill the actor, and with it its ranks."""
        self._is_closed = True
        ray = self._job.ray
        if self.actor is not None:
            with contextlib.suppress(Exception):
                if self.is_ready:
                    ray.get(self.actor.finish.remote(), timeout=10)
                ray.kill(self.actor)
        if self._thread.ident is not None:
            self._thread.join()
            self._job.selector.unregister(self._awake)
        self._awake.close()
        self._wake.close()

    def _do(self, *values: Any) -> None:
        if self.actor is not None:
            with contextlib.suppress(Exception):
                self.actor.do.remote(*values)

    # -- on the listener thread -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        is_first = True
        while not self._is_closed:
            try:
                self._begin()
            except Exception as error:
                self._problem = error
                self._ready.set()
                if is_first or self._is_closed:
                    return
                time.sleep(1.0)
                continue
            self._ready.set()
            if not is_first:
                self._push(functools.partial(self._job.admit, self))
            is_first = False
            reason = self._poll_until_lost()
            self._ready.clear()
            self._push(functools.partial(self._job.dismiss, self, reason))
            if not self._returns:
                return

    def _begin(self) -> None:
        """Create an actor and wait until it answers, however long Ray needs to find resources for it."""
        ray = self._job.ray
        self.actor = self._job.start_actor(self._bundle, len(self.devices), self.devices[0].kind)
        asked = self.actor.facts.remote()
        while not ray.wait([asked], timeout=1.0)[0]:
            if self._is_closed:
                raise RuntimeError("the job has ended")
        facts = ray.get(asked)
        _require_alike(self.host, facts)
        self._address = facts["address"]
        ray.get(self._job.prepare(self.actor, self.devices))
        self._problem = None

    def _poll_until_lost(self) -> str:
        ray = self._job.ray
        while True:
            try:
                news = ray.get(self.actor.news.remote(NEWS_SECONDS))
            except Exception as error:
                return f"is gone: {brief(error)}"
            for one in news:
                self._push(functools.partial(self._pass_on, one))
            if self._is_closed:
                return "was left"

    def _push(self, act: Callable[[], None]) -> None:
        self._queued.append(act)
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    # -- on the coordinator's thread ------------------------------------------------------------------------------

    def _drain(self) -> None:
        self._awake.recv(4096)
        while self._queued:
            self._queued.popleft()()

    def _pass_on(self, one: News) -> None:
        kind, slot, rest = one
        job = self._job
        if kind == "event":
            job.handle_event(self, slot, rest)
        elif kind == "output":
            job.handle_output(self, slot, *rest)
        elif kind == "lost_world":
            job.handle_lost_world(self, slot, rest)
        elif kind == "failure":
            job.handle_failure(self, slot, rest)
        else:
            job.handle_exit(self, slot, ProcessExit(*rest))


class _RayRendezvous:
    """The rendezvous of the ranks: a store on one of the hosts, replaced when that host fails."""

    def __init__(self, job: RayJob) -> None:
        self._job = job
        self._at: _RayPlace | None = None
        self._server: Any = None
        self._where = LOOPBACK, 0
        self.interface = ""
        """Network interface: empty, because every host determines its own."""

    @property
    def address(self) -> str:
        return self._open()[0]

    @property
    def port(self) -> int:
        return self._open()[1]

    def _open(self) -> tuple[str, int]:
        if self._at is None or not self._at.is_ready or self._server is not self._at.actor:
            self._at = next(place for place in self._job.places if place.is_ready)
            self._server = self._at.actor
            self._where = self._at.meet()
        return self._where

    def close(self) -> None:
        self._at = None


class _NoProcesses:
    """Placeholder for the local processes of a program that runs no ranks itself."""

    is_over = True

    def look(self) -> None:
        """Do nothing: there are no processes to check."""

    def finish(self) -> None:
        """Do nothing: there are no resources to release."""


class _Nowhere(LocalHost):
    """The caller's own host, on which no rank runs."""

    def __init__(self) -> None:
        self.host, self.devices = "", ()

    def open(self, coordinator: Coordinator) -> None:
        self.processes = _NoProcesses()  # type: ignore[assignment]


def _hosts(ray: Any) -> dict[str, dict[str, float]]:
    """Return the Ray resources of each host by its name."""
    return {host: node["Resources"] for host, node in _nodes(ray).items()}


def _nodes(ray: Any) -> dict[str, dict[str, Any]]:
    """Return Ray's nodes by host name; further nodes on one machine get distinct names."""
    found: dict[str, dict[str, Any]] = {}
    for node in sorted(ray.nodes(), key=lambda node: node["NodeID"]):
        if node["Alive"]:
            name = node["NodeManagerHostname"]
            found[name if name not in found else f"{name}-{node['NodeID'][:6]}"] = node
    return found


def _cpus(hosts: dict[str, dict[str, float]], num_wanted: int | None) -> list[Device]:
    """Return CPU devices spread evenly over the hosts, in the order of the hosts."""
    free_cpus = {host: int(has.get("CPU", 0)) for host, has in hosts.items()}
    counts = dict.fromkeys(free_cpus, 0)
    wanted = sum(count > 0 for count in free_cpus.values()) if num_wanted is None else num_wanted
    for _ in range(wanted):
        free = [host for host in free_cpus if counts[host] < free_cpus[host]]
        if not free:
            break
        counts[min(free, key=lambda host: counts[host])] += 1
    return [Device("cpu", slot, host=host) for host, count in counts.items() for slot in range(count)]


def _placed(ray: Any, counts: Sequence[int], kind: str) -> Any:
    """Return a placement group with one bundle per host, each on a different node.

    `counts` are the numbers of devices. Raise DeviceError if the resources do not become available in time.
    """
    from ray.util import placement_group, remove_placement_group

    bundles = [{"CPU": count} if kind == "cpu" else {"GPU": count, "CPU": 1} for count in counts]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    if not ray.wait([group.ready()], timeout=READY_SECONDS)[0]:
        remove_placement_group(group)
        raise DeviceError(
            f"the Ray cluster must have free resources for {sum(counts)} ranks",
            got=f"none within {READY_SECONDS:.0f} s: {_free_resources(ray)}",
            remedy="stop other jobs there, or use fewer replicas",
        )
    return group


def _free_resources(ray: Any) -> str:
    free = ray.available_resources()
    return f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free"


def _require_alike(host: str, facts: dict[str, Any]) -> None:
    mine = {"manyhands": version("manyhands"), "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:2]))}  # fmt: skip
    for what, value in mine.items():
        if facts[what] != value:
            raise SettingsError(
                f"{what} must be the same on this machine and on the hosts of the Ray cluster",
                got=f"{value} here, {facts[what]} on {host}",
                remedy="install the same version on all of them",
            )
