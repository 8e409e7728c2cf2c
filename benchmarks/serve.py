"""Serving: requests per second and latencies on two cores, against LitServe, BentoML, Ray Serve, MLServer and Triton.

`python -m benchmarks.serve [--quick]`. The same small network everywhere, rows of 784 numbers as JSON or as bytes, 32
connections that wait for their answers; servers take turns in rounds, asked by our own generator and, where it is
installed, by wrk. Then the same with a network that takes milliseconds; of it, three times as many requests as it can
answer, and two replicas against one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import manyhands as mh
from manyhands.core import from_flat
from manyhands.distributed import resolve
from manyhands.serving import Batching, Listen, Replicas, Rollout, Router, Server
from manyhands.storage import export

from .load import Ask, Outcome, at_share, measure
from .peers import triton_server
from .report import Check, Report, arguments, interleaved
from .serving_works import CHOICE, MAX_ROWS, ROW, WORKS

ROOT = Path(__file__).parents[1]
PEERS = {
    ".peers-serving": "serving_peers.txt",
    ".peers-serving-v2": "serving_peers_v2.txt",
    triton_server.FOLDER.name: triton_server.REQUIREMENTS.name,
}
"""Environments and what is in them: peers that do not go together live apart."""
ROWS = np.random.default_rng(0).random((1, ROW), np.float32)
OURS = "manyhands"


def main() -> None:
    """Measures all cases."""
    quick = arguments(__doc__).quick
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    report = Report("serve", quick)
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        for work, make in WORKS.items():
            export(make(), lambda model, x: model(x), {"x": torch.from_numpy(ROWS)}, models / work)
        throughput(report, models, quick)
        if not quick:
            convolutions(report, models, 3.0, 4)
        overload(report, models, 2.5 if quick else 8.0, 1 if quick else 3)
        replicas(report, models, 2.0 if quick else 2.5, 1 if quick else 7)
    report.finish()


def throughput(report: Report, models: Path, quick: bool) -> None:
    """Seconds per request, in rounds."""
    seconds, rounds = (1.5, 3) if quick else (3.5, 8)
    with serving(models, "cpu") as server, peers(quick, "mlp") as asks:
        contenders: dict[str, Callable[[], float]] = {
            f"{OURS} JSON": asking(as_json(server, "mlp"), seconds),
            f"{OURS} binary": asking(as_bytes(server, "mlp"), seconds),
            f"{OURS} JSON again": asking(as_json(server, "mlp"), seconds),
            **{name: asking(ask, seconds) for name, ask in asks.items()},
        }
        times = interleaved(contenders, rounds)
        baseline = "litserve JSON" if "litserve JSON" in times else f"{OURS} JSON"
        rows = report.add("small network, 32 connections", times, baseline)
        rates = {name: 1 / median(values) for name, values in times.items()}
        report.notes.update({f"{name} requests/s": round(rate, 1) for name, rate in rates.items()})
        same = {name: ask for name, ask in asks.items() if name.startswith("litserve")}
        by_wrk(
            report,
            {f"{OURS} JSON": as_json(server, "mlp"), f"{OURS} binary": as_bytes(server, "mlp"), **same},
            *((1, 1) if quick else (3, 3)),
        )
        over_bare(report, as_json(server, "mlp"), 1.0 if quick else 3.0)
        if asks:
            texts = {name: ask for name, ask in asks.items() if "JSON" in name}
            at_half(report, as_json(server, "mlp"), texts, rates)
    if not asks:
        return
    report.checks["json_over_litserve"] = Check(value=1 / rows[f"{OURS} JSON"].ratio, at_least=10)
    report.checks["binary_over_litserve"] = Check(value=1 / rows[f"{OURS} binary"].ratio, at_least=15)
    best = max(rate for name, rate in rates.items() if name in asks and "JSON" in name)
    report.checks["json_over_best_python_peer"] = Check(value=rates[f"{OURS} JSON"] / best, at_least=1.5)


def convolutions(report: Report, models: Path, seconds: float, rounds: int) -> None:
    """The same with a network whose computing matters, in batches of one size everywhere; ours over each peer."""
    with serving(models, "cpu", max_rows=MAX_ROWS["cnn"]) as server, peers(False, "cnn") as asks:
        contenders = {
            f"{OURS} JSON": asking(as_json(server, "cnn"), seconds),
            f"{OURS} binary": asking(as_bytes(server, "cnn"), seconds),
            f"{OURS} JSON again": asking(as_json(server, "cnn"), seconds),
            **{name: asking(ask, seconds) for name, ask in asks.items()},
        }
        times = interleaved(contenders, rounds)
    report.add("a network of milliseconds, 32 connections", times, f"{OURS} JSON")
    for name, values in times.items():
        report.notes[f"cnn: {name} requests/s"] = round(1 / median(values), 1)
    for name in asks:
        ours = times[f"{OURS} JSON" if "JSON" in name else f"{OURS} binary"]
        ratio = median(theirs / own for theirs, own in zip(times[name], ours, strict=True))
        report.notes[f"cnn: {OURS} over {name}"] = round(ratio, 3)


def over_bare(report: Report, ask: Ask, seconds: float) -> None:
    """The time of a request without queueing, and the model's own part of it."""
    model, rows, times = WORKS["mlp"](), torch.from_numpy(ROWS), []
    with torch.inference_mode():
        for _ in range(2000):
            began = time.perf_counter()
            model(rows)
            times.append(time.perf_counter() - began)
    alone = measure(ask, seconds=seconds, connections=1)
    report.notes["bare call of the small network, µs"] = round(1e6 * median(times), 1)
    report.notes[f"{OURS} JSON, one connection, p50 µs"] = round(1e6 * alone.percentile(0.5), 1)


def by_wrk(report: Report, asks: Mapping[str, Ask], seconds: int, rounds: int) -> None:
    """A closed loop from an independent load generator."""
    if shutil.which("wrk") is None:
        report.notes["by wrk"] = "left out: wrk is not installed (apt-get install wrk)"
        return
    times = interleaved({name: partial(wrk, ask, seconds) for name, ask in asks.items()}, rounds)
    report.add("small network, 32 connections of wrk", times, list(times)[-1])
    for name, values in times.items():
        report.notes[f"{name} by wrk, requests/s"] = round(1 / median(values), 1)


def wrk(ask: Ask, seconds: int) -> float:
    """Seconds per good answer of one thread of wrk with 32 connections; every answer must be one."""
    with tempfile.TemporaryDirectory() as name:
        body, script = Path(name) / "body", Path(name) / "ask.lua"
        body.write_bytes(ask.body)
        headers = {"Content-Type": "application/json", **ask.headers}
        lines = ['wrk.method = "POST"', f"wrk.body = io.open({json.dumps(str(body))}, 'rb'):read('*a')"]
        lines += [f"wrk.headers[{json.dumps(key)}] = {json.dumps(value)}" for key, value in headers.items()]
        script.write_text("\n".join(lines))
        url = f"http://127.0.0.1:{ask.port}{ask.path}"
        command = ["wrk", "--threads=1", "--connections=32", f"--duration={seconds}s", f"--script={script}", url]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = re.search(r"Requests/sec:\s*([\d.]+)", found)
    if rate is None or "Non-2xx" in found or "Socket errors" in found:
        raise RuntimeError(f"answers of {ask.path} to wrk: {found}")
    return 1 / float(rate[1])


def at_half(report: Report, ours: Ask, asks: Mapping[str, Ask], rates: Mapping[str, float]) -> None:
    """Latencies in an open loop at half of what each peer can do, ours at the same rate, and at our own half."""
    worst = 0.0
    for name, ask in asks.items():
        theirs, same = (measure(one, seconds=3.0, rate=rates[name] / 2, connections=64) for one in (ask, ours))
        worst = max(worst, same.percentile(0.99) / theirs.percentile(0.99))
        note_times(report, f"{name} at half load", theirs)
        note_times(report, f"{OURS} JSON at that load of {name}", same)
    own = measure(ours, seconds=3.0, rate=rates[f"{OURS} JSON"] / 2, connections=64)
    note_times(report, f"{OURS} JSON at half load", own)
    report.checks["p99_over_peers"] = Check(value=worst, at_most=1)


def note_times(report: Report, what: str, found: Outcome) -> None:
    """The median and the slowest hundredth."""
    for percent in (50, 99):
        report.notes[f"{what}, p{percent} ms"] = round(1000 * found.percentile(percent / 100), 2)


def overload(report: Report, models: Path, seconds: float, rounds: int) -> None:
    """Three times as many requests as can be answered: good answers, how fast refusals come, and what is left of it."""
    with serving(models, "cpu", max_rows=MAX_ROWS["cnn"], queue_rows=64) as server:
        ask = as_bytes(server, "cnn")
        measure(ask, seconds=1.0, connections=64)
        peaks, floods = [], []
        for _ in range(rounds):
            peaks.append(measure(ask, seconds=seconds, connections=64))
            calm = measure(ask, seconds=seconds, rate=peaks[-1].rate / 2)
            floods.append(measure(ask, seconds=seconds, connections=512, rate=3 * peaks[-1].rate))
            ended = time.monotonic()
        recovery = recovered(ask, peaks[-1].rate / 2, 2 * calm.percentile(0.99)) - ended
    goodput = median(flood.rate / peak.rate for flood, peak in zip(floods, peaks, strict=True))
    refusal = median(at_share(flood.refusals, 0.99) for flood in floods)
    report.checks["overload_goodput"] = Check(value=goodput, at_least=0.9)
    report.checks["refusal_p99_ms"] = Check(value=1000 * refusal, at_most=50)
    report.checks["recovery_seconds"] = Check(value=recovery, at_most=5)
    codes = sum((Counter(flood.codes) for flood in floods), Counter())
    report.notes.update(
        {
            "cnn peak requests/s": round(median(peak.rate for peak in peaks), 1),
            "overload refused": codes[503],
            "overload other failures": sum(num for code, num in codes.items() if code not in (200, 503)),
            "p99 ms at half load before overload": round(1000 * calm.percentile(0.99), 2),
        }
    )


def recovered(ask: Ask, rate: float, slowest: float) -> float:
    """When a second began in which every request was answered, about as fast as before; infinite where none did."""
    for _ in range(20):
        began = time.monotonic()
        found = measure(ask, seconds=1.0, rate=rate)
        if set(found.codes) == {200} and found.percentile(0.99) <= slowest:
            return began
    return math.inf


def replicas(report: Report, models: Path, seconds: float, rounds: int) -> None:
    """Two replicas over one, as a share of what two processes that know nothing of each other reach; in rounds.

    Beside them two servers of one replica each, behind a router.
    """
    devices = resolve("cpu*2")[0]
    with (
        serving(models, devices[:1], max_rows=MAX_ROWS["cnn"]) as one,
        serving(models, devices[1:], max_rows=MAX_ROWS["cnn"]) as other,
        serving(models, devices, max_rows=MAX_ROWS["cnn"]) as two,
        mh.route(
            [f"127.0.0.1:{s.grpc}/{s.http}/{s.manage}" for s in (one, other)],
            listen=mh.serving.Listen(http=0, grpc=0, manage=0),
        ) as router,
    ):
        contenders: dict[str, Callable[[], float]] = {
            "one replica": asking(as_bytes(one, "cnn", rows=16), seconds, connections=8),
            "two replicas": asking(as_bytes(two, "cnn", rows=16), seconds, connections=8),
            "two servers behind a router": asking(as_bytes(router, "cnn", rows=16), seconds, connections=8),
            "one process": lambda: 1 / bare(1, seconds),
            "two processes": lambda: 1 / bare(2, seconds),
        }
        times = interleaved(contenders, rounds)
    report.add("a network of milliseconds, batches of 16", times, "one process")
    gains = {
        kind: median(one / two for one, two in zip(times[f"one {kind}"], times[f"two {many}"], strict=True))
        for kind, many in (("replica", "replicas"), ("process", "processes"))
    }
    routed = zip(times["one replica"], times["two servers behind a router"], strict=True)
    report.notes["two servers behind a router over one"] = round(median(one / two for one, two in routed), 3)
    report.notes["two replicas over one"] = round(gains["replica"], 3)
    report.notes["two processes over one"] = round(gains["process"], 3)
    report.checks["two_replicas_of_ceiling"] = Check(value=gains["replica"] / gains["process"], at_least=0.9)


def bare(num: int, seconds: float) -> float:
    """Batches per second of so many processes with a core each, the network called in a loop."""
    program = (
        "import os, sys, time, torch; from benchmarks.serving_works import cnn;"
        "core = sorted(os.sched_getaffinity(0))[int(sys.argv[1])]; os.sched_setaffinity(0, {core});"
        "torch.set_num_threads(1); model = cnn(); rows = torch.rand(16, 784); n = 0;"
        "torch.inference_mode().__enter__(); [model(rows) for _ in range(3)]; end = time.time() + float(sys.argv[2])\n"
        "while time.time() < end: model(rows); n += 1\n"
        "print(n)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(i), str(seconds)], cwd=ROOT, stdout=subprocess.PIPE)
        for i in range(num)
    ]
    return sum(int(process.communicate()[0]) for process in processes) / seconds


@contextmanager
def serving(models: Path, on: object, **settings: object) -> Iterator[Server]:
    """Our server, with every feature on."""
    kinds = (Listen, Batching, Rollout, Replicas)
    listen, batching, rollout, replicas = from_flat(kinds, {"http": 0, "grpc": 0, "manage": 0, **settings})
    log = models.parent / f"log-{time.time_ns()}"
    groups = {"listen": listen, "batching": batching, "rollout": rollout, "replicas": replicas, "log": log}
    with mh.serve(models, on=on, **groups) as server:  # type: ignore[arg-type]
        yield server


def as_json(server: Server, model: str) -> Ask:
    """TensorFlow Serving's JSON."""
    body = json.dumps({"instances": np.round(ROWS, 4).tolist()}).encode()
    return Ask(port=server.http, path=f"/v1/models/{model}:predict", body=body)


def as_bytes(server: Server | Router, model: str, rows: int = 1) -> Ask:
    """The Open Inference Protocol with binary tensors."""
    return binary_ask(server.http, model, rows)


def binary_ask(port: int, model: str, rows: int = 1) -> Ask:
    """It, to any server that speaks it."""
    blob = np.repeat(ROWS, rows, 0).tobytes()
    one = {"name": "x", "shape": [rows, ROW], "datatype": "FP32", "parameters": {"binary_data_size": len(blob)}}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
    return Ask(port=port, path=f"/v2/models/{model}/infer", body=text + blob, headers=headers)


def asking(ask: Ask, seconds: float, connections: int = 32) -> Callable[[], float]:
    """Seconds per good answer; every answer must be one."""

    def run() -> float:
        found = measure(ask, seconds=seconds, connections=connections)
        if set(found.codes) != {200}:
            raise RuntimeError(f"answers of {ask.path}: {found.codes}")
        return 1 / found.rate

    return run


@contextmanager
def peers(quick: bool, work: str) -> Iterator[dict[str, Ask]]:
    """The peers with a network, running in environments of their own; none in a quick run."""
    if quick:
        yield {}
        return
    for folder, requirements in PEERS.items():
        make_environment(ROOT / folder, ROOT / "requirements" / requirements)
    ports = {name: free_port() for name in ("litserve", "bento", "rayserve", "mlserver", "pytriton")}
    python, v2, triton = (str(ROOT / folder / "bin" / "python") for folder in PEERS)
    servers = "benchmarks.peers.servers"
    commands = {
        "litserve": [python, "-m", f"{servers}.litserve", str(ports["litserve"])],
        "bento": [python, "-m", "bentoml", "serve", f"{servers}.bento:Rows", "--port", str(ports["bento"])],
        "rayserve": [python, "-m", f"{servers}.rayserve", str(ports["rayserve"])],
        "mlserver": [v2, "-m", f"{servers}.mlserver", str(ports["mlserver"])],
        "pytriton": [triton, "-m", f"{servers}.pytriton", str(ports["pytriton"])],
    }
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**(triton_server.environ() if name == "pytriton" else os.environ), CHOICE: work},
            **quiet,
        )
        for name, command in commands.items()
    ]
    asks = peer_asks(ports)
    try:
        for ask in asks.values():
            wait_for(ask)
        yield asks
    finally:
        for process in running:
            os.killpg(process.pid, 15)
        for process in running:
            process.wait(60)


def peer_asks(ports: Mapping[str, int]) -> dict[str, Ask]:
    """A row for each peer, in the form that it takes."""
    row = np.round(ROWS, 4).tolist()
    plain = json.dumps({"input": row[0]}).encode()
    tensor = {"name": "x", "shape": [1, ROW], "datatype": "FP32"}
    infer = json.dumps({"inputs": [{**tensor, "data": row[0]}]}).encode()
    return {
        "litserve JSON": Ask(port=ports["litserve"], path="/predict", body=plain),
        "bentoml JSON": Ask(port=ports["bento"], path="/predict", body=json.dumps({"x": row}).encode()),
        "ray serve JSON": Ask(port=ports["rayserve"], path="/predict", body=plain),
        "mlserver JSON": Ask(port=ports["mlserver"], path="/v2/models/rows/infer", body=infer),
        "triton JSON": Ask(port=ports["pytriton"], path="/v2/models/rows/infer", body=infer),
        "triton binary": binary_ask(ports["pytriton"], "rows"),
    }


def make_environment(folder: Path, requirements: Path) -> None:
    """Installs peers unless this very list of them is installed."""
    ready, wanted = folder / "installed.txt", requirements.read_text()
    if ready.exists() and ready.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)]
    subprocess.run(pip, check=True)
    ready.write_text(wanted)


def wait_for(ask: Ask, seconds: float = 120.0) -> None:
    """Waits until a server answers well."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", ask.port)).close()
            if measure(ask, seconds=0.5, connections=1).codes.get(200):
                return
        time.sleep(1.0)
    raise RuntimeError(f"no server answers {ask.path} on port {ask.port}")


def free_port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
