"""Published scaling: speed-ups predicted from each series' smallest row and the hardware, against what was measured.

The hardware and the system are read off the rows' own words. Nothing is fitted to a series: the smallest row gives the
time of computing, everything else comes from the catalogue and from how the system of that time exchanged gradients.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev

from manyhands.core import DeviceError, StrategySpec, UsageError
from manyhands.costs import Chip, Link, Network, NetworkPart, PassCost, Servers, chip, link
from manyhands.planning import Cluster, Workload, estimate

DATA = Path(__file__).parent / "data" / "published_scaling.csv"
NUM_PIECES = 16
LARGEST = {"VGG16": 411e6, "VGG-16": 411e6, "AlexNet": 151e6}
"""Bytes of the largest parameter, where one rules all others: the first fully connected layer."""
TABLES = {"BERT-base": 30522 * 768 * 4.0}
"""Bytes of embedding tables that are also the last layer's weights, so that their gradients are complete at the end."""
CARDS = 4
"""Cards behind one PCIe root of a host."""
CLOCK = Chip(name="clock", flops={"fp32": 1.0}, memory=1e15, bandwidth=1e30, reach=1.0, ramp=0.0, operation=0.0)
"""A device on which an operation takes a second."""
DEVICES = {"Pascal": "P100"}
COLUMNS = (
    "system",
    "mode",
    "model",
    "params_M",
    "batch_per_gpu",
    "gpu",
    "gpus_per_node",
    "network",
    "unit",
    "src",
    "N",
    "value",
)
BLANK = ("", "-", "?", "n/a", "na", "none", "unknown", "unstated")
"""The content of cells without a value."""
USUAL_LENGTH = 2048
"""Tokens of a GPT's sequence where a row does not say."""
OVERLAPS = True
"""Whether gradients are exchanged during backward where a row does not say; errors are reported with and without."""


@dataclass(frozen=True)
class Point:
    """One measured throughput of a series."""

    series: tuple[str, ...]
    row: dict[str, str]
    num_devices: int
    throughput: float


@dataclass(frozen=True)
class Read:
    """The points of a file, and how many rows are left out, by reason."""

    points: list[Point]
    left_out: Counter[str]


def read(path: Path = DATA, *, withdrawn: bool = False) -> Read:
    """All rows that say what a prediction needs; throughput per device becomes that of all.

    Rows that their source has withdrawn are left out, unless `withdrawn`.
    """
    found, left_out = [], Counter[str]()
    with path.open(encoding="utf-8-sig") as file:
        lines = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (lines.fieldnames or ())]
        if missing:
            raise SystemExit(f"{path} must have the columns {', '.join(COLUMNS)}; it lacks {', '.join(missing)}")
        for given in lines:
            row = {
                key: "" if (text or "").strip().lower() in BLANK else text.strip() for key, text in given.items() if key
            }
            reason = unusable({**row, "withdrawn": ""} if withdrawn else row)
            if reason:
                left_out[reason] += 1
                continue
            count = int(_number(row["N"]))
            throughput = _throughput(row["unit"], _number(row["value"]), count)
            assert throughput is not None
            series = tuple(row[key] for key in row if key not in ("N", "value", "overlap", "withdrawn"))
            found.append(Point(series, row, count, throughput))
    return Read(found, left_out)


def points(path: Path = DATA) -> list[Point]:
    """The usable rows of a file."""
    return read(path).points


def unusable(row: dict[str, str]) -> str:
    """Why a row cannot be predicted; empty if it can.

    >>> row = {"N": "16", "value": "3.5", "unit": "img/s", "params_M": "25.6", "gpus_per_node": "8", "network": "10GbE"}
    >>> row |= {"batch_per_gpu": "64", "mode": "DDP"}
    >>> unusable(row), unusable({**row, "unit": "hours"}), unusable({**row, "network": ""})
    ('', 'no throughput', 'unstated network')
    """
    if row.get("withdrawn"):
        return "withdrawn by its source"
    if _throughput(row["unit"], 1.0, 1) is None:
        return "no throughput"
    numbers = [_number(row[key]) for key in ("N", "value", "params_M")]
    if not all(numbers) or numbers[0] % 1:
        return "no number"
    if _batch(row) is None:
        return "unstated batch"
    alone = "single" in row["network"].lower() or numbers[0] == 1
    per_host = _number(row["gpus_per_node"])
    if not per_host and not alone:
        return "unstated hosts"
    if not alone and numbers[0] > per_host and _network_of(row["network"]) is None:
        return "unstated network"
    if _axis(row, "TP") * _axis(row, "PP") > 1 and not (_figure(row, "h") and _figure(row, "L")):
        return "unstated width or layers"
    return ""


def _number(text: str) -> float:
    """A positive number, perhaps with its unit; 0 if there is none.

    >>> _number("10,632.33"), _number("8 GPUs"), _number("-3"), _number("12-18")
    (10632.33, 8.0, 0.0, 0.0)
    """
    found = re.fullmatch(r"([\d,]*\.?\d+)\s*(?:M|GPUs?|devices?)?", text.strip(), re.IGNORECASE)
    return float(found[1].replace(",", "")) if found else 0.0


def _throughput(unit: str, value: float, count: int) -> float | None:
    """Samples, or any multiple of them, per second of all devices; None if the unit is not that of a throughput.

    >>> _throughput("img/s", 100.0, 8), _throughput("tok/sec per GPU", 100.0, 8), _throughput("ms/step", 100.0, 8)
    (100.0, 800.0, 80.0)
    >>> _throughput("hours", 100.0, 8), _throughput("TFLOPs", 100.0, 8), _throughput("TFLOP/s", 100.0, 8)
    (None, None, None)
    """
    words = re.sub(r"\s*(?:/|\bper\b)\s*", "/", unit.strip().lower())
    step = r"(?:steps?|it|its|iters?|iterations?|batch(?:es)?)"
    timed = re.fullmatch(rf"(m?)s(?:ec(?:ond)?s?)?/{step}", words)
    if timed:  # every device has a batch of its own
        return count / value * (1000 if timed[1] else 1)
    found = re.fullmatch(r"([a-z]+)/s(?:ec(?:ond)?)?(/(?:gpu|device|chip|card)s?)?", words)
    if found is None or re.search(r"flop", words):
        return None
    whole = found[2] is None and not re.fullmatch(step, found[1])
    return value * (1 if whole else count)


def _network_of(text: str) -> Link | None:
    """The network between hosts, as the planner reads it; None if its speed is not stated.

    >>> [round(found.bandwidth / 1e9, 2) for word in ("10GbE*", "50 GB/s", "1000 Mb/s") if (found := _network_of(word))]
    [1.25, 50.0, 0.12]
    """
    try:
        return Cluster.parse(f"2 hosts x 1 A100, {text.rstrip('*')}").network
    except UsageError:
        return None


@dataclass(frozen=True)
class Turned:
    """Factors on the constants that published rows have a say in, to see how much hangs on each."""

    tcp: float = 1.0
    rdma: float = 1.0
    server: float = 1.0
    spread: float = 1.0


AS_THEY_ARE = Turned()


def predicted(
    found: Iterable[Point], turned: Turned = AS_THEY_ARE, overlaps: bool | None = None
) -> list[tuple[Point, float, float]]:
    """For every row but a series' smallest: its measured and its predicted speed-up over that one.

    `overlaps` replaces what the rows say of overlap, if they say anything.
    """
    if overlaps is not None:
        found = [replace(point, row={**point.row, "overlap": "yes" if overlaps else "no"}) for point in found]
    result = []
    for _, group in groupby(sorted(found, key=lambda p: (p.series, p.num_devices)), key=lambda p: p.series):
        first, *others = list(group)
        compute = _compute(first, turned)
        at_first = first.num_devices / seconds(first, compute, turned)
        for point in others:
            fixed = re.search(r"\bgb\d+", point.row["mode"]) is not None  # one batch for any number of devices
            share = first.num_devices / point.num_devices if fixed else 1.0
            speed = point.num_devices * share / seconds(point, compute * share, turned) / at_first
            result.append((point, point.throughput / first.throughput, speed))
    return result


def turns() -> list[Turned]:
    """The constants as they are, and each by itself smaller and larger."""
    factors = [(name, factor) for name in ("tcp", "rdma", "server", "spread") for factor in (0.7, 1.4)]
    return [AS_THEY_ARE, *(Turned(**{name: factor}) for name, factor in factors)]


def left_out(found: Sequence[Point], key: Callable[[Point], Hashable]) -> tuple[float, float]:
    """The mean error on points whose group had no say in the constants, and where all groups had one.

    Constants other than the catalogue's are chosen, out of a few, if they are better on the other groups by more than
    the gain's standard error.
    """
    errors: list[list[tuple[Hashable, float]]] = []
    for turned in turns():
        errors.append([(key(point), abs(guess / measured - 1)) for point, measured, guess in predicted(found, turned)])
    groups = [group for group, _ in errors[0]]
    held = [errors[_chosen(errors, group)][index][1] for index, group in enumerate(groups)]
    return fmean(held), fmean(error for _, error in errors[_chosen(errors, None)])


def _chosen(errors: Sequence[Sequence[tuple[Hashable, float]]], without: Hashable) -> int:
    """Return which constants are the best on all groups but one."""
    best, most = 0, 0.0
    for index, found in enumerate(errors):
        gains = [first - error for (group, error), (_, first) in zip(found, errors[0], strict=True) if group != without]
        doubt = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        if sum(gains) > most and fmean(gains) > doubt:
            best, most = index, sum(gains)
    return best


def source_of(point: Point) -> str:
    """The report that a point is from."""
    return point.row["src"]


def seconds(point: Point, compute: float, turned: Turned = AS_THEY_ARE) -> float:
    """A step in which each replica computes for so long on one device, as the planner sees it."""
    count, row = point.num_devices, point.row
    mode = f"{row['system']} {row['mode']}"
    cluster = _cluster(row, count, turned)
    tensor = min(_axis(row, "TP"), count)
    stages = min(_axis(row, "PP"), count // tensor)
    replicas = count // tensor // stages
    samples = (_batch(row) or 1.0) * count / replicas
    micros = max(1, round(samples)) if stages > 1 else 1
    workload = _workload(row, compute, mode, replicas * micros)
    if tensor > 1 or stages > 1:
        workload = _split(workload, row, samples, micros)
    if "FSDP" in mode:
        return estimate(workload, cluster, StrategySpec(shards=count)).seconds
    spec = StrategySpec(replicas=replicas, tensor=tensor, stages=stages, microbatches=micros)
    if not re.search(r"\bPS\b|distributed_replicated|parameter.server", mode, re.IGNORECASE):
        return estimate(workload, cluster, spec).seconds
    whole = estimate(
        workload, cluster, spec, servers=_inside(row, cluster, count), pushers=min(count, cluster.per_host)
    )
    if cluster.hosts == 1:
        return whole.seconds
    aggregated = "distributed_replicated" in mode
    outside = _servers(row, cluster, mode, turned)
    between = estimate(workload, cluster, spec, servers=outside, pushers=cluster.hosts if aggregated else count)
    return between.seconds + (whole.communication if aggregated else 0.0)


def _compute(point: Point, turned: Turned) -> float:
    """The seconds of computing with which the smallest row comes out as it was measured, for a batch of one each."""
    measured = point.num_devices / point.throughput * (_batch(point.row) or 1.0)
    low, high = 0.05 * measured, measured * _axis(point.row, "TP") * _axis(point.row, "PP")
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(point, middle, turned) < measured else (low, middle)
    return high


def _batch(row: dict[str, str]) -> float | None:
    """Samples (or tokens) of a step on one device; None if they are not stated."""
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", row["batch_per_gpu"])]
    whole = re.search(r"\bgb(\d+)", row["mode"])
    if whole:
        numbers = [float(whole[1]) / _number(row["N"])]
    if not numbers:
        return None
    samples = sum(numbers) / len(numbers)
    length = re.search(r"\bs(\d+)", row["mode"])
    return samples * (float(length[1]) if length and row["unit"].startswith("tok") else 1.0)


def _axis(row: dict[str, str], name: str) -> int:
    """How many devices an axis of a row's mode has, such as TP in "DP2xTP4xPP4"; 1 if it does not say."""
    found = re.search(rf"{name}(\d+)", row["mode"])
    return int(found[1]) if found else 1


def _figure(row: dict[str, str], letter: str, usual: int = 0) -> int:
    """A figure in a row's mode: h for width, L for layers, s for the length of a sequence."""
    found = re.search(rf"\b{letter}(\d+)", row["mode"])
    return int(found[1]) if found else usual


def _split(workload: Workload, row: dict[str, str], samples: float, micros: int) -> Workload:
    """The workload of a transformer of which each layer has four products, and whose step has micro-batches."""
    network = workload.networks["fp32"]
    size = 4 * workload.wire * samples * _figure(row, "s", USUAL_LENGTH) * _figure(row, "h")
    products = max(1, round(4 * _figure(row, "L") / len(network.pieces)))
    pieces = [replace(piece, output=size, products=products, is_repeated=True) for piece in network.pieces]
    return replace(workload, networks={"fp32": replace(network, rows=micros, pieces=tuple(pieces))})


def _workload(row: dict[str, str], compute: float, mode: str, batch_size: int) -> Workload:
    size = _number(row["params_M"]) * 1e6 * 4
    largest = LARGEST.get(row["model"], 2048 * 1000 * 4.0)
    weights = [index + 1 for index in range(NUM_PIECES)]  # later layers of such networks have more parameters
    sizes = [(size - largest) * weight / sum(weights) for weight in weights]
    sizes[-1] += largest
    if row["model"] in ("GPT", "BERT-base"):
        width = re.search(r"\bh(\d+)", row["mode"])
        table = float(width[1]) * 51200 * 4 if width else TABLES.get(row["model"], 0.0)
        sizes = [table, *[(size - table) / (NUM_PIECES - 1)] * (NUM_PIECES - 1)]
    narrow = 0.5 if _is_half(row, mode) else 1.0
    if "FSDP" in mode:
        sizes = [size * narrow for size in sizes]
    return Workload(
        networks={"fp32": timed(compute, sizes)},
        batch_size=batch_size,
        overlaps=_overlaps(row),
        wire=narrow,
    )


def _is_half(row: dict[str, str], mode: str) -> bool:
    """Whether gradients have 16 bits: as the row says, or else for GPTs, which are trained so.

    >>> _is_half({"model": "GPT"}, "DP"), _is_half({"model": "GPT"}, "DP fp32"), _is_half({"model": "VGG16"}, "DP AMP")
    (True, False, True)
    """
    if re.search(r"\b(?:fp32|tf32)\b", mode, re.IGNORECASE):
        return False
    return row["model"] == "GPT" or re.search(r"\b(?:fp16|bf16|AMP)\b", mode, re.IGNORECASE) is not None


def _overlaps(row: dict[str, str]) -> bool:
    said = row.get("overlap", "").lower()
    return OVERLAPS if not said else said in ("yes", "true", "1")


def timed(compute: float, sizes: Sequence[float]) -> Network:
    """A network of pieces with so many bytes of parameters, whose step on a `CLOCK` takes so many seconds."""
    count = len(sizes)
    pieces = [
        NetworkPart(
            name=str(index),
            forward=PassCost(flops=compute / 3 / count),
            backward=PassCost(flops=2 * compute / 3 / count),
            param_bytes=int(size),
        )
        for index, size in enumerate(sizes)
    ]
    return Network(rows=1, pieces=tuple(pieces))


def _cluster(row: dict[str, str], count: int, turned: Turned) -> Cluster:
    words = row["gpu"].replace("-", " ").split()
    known = _device(row)
    linked = "NVLink" in words or (known.inside.startswith("NVLink") and known.name != "P100")  # most P100 are cards
    inside = known.inside if linked and "PCIe" not in words else "PCIe 3"
    per_host = min(count, int(_number(row["gpus_per_node"]))) if row["gpus_per_node"] else count
    hosts = -(-count // per_host)
    network = _network(row, turned) if hosts > 1 else None
    chip = replace(CLOCK, per_root=known.per_root if linked or known.inside == "PCIe 3" else CARDS)
    return Cluster(
        hosts=hosts, per_host=per_host, chip=chip, inside=link(inside), network=network, spread=0.02 * turned.spread
    )


def _device(row: dict[str, str]) -> Chip:
    """The catalogue's device; one that it does not have is a card."""
    words = row["gpu"].replace("-", " ").split()
    try:
        return chip(DEVICES.get(words[0], " ".join(words)))
    except (DeviceError, IndexError):
        return replace(CLOCK, inside="PCIe 3")


def _network(row: dict[str, str], turned: Turned) -> Link:
    way = _network_of(row["network"])
    assert way is not None, row  # others are left out
    return replace(way, share=way.share * (turned.tcp if way.name == "Ethernet" else turned.rdma))


def _inside(row: dict[str, str], cluster: Cluster, count: int) -> Servers:
    """Parameters in the host's memory, which devices behind one PCIe root reach together."""
    way = link("PCIe 3")
    ways = -(-min(count, cluster.per_host) // cluster.chip.per_root)
    waits = "replicated" in row["mode"]  # copies on the devices are renewed when all gradients were applied
    return Servers(count=1, hottest=1.0, way=way, task_rate=ways * way.rate, waits=waits)


def _servers(row: dict[str, str], cluster: Cluster, mode: str, turned: Turned) -> Servers:
    said = re.search(r"(\d+) PS", mode)
    count = min(int(said[1]), cluster.hosts) if said else cluster.hosts
    size = _number(row["params_M"]) * 1e6 * 4
    assert cluster.network is not None
    hottest = LARGEST.get(row["model"], 0.0) / size
    rate = Servers.task_rate * turned.server
    return Servers(count=count, hottest=hottest, way=cluster.network, waits="replicated" in mode, task_rate=rate)
