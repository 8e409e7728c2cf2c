"""Clusters as users write them, and the share that the planner understands, or refuses with the right remedy."""

from __future__ import annotations

from manyhands.core import UsageError
from manyhands.planning import as_cluster

UNDERSTOOD: dict[str, tuple[int, int, str, float]] = {
    "8 hosts x 8 H100, 400Gb/s": (8, 8, "H100", 400),
    "8 hosts \u00d7 8 H100, 400 Gb/s": (8, 8, "H100", 400),
    "8 hosts * 8 h100 , 400 gbit/s": (8, 8, "H100", 400),
    "8x8 H100, 400Gbps": (8, 8, "H100", 400),
    "8x8xH100, 400G": (8, 8, "H100", 400),
    "8 nodes with 8 H100 each, 400 Gbit/s": (8, 8, "H100", 400),
    "8 nodes of 8 H100, 400Gb/s": (8, 8, "H100", 400),
    "8 nodes, 8 H100 per node, 400Gb/s": (8, 8, "H100", 400),
    "8 machines x 8 H100, 400Gb/s": (8, 8, "H100", 400),
    "64 H100, 8 per host, 400Gb/s": (8, 8, "H100", 400),
    "64 H100 (8 per node), 400Gb/s": (8, 8, "H100", 400),
    "64 H100 on 8 nodes, 400Gb/s": (8, 8, "H100", 400),
    "64 H100 in 8 servers, 400Gb/s": (8, 8, "H100", 400),
    "64 H100, 400Gb/s": (8, 8, "H100", 400),
    "8 DGX H100, 400G IB": (8, 8, "H100", 400),
    "8 hosts x 8 H100, 50 GB/s": (8, 8, "H100", 400),
    "8 hosts x 8 H100, 400 GB/s": (8, 8, "H100", 3200),
    "8 hosts x 8 H100, 8x400Gb/s": (8, 8, "H100", 3200),
    "8 hosts x 8 H100, 3.2Tb/s": (8, 8, "H100", 3200),
    "8 hosts x 8 H100, 400Gb/s per GPU": (8, 8, "H100", 3200),
    "8 hosts x 8 H100, 400Gb/s InfiniBand per device": (8, 8, "H100", 3200),
    "8 hosts x 8 H100, 400Gb/s NDR InfiniBand": (8, 8, "H100", 400),
    "16 hosts x 8 H200, EFA 3200Gbps": (16, 8, "H200", 3200),
    "4 hosts x 8 K80, 10GbE": (4, 8, "K80", 10),
    "4 hosts x 8 K80, 10 Gb/s Ethernet": (4, 8, "K80", 10),
    "4 hosts x 4 L40S, 25 gigabit ethernet": (4, 4, "L40S", 25),
    "4 machines x 1 T4, 1Gbit/s": (4, 1, "T4", 1),
    "2 hosts x 1 T4, 100 Mbit/s": (2, 1, "T4", 0.1),
    "16 RTX 4090, 4 per node, 10GbE": (4, 4, "RTX-4090", 10),
    "2 nodes of 4 A100 PCIe, 100 Gb/s": (2, 4, "A100-PCIe", 100),
    "4 hosts x 8 V100-32GB, 100Gbps": (4, 8, "V100-32GB", 100),
    "64 A100 80GB (8 per node), 8x200Gb/s, 16 \u20ac/h per host": (8, 8, "A100", 1600),
    "8 H100": (1, 8, "H100", 0),
    "8x H100": (1, 8, "H100", 0),
    "8 x H100": (1, 8, "H100", 0),
    "8 h100": (1, 8, "H100", 0),
    "8 NVIDIA H100": (1, 8, "H100", 0),
    "8 NVIDIA H100 80GB": (1, 8, "H100", 0),
    "8 H100 SXM5 80GB": (1, 8, "H100", 0),
    "8 H100 SXM": (1, 8, "H100", 0),
    "8 H100 with NVSwitch": (1, 8, "H100", 0),
    "8 H100 PCIe": (1, 8, "H100-PCIe", 0),
    "8 Tesla V100": (1, 8, "V100", 0),
    "8 V100 16 GB": (1, 8, "V100", 0),
    "8 V100 32GB": (1, 8, "V100-32GB", 0),
    "8 A100 SXM4 40GB": (1, 8, "A100-40GB", 0),
    "8xA100-40GB": (1, 8, "A100-40GB", 0),
    "8 B200 NVLink 5": (1, 8, "B200", 0),
    "8 MI300X": (1, 8, "MI300X", 0),
    "8 AMD Instinct MI300X": (1, 8, "MI300X", 0),
    "1 RTX 5090": (1, 1, "RTX-5090", 0),
    "2 GeForce RTX 3090": (1, 2, "RTX-3090", 0),
    "1 L4": (1, 1, "L4", 0),
    "16 CPU": (1, 16, "CPU", 0),
    "32 cores": (1, 32, "CPU", 0),
}
"""Text: hosts, devices per host, device, and the network of a host in Gb/s."""
PRICES = {
    "8 H100, $2.5/h": (2.5, "$"),
    "8 H100, 2.5 USD per hour": (2.5, "$"),
    "8 H100, $2.5/GPU/hour": (2.5, "$"),
    "8 H100, \u20ac2.5/h per device": (2.5, "\u20ac"),
    "8 H100, 20 EUR/h per host": (2.5, "\u20ac"),
    "8 H100, 2.5/h": (2.5, "$"),
}
REFUSED = {
    "": "hosts times devices",
    "H100": "hosts times devices",
    "some H100": "hosts times devices",
    "8 H900": "one of the catalogue",
    "12 H100, 400Gb/s": "hosts times devices per host",
    "8 H100, 7 per host": "hosts times devices per host",
    "64 H100 on 7 nodes, 400Gb/s": "hosts times devices per host",
    "2 hosts x 8 H100": "the speed of its network",
    "64 H100": "the speed of its network",
    "8 hosts x 8 H100, -400Gb/s": "must be above 0",
    "0 hosts x 8 H100, 10Gb/s": "at least 1",
    "8 A100 64GB": "40 GB, 80 GB",
    "8 H100, warp drive": "'warp'",
}


def share_understood() -> float:
    """The share of all texts that are read as they should be."""
    right = [_shape(text) == expected for text, expected in UNDERSTOOD.items()]
    right += [_price(text) == expected for text, expected in PRICES.items()]
    right += [part in _refusal(text) for text, part in REFUSED.items()]
    return sum(right) / len(right)


def _shape(text: str) -> tuple[int, int, str, float] | None:
    try:
        made = as_cluster(text)
    except UsageError:
        return None
    gbits = made.network.bandwidth * 8 / 1e9 if made.network is not None else 0
    return made.hosts, made.per_host, made.chip.name, round(gbits, 6)


def _price(text: str) -> tuple[float | None, str] | None:
    try:
        made = as_cluster(text)
    except UsageError:
        return None
    return made.price, made.currency


def _refusal(text: str) -> str:
    try:
        as_cluster(text)
    except UsageError as error:
        return str(error)
    return ""
