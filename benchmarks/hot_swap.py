"""Hot swaps: versions that take over under constant load, one after the other.

`python -m benchmarks.hot_swap [--quick]`. Version k answers with its input plus k, so an answer shows which version
gave it, and whether one alone did. Beside it a second model is asked all the time that never changes. The server is a
process of its own, and versions are written beforehand: what is measured is loading and taking over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyhands.storage import export

from .load import Ask, Outcome, measuring
from .report import Check, Report, arguments
from .serve import free_port, wait_for

RATE = 100.0
"""Requests a second to each of the two models."""
PERIOD = 2.0
"""Seconds between two versions."""
MODELS = ("swapped", "neighbour")


class Adder(nn.Module):
    """x + k, with some megabytes of weights beside it to load."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(1.0))
        self.ballast = nn.Parameter(torch.zeros(1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.k + 0 * self.ballast.sum()


def main() -> None:
    """Asks while nothing changes, then while versions come."""
    quick = arguments(__doc__).quick
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    num_swaps = 5 if quick else 100
    report = Report("hot_swap", quick)
    with tempfile.TemporaryDirectory() as name:
        models = Path(name) / "models"
        first = export(Adder(), lambda model, x: model(x), {"x": torch.ones(2, 8)}, models / "swapped")
        shutil.copytree(first, models / "neighbour" / "1")
        versions = [written(first, number) for number in range(2, num_swaps + 2)]
        with serving(models) as server:
            port = server.http
            steady = asked(port, 8.0 if quick else 40.0)
            swapped = asked(port, PERIOD * (num_swaps + 1), lambda: swap(port, first.parent, versions, PERIOD))
    outcomes = {
        "steady": steady["swapped"],
        "swaps": swapped["swapped"],
        "steady neighbour": steady["neighbour"],
        "neighbour": swapped["neighbour"],
    }
    describe(report, outcomes)
    for model in MODELS:
        times = {name: percentiles(found[model]) for name, found in (("steady", steady), ("swaps", swapped))}
        report.add(f"percentiles of {model}", times, "steady")
    report.notes["swaps"] = num_swaps
    for check, model, bar in (("p99_over_steady", "swapped", 2.0), ("neighbour_p99", "neighbour", 1.5)):
        slower = swapped[model].percentile(0.99) / steady[model].percentile(0.99)
        report.checks[check] = Check(value=slower, at_most=bar)
    report.finish()


@dataclass(frozen=True)
class Served:
    """A server in a process of its own."""

    pid: int
    http: int
    grpc: int


@contextmanager
def serving(models: Path, *options: str) -> Iterator[Served]:
    """`manyhands serve`, once it answers for both models."""
    ports = {name: free_port() for name in ("http", "grpc", "manage")}
    where = [f"--{name}={port}" for name, port in ports.items()]
    command = [sys.executable, "-m", "manyhands", "serve", str(models), "--probation=0", "--quiet", *where, *options]
    process = subprocess.Popen(command)
    try:
        for model in MODELS:
            wait_for(question(ports["http"], model))
        yield Served(process.pid, ports["http"], ports["grpc"])
    finally:
        process.terminate()
        process.wait(60)


def percentiles(outcome: Outcome) -> list[float]:
    """The times of answers, from the fastest hundredth to the slowest."""
    return [outcome.percentile(share / 100) for share in range(1, 100)]


def describe(report: Report, outcomes: Mapping[str, Outcome]) -> None:
    """Latencies, and whether anything was lost or mixed."""
    for name, outcome in outcomes.items():
        report.notes[f"{name} p50 ms"] = round(1000 * outcome.percentile(0.5), 3)
        report.notes[f"{name} p99 ms"] = round(1000 * outcome.percentile(0.99), 3)
        report.notes[f"{name} answers"] = outcome.codes.get(200, 0)
    failed = sum(num for outcome in outcomes.values() for code, num in outcome.codes.items() if code != 200)
    report.checks["failed"] = Check(value=float(failed), at_most=0)
    report.checks["mixed"] = Check(value=float(sum(outcome.mixed for outcome in outcomes.values())), at_most=0)


def question(port: int, model: str) -> Ask:
    """Four rows that are answered with one number."""
    body = json.dumps({"instances": [[0.0] * 8] * 4}).encode()
    return Ask(port=port, path=f"/v1/models/{model}:predict", body=body)


def asked(port: int, seconds: float, during: Callable[[], None] | None = None) -> dict[str, Outcome]:
    """What became of requests to both models, while something else happens."""
    running = {model: measuring(question(port, model), seconds=seconds, rate=RATE, alike=True) for model in MODELS}
    if during is not None:
        during()
    return {model: one.outcome() for model, one in running.items()}


def swap(port: int, model: Path, versions: Sequence[Path], period: float) -> None:
    """Publishes a version every so many seconds, and sees that each takes over."""
    for version in versions:
        due = time.monotonic() + period
        version.rename(model / version.name[1:])
        while current(port) != int(version.name[1:]):
            time.sleep(0.1)
            if time.monotonic() > due + 30:
                raise RuntimeError(f"version {version.name[1:]} did not take over")
        time.sleep(max(0.0, due - time.monotonic()))


def current(port: int) -> int:
    """The newest version that answers."""
    with urlopen(f"http://127.0.0.1:{port}/v1/models/swapped") as answer:
        found = json.load(answer)["model_version_status"]
    return max((int(one["version"]) for one in found if one["state"] == "AVAILABLE"), default=0)


def written(first: Path, number: int) -> Path:
    """The first version with another k, beside the place where it will be published."""
    aside = first.parent.parent / f".{number}"
    shutil.copytree(first, aside)
    path = aside / "weights.safetensors"
    weights = load_file(path)
    save_file({name: torch.full_like(w, number) if w.dim() == 0 else w for name, w in weights.items()}, path)
    manifest = json.loads((aside / "manifest.json").read_text())
    data = path.read_bytes()
    manifest["files"][path.name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (aside / "manifest.json").write_text(json.dumps(manifest))
    return aside


if __name__ == "__main__":
    main()
