"""Clusters as users write them, and the share that the planner understands, or refuses with the right remedy."""

from __future__ import annotations

from manyhands.core import UsageError
from manyhands.planning import as_cluster, as_clusters

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
    "32-core CPU": (1, 32, "CPU", 0),
    "a single A100": (1, 1, "A100", 0),
    "eight H100s, NVLink": (1, 8, "H100", 0),
    "H100 x 8": (1, 8, "H100", 0),
    "8 GPUs (H100)": (1, 8, "H100", 0),
    "DGX A100": (1, 8, "A100", 0),
    "8x NVIDIA H100 80GB HBM3": (1, 8, "H100", 0),
    "8 NVIDIA-A100-SXM4-40GB": (1, 8, "A100-40GB", 0),
    "8 A100 40GB PCIe": (1, 8, "A100-PCIe-40GB", 0),
    "4 A100, PCIe 4.0 x16": (1, 4, "A100-PCIe", 0),
    "4 A100 without NVLink": (1, 4, "A100-PCIe", 0),
    "8 H100 NVL 94GB": (1, 8, "H100-NVL", 0),
    "4 Tesla V100 PCIe 16GB": (1, 4, "V100-PCIe", 0),
    "4 A6000": (1, 4, "RTX-A6000", 0),
    "2 RTX 6000 Ada": (1, 2, "RTX-6000-Ada", 0),
    "8 hosts, each with 8 H100, 400Gb/s": (8, 8, "H100", 400),
    "8 nodes with eight H100 each, 400 Gigabits per second": (8, 8, "H100", 400),
    "8 H100 nodes, 400Gb/s": (8, 8, "H100", 400),
    "4 8-GPU A100 servers, 100 GbE": (4, 8, "A100", 100),
    "16 nodes of DGX A100, 200Gb/s per GPU": (16, 8, "A100", 1600),
    "64 H100 in groups of 8, 400Gb/s": (8, 8, "H100", 400),
    "1,024 H100, 8 per node, 3.2 Tbps EFA": (128, 8, "H100", 3200),
    "400Gb/s InfiniBand, 8 hosts x 8 H100": (8, 8, "H100", 400),
    "8 hosts x 8 H100, 8x NDR": (8, 8, "H100", 3200),
    "8 hosts x 8 H100, 8 NICs of 400 Gb/s": (8, 8, "H100", 3200),
    "16 A100 40GB, 8 per node, 4x HDR 200Gb/s": (2, 8, "A100-40GB", 800),
    "8 hosts x 8 H100, 400 GbE RoCE v2": (8, 8, "H100", 400),
    "8 hosts x 8 H100, 0.4 TB/s": (8, 8, "H100", 3200),
    "2 hosts x 8 H100, 10 GigE": (2, 8, "H100", 10),
    "2 hosts x 4 MI325X, 400Gb/s Spectrum-X": (2, 4, "MI325X", 400),
}
"""Text: hosts, devices per host, device, and the network of a host in Gb/s."""
PRICES = {
    "8 H100, $2.5/h": (2.5, "$"),
    "8 H100, 2.5 USD per hour": (2.5, "$"),
    "8 H100, $2.5/GPU/hour": (2.5, "$"),
    "8 H100, \u20ac2.5/h per device": (2.5, "\u20ac"),
    "8 H100, 20 EUR/h per host": (2.5, "\u20ac"),
    "8 H100, 2.5/h": (2.5, "$"),
    "8 H100, \u20ac2.50 per GPU-hour": (2.5, "\u20ac"),
    "8 H100, 2,5 euros per hour": (2.5, "\u20ac"),
    "8 H100, $20/hour/node": (2.5, "$"),
    "8 H100, \u00a3 2 / GPU / h": (2.0, "\u00a3"),
    "8 H100, CHF 3/h": (3.0, "CHF"),
    "8 hosts x 8 H100, 400Gb/s, $128/h for the cluster": (2.0, "$"),
    "8 hosts x 8 H100, 400Gb/s, 192 \u20ac/h in total": (3.0, "\u20ac"),
}
MIXED = {
    "2 hosts x 8 H100 + 4 hosts x 8 A100, 400Gb/s": (48, 16, 32),
    "2 hosts x 8 H100 and 4 hosts x 8 A100, 400Gb/s": (48, 16, 32),
    "2x8 H100 plus 2x8 V100, 100 Gb/s": (32, 16, 16),
    "16 H100 at $3/h + 32 A100 at $1/h, 400Gb/s": (48, 16, 32),
}
"""Numbers of devices of all hosts together, and of each kind."""
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
    "0 hosts x 8 H100, 10Gb/s, 192 \u20ac/h in total": "at least 1",
    "8 hosts x 0 H100, 10Gb/s": "at least 1",
    "8 hosts x 8 H100, 0Gb/s Ethernet": "above zero",
    "8 A100 64GB": "40 GB, 80 GB",
    "8 H100, warp drive": "'warp'",
    "2 x p4d.24xlarge": "what it consists of",
    "a3-highgpu-8g": "what it consists of",
    "8 H900, 8 per host": "[chip]",
    "\u22128 H100": "must be above 0",
    "8.5 H100": "whole numbers",
    "8 hosts x 8 H100, 4 per host, 400Gb/s": "one number of hosts",
    "8 H100, 8 A100": "one kind of hosts",
    "8 hosts x 8 H100, 400Gb/s, 200Gb/s": "one network and one price",
    "8 hosts x 8 H100, 400Gb/s per NIC": "8x400Gb/s",
    "8 H100, $2 per device": "per hour",
    "4 RTX 4090 with NVLink": "linked by PCIe 4",
    "4 RTX 4090 over PCIe 3.0 x8": "16 lanes",
    "1000000000000 H100, 400Gb/s": "at most 1,000,000 devices",
    "2 hosts x 8 H100 at $3/h + 2 hosts x 8 A100 at 1\u20ac/h, 400Gb/s": "same currency",
}


def share_understood() -> float:
    """The share of all texts that are read as they should be."""
    right = [_shape(text) == expected for text, expected in UNDERSTOOD.items()]
    right += [_price(text) == expected for text, expected in PRICES.items()]
    right += [tuple(one.num_devices for one in as_clusters(text)) == expected for text, expected in MIXED.items()]
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
        as_clusters(text)
    except UsageError as error:
        return str(error)
    return ""
