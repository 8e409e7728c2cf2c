"""Published scaling: speed-ups predicted from each series' smallest row and the hardware, against what was measured.

The hardware and the system are read off the rows' own words. Nothing is fitted to a series: the smallest row gives the
time of computing, everything else comes from the catalogue and from how the system of that time exchanged gradients.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from manyhands.core import StrategySpec
from manyhands.costs import Chip, Link, Network, Piece, Servers, Work, chip, link
from manyhands.planning import Cluster, Workload, estimate

DATA = Path(__file__).parent / "data" / "published_scaling.csv"
NUM_PIECES = 16
LARGEST = {"VGG16": 411e6, "VGG-16": 411e6, "AlexNet": 151e6}
"""Bytes of the largest parameter, where one rules all others: the first fully connected layer."""
DEVICES = {"Pascal": "P100"}
SWITCH = {"K80": 8}
"""Devices that share one way to the host's memory: eight on the cloud's K80 hosts, else two."""


@dataclass(frozen=True)
class Point:
    """One measured throughput of a series."""

    series: tuple[str, ...]
    row: dict[str, str]
    num_devices: int
    throughput: float


def points(path: Path = DATA) -> list[Point]:
    """All rows; throughput per device becomes that of all."""
    found = []
    with path.open() as file:
        for row in csv.DictReader(file):
            count = int(row["N"])
            each = count if row["unit"].endswith("/gpu") else 1
            series = tuple(row[key] for key in row if key not in ("N", "value"))
            found.append(Point(series, row, count, float(row["value"]) * each))
    return found


def predicted(found: Iterable[Point]) -> list[tuple[Point, float, float]]:
    """For every row but a series' smallest: its measured and its predicted speed-up over that one."""
    result = []
    for _, group in groupby(sorted(found, key=lambda p: (p.series, p.num_devices)), key=lambda p: p.series):
        first, *others = list(group)
        compute = _compute(first)
        at_first = first.num_devices / seconds(first, compute)
        for point in others:
            speed = point.num_devices / seconds(point, compute) / at_first
            result.append((point, point.throughput / first.throughput, speed))
    return result


def seconds(point: Point, compute: float) -> float:
    """A step in which each device computes for so long, as the planner sees it."""
    count, row = point.num_devices, point.row
    mode = f"{row['system']} {row['mode']}"
    cluster = _cluster(row, count)
    workload = _workload(row, compute, count, mode)
    if "FSDP" in mode:
        return estimate(workload, cluster, StrategySpec(shards=count)).seconds
    spec = StrategySpec(replicas=count)
    if not re.search(r"\bPS\b|distributed_replicated|parameter.server", mode):
        return estimate(workload, cluster, spec).seconds
    whole = estimate(
        workload, cluster, spec, servers=_inside(row, cluster, count), pushers=min(count, cluster.per_host)
    )
    if cluster.hosts == 1:
        return whole.seconds
    aggregated = "distributed_replicated" in mode
    outside = _servers(row, cluster, mode)
    between = estimate(workload, cluster, spec, servers=outside, pushers=cluster.hosts if aggregated else count)
    return between.seconds + (whole.communication if aggregated else 0.0)


def _compute(point: Point) -> float:
    """The seconds of computing with which the smallest row comes out as it was measured, for a batch of one each."""
    measured = point.num_devices / point.throughput * _batch(point.row)
    low, high = 0.05 * measured, measured
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(point, middle) < measured else (low, middle)
    return high


def _batch(row: dict[str, str]) -> float:
    numbers = [float(number) for number in re.findall(r"\d+", row["batch_per_gpu"])]
    samples = sum(numbers) / len(numbers) if numbers else 1.0
    length = re.search(r"\bs(\d+)", row["mode"])
    return samples * (float(length[1]) if length and row["unit"].startswith("tok") else 1.0)


def _workload(row: dict[str, str], compute: float, count: int, mode: str) -> Workload:
    size = float(row["params_M"]) * 1e6 * 4
    largest = LARGEST.get(row["model"], 2048 * 1000 * 4.0)
    weights = [index + 1 for index in range(NUM_PIECES)]
    sizes = [(size - largest) * weight / sum(weights) for weight in weights]
    sizes[-1] += largest
    if row["model"] in ("GPT", "BERT-base"):
        sizes = [size / NUM_PIECES] * NUM_PIECES
    pieces = tuple(
        Piece(
            name=str(index),
            forward=Work(flops=compute / 3 / NUM_PIECES),
            backward=Work(flops=2 * compute / 3 / NUM_PIECES),
            param_bytes=int(size),
            largest=int(min(size, largest)),
        )
        for index, size in enumerate(sizes)
    )
    narrow = 0.5 if re.search(r"Megatron|fp16|bf16|AMP", mode) else 1.0
    if "FSDP" in mode:
        pieces = tuple(replace(piece, param_bytes=int(piece.param_bytes * narrow)) for piece in pieces)
    return Workload(
        networks={"fp32": Network(rows=1, pieces=pieces)},
        batch_size=count,
        overlaps=not re.search(r"Megatron|MXNet", mode),  # both exchange when backward has ended
        wire=narrow,
    )


def _cluster(row: dict[str, str], count: int) -> Cluster:
    words = row["gpu"].split()
    known = chip(DEVICES.get(words[0], words[0]))
    inside = known.inside if "NVLink" in words or known.name in ("V100", "A100", "A100-40GB") else "PCIe 3"
    clock = Chip(name="clock", flops={"fp32": 1.0}, memory=1e15, bandwidth=1e30, reach=1.0, ramp=0.0, operation=0.0)
    per_host = min(count, int(row["gpus_per_node"]))
    hosts = -(-count // per_host)
    network = _network(row) if hosts > 1 else None
    return Cluster(hosts=hosts, per_host=per_host, chip=clock, inside=link(inside), network=network)


def _network(row: dict[str, str]) -> Link:
    gbits = float(re.search(r"(\d+)\s*G", row["network"])[1])  # type: ignore[index]
    kind = "InfiniBand" if "IB" in row["network"] else "RoCE" if "RoCE" in row["network"] else "Ethernet"
    return link(kind, gbits * 1e9 / 8)


def _inside(row: dict[str, str], cluster: Cluster, count: int) -> Servers:
    """Parameters in the host's memory, reached over PCIe by all devices of a switch together."""
    way = link("PCIe 3")
    ways = max(1, min(count, cluster.per_host) // SWITCH.get(row["gpu"].split()[0], 2))
    waits = "replicated" in row["mode"]  # copies on the devices are renewed when all gradients were applied
    return Servers(count=1, hottest=1.0, way=way, task_rate=ways * way.rate, waits=waits)


def _servers(row: dict[str, str], cluster: Cluster, mode: str) -> Servers:
    said = re.search(r"(\d+) PS", mode)
    count = min(int(said[1]), cluster.hosts) if said else cluster.hosts
    size = float(row["params_M"]) * 1e6 * 4
    assert cluster.network is not None
    hottest = LARGEST.get(row["model"], 0.0) / size
    return Servers(count=count, hottest=hottest, way=cluster.network, waits="replicated" in mode)
