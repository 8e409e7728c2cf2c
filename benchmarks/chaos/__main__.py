"""Chaos: inject random faults into four systems, and check the invariants that must hold under them. Needs root.

`python -m benchmarks.chaos --minutes 10 --seed N [--quick] [--only training,study]`. A training job on three hosts, a
study, parameter servers, and servers behind two routers run one after the other. The runner injects faults of each
system's catalogue in random order, the least tried ones first. After each fault the system must work again, and must
have reported the fault. At the end its results must be those of an undisturbed system, and no process, port, file
descriptor or shared memory of it may remain. Failures are printed with the seed, and the logs are kept. The seed
decides the faults and their targets; the moment within a step or a request at which a fault hits is not repeatable.

A full run adds its figures to `benchmarks/results/chaos.json`, in place of those of the same seed and systems. The
checks are sums over all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

os.environ.setdefault("OMP_NUM_THREADS", "1")

from ..report import RESULTS, Check, Report
from .parameter_servers import ParameterServers
from .serving import Serving
from .study import Study
from .system import RECOVER_SECONDS, Broken, System, Trial
from .training import Control, HostFaults, Training

SUMMED = ("unrecovered", "wrong_samples", "wrong_answers", "lost_requests", "silent_faults", "left_behind")
SHARES = {"training": 0.1, "hosts": 0.3, "study": 0.16, "parameter servers": 0.22, "serving": 0.22}
"""Share of the time of each system; training has two jobs, the second one with faults of hosts and networks."""
_PR_SET_CHILD_SUBREAPER = 36


class Tries:
    """How often each fault hit each system, how long recovery took, and what was wrong."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.counts: dict[tuple[str, str], int] = {}
        self.problems: list[str] = []

    def add(self, system: System, trial: Trial) -> None:
        """Add the result of one fault."""
        self.seconds[system.name, trial.fault].append(trial.seconds)
        report = "" if trial.reported is None else f", reported after {trial.reported:.1f} s"
        say(f"{system.name}: {trial.fault}: works again after {trial.seconds:.1f} s{report}")

    def take(self, system: System) -> None:
        """Add the problems that a system has found."""
        for name in SUMMED:
            self.counts[system.name, name] = self.counts.get((system.name, name), 0) + system.counts[name]
        self.problems += [f"{system.name}: {text}" for text in system.problems]


def main() -> None:
    """Run the systems for their share of the time, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; 10 by default")
    parser.add_argument("--seed", type=int, default=0, help="decides the faults, their order and their targets")
    parser.add_argument("--quick", action="store_true", help="two faults for each system")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SHARES), help="only these systems")
    asked = parser.parse_args()
    if unknown := set(asked.only) - set(SHARES):
        parser.error(f"--only must name systems of {', '.join(SHARES)}, but got {', '.join(unknown)}")
    if os.geteuid():
        parser.error("hosts are network namespaces, which only root can create; run it as root")
    # The systems end with this program.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Processes whose parent was killed become children of this one, so that it can see what is left.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{asked.seed}-"))
    tries = Tries()
    began = time.monotonic()
    for make, seconds in _systems(folder, 60 * asked.minutes, asked.seed, asked.only, asked.quick):
        inject_faults(make(), seconds, tries, most=2 if asked.quick else None)
    report = Report("chaos", asked.quick, is_part=asked.quick and set(asked.only) != set(SHARES))
    for text in tries.problems:
        print(f"seed {asked.seed}: {text}", file=sys.stderr)
    if tries.problems:
        print(f"seed {asked.seed}: the logs are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    with (folder.parent / "chaos.lock").open("w") as lock:
        # Systems of one seed may run in several programs at a time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        summed(report, asked.seed, tries, time.monotonic() - began)
        report.finish()
    sys.exit(bool(tries.problems))


def _systems(
    folder: Path, seconds: float, seed: int, only: list[str], quick: bool
) -> list[tuple[Callable[[], System], float]]:
    """Return the systems with their seconds of faults."""
    control = Control(folder / "control")
    total = sum(SHARES[name] for name in only)
    share = {name: 30.0 if quick else seconds * SHARES[name] / total for name in only}
    found: list[tuple[Callable[[], System], float]] = []
    for kind in (Training, HostFaults):
        if kind.name in only:
            lot = random.Random(f"{seed} {kind.name}")
            lasts = share[kind.name]
            found.append((functools.partial(kind, folder / kind.name, lasts, lot, control), lasts))
    for each in (Study, ParameterServers, Serving):
        if each.name in only:
            place, lasts = folder / each.name.replace(" ", "-"), share[each.name]
            found.append((functools.partial(each, place, lasts, random.Random(f"{seed} {each.name}")), lasts))
    return found


def inject_faults(system: System, seconds: float, tries: Tries, most: int | None) -> None:
    """Inject faults into a system for `seconds` seconds, and check its results."""
    say(f"{system.name}: starts")
    try:
        system.open()
        end, num = time.monotonic() + seconds, 0
        while time.monotonic() < end and (most is None or num < most):
            faults = system.faults()
            least = min(len(tries.seconds[system.name, fault.name]) for fault in faults)
            fault = system.draw.choice([one for one in faults if len(tries.seconds[system.name, one.name]) == least])
            try:
                tries.add(system, system.inject(fault))
            except Broken:
                tries.seconds[system.name, fault.name].append(RECOVER_SECONDS)
                raise
            num += 1
        system.finish()
    except Broken as error:
        system.found("unrecovered", str(error))
    finally:
        system.close()
        tries.take(system)
    say(f"{system.name}: ends")


def summed(report: Report, seed: int, tries: Tries, seconds: float) -> None:
    """Write this seed's figures beside those of earlier seeds, and the checks over all of them."""
    figures: dict[str, float] = {}
    for (system, check), count in tries.counts.items():
        figures[f"{system}: minutes"] = round(seconds / 60, 1)
        figures[f"{system}: {check}"] = count
    for (system, fault), times in tries.seconds.items():
        figures[f"{system}: {fault}: tries"] = len(times)
        figures[f"{system}: {fault}: slowest seconds"] = round(max(times, default=0.0), 1)
    path = RESULTS / "chaos.json"
    others = {} if report.quick or not path.exists() else json.loads(path.read_text())["notes"]
    own = tuple(f"seed {seed}: {system}: " for system in dict.fromkeys(system for system, _ in tries.counts))
    report.notes = {name: value for name, value in others.items() if not name.startswith(own)}
    report.notes |= {f"seed {seed}: {name}": value for name, value in figures.items()}
    totals: dict[str, float] = defaultdict(float)
    for name, value in report.notes.items():
        totals[name.partition(": ")[2]] += float(value)
    pairs = {name.removesuffix(": tries"): value for name, value in totals.items() if name.endswith(": tries")}
    report.checks["faults"] = Check(value=sum(pairs.values()), at_least=None if report.quick else 100)
    report.checks["lowest_tries"] = Check(value=min(pairs.values(), default=0.0), at_least=None if report.quick else 3)
    for name in SUMMED:
        wrong = sum(value for key, value in totals.items() if key.endswith(f": {name}"))
        report.checks[name] = Check(value=wrong, at_most=0)
    report.picture = picture(pairs)


def picture(pairs: Mapping[str, float]) -> str:
    """Return a bar chart, as SVG, of how often each fault was injected into each system."""
    scale = 300 / max(pairs.values(), default=1.0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{46 + 18 * len(pairs)}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="8" y="20" font-size="14">chaos: faults that were injected</text>',
    ]
    for index, (name, value) in enumerate(sorted(pairs.items())):
        top, width = 36 + 18 * index, value * scale
        lines.append(f'<text x="300" y="{top + 11}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<rect x="308" y="{top}" width="{width:.1f}" height="14" fill="#4878a8"/>')
        lines.append(f'<text x="{312 + width:.1f}" y="{top + 11}">{value:.0f}</text>')
    return "\n".join([*lines, "</svg>\n"])


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
