"""A soak: minutes of everything that clients do to a server, while its memory and its open files are watched.

`python -m benchmarks.soak [--seconds 600]`. All four protocols, requests that are wrong, clients that go away in the
middle, connections for one request each, scrapes of the metrics, and versions that take over all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import numpy as np
import psutil
import torch

from manyhands.serving.protocols import open_inference_grpc, tensorflow_messages
from manyhands.storage import export

from .hot_swap import Adder, Served, question, serving, swap, written
from .load import Ask, answer_size, measuring
from .report import Check, Report

RATE = 80.0
"""Requests a second of each kind that the generators send."""
PAUSE = 0.02
"""Seconds between two requests of everybody else."""
PERIOD = 10.0
"""Seconds between two versions."""
FIFTHS = 5
ROWS = np.zeros((4, 8), np.float32)


def main() -> None:
    """Lets everybody in, and looks at the server once a second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long; 600 by default")
    seconds = parser.parse_args().seconds
    if seconds < 2 * PERIOD:
        parser.error(f"--seconds must be at least {2 * PERIOD:g}, but got {seconds:g}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    report = Report("soak", quick=seconds < 600)
    with tempfile.TemporaryDirectory() as name:
        models = Path(name) / "models"
        first = export(Adder(), lambda model, x: model(x), {"x": torch.from_numpy(ROWS)}, models / "swapped")
        shutil.copytree(first, models / "neighbour" / "1")
        versions = [written(first, number) for number in range(2, 2 + int(seconds / PERIOD))]
        with serving(models, f"--log={name}/log") as server:
            looks, counts = soaked(server, seconds, lambda: swap(server.http, first.parent, versions, PERIOD))
    describe(report, looks, counts)
    report.notes["swaps"] = len(versions)
    report.finish()


@dataclass(frozen=True)
class Look:
    """What a server and its replicas hold at a moment."""

    seconds: float
    memory: float
    """MiB of all of them, shared pages counted once."""
    own: float
    """MiB that only the server itself holds: a small leak shows here first."""
    files: int
    """That the server itself has open, connections among them."""

    @classmethod
    def at(cls, pid: int, seconds: float) -> Look:
        """Looks now; a replica that has just ended holds nothing."""
        server = psutil.Process(pid)
        memory = 0
        for process in (server, *server.children(recursive=True)):
            try:
                memory += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        return cls(seconds, memory / 2**20, server.memory_full_info().uss / 2**20, server.num_fds())


def soaked(server: Served, seconds: float, swaps: Callable[[], None]) -> tuple[list[Look], Counter[str]]:
    """Looks once a second, and what came of all requests, by kind; failures begin with `failed`."""
    asks = {"JSON": question(server.http, "swapped"), "binary": as_bytes(server.http, "neighbour")}
    generators = {kind: measuring(ask, seconds=seconds, rate=RATE) for kind, ask in asks.items()}
    began, looks = time.monotonic(), []
    channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc}")
    with channel, visiting(visitors(server.http, channel)) as counts, running(swaps):
        while (now := time.monotonic() - began) < seconds:
            looks.append(Look.at(server.pid, now))
            time.sleep(1.0)
    for kind, generator in generators.items():
        for code, num in generator.outcome().codes.items():
            counts[kind if code == 200 else f"failed {kind}: {code}"] += num
    return looks, counts


def describe(report: Report, looks: Sequence[Look], counts: Counter[str]) -> None:
    """How memory and files went from fifth to fifth, and what was asked."""
    size = len(looks) // FIFTHS
    fifths = [looks[i * size : (i + 1) * size] for i in range(FIFTHS)]
    memory = [median(look.memory for look in fifth) for fifth in fifths]
    # Connections come and go: what is never closed raises the lowest number.
    files = [min(look.files for look in fifth) for fifth in fifths]
    for i in range(FIFTHS):
        report.notes[f"fifth {i + 1}: MiB"] = round(memory[i], 1)
        report.notes[f"fifth {i + 1}: MiB of the server alone"] = round(median(look.own for look in fifths[i]), 1)
        report.notes[f"fifth {i + 1}: open files at least"] = files[i]
    report.notes.update({f"{kind} requests": num for kind, num in sorted(counts.items())})
    failed = sum(num for kind, num in counts.items() if kind.startswith("failed"))
    report.checks["memory_growth"] = Check(value=memory[-1] / memory[1], at_most=1.05)
    report.checks["open_files_growth"] = Check(value=float(files[-1] - files[1]), at_most=0)
    report.checks["failed"] = Check(value=float(failed), at_most=0)
    report.picture = curve([(look.seconds, look.memory) for look in looks])


@contextmanager
def running(work: Callable[[], None]) -> Iterator[None]:
    """Does something beside the block, and waits for it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    if errors:
        raise errors[0]


@contextmanager
def visiting(turns: dict[str, Callable[[], object]]) -> Iterator[Counter[str]]:
    """Clients that take their turns until the block ends, each in a thread: how many went well, or what did not."""
    counts: Counter[str] = Counter()
    over = threading.Event()

    def visit(kind: str, turn: Callable[[], object]) -> None:
        while not over.wait(PAUSE):
            try:
                turn()
                counts[kind] += 1
            except Exception as error:
                counts[f"failed {kind}: {str(error)[:200]}"] += 1

    threads = [threading.Thread(target=visit, args=each) for each in turns.items()]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        over.set()
        for thread in threads:
            thread.join()


def visitors(port: int, channel: Any) -> dict[str, Callable[[], object]]:
    """Everybody but the generators, by kind."""
    infer, predict = as_v2(channel), as_tensorflow(channel)
    whole, binary = question(port, "swapped").message(), as_bytes(port, "neighbour").message()
    return {
        "gRPC v2": lambda: infer(timeout=20),
        "gRPC TensorFlow": lambda: predict(timeout=20),
        "cancelled gRPC": lambda: infer.future(timeout=20).cancel(),
        "one a connection": lambda: require(200, port, whole),
        "cancelled HTTP": lambda: leave(port, binary),
        "half sent": lambda: leave(port, binary[:-7]),
        "wrong": wrong(port),
        "wrong gRPC": lambda: refused(predict, b"\xff\xff"),
        "metrics": lambda: urlopen(f"http://127.0.0.1:{port}/metrics").read(),
    }


class Call:
    """A gRPC method with a request that never changes."""

    def __init__(self, channel: Any, method: str, request: bytes) -> None:
        self._asked, self._request = channel.unary_unary(method), request

    def __call__(self, request: bytes | None = None, timeout: float = 20.0) -> bytes:
        """Asks and waits."""
        return bytes(self._asked(self._request if request is None else request, timeout=timeout))

    def future(self, timeout: float) -> Any:
        """Asks only."""
        return self._asked.future(self._request, timeout=timeout)


def as_v2(channel: Any) -> Call:
    """The Open Inference Protocol over gRPC."""
    messages = open_inference_grpc.MESSAGES
    request = messages["ModelInferRequest"](model_name="swapped", raw_input_contents=[ROWS.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=ROWS.shape)
    return Call(channel, "/inference.GRPCInferenceService/ModelInfer", request.SerializeToString())


def as_tensorflow(channel: Any) -> Call:
    """TensorFlow Serving's Predict."""
    request = tensorflow_messages.MESSAGES["PredictRequest"]()
    request.model_spec.name = "swapped"
    tensor = request.inputs["x"]
    tensor.dtype, tensor.tensor_content = 1, ROWS.tobytes()
    for size in ROWS.shape:
        tensor.tensor_shape.dim.add(size=size)
    return Call(channel, "/tensorflow.serving.PredictionService/Predict", request.SerializeToString())


def as_bytes(port: int, model: str) -> Ask:
    """The Open Inference Protocol with binary tensors."""
    blob = ROWS.tobytes()
    one = {"name": "x", "shape": ROWS.shape, "datatype": "FP32", "parameters": {"binary_data_size": len(blob)}}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
    return Ask(port=port, path=f"/v2/models/{model}/infer", body=text + blob, headers=headers)


def wrong(port: int) -> Callable[[], None]:
    """Requests that are refused, one after the other, each with its own status."""
    path = "/v1/models/swapped:predict"
    asks = [
        (400, Ask(port=port, path=path, body=b'{"instances": [[1, 2]]}').message()),
        (400, Ask(port=port, path=path, body=b'{"instances": [').message()),
        (400, Ask(port=port, path=path, body=b"[" * 10000).message()),
        (404, Ask(port=port, path="/v1/models/unknown:predict", body=b"{}").message()),
        (400, Ask(port=port, path="/v2/models/swapped/infer", body=b'{"inputs": []}').message()),
        (413, b"POST /v1/models/swapped:predict HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"),
        (400, b"this is not HTTP\r\n\r\n"),
    ]
    turn = iter(range(1 << 60))

    def ask() -> None:
        status, message = asks[next(turn) % len(asks)]
        require(status, port, message)

    return ask


def require(status: int, port: int, message: bytes) -> None:
    """Asks over a connection of its own; the answer must have this status."""
    data = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(message)
        while not (size := answer_size(data)) or len(data) < size:
            more = connection.recv(1 << 16)
            if not more:
                break
            data += more
    if int(data[9:12] or 0) != status:
        raise RuntimeError(f"expected {status}, but got {data[9:12].decode()}")


def leave(port: int, message: bytes) -> None:
    """Asks, and does not wait."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(message)


def refused(call: Call, request: bytes) -> None:
    """Asks what must be called a mistake."""
    try:
        call(request)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return
        raise
    raise RuntimeError("a wrong request was answered")


def curve(points: Sequence[tuple[float, float]]) -> str:
    """Memory over time, from zero, as SVG."""
    last, top = points[-1][0], 1.2 * max(memory for _, memory in points)
    line = " ".join(f"{60 + 620 * at / last:.1f},{240 - 200 * memory / top:.1f}" for at, memory in points)
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" width="700" height="270" font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            '<text x="8" y="20" font-size="14">soak: memory of the server and its replicas, MiB</text>',
            '<path d="M60 40V240H680" fill="none" stroke="#888"/>',
            f'<polyline points="{line}" fill="none" stroke="#4878a8"/>',
            f'<text x="54" y="44" text-anchor="end">{top:.0f}</text><text x="54" y="244" text-anchor="end">0</text>',
            f'<text x="680" y="256" text-anchor="end">{last:.0f} s</text>',
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
