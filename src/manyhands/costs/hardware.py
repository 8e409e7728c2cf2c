"""Hardware: the performance of devices and links, with a catalogue of known devices and links."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core import DeviceError
from .network import PassCost

SHARPNESS = 3.0
"""Exponent of `blend`, an assumption: two concurrent activities of equal length take 26% longer than one of them."""


TILE = 128
"""Usual rows and columns of the part of a product's result that a multiprocessor computes at a time.

Tiles are computed in waves, of which the last is half empty on average.
"""
WINOGRAD = 1.5
"""Factor by which Winograd's algorithm speeds up 3x3 convolutions in fp32.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks": 9.5e12 FLOP/s on a device with a peak of 7e12.
"""
TENSOR_CORES = 4
"""Least ratio of half-precision to fp32 operations per second of a device with tensor cores."""
MOST_IDLE = 0.25
"""Largest fraction of its operations that a half empty wave costs a product: kernels split long inner dimensions."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The performance of a kind of device, such as a GPU model.

    >>> chip("H100").flops["bf16"] / chip("A100").flops["bf16"] > 3
    True
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    """Datasheet operations per second of dense matrix products, by precision."""
    memory: float
    """Bytes of memory."""
    bandwidth: float
    """Bytes per second of memory bandwidth."""
    inside: str = "PCIe 4"
    """Name of the link to other devices of the same host."""
    per_root: int = 4
    """Number of devices behind one PCIe root complex, which share its bandwidth to the host's memory."""
    reach: float = 0.75
    """The fraction of `flops` that large matrix products reach."""
    plain: float = 1.0
    """Factor by which `reach` is multiplied for fp32 products, which do not use tensor cores."""
    attention: float = 0.4
    """The fraction of `flops` that fused attention reaches."""
    fill: float = 144.0
    """Time in which a half-precision product fills and drains its kernel, in elements of the inner dimension."""
    cores: int = 0
    """Number of multiprocessors, which compute a matrix product's tiles in waves; 0 if products are not tiled."""
    ramp: float = 4e-6
    """Overhead of a matrix product's kernel, in seconds; other kernels have half of it."""
    streaming: float = 0.8
    """The fraction of the memory bandwidth that operations reach."""
    operation: float = 25e-6
    """Seconds that the host needs to launch one operation."""
    replayed: float = 2e-6
    """Seconds that the host needs per operation if it replays a CUDA graph."""
    watts: float | None = None
    """Thermal design power in watts; None if it is unknown."""
    source: str = ""
    """Where the values come from."""

    def rate(self, precision: str, tf32: float = 0.0) -> float:
        """Return the operations per second that large matrix products reach.

        `tf32` is the fraction of the operations that tensor cores may compute in TF32, if `precision` is "fp32".

        >>> round(chip("A100").rate("fp32", tf32=1.0) / chip("A100").rate("bf16"), 2)
        0.5
        """
        share = self.reach * (self.plain if precision == "fp32" else 1.0)
        usual = min(1.0, share) * self.flops.get(precision, self.flops["fp32"] / 2)
        if precision != "fp32" or "tf32" not in self.flops:
            return usual
        return 1 / ((1 - tf32) / usual + tf32 / (self.reach * self.flops["tf32"]))

    def has_tensor_cores(self, precision: str) -> bool:
        """Return whether tensor cores can compute products of a precision, fp32 ones in TF32."""
        narrow = self.flops.get("bf16", 0.0)
        return "tf32" in self.flops or (precision != "fp32" and narrow >= TENSOR_CORES * self.flops["fp32"])

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
        """Return the seconds in which the device computes a forward or backward.

        A matrix product moves its bytes while it computes; other operations only move bytes.

        Args:
            work: The cost of the forward or backward, for the traced number of samples.
            samples: Number of samples, relative to the traced number.
            precision: Precision of the products, such as "bf16".
            tensor: Number of devices over which products are split (tensor parallelism).
            fused: Whether neighbouring operations are fused, so that they move fewer bytes.
            sequence: Whether operations that need whole rows are split too, along the sequence.
        """
        rate = self.rate(precision, work.tf32 / work.flops if work.tf32 else 0.0)
        streaming = self.bandwidth * self.streaming
        slower = min(1.0, self.attention / self.reach)
        # Kernels fill and drain in the same time in every precision.
        fill = self.fill * rate / self.rate("bf16" if "bf16" in self.flops else precision)
        flops = work.flops - work.attention + fill * work.fill + work.attention / slower
        tensor_cores = self.has_tensor_cores(precision) and (precision != "fp32" or work.tf32 > 0)
        if precision == "fp32" and self.cores and not tensor_cores:
            flops -= (1 - 1 / WINOGRAD) * work.winograd
        # Tensor parallelism splits every second inner dimension, but not the rows over which gradients are summed.
        depth = (work.depth - work.depth_scaled) * (1 + 1 / tensor) / 2 + work.depth_scaled * samples
        idle = min(TILE**2 * self.cores * depth, MOST_IDLE * work.flops * samples / tensor)
        calculating = (flops * samples / tensor + idle) / rate
        feeding = (work.product_moved * samples + work.product_fixed) / tensor / streaming
        products = blend(calculating, feeding) + work.products * self.ramp
        alone = work.alone(fused=fused)
        whole = 0.0 if sequence or not work.moved else work.unsharded * alone / (work.moved - work.product_moved or 1.0)
        relaid = work.relaid if tensor_cores else 0.0
        moved = (whole + (alone - whole + relaid) / tensor) * samples + (work.fixed - work.product_fixed) / tensor
        others = max(0, work.launches(fused=fused) - work.products) * self.ramp / 2
        return products + moved / streaming + others

    def starting(self, operations: float, *, captured: bool = False) -> float:
        """Return the seconds that the host needs to launch a number of operations, or if `captured` to replay them."""
        return operations * (self.replayed if captured else self.operation)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The performance of a link between devices of a host, or between hosts."""

    name: str
    bandwidth: float
    """Bytes per second in one direction, at line rate."""
    share: float = 0.8
    """The fraction of the bandwidth that a large transfer reaches."""
    latency: float = 5e-6
    """Seconds for one hop."""
    mesh: tuple[float, ...] = ()
    """Fractions of a device's links that rings of 2, 4, 8, … devices use if devices are wired to each other directly.

    Larger rings use all links; so do all rings if it is empty, as with a switch.
    """
    source: str = ""
    """Where the values come from."""

    @property
    def rate(self) -> float:
        """Return the bytes per second that a large transfer reaches."""
        return self.bandwidth * self.share

    def within(self, members: int) -> float:
        """Return the bytes per second of a ring of `members` devices of a host.

        >>> round(link("NVLink 2").within(2) / link("NVLink 2").within(8), 2)
        0.17
        """
        index = max(0, (members - 1).bit_length() - 1)
        return self.rate * (self.mesh[index] if index < len(self.mesh) else 1.0)


def blend(*times: float) -> float:
    """Return the duration of concurrent activities: the longest one, or a little more if others take about as long.

    >>> blend(0.0, 2.0), round(blend(1.0, 1.0), 2)
    (2.0, 1.26)
    """
    longest = max(times)
    if longest <= 0:
        return 0.0
    return float(longest * sum((time / longest) ** SHARPNESS for time in times) ** (1 / SHARPNESS))


def chip(name: str) -> Chip:
    """Return a device of the catalogue by its name there, or by the name that its driver reports.

    Raises:
        DeviceError: The catalogue has no such device.

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
            remedy="choose one of them, or write the device's flops, memory and bandwidth into a cluster file",
        )
    return make_chip(max(within, key=len), {})


def device_names() -> dict[str, float]:
    """Return the names of all devices of the catalogue, with their bytes of memory."""
    return {name: make_chip(name, {}).memory for name in _catalogue()["devices"]}


def make_chip(name: str, given: Mapping[str, Any]) -> Chip:
    """Return the catalogue's device `name` with the values in `given` replaced, or a new device with these values.

    A new device needs flops, memory and bandwidth, or `like`: the name of a device from which missing values are taken.

    Raises:
        DeviceError: A required value is missing, or a value has an unknown name.
    """
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
                remedy=f"add {wanted} = ... under [chip] in the cluster file",
            )
    if not isinstance(values["flops"], Mapping):
        values["flops"] = {"fp32": float(values["flops"]), "bf16": float(values["flops"])}
    try:
        return Chip(name=name, **values)
    except TypeError as error:
        raise DeviceError(
            f"a device can only have {', '.join(Chip.__dataclass_fields__)}",
            got=str(error).split("argument ")[-1],
            remedy="rename or remove this value",
        ) from None


def link(name: str, bandwidth: float | None = None) -> Link:
    """Return a link of the catalogue, with another line rate (bytes per second) if `bandwidth` is given.

    Raises:
        DeviceError: The catalogue has no such link.

    >>> [round(link(name, 12.5e9).rate / 1e9, 1) for name in ("InfiniBand", "Ethernet")]
    [10.0, 5.0]
    """
    known = _catalogue()["links"]
    if name not in known:
        raise DeviceError(
            f"a link must be one of the catalogue ({', '.join(known)})", got=repr(name), remedy="choose one of them"
        )
    made = {"name": name, **known[name]}
    made["mesh"] = tuple(made.get("mesh", ()))
    if bandwidth is not None:
        made["bandwidth"] = bandwidth
    if "shares" in made:
        rates, shares = np.log(made.pop("shares")).T
        made["share"] = float(np.exp(np.interp(np.log(made["bandwidth"]), rates, shares)))
    return Link(**made)


@cache
def _catalogue() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "catalogue.toml").read_text(encoding="utf-8"))
