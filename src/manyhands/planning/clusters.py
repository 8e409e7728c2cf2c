"""Clusters for which a plan is made, from a line of text or a TOML file; their hardware need not be available."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core import SettingsError
from ..costs import Chip, ExchangeGroup, Link, chip, link, make_chip
from .cluster_text import REMEDY, parse_cluster

SPREAD = 0.02
"""Assumed relative standard deviation of a replica's step time, if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of hosts with equal devices, for which a plan is made.

    >>> cluster = Cluster.parse("8 hosts x 8 H100, 400Gb/s")
    >>> cluster.num_devices, cluster.chip.name, cluster.network.name
    (64, 'H100', 'InfiniBand')
    """

    hosts: int
    per_host: int
    chip: Chip
    inside: Link
    network: Link | None = None
    price: float | None = None
    """Price of one device per hour."""
    currency: str = "$"
    spread: float = SPREAD
    """Relative standard deviation of a replica's step time."""
    assumed: tuple[str, ...] = ()
    """Assumptions about properties that were not given, as texts for the user."""
    measured: bool = False
    """Whether its constants were fitted to measured steps; otherwise they are from the catalogue."""
    shared: bool = False
    """Whether its devices are parts of one physical device, such as cores of a CPU."""
    part: Chip | None = None
    """Measured properties of each device of a host while all of them compute; only if `shared`."""
    exchange: float = 0.0
    """Measured seconds of a collective apart from the transfer of its bytes; 0 if not measured."""

    def __post_init__(self) -> None:
        for name in ("hosts", "per_host"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} of a cluster must be at least 1", got=getattr(self, name), remedy=REMEDY)
        if self.hosts > 1 and self.network is None:
            raise SettingsError(
                "a cluster of several hosts needs a network", got=f"{self.hosts} hosts without one", remedy=REMEDY
            )

    @property
    def num_devices(self) -> int:
        """Number of devices on all hosts."""
        return self.hosts * self.per_host

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts x " if self.hosts > 1 else ""
        network = f", {self.network.bandwidth * 8 / 1e9:g} Gb/s {self.network.name}" if self.network else ""
        return f"{hosts}{self.per_host} {self.chip.name} over {self.inside.name}{network if self.hosts > 1 else ''}"

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Create a cluster from a line of text such as "8 hosts x 8 H100, 400Gb/s InfiniBand, $2/h"."""
        return cls.from_dict(parse_cluster(text))

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """Create a cluster from a TOML file with hosts, per_host, device, network; [chip] describes a new device."""
        return cls.from_dict(read_toml(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cluster:
        """Create a cluster from settings by name.

        Raises:
            SettingsError: A setting is unknown, missing or invalid, or settings contradict each other.
        """
        known = (
            "hosts",
            "per_host",
            "devices",
            "device",
            "chip",
            "inside",
            "network",
            "gbits",
            "per_device",
            "price",
            "currency",
        )
        for key in values:
            if key not in (*known, "spread", "assumed"):
                raise SettingsError(
                    f"a key of a cluster must be one of {', '.join(known)}, spread",
                    got=repr(key),
                    remedy="rename or remove this key",
                )
        assumed: list[str] = [str(text) for text in values.get("assumed", ())]
        hosts, per_host = _shape(values)
        name = str(values.get("device", "mine"))
        made = make_chip(name, values["chip"]) if "chip" in values else chip(name)
        inside = link(str(values.get("inside", made.inside)))
        if "inside" not in values and per_host > 1:
            assumed.append(f"{inside.name} between the devices of a host")
        price = values.get("price")
        for key, number in (("price", price), ("gbits", values.get("gbits"))):
            if number is not None and not (isinstance(number, int | float) and number > 0):
                raise SettingsError(f"{key} must be a number above zero", got=repr(number), remedy=REMEDY)
        network = None
        if hosts > 1:
            network = _network(values, per_host, assumed)
        assumed.append(f"{made.name}: {made.reach:.0%} of the datasheet's products per second ({made.source})")
        return cls(
            hosts=hosts,
            per_host=per_host,
            chip=made,
            inside=inside,
            network=network,
            price=price,
            currency=str(values.get("currency", "$")),
            spread=float(values.get("spread", SPREAD)),
            assumed=tuple(assumed),
        )

    def chip_for(self, count: int) -> Chip:
        """Return the properties of each device while `count` of a host's are used; CPU cores share bandwidth."""
        count = min(count, self.per_host)
        if not self.shared or count == 1:
            return self.chip
        if self.part is not None and count == self.per_host:
            return self.part
        flops = {precision: rate / count for precision, rate in self.chip.flops.items()}
        return replace(self.chip, flops=flops, memory=self.chip.memory / count, bandwidth=self.chip.bandwidth / count)

    def with_devices(self, count: int) -> Cluster:
        """Return a cluster of this kind with `count` devices, which fill one host after another.

        If it then has several hosts and no known network, a usual one is assumed.
        """
        per_host = min(self.per_host, count)
        hosts = -(-count // per_host)
        network = self.network
        if hosts > 1 and network is None:
            network = link("Ethernet", 1.25e9) if self.chip.name == "CPU" else link("InfiniBand", 12.5e9 * per_host)
        return replace(self, hosts=hosts, per_host=per_host, network=network)

    def group(self, size: int, stride: int) -> ExchangeGroup:
        """Return a group of `size` ranks whose numbers are `stride` apart, as the cost model needs it.

        It says how many of these ranks share a host, and how many such groups share the host's network card.
        """
        together = max(1, min(size, self.per_host // stride)) if stride < self.per_host else 1
        sharing = max(1, min(self.per_host, self.num_devices) // together) if size > together else 1
        return ExchangeGroup(
            size=size,
            per_host=together,
            inside=self.inside,
            network=self.network,
            sharing=sharing,
            start=self.exchange or None,
        )

    def way(self, stride: int) -> Link:
        """Return the link between ranks whose numbers are `stride` apart.

        Between hosts, its bandwidth is the part of the network card for one of the ranks that send at the same time.
        """
        if stride < self.per_host or self.network is None:
            return self.inside
        return replace(self.network, bandwidth=self.network.bandwidth / min(stride, self.per_host))


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the settings in a cluster file; raise SettingsError if it is missing or not valid TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError("a cluster file must be valid TOML", got=f"{path}: {error}", remedy=REMEDY) from None


def as_cluster(given: Cluster | str | Path) -> Cluster:
    """Return the cluster that a user's argument describes: a Cluster, a line of text or the path of a TOML file."""
    if isinstance(given, Cluster):
        return given
    if isinstance(given, Path) or str(given).endswith(".toml"):
        return Cluster.read(given)
    if not isinstance(given, str):
        raise SettingsError("a cluster must be a string, a TOML file or a Cluster", got=repr(given), remedy=REMEDY)
    return Cluster.parse(given)


def _shape(values: Mapping[str, Any]) -> tuple[int, int]:
    numbers = {key: values[key] for key in ("hosts", "per_host", "devices") if key in values}
    for key, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise SettingsError(f"{key} must be a whole number of at least 1", got=repr(number), remedy=REMEDY)
    devices = numbers.get("devices")
    hosts = numbers.get("hosts")
    per_host = numbers.get("per_host")
    if per_host is None:
        per_host = devices // hosts if devices and hosts else devices or 1
    if hosts is None:
        hosts = -(-(devices or per_host) // per_host)
    if devices is not None and devices != hosts * per_host:
        raise SettingsError(
            "the number of devices must be hosts times devices per host",
            got=f"{devices} devices, {hosts} hosts of {per_host}",
            remedy="correct one of the numbers",
        )
    return hosts, per_host


def _network(values: Mapping[str, Any], per_host: int, assumed: list[str]) -> Link:
    gbits = values.get("gbits")
    if gbits is None:
        raise SettingsError("a cluster of several hosts needs the speed of its network", remedy=REMEDY)
    kind = values.get("network")
    if kind is None:
        kind = "InfiniBand" if gbits >= 50 else "Ethernet"
        assumed.append(f"{kind} between hosts")
    if values.get("per_device"):
        gbits *= per_host
    elif per_host > 1:
        assumed.append(f"{gbits:g} Gb/s for a host as a whole (write 'per device' where each device has a card)")
    return link(str(kind), gbits * 1e9 / 8)
