"""Code that the public functions share: finding devices, gathering hosts, and running a function on them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from .. import parameter_server, training
from ..core import Event, SettingsError, StrategyError, StrategySpec, Task, as_spec, random_state, restore_random_state
from ..distributed import (
    DEFAULT_TIMEOUT,
    Device,
    DirectChannel,
    NullWorld,
    World,
    backend_for,
    current_world,
    resolve,
)
from ..launcher import AfterLoss, Engine, Join, JoinedHosts, LocalEngine, engine_for, leased, whole_host
from ..monitoring import View, make_view
from ..strategies import require_built
from ..sync import carrying
from .signals import interruptible

TaskLike = Task | Callable[..., Task]
On = str | Sequence[Device] | Sequence[str] | None
Where = On | Join | JoinedHosts
"""Devices of this host, a hosts file, `mh.Join` for several hosts, or the hosts that have joined."""


class Runtime:
    """The engine of this program: resolves strategies and devices, and runs functions on them."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine

    def find_devices(
        self, on: On, num_wanted: int | None = None, arithmetic: str = ""
    ) -> tuple[Engine, list[Device], list[str]]:
        """Return the engine that `on` names, its devices, and notices about them.

        Args:
            on: Devices, as for `mh.fit`.
            num_wanted: Number of devices that the strategy needs; None for any number.
            arithmetic: How that number was computed, for an error.
        """
        engine = engine_for(on, self.engine)
        devices, notices = engine.devices(on, num_wanted, arithmetic)
        return engine, devices, notices

    def settle(
        self,
        strategy: StrategySpec | str | None,
        on: Where,
        *,
        deterministic: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        with_servers: bool = False,
    ) -> tuple[StrategySpec, list[Device], list[str]]:
        """Return the spec with its number of devices, the devices, and notices.

        Args:
            strategy: Strategy, as for `mh.fit`.
            on: Devices or joined hosts; in a rank the devices of its job are used.
            deterministic: Whether random numbers must not depend on the number of devices.
            timeout: Seconds within which a healthy operation completes.
            with_servers: Whether the caller supports parameter servers.

        Raises:
            UsageError: The strategy, the devices or their combination is not supported.
        """
        spec = as_spec(strategy)
        if deterministic:
            spec = dataclasses.replace(spec, deterministic=True)
        require_built(spec)
        if isinstance(on, Join):
            raise SettingsError(
                "only mh.fit, mh.launch and mh.profile accept mh.Join",
                got=f"mh.Join(address={on.address!r}) in another function",
                remedy="use one of them, or devices of this machine",
            )
        role = parameter_server.find_role() if spec.servers and with_servers and current_world() is None else None
        if role is not None and not isinstance(on, JoinedHosts):
            return role.fitted(spec), [resolve(on, 1)[0][0]] * role.num_workers, []
        world = None if isinstance(on, JoinedHosts) else training.joined_world(on, timeout)
        if spec.servers and (world is not None or isinstance(on, JoinedHosts) or not with_servers):
            where = "in a rank" if world is not None else "with mh.Join"
            raise StrategyError(
                "parameter servers need a call of mh.fit that starts their processes",
                got=f"{spec} {where if with_servers else 'in a function other than mh.fit'}",
                remedy="use mh.Mirrored() here",
            )
        if isinstance(on, JoinedHosts):
            return spec.with_devices(len(on.devices)), list(on.devices), [*on.notices, *_experimental(on.devices)]
        if world is not None:
            return spec.with_devices(world.size), [world.rank_info.device] * world.size, []
        _, devices, notices = self.find_devices(on, spec.num_devices, spec.arithmetic)
        if None in (spec.replicas, spec.shards) and len(devices) == 1 and strategy is not None:
            part = "replica" if spec.replicas is None else "shard"
            notices.append(f'there is one device ({devices[0]}), so one {part}; on="{devices[0].name}*2" makes two')
        return spec.with_devices(len(devices)), devices, [*notices, *_experimental(devices)]

    @contextlib.contextmanager
    def joined(
        self, on: Where, strategy: StrategySpec | str | None, timeout: float, progress: bool | None
    ) -> Iterator[Where]:
        """Replace `on=Join(...)` by the hosts that have joined, and release them at the end of the context.

        If a scheduler has started one process per host, its hosts join too. Any other `on` is yielded unchanged.

        Args:
            on: Devices or hosts, as for `mh.fit`.
            strategy: Strategy; the number of its devices is compared with that of the hosts.
            timeout: Seconds to wait for the hosts.
            progress: False to display nothing.
        """
        if not isinstance(on, Join | JoinedHosts) and current_world() is None and not _has_servers(strategy):
            on = whole_host(on) or on
        if not isinstance(on, Join):
            yield on
            return
        view = make_view("", progress, live=False)
        self.engine.warm_up()
        hosts = on.gather(as_spec(strategy).num_devices, timeout, view.line)
        try:
            yield hosts
        except BaseException as error:
            hosts.close(f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        finally:
            hosts.close("")

    def start(
        self,
        fn: Callable[[World], Any],
        devices: Sequence[Device],
        timeout: float,
        on_event: Callable[[int, Event], None],
        view: View,
        *,
        on: Where = None,
        separate: bool = False,
        after_loss: AfterLoss = "end",
        unit: int = 1,
        checks_stop: bool = True,
    ) -> list[Any]:
        """Run a function once per device, and return its results in rank order.

        In a rank, and for one device unless `separate`, the function runs in this process; otherwise in new processes.
        On several hosts, only the results of this host's ranks are returned.

        Args:
            fn: Function of a World.
            devices: The devices of all ranks.
            timeout: Seconds within which a healthy operation completes.
            on_event: Called with the rank and the event for every event that a rank reports.
            view: View that displays the output of ranks and messages.
            on: Devices or joined hosts, which decide the engine.
            separate: Whether a single rank must run in a new process.
            after_loss: What the coordinator does after a rank fails.
            unit: Number of ranks that are removed together.
            checks_stop: Whether the function stops after its current step on request; if not, the first Ctrl-C
                interrupts it.
        """
        world = current_world()
        if world is not None:
            return [fn(world)]
        is_local = not isinstance(on, JoinedHosts) and engine_for(on, self.engine) is self.engine
        if len(devices) == 1 and not separate and is_local:
            channel = DirectChannel(lambda entry: on_event(0, entry))
            here = NullWorld(devices[0], channel)
            stopping = interruptible(lambda: _ask_to_stop(channel, after_loss), view, checks_stop)
            with own_randomness(), current_device(here.device), contextlib.closing(here), stopping:
                return [fn(here)]
        work = carrying(fn)
        if isinstance(on, JoinedHosts):
            job = on.start(self.engine, work, timeout=timeout, after_loss=after_loss, unit=unit)
        else:
            engine = engine_for(on, self.engine)
            job = engine.start(work, devices, timeout=timeout, after_loss=after_loss, unit=unit)
        with interruptible(job.stop, view, checks_stop):
            return job.wait(on_event, view.output)

    def call(
        self, fn: Callable[[World], Any], devices: Sequence[Device], timeout: float, *, on: Where = None
    ) -> list[Any]:
        """Run a function once per device without output, and return its results in rank order.

        The first Ctrl-C interrupts it.
        """
        return self.start(fn, devices, timeout, lambda rank, entry: None, View(), on=on, checks_stop=False)


runtime = Runtime(
    LocalEngine(preload=["manyhands.api.fit", "manyhands.serving.replica_process", "torch._dynamo"]),
)


def _experimental(devices: Sequence[Device]) -> list[str]:
    """Return a notice where ranks communicate over NCCL, because that was never tried with several GPUs."""
    if len(devices) < 2 or "nccl" not in backend_for(devices):
        return []
    return ["several GPUs over NCCL are experimental: manyhands selftest compares each strategy with one GPU"]


def is_planned(strategy: StrategySpec | str | Path | None) -> bool:
    """Return whether a strategy is "auto" or names the file of a saved plan (.toml)."""
    return isinstance(strategy, str | Path) and (strategy == "auto" or str(strategy).endswith(".toml"))


def _has_servers(strategy: StrategySpec | str | None) -> bool:
    """Return whether a strategy uses parameter servers; their processes join as coordinator, server and worker."""
    return not is_planned(strategy) and bool(as_spec(strategy).servers)


def _ask_to_stop(channel: DirectChannel, after_loss: AfterLoss) -> None:
    """Request a stop after the current step; raise KeyboardInterrupt if a launched script does not check for stops."""
    channel.handle_message({"stop": True})
    if after_loss == "restart" and not channel.checks_stop:
        raise KeyboardInterrupt


def lease(
    on: Where, devices: Sequence[Device], run: str, notify: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """Return a context that holds a lease on this host's devices.

    In a rank it does nothing, because the program that started the rank holds the lease.

    Args:
        on: Devices or joined hosts.
        devices: The devices of the job.
        run: Name of the run, which other programs see if they wait for the lease.
        notify: Called with a message if this program has to wait.
    """
    candidates = on.here if isinstance(on, JoinedHosts) else devices
    here = [device for device in candidates if not device.host]
    return leased(here, run, notify) if current_world() is None else contextlib.nullcontext()


def from_first(make: Callable[[], Path], on: Where) -> Path:
    """Call `make` on the first rank or host only, and return its result on all ranks or hosts."""
    if isinstance(on, JoinedHosts):
        return Path(on.agree(lambda: str(make())))
    world = current_world()
    if world is None:
        return make()
    return cast(Path, world.gather_objects(make() if world.is_first else None)[0])


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Restore the states of the caller's random generators at the end of the context."""
    device = torch.device("cpu")
    states = random_state(device)
    try:
        yield
    finally:
        restore_random_state(states, device)


def current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which an accelerator is torch's default device of its kind."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device).device(device)  # type: ignore[no-any-return]
