"""Clusters to plan for, available or not, described by a line of text or a TOML file."""

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
"""Relative standard deviation of a replica's step time, if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts with equal devices.

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
    assumed: tuple[str, ...] = ()
    """Assumptions about properties that were not given."""
    measured: bool = False
    """Whether its figures were measured instead of read off datasheets."""
    shared: bool = False
    """Whether its devices share one physical device, such as a CPU's cores."""
    part: Chip | None = None
    """Measured properties of each of a host's devices while all of them work."""
    exchange: float = 0.0
    """Measured seconds of a collective apart from the transfer of its bytes."""

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
        """Parse a line such as "8 hosts x 8 H100, 400Gb/s InfiniBand, $2/h"."""
        return cls.from_dict(parse_cluster(text))

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """Read a TOML file: hosts, per_host, device, network, and custom figures under [chip]."""
        return cls.from_dict(read_toml(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cluster:
        """Create a cluster from settings by name; raises SettingsError for unknown or contradictory ones."""
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
                    remedy="correct the name",
                )
        assumed: list[str] = [str(text) for text in values.get("assumed", ())]
        hosts, per_host = _shape(values)
        name = str(values.get("device", "mine"))
        made = make_chip(name, values["chip"]) if "chip" in values else chip(name)
        inside = link(str(values.get("inside", made.inside)))
        if "inside" not in values and per_host > 1:
            assumed.append(f"{inside.name} between the devices of a host")
        network = None
        if hosts > 1:
            network = _network(values, per_host, assumed)
        price = values.get("price")
        for key, number in (("price", price), ("gbits", values.get("gbits"))):
            if number is not None and not (isinstance(number, int | float) and number > 0):
                raise SettingsError(f"{key} must be a number above zero", got=repr(number), remedy=REMEDY)
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
        """Return the properties of each device when this many are used."""
        count = min(count, self.per_host)
        if not self.shared or count == 1:
            return self.chip
        if self.part is not None and count == self.per_host:
            return self.part
        flops = {precision: rate / count for precision, rate in self.chip.flops.items()}
        return replace(self.chip, flops=flops, memory=self.chip.memory / count, bandwidth=self.chip.bandwidth / count)

    def with_devices(self, count: int) -> Cluster:
        """Return the cluster with this many devices, filling one host after another; adds a network if needed."""
        per_host = min(self.per_host, count)
        hosts = -(-count // per_host)
        network = self.network
        if hosts > 1 and network is None:
            network = link("Ethernet", 1.25e9) if self.chip.name == "CPU" else link("InfiniBand", 12.5e9 * per_host)
        return replace(self, hosts=hosts, per_host=per_host, network=network)

    def group(self, size: int, stride: int) -> ExchangeGroup:
        """Return the group of ranks `stride` apart: how many share a host, and how many such groups share its NIC."""
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
        """Return the link between ranks this far apart; concurrent senders of a host share its NIC."""
        if stride < self.per_host or self.network is None:
            return self.inside
        return replace(self.network, bandwidth=self.network.bandwidth / min(stride, self.per_host))


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the contents of a cluster file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError("a cluster file must be valid TOML", got=f"{path}: {error}", remedy=REMEDY) from None


def as_cluster(given: Cluster | str | Path) -> Cluster:
    """Return a cluster from a user's argument."""
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
