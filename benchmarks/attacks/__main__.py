"""Attacks under normal load: what an attacker reaches, and what honest clients notice.

`python -m benchmarks.attacks [--quick] [--only NAME ...]`. A server with two models answers honest clients all the
time, pinned to one core; attackers and clients share the other one. Attackers have all of its time that the clients
leave: so they send as fast as one core can, and a client that is late was not kept waiting by them. Each attack by
requests is compared with a control that sends as many cheap requests in the same time, all refused for want of a token:
a connection, a call over gRPC and a pipelined request count as one request each. Where one core cannot send so many of
them, each on its own connection, the control sends as many as it can. Then hostile models and
manifests are added to the folder that the server watches, and jobs, files and the loader are attacked by themselves.

`--only` runs some of the attacks by requests, or the parts `models`, `forged`, `ranks`, `files` and `exports`, and
replaces what the result file has about them; the other figures of that file stay.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
from torch import nn

from manyhands.api.runtime import runtime
from manyhands.serving.grpc_process import NAME as GRPC_PROCESS
from manyhands.serving.scheduling import step_aside
from manyhands.storage import export

from ..load import Ask, at_share, measuring
from ..load import Outcome as Answers
from ..report import RESULTS, Check, Report, Row
from ..serve import free_port, wait_for
from . import files, models, ranks, zoo
from .outcome import Outcome
from .requests import ATTACKS, PREDICT, Target, head, send

RATE = 150.0
"""Honest requests a second."""
SECONDS, ROUNDS = 6.0, 3
QUICK = ("header_line", "tiny_chunks", "json_lists", "grpc_memory")
"""Attacks by requests that `--quick` runs."""
NAMES = [attack.__name__ for attack in ATTACKS]
PARTS = ("models", "forged", "ranks", "files", "exports")
MIB = 1 << 20
NICENESS = 10
"""Of attackers: they yield to the clients beside them, whose latency is measured."""
HOSTILE: dict[str, tuple[Callable[[Path], Path], float]] = {
    "wrong_shape": (models.wrong_shape, 1.0),
    "wrong_dtype": (models.wrong_dtype, 1.0),
    "raises": (models.raises, 100.0),
    "allocates": (models.allocates, 4e10),
    "computes_long": (models.computes_long, 6000.0),
}
"""Models that are added to a running server, and the number with which each is asked."""
AGAINST_JOBS = (ranks.impersonate_rank, ranks.preset_store_keys, ranks.inject_into_listeners, ranks.fuzz_ports)
AGAINST_MESSAGES = (ranks.replay_message, ranks.flip_bits, ranks.fill_join_port)
TOKENS = {"MANYHANDS_TOKEN": "asking", "MANYHANDS_MANAGE_TOKEN": "managing"}
Attack = Callable[[Target], Outcome]


@dataclass
class Served:
    """A server in a process of its own.

    Attributes:
        pid: Its process.
        target: Its ports and tokens.
        folder: The models that it watches.
    """

    pid: int
    target: Target
    folder: Path


@dataclass
class Window:
    """What happened while honest clients asked for some seconds.

    Attributes:
        answers: What the clients got.
        outcomes: Of the attacks of this run.
        requests: How many requests the attackers sent.
        growth: Bytes by which the server's resident memory exceeded what it was at the start, at most.
    """

    answers: Answers
    outcomes: list[Outcome] = field(default_factory=list)
    requests: int = 0
    growth: int = 0


def main() -> None:
    """Run all attacks, or some of them, print and write the report."""
    options = arguments()
    quick, chosen = options.quick, set(options.only or [*NAMES, *PARTS])
    report = Report("attacks", quick)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if chosen & {"models", *NAMES}:
        with tempfile.TemporaryDirectory() as name, serving(Path(name), cores[0]) as server:
            os.sched_setaffinity(0, {cores[-1]})
            by_requests(report, server, quick, chosen)
            if "models" in chosen:
                hostile, failed = by_models(server, quick)
                note(report, "models", hostile, failed=failed)
            os.sched_setaffinity(0, cores)
    if "forged" in chosen:
        note(report, "forged", models.attempt_all())
    if "ranks" in chosen:
        note(report, "ranks", by_ranks(quick))
    if "files" in chosen:
        note(report, "files", by_files(quick))
    if "exports" in chosen:
        entries = zoo.sample() if quick else zoo.zoo()
        report.notes["exports.accepted"] = zoo.accepted(entries, lambda text: print(text, flush=True))
        report.notes["exports.tried"] = len(entries)
    if options.only:
        keep_others(report, chosen)
    conclude(report)
    report.finish()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short look: few attacks, one short round each")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[*NAMES, *PARTS], help="attacks and parts to run; the others stay"
    )
    return parser.parse_args()


def keep_others(report: Report, chosen: Collection[str]) -> None:
    """Take from the result file what it has about attacks and parts that do not run now."""
    path = RESULTS / ("attacks.quick.json" if report.quick else "attacks.json")
    if path.exists():
        found = json.loads(path.read_text())
        report.rows += [Row(**row) for row in found["rows"] if row["case"] not in chosen]
        rest = found.get("notes", {}).items()
        report.notes.update({name: value for name, value in rest if name.partition(".")[0] not in chosen})


def by_requests(report: Report, server: Served, quick: bool, chosen: Collection[str]) -> None:
    """Run attacks by requests, each beside its control."""
    seconds = 2.0 if quick else SECONDS
    for attack in ATTACKS:
        name = attack.__name__
        if name not in chosen or (quick and name not in QUICK):
            continue
        attacked, control = list[Window](), list[Window]()
        for _ in range(1 if quick else ROUNDS):
            attacked.append(during(server, functools.partial(repeatedly, attack), seconds))
            control.append(during(server, functools.partial(cheaply, attacked[-1].requests), seconds))
            print(f"{name}: {shown(attacked[-1])}; control {shown(control[-1])}", flush=True)
        times = {
            kind: [window.answers.percentile(0.99) for window in windows]
            for kind, windows in (("control", control), ("attack", attacked))
        }
        report.add(name, times, "control")
        figures = {
            "growth_mib": max(window.growth for window in attacked) / MIB,
            "requests_per_second": median(window.requests for window in attacked) / seconds,
            "control_per_second": median(window.requests for window in control) / seconds,
            "client_late_p99_ms": 1e3 * median(at_share(window.answers.late, 0.99) for window in attacked),
        }
        note(report, name, [one for window in attacked for one in window.outcomes], **figures)


def shown(window: Window) -> str:
    """A line about a window."""
    late = at_share(window.answers.late, 0.99) * 1e3
    p99 = window.answers.percentile(0.99) * 1e3
    return f"p99 {p99:.1f} ms (sent {late:.1f} ms late), {window.requests} requests"


def by_models(server: Served, quick: bool) -> tuple[list[Outcome], int]:
    """Add hostile models to the server's folder; return the outcomes and the number of honest requests that failed."""
    outcomes, failed = list[Outcome](), 0
    for name in ("raises",) if quick else HOSTILE:
        window = during(server, functools.partial(adding, name, server.folder), 4.0 if quick else SECONDS)
        failed += sum(num for code, num in window.answers.codes.items() if code != 200)
        outcomes += window.outcomes
    if not quick:
        answers = functools.partial(answers_well, server.target)
        outcomes += files.attack_models(server.folder, answers, functools.partial(reason_of, server.target))
    return outcomes, failed


def by_ranks(quick: bool) -> list[Outcome]:
    """Attack jobs of two ranks, and the port where hosts join."""
    engine = runtime.engine
    engine.warm_up()
    try:
        outcomes = [attack(engine) for attack in (AGAINST_JOBS[:1] if quick else AGAINST_JOBS)]
    finally:
        engine.close()
    return outcomes + [attack() for attack in AGAINST_MESSAGES]


def by_files(quick: bool) -> list[Outcome]:
    """Damage checkpoints, and where there is time show hostile runs to a dashboard."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        outcomes = files.attack_checkpoints(root / "checkpoints")
        if not quick:
            with dashboard(root / "runs") as url:
                outcomes += files.attack_dashboard(root / "runs", url)
    return outcomes


def note(report: Report, name: str, outcomes: Sequence[Outcome], **figures: float) -> None:
    """Count what was reached and what was refused, and name what was refused without a reason."""
    counts = {
        "attacks": len(outcomes),
        "refused": sum(one.is_refused_with_reason for one in outcomes),
        "succeeded": sum(one.succeeded for one in outcomes),
    }
    for what, value in {**counts, **figures}.items():
        report.notes[f"{name}.{what}"] = round(float(value), 3)
    for one in outcomes:
        if not one.is_refused_with_reason:
            report.notes[f"{name}.not refused: {one.name}"] = f"{one.reason} {one.detail}"[:300]


def conclude(report: Report) -> None:
    """Compare all figures that there are with their bars."""
    notes = report.notes

    def every(what: str) -> list[float]:
        return [float(value) for name, value in notes.items() if name.endswith(f".{what}")]

    ratios = [row.ratio for row in report.rows if row.name == "attack"]
    report.checks["normal_p99_ratio"] = Check(value=max(ratios, default=0.0), at_most=2.0)
    report.checks["server_rss_growth_mib"] = Check(value=max(every("growth_mib"), default=0.0), at_most=64)
    report.checks["refused_with_reason"] = Check(value=sum(every("refused")) / sum(every("attacks")), at_least=1.0)
    for check, name in (
        ("other_models_affected", "models.failed"),
        ("memory_escapes", "forged.succeeded"),
        ("code_executions", "ranks.succeeded"),
    ):
        if name in notes:
            report.checks[check] = Check(value=float(notes[name]), at_most=0)
    if "exports.accepted" in notes:
        report.checks["honest_exports_accepted"] = Check(value=float(notes["exports.accepted"]), at_least=0.98)


def during(server: Served, attack: Callable[[Target, float], tuple[list[Outcome], int]], seconds: float) -> Window:
    """Let honest clients send requests for some seconds while another process attacks."""
    honest = Ask(port=server.target.http, path="/v1/models/neighbour:predict", body=BODY, headers=HONEST)
    running = measuring(honest, seconds=seconds, rate=RATE)
    time.sleep(0.5)
    with watching(server.pid) as memory:
        outcomes, requests = aside(functools.partial(attack, server.target, seconds - 1.0), 60.0 + seconds)
        answers = running.outcome()
    return Window(answers, outcomes, requests, memory.growth)


def aside(work: Callable[[], tuple[list[Outcome], int]], timeout: float) -> tuple[list[Outcome], int]:
    """Run something in a process that has the time which clients leave."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def run() -> None:
        step_aside(NICENESS)
        sending.send(work())

    process = context.Process(target=run)
    process.start()
    try:
        if not receiving.poll(timeout):
            raise RuntimeError(f"an attack did not end within {timeout:.0f} s")
        outcomes, requests = receiving.recv()
    finally:
        process.kill()
        process.join()
    return outcomes, requests


def repeatedly(attack: Attack, target: Target, seconds: float) -> tuple[list[Outcome], int]:
    """Attack again and again."""
    until = time.monotonic() + seconds
    outcomes = [attack(target)]
    while time.monotonic() < until:
        outcomes.append(attack(target))
    return outcomes, sum(int(one.detail.get("requests", 1)) for one in outcomes)


def cheaply(requests: int, target: Target, seconds: float) -> tuple[list[Outcome], int]:
    """Send as many requests without a token, evenly over the time; they are refused at once."""
    message = head("POST", PREDICT, {"Host": "localhost", "Content-Length": "2"}) + b"{}"
    began, sent = time.monotonic(), 0
    while sent < requests and time.monotonic() < began + seconds:
        time.sleep(max(0.0, began + seconds * sent / requests - time.monotonic()))
        send(target.http, [message])
        sent += 1
    return [], sent


def adding(name: str, folder: Path, target: Target, seconds: float) -> tuple[list[Outcome], int]:
    """Publish a hostile model and ask it for some seconds: it must be refused, or fail, with a reason."""
    build, number = HOSTILE[name]
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside_name:
        version = build(Path(aside_name) / "made")
        model = folder / f"hostile-{name.replace('_', '-')}"
        model.mkdir()
        version.rename(model / "1")
    until, reason, requests, answered = time.monotonic() + seconds, "", 0, False
    while time.monotonic() < until:
        reason = reason or reason_of(target, model.name)
        answer = ask(target, model.name, number)
        answered = answered or answer[0] == 200
        reason = reason or (answer[1] if answer[0] >= 500 else "")
        requests += 1
        time.sleep(0.2)
    shutil.rmtree(model)
    return [Outcome(f"served_{name}", succeeded=answered, reason=reason)], requests


def ask(target: Target, model: str, number: float) -> tuple[int, str]:
    """Ask a model for two rows of a number; return the status and the text of a refusal.

    The client waits longer than the server, whose timeout is 30 seconds, so that it reads the reason.
    """
    url = f"http://127.0.0.1:{target.http}/v1/models/{model}:predict"
    body = json.dumps({"instances": [[number] * models.WIDTH] * 2}).encode()
    headers = {**target.headers, "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")[:300]
    except OSError as error:
        return 0, str(error)


def answers_well(target: Target) -> bool:
    """Whether the honest model answers."""
    message = head(
        "POST", "/v1/models/neighbour:predict", {**HONEST, "Host": "localhost", "Content-Length": str(len(BODY))}
    )
    return send(target.http, [message + BODY]).status == 200


def reason_of(target: Target, model: str) -> str:
    """Return the error that the server reports for a model; empty while it reports none."""
    request = urllib.request.Request(f"http://127.0.0.1:{target.http}/v1/models/{model}", headers=target.headers)
    with suppress(OSError, ValueError, KeyError), urllib.request.urlopen(request, timeout=10) as answer:
        found = json.load(answer)["model_version_status"]
        return next((one["status"]["error_message"] for one in found if one["status"]["error_message"]), "")
    return ""


@dataclass
class Memory:
    """How far a process grew beyond its first size."""

    growth: int = 0


@contextmanager
def watching(pid: int) -> Iterator[Memory]:
    """Watch the resident memory of a server: its process, and that for gRPC."""
    server = psutil.Process(pid)
    processes = [server, *(child for child in server.children(recursive=True) if child.name() == GRPC_PROCESS)]
    memory, over = Memory(), threading.Event()
    first = sum(process.memory_info().rss for process in processes)

    def watch() -> None:
        while not over.wait(0.02):
            memory.growth = max(memory.growth, sum(process.memory_info().rss for process in processes) - first)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        over.set()
        thread.join()


@contextmanager
def serving(root: Path, core: int) -> Iterator[Served]:
    """`manyhands serve` on one core, once its models answer; `free` takes rows of any length."""
    folder = root / "models"
    made = export(nn.Identity(), lambda model, x: x + 1, {"x": torch.ones(2, 3)}, root / "made")
    for name in ("adder", "neighbour"):
        shutil.copytree(made, folder / name / "1")
    rows = {"x": torch.ones(2, 3)}
    free = export(nn.Identity(), lambda model, x: 2 * x, rows, root / "made-free", free={"x": [1]})
    shutil.copytree(free, folder / "free" / "1")
    ports = {name: free_port() for name in ("http", "grpc", "manage")}
    where = [f"--{name}={port}" for name, port in ports.items()]
    command = [sys.executable, "-m", "manyhands", "serve", str(folder), "--probation=0", "--quiet", *where]
    process = subprocess.Popen(
        command, env={**os.environ, **TOKENS}, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    try:
        for name in ("adder", "neighbour"):
            wait_for(Ask(port=ports["http"], path=f"/v1/models/{name}:predict", body=BODY, headers=HONEST))
        asking, managing = TOKENS.values()
        target = Target(**ports, token=asking, manage_token=managing)
        yield Served(process.pid, target, folder)
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def dashboard(root: Path) -> Iterator[str]:
    """`manyhands dashboard` over a folder of runs; its address."""
    root.mkdir()
    port = free_port()
    command = [sys.executable, "-m", "manyhands", "dashboard", str(root), f"--port={port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(300):
            with suppress(OSError), urllib.request.urlopen(f"{url}api/overview", timeout=5):
                break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


BODY = json.dumps({"instances": [[1.0, 2.0, 3.0]] * 4}).encode()
HONEST = {"Authorization": f"Bearer {TOKENS['MANYHANDS_TOKEN']}"}


if __name__ == "__main__":
    main()
