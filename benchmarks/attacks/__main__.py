"""Attacks under normal load: what an attacker reaches, and what honest clients notice.

`python -m benchmarks.attacks [--quick]`. A server with two models answers honest clients all the time, pinned to one
core; attackers and clients share the other one, the attackers at the lowest priority. Each attack by requests is
compared with a control that sends as many cheap requests in the same time, all refused for want of a token: so what
the ratio shows is what the attack costs the server beyond the connections. Then hostile models and manifests are added
to the folder that the server watches, and jobs, files and the loader are attacked by themselves.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
from torch import nn

from manyhands import verbs
from manyhands.store import export

from ..load import Ask, measuring
from ..load import Outcome as Answers
from ..report import Check, Report, arguments
from ..serve import free_port, wait_for
from . import files, models, ranks, zoo
from .outcome import Outcome
from .requests import ATTACKS, PREDICT, Target, head, send

RATE = 150.0
"""Honest requests a second."""
SECONDS, ROUNDS = 8.0, 3
QUICK = ("header_line", "tiny_chunks", "json_lists", "grpc_memory")
"""Attacks by requests that `--quick` runs."""
MIB = 1 << 20
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
        outcomes: Of the attacks meanwhile.
        requests: How many requests the attackers sent.
        growth: Bytes by which the server's resident memory exceeded what it was at the start, at most.
    """

    answers: Answers
    outcomes: list[Outcome] = field(default_factory=list)
    requests: int = 0
    growth: int = 0


def main() -> None:
    """Run all attacks, print and write the report."""
    quick = arguments(__doc__).quick
    cores = sorted(os.sched_getaffinity(0))[:2]
    report = Report("attacks", quick)
    outcomes: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as name, serving(Path(name), cores[0]) as server:
        os.sched_setaffinity(0, {cores[-1]})
        outcomes["requests"], growth = by_requests(report, server, quick)
        hostile, failed = by_models(server, quick)
        outcomes["served models"] = hostile
        os.sched_setaffinity(0, cores)
    outcomes["forged models"] = models.attempt_all()
    outcomes["ranks"] = by_ranks(quick)
    outcomes["files"] = by_files(quick)
    entries = zoo.sample() if quick else zoo.zoo()
    accepted = zoo.accepted(entries, lambda text: print(text, flush=True))
    describe(report, outcomes)
    report.notes["honest exports tried"] = len(entries)
    report.checks["other_models_affected"] = Check(value=float(failed), at_most=0)
    report.checks["server_rss_growth_mib"] = Check(value=growth / MIB, at_most=64)
    report.checks["honest_exports_accepted"] = Check(value=accepted, at_least=0.98)
    report.finish()


def by_requests(report: Report, server: Served, quick: bool) -> tuple[list[Outcome], int]:
    """Run every attack by requests beside its control; return the outcomes and the largest growth of memory."""
    attacks = [attack for attack in ATTACKS if not quick or attack.__name__ in QUICK]
    worst, growth, outcomes = 0.0, 0, list[Outcome]()
    for attack in attacks:
        name = attack.__name__
        attacked, control = list[float](), list[float]()
        for _ in range(1 if quick else ROUNDS):
            window = during(server, functools.partial(repeatedly, attack), 2.0 if quick else SECONDS)
            again = during(server, functools.partial(cheaply, window.requests), 2.0 if quick else SECONDS)
            attacked.append(window.answers.percentile(0.99))
            control.append(again.answers.percentile(0.99))
            growth = max(growth, window.growth)
            outcomes += window.outcomes
            print(f"{name}: p99 {attacked[-1] * 1e3:.1f} ms, control {control[-1] * 1e3:.1f} ms", flush=True)
        row = report.add(name, {"control": control, "attack": attacked}, "control")["attack"]
        worst = max(worst, row.ratio)
    report.checks["normal_p99_ratio"] = Check(value=worst, at_most=2.0)
    return outcomes, growth


def by_models(server: Served, quick: bool) -> tuple[list[Outcome], int]:
    """Add hostile models to the server's folder; return the outcomes and how many honest requests failed meanwhile."""
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
    engine = verbs._engine
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


def describe(report: Report, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Count what was reached, and what was refused without a reason."""
    everything = [one for found in outcomes.values() for one in found]
    escapes = [one for one in outcomes["forged models"] if one.succeeded]
    executed = [one for one in outcomes["ranks"] if one.succeeded]
    report.checks["memory_escapes"] = Check(value=float(len(escapes)), at_most=0)
    report.checks["code_executions"] = Check(value=float(len(executed)), at_most=0)
    refused = sum(one.is_refused_with_reason for one in everything)
    report.checks["refused_with_reason"] = Check(value=refused / len(everything), at_least=1.0)
    for kind, found in outcomes.items():
        report.notes[f"attacks: {kind}"] = len(found)
    for one in everything:
        if not one.is_refused_with_reason:
            report.notes[f"not refused: {one.name}"] = f"{one.reason} {one.detail}"[:300]


def during(server: Served, attack: Callable[[Target, float], tuple[list[Outcome], int]], seconds: float) -> Window:
    """Let honest clients ask for some seconds, and an attacker in another process do something meanwhile."""
    honest = Ask(port=server.target.http, path="/v1/models/neighbour:predict", body=BODY, headers=HONEST)
    running = measuring(honest, seconds=seconds, rate=RATE)
    time.sleep(0.5)
    with watching(server.pid) as memory:
        outcomes, requests = aside(functools.partial(attack, server.target, seconds - 1.0), 60.0 + seconds)
        answers = running.outcome()
    return Window(answers, outcomes, requests, memory.growth)


def aside(work: Callable[[], tuple[list[Outcome], int]], timeout: float) -> tuple[list[Outcome], int]:
    """Run something in a process of the lowest priority."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def run() -> None:
        os.nice(19)
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
    began = time.monotonic()
    for number in range(requests):
        time.sleep(max(0.0, began + seconds * number / requests - time.monotonic()))
        send(target.http, [message])
        if time.monotonic() > began + seconds:
            break
    return [], requests


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
    """Ask a model for two rows of a number; return the status and the text of a refusal."""
    url = f"http://127.0.0.1:{target.http}/v1/models/{model}:predict"
    body = json.dumps({"instances": [[number] * models.WIDTH] * 2}).encode()
    headers = {**target.headers, "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
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
    """Watch the resident memory of a process."""
    process, memory, over = psutil.Process(pid), Memory(), threading.Event()
    first = process.memory_info().rss

    def watch() -> None:
        while not over.wait(0.02):
            memory.growth = max(memory.growth, process.memory_info().rss - first)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        over.set()
        thread.join()


@contextmanager
def serving(root: Path, core: int) -> Iterator[Served]:
    """`manyhands serve` on one core, once both models answer."""
    folder = root / "models"
    made = export(nn.Identity(), lambda model, x: x + 1, {"x": torch.ones(2, 3)}, root / "made")
    for name in ("adder", "neighbour"):
        shutil.copytree(made, folder / name / "1")
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
