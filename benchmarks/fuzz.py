"""Fuzz every decoder: HTTP requests, tensors, gRPC messages, files, messages between hosts, settings.

`python -m benchmarks.fuzz [--seconds 60] [--only NAME] [--quick] [--keep FOLDER]`. Each target runs in a process of its
own, two at a time, guided by coverage where atheris is installed (`pip install 'manyhands[fuzz]'`). A target raises
only on a defect; what was found is named with the input, and `tests/fuzz` replays the inputs that the repository keeps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .fuzzing.engine import is_installed, targets
from .report import Check, Report

SECONDS, QUICK_SECONDS = 60.0, 1.0
START_SECONDS = 240.0
"""Until a process has imported what it fuzzes, on a busy machine."""
NUM_TARGETS = 28
"""Decoders that there are; one that is not fuzzed is missed."""


@dataclass(frozen=True)
class Found:
    """What fuzzing one target gave."""

    name: str
    count: int
    defects: tuple[str, ...]
    hangs: tuple[str, ...]


def fuzz(names: Sequence[str], seconds: float, folder: Path) -> list[Found]:
    """Fuzz targets in a process of their own: one with guidance by coverage, several without."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.fuzzing.engine", str(seconds), str(folder), *names]
    limit = START_SECONDS + 2 * seconds * len(names)
    with (folder / f"{names[0]}.log").open("wb") as log:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            status = subprocess.run(command, stdout=log, stderr=log, env=environ, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            status = -9
    return [_found(name, folder / name, status) for name in names]


def _found(name: str, folder: Path, status: int) -> Found:
    found = sorted(path.name for path in (folder / "findings").glob("*"))
    hangs = tuple(one for one in found if one.startswith(("Hang", "timeout", "slow")))
    defects = tuple(one for one in found if one not in hangs)
    count = int((folder / "count").read_text()) if (folder / "count").exists() else 0
    # A process that ended early has not written the count of the target that ended it.
    ended = (f"the process ended with {status}",) if status and not count else ()
    return Found(name, count, (*defects, *ended), hangs)


def main() -> None:
    """Fuzz the targets that the command line names, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a short look: one second for each target, without guidance by coverage"
    )
    parser.add_argument("--seconds", type=float, default=None, help="for each target")
    parser.add_argument("--only", action="append", help="the name of a target")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for corpora, findings and logs")
    given = parser.parse_args()
    seconds = given.seconds or (QUICK_SECONDS if given.quick else SECONDS)
    names = [name for name in targets() if not given.only or name in given.only]
    # Importing torch takes longer than a short look, so that half of the targets share a process then.
    groups = [names[::2], names[1::2]] if given.quick else [[name] for name in names]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        root = (given.keep or Path(temporary)).absolute()
        parts = pool.map(lambda group: fuzz(group, seconds, root), [group for group in groups if group])
        found = [one for part in parts for one in part]
    report = Report("fuzz", given.quick)
    report.notes["engine"] = "atheris" if is_installed() and not given.quick else "random mutations"
    report.notes["seconds"] = seconds
    for one in found:
        report.notes[one.name] = one.count
    for name, defects in ((one.name, [*one.defects, *one.hangs]) for one in found):
        if defects:
            report.notes[f"{name}: found"] = ", ".join(defects)
    report.checks["crashes"] = Check(value=sum(len(one.defects) for one in found), at_most=0)
    report.checks["hangs"] = Check(value=sum(len(one.hangs) for one in found), at_most=0)
    report.checks["targets"] = Check(value=sum(one.count > 0 for one in found), at_least=NUM_TARGETS)
    show(found)
    report.picture = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>\n'
    report.finish()


def show(found: list[Found]) -> None:
    """Print a line for every target."""
    table = Table("target", "inputs", "crashes", "hangs")
    for one in found:
        table.add_row(one.name, f"{one.count:,}", ", ".join(one.defects) or "none", ", ".join(one.hangs) or "none")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
