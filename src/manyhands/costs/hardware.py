"""Hardware: the performance of devices and links, with a catalogue of known ones."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..core import DeviceError
from .network import PassCost

TCP_FILLS = 1.25e9
"""Bytes per second up to which kernel TCP saturates a link."""
SHARPNESS = 3.0
"""How strongly the slower of two concurrent activities dominates; assumed: equal ones take 26% longer than each."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of device.

    >>> chip("H100").flops["bf16"] / chip("A100").flops["bf16"] > 3
    True
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    """Datasheet operations per second of dense matrix products, by precision."""
    memory: float
    bandwidth: float
    inside: str = "PCIe 4"
    """The link to the other devices of its host."""
    per_root: int = 4
    """Devices behind one PCIe root of a host, which share its way to the host's memory."""
    reach: float = 0.75
    """The fraction of `flops` that large matrix products reach."""
    plain: float = 1.0
    """The same for fp32 products without tensor cores, relative to `reach`."""
    attention: float = 0.4
    """The fraction of `flops` that fused attention reaches."""
    fill: float = 144.0
    """Elements of a product's inner dimension in whose time its kernel fills and drains, in half precision."""
    ramp: float = 4e-6
    """Overhead of a matrix product's kernel, in seconds; other kernels take half of it."""
    streaming: float = 0.8
    """The fraction of the memory bandwidth that operations reach."""
    operation: float = 25e-6
    """Seconds that the host needs to launch one operation."""
    replayed: float = 2e-6
    """Seconds per operation of a captured step."""
    source: str = ""

    def rate(self, precision: str) -> float:
        """Return the operations per second that large matrix products reach."""
        share = self.reach * (self.plain if precision == "fp32" else 1.0)
        return min(1.0, share) * self.flops.get(precision, self.flops["fp32"] / 2)

    def computing(
        self,
        work: PassCost,
        samples: float,
        precision: str,
        tensor: int = 1,
        *,
        fused: bool = False,
        sequence: bool = False,
    ) -> float:
        """Return the device's seconds for `samples` traced samples; products are split over `tensor` devices.

        A product moves its bytes while it computes; other operations only move bytes, fewer if they are `fused`. With
        `sequence`, those that need whole rows are split over the devices as well, by tokens.
        """
        rate, streaming = self.rate(precision), self.bandwidth * self.streaming
        slower = min(1.0, self.attention / self.reach)
        fill = self.fill * (
            self.flops["fp32"] / self.flops.get("bf16", self.flops["fp32"]) if precision == "fp32" else 1
        )
        flops = work.flops - work.attention + fill * work.fill + work.attention / slower
        calculating = flops * samples / tensor / rate
        feeding = (work.product_moved * samples + work.product_fixed) / tensor / streaming
        products = blend(calculating, feeding) + work.products * self.ramp
        alone = work.alone(fused=fused)
        whole = 0.0 if sequence or not work.moved else work.unsharded * alone / (work.moved - work.product_moved or 1.0)
        moved = (whole + (alone - whole) / tensor) * samples + (work.fixed - work.product_fixed) / tensor
        others = max(0, work.launches(fused=fused) - work.products) * self.ramp / 2
        return products + moved / streaming + others

    def starting(self, operations: float, *, captured: bool = False) -> float:
        """Return the seconds that the host needs to launch these operations."""
        return operations * (self.replayed if captured else self.operation)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices or hosts."""

    name: str
    bandwidth: float
    """Bytes per second in one direction, at line rate."""
    share: float = 0.8
    """The fraction of the bandwidth that a large transfer reaches."""
    latency: float = 5e-6
    """Seconds for one hop."""
    mesh: tuple[float, ...] = ()
    """Fraction of a device's links that a ring of 2, 4, … devices uses where devices are wired directly; with a
    switch, or if empty, all of them."""
    source: str = ""

    @property
    def rate(self) -> float:
        """Return the bytes per second that a transfer reaches."""
        return self.bandwidth * self.share

    def within(self, members: int) -> float:
        """Return the bytes per second of a ring of this many devices of a host.

        >>> round(link("NVLink 2").within(2) / link("NVLink 2").within(8), 2)
        0.17
        """
        index = max(0, (members - 1).bit_length() - 1)
        return self.rate * (self.mesh[index] if index < len(self.mesh) else 1.0)


def blend(*times: float) -> float:
    """Return the time of concurrent activities: the longest, a little more where two are close.

    >>> blend(0.0, 2.0), round(blend(1.0, 1.0), 2)
    (2.0, 1.26)
    """
    longest = max(times)
    if longest <= 0:
        return 0.0
    return float(longest * sum((time / longest) ** SHARPNESS for time in times) ** (1 / SHARPNESS))


def chip(name: str) -> Chip:
    """Return a device of the catalogue by its name there, or by its driver's name.

    >>> chip("NVIDIA H200").name, chip("V100-16GB").name
    ('H200', 'V100')
    """
    known = _catalogue()["devices"]
    words = set(re.split(r"[\s_-]+", name.upper()))
    within = [key for key in known if set(key.upper().split("-")) <= words]
    if not within:
        raise DeviceError(
            f"a device must be one of the catalogue ({', '.join(known)})",
            got=repr(name),
            remedy="choose one of them, or give its flops, memory and bandwidth in a cluster file",
        )
    return make_chip(max(within, key=len), {})


def device_names() -> dict[str, float]:
    """Return the bytes of memory of every device of the catalogue, by name."""
    return {name: make_chip(name, {}).memory for name in _catalogue()["devices"]}


def make_chip(name: str, given: Mapping[str, Any]) -> Chip:
    """Return a device from the catalogue with some values replaced, or one that is described completely."""
    known = _catalogue()["devices"]
    values: dict[str, Any] = {}
    entry: dict[str, Any] = {**known.get(name, {}), **given}
    if "like" in entry:
        values.update(known[entry.pop("like")])
    values.update(entry)
    for wanted in ("flops", "memory", "bandwidth"):
        if wanted not in values:
            raise DeviceError(
                "a device needs flops, memory and bandwidth",
                got=f"{name} without {wanted}",
                remedy=f"add {wanted} = ...",
            )
    if not isinstance(values["flops"], Mapping):
        values["flops"] = {"fp32": float(values["flops"]), "bf16": float(values["flops"])}
    try:
        return Chip(name=name, **values)
    except TypeError as error:
        raise DeviceError(
            f"a device can only have {', '.join(Chip.__dataclass_fields__)}",
            got=str(error).split("argument ")[-1],
            remedy="correct the name",
        ) from None


def link(name: str, bandwidth: float | None = None) -> Link:
    """Return a link of the catalogue; networks take the given line rate, in bytes per second.

    >>> round(link("InfiniBand", 12.5e9).rate / 1e9, 1)
    10.0
    """
    known = _catalogue()["links"]
    if name == "Ethernet" and bandwidth is not None and bandwidth > TCP_FILLS:
        return Link(**{**known["fast Ethernet"], "name": name, "bandwidth": bandwidth})
    if name not in known:
        raise DeviceError(
            f"a device must be one of the catalogue ({', '.join(known)})", got=repr(name), remedy="choose one of them"
        )
    made = {"name": name, **known[name]}
    made["mesh"] = tuple(made.get("mesh", ()))
    if bandwidth is not None:
        made["bandwidth"] = bandwidth
    return Link(**made)


@cache
def _catalogue() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "catalogue.toml").read_text(encoding="utf-8"))
