"""Slow, silent and disconnected clients do not affect others, and their requests are not computed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
from torch import Tensor

from manyhands.core import FileError, Predictor, Signature, TensorSpec
from manyhands.serving import Client, Limits, Server
from manyhands.serving.logs import Logs
from manyhands.serving.protocols import open_inference_grpc

from .conftest import Start
from .test_versions import Moody, until

REQUEST = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"


def figures(server: Server) -> dict[str, Any]:
    return dict(server.state()["models"][0]["versions"][0])


def test_slow_clients_are_disconnected_while_others_are_served(start: Start) -> None:
    server = start({"moody": Moody()}, limits=Limits(receive=1.0, connections=64))
    slow = [socket.create_connection(("127.0.0.1", server.http)) for _ in range(40)]
    over = threading.Event()
    for sock in slow:
        sock.sendall(b"POST /v1/models/moody:predict HTTP/1.1\r\nA: ")

    def drip() -> None:
        """Another byte of the header now and then, on every connection."""
        while not over.wait(0.05):
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.send(b"b")

    thread = threading.Thread(target=drip)
    thread.start()
    client = Client(server.url, timeout=20)
    try:
        for value in range(30):
            assert client("moody", np.full((1, 1), float(value), np.float32)).tolist() == [[value + 1.0]]
        for sock in slow:
            sock.settimeout(30)
            assert sock.recv(4096).startswith(b"HTTP/1.1 408 ")
    finally:
        over.set()
        thread.join()
        client.close()
        for sock in slow:
            sock.close()


def test_pending_body_bytes_are_limited_across_http_and_grpc(start: Start) -> None:
    server = start({"moody": Moody()}, limits=Limits(body=1000, bodies=1000))
    method = "/tensorflow.serving.PredictionService/Predict"
    asked = httpx.Request("POST", f"{server.url}/v1/models/moody:predict", content=b" " * 100 + b'{"inputs": [[1]]}')
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel, httpx.Client() as client:
        with socket.create_connection(("127.0.0.1", server.http)) as half:
            half.sendall(REQUEST % (b"/v1/models/moody:predict", 1000, b" " * 950))
            refused = until(lambda: (answer := client.send(asked)).status_code == 503 and answer)
            assert refused.headers["Retry-After"] == "1"
            assert refused.json()["error"] == "overloaded: 950 bytes of requests are waiting"
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(b" " * 100, timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
            assert dict(caught.value.trailing_metadata())["retry-after"] == "1"  # type: ignore[attr-defined]
        until(lambda: client.send(asked).status_code == 200)
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method)(b" " * 100, timeout=20)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


class Gate(Predictor):
    """Answers when a file is there."""

    signature = Signature({"x": TensorSpec("float32", (None, 1))}, {"y": TensorSpec("float32", (None, 1))})

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        while inputs["x"].any() and not self.path.exists():
            time.sleep(0.01)
        return {"y": inputs["x"] + 1}


def test_requests_of_disconnected_clients_are_not_computed(start: Start, tmp_path: Path) -> None:
    server = start({"gate": Gate(tmp_path / "open")}, max_rows=4)
    path = "/v1/models/gate:predict"
    blocker = threading.Thread(target=lambda: httpx.post(server.url + path, json={"instances": [[1.0]]}, timeout=60))
    blocker.start()
    until(lambda: taken(server) == 1)
    body = b'{"instances": [[2.0]]}'
    gone = [socket.create_connection(("127.0.0.1", server.http)) for _ in range(20)]
    for sock in gone:
        sock.sendall(REQUEST % (path.encode(), len(body), body))
    until(lambda: figures(server)["queue"] + taken(server) == 21)
    before = taken(server)
    for sock in gone:
        sock.close()
    until(lambda: figures(server)["requests"].get("CANCELLED", 0) == 20)
    messages = open_inference_grpc.MESSAGES
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "contents": {"fp32_contents": [3.0]}}
    request = messages["ModelInferRequest"](model_name="gate", inputs=[tensor])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        method = "/inference.GRPCInferenceService/ModelInfer"
        call = channel.unary_unary(method, lambda message: message.SerializeToString()).future(request, timeout=60)
        until(lambda: figures(server)["queue"] + taken(server) == before + 1)
        call.cancel()
        until(lambda: figures(server)["requests"]["CANCELLED"] == 21)
    before = max(before, taken(server))
    assert figures(server)["queue"] == 0
    (tmp_path / "open").touch()
    blocker.join()
    until(lambda: taken(server) == 0)
    # Only what a replica had taken before its client went was computed.
    assert figures(server)["rows"] == before < 21


def test_hung_replica_is_replaced(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.serving.replica.STUCK_SECONDS", 0.2)
    server = start({"gate": Gate(tmp_path / "never")}, timeout=5.0)
    before = figures(server)["replicas"][0]["pid"]
    body = (
        b'{"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [%d]}], "parameters": {"timeout": %d}}'
    )

    def ask(value: int, micros: int) -> httpx.Response:
        return httpx.post(
            f"{server.url}/v2/models/gate/infer", content=body % (value, micros), timeout=60, verify=False
        )

    assert ask(1, 100_000).status_code == 504
    until(lambda: [replica for replica in figures(server)["replicas"] if replica["pid"] != before])
    assert ask(0, 5_000_000).json()["outputs"][0]["data"] == [1.0]
    late = "must be an integer from 0 to 2**63 - 1, but got '-1'"
    assert ask(0, -1).json() == {"error": f"the parameter timeout (microseconds) {late}"}
    # Nor does it keep a server from ending.
    monkeypatch.setattr("manyhands.serving.replica.STUCK_SECONDS", 60.0)
    monkeypatch.setattr("manyhands.serving.replica.ENDING_SECONDS", 0.2)
    assert ask(1, 100_000).status_code == 504
    server.stop()


def taken(server: Server) -> int:
    return sum(replica["rows"] for replica in figures(server)["replicas"])


def test_full_disk_drops_access_log_lines_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("ab", buffering=1 << 16)  # noqa: SIM115 - the log closes it
    monkeypatch.setattr("manyhands.serving.logs._opened", lambda path: full)
    logs = Logs(tmp_path)

    def write_many() -> None:
        for _ in range(1000):
            logs.call("POST", "/v1/models/moody:predict", 200, 10, 10, 0.0)

    with pytest.warns(UserWarning, match=r"requests are not logged .*access.jsonl cannot be written: .*No space"):
        write_many()
    write_many()
    logs.close()


def test_access_log_is_never_written_through_a_link(tmp_path: Path) -> None:
    """The folder of logs may be in /tmp, where other users can create links with known names."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "access.jsonl").symlink_to(victim)
    with pytest.raises(FileError, match="got a symbolic link"):
        Logs(tmp_path)
    assert victim.read_text() == "mine"


def test_access_log_is_rotated_at_its_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.serving.logs.MAX_ACCESS_BYTES", 2000)
    logs = Logs(tmp_path)
    for number in range(200):
        logs.call("POST", f"/v1/models/moody{number}:predict", 200, 10, 10, 0.0)
        logs.flush()
    logs.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("access*")}
    assert sorted(sizes) == ["access.1.jsonl", "access.jsonl"]
    assert max(sizes.values()) < 2200
    assert "moody199" in (tmp_path / "access.jsonl").read_text() + (tmp_path / "access.1.jsonl").read_text()


def test_memory_stays_constant_over_many_requests(start: Start) -> None:
    server = start({"moody": Moody()})
    body = {"instances": [[1.0]] * 64}

    def ask(num: int) -> None:
        with httpx.Client(base_url=server.url) as http:
            for _ in range(num):
                assert http.post("/v1/models/moody:predict", json=body).status_code == 200
                http.post("/v1/models/moody:predict", json={"instances": [["bad"]]})
                http.get("/v2/models/unknown")

    ask(100)
    here = psutil.Process()
    before = here.memory_info().rss
    ask(300)
    assert here.memory_info().rss - before < 12 << 20


class Sums(Predictor):
    """Rows of a megabyte, answered with their sums."""

    signature = Signature({"x": TensorSpec("float32", (None, 1 << 18))}, {"y": TensorSpec("float32", (None, 1))})

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": inputs["x"].sum(1, keepdim=True)}


def test_large_batches_are_written_off_thread_while_clients_disconnect(start: Start) -> None:
    server = start({"sums": Sums()}, max_rows=8)
    rows = np.ones((1, 1 << 18), np.float32)
    message = REQUEST.replace(b"\r\n\r\n", b"\r\nInference-Header-Content-Length: 0\r\n\r\n")

    def leave() -> None:
        """Asks all the time, and does not wait for answers."""
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.http)) as sock:
                sock.sendall(message % (b"/v2/models/sums/infer", rows.nbytes, rows.tobytes()))

    def ask(value: int) -> list[float]:
        with Client(server.url, timeout=60) as client:
            return [float(client("sums", rows * value)[0, 0]) for _ in range(10)]

    with ThreadPoolExecutor(7) as pool:
        leaving = pool.submit(leave)
        assert list(pool.map(ask, range(6))) == [[float(value << 18)] * 10 for value in range(6)]
        leaving.result()
    assert any(thread.name.startswith("manyhands-slots") for thread in threading.enumerate())


WAITING = """
import manyhands as mh
from tests.serving.test_versions import Moody

if __name__ == "__main__":
    listen = mh.serving.Listen(http=0, grpc=0, manage=0)
    server = mh.serve({"moody": Moody()}, on="cpu", listen=listen)
    print(server.url, flush=True)
    server.wait()
    print("drained", flush=True)
"""


def test_sigterm_drains_a_python_server_that_waits(tmp_path: Path) -> None:
    (tmp_path / "serving.py").write_text(WAITING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    process = subprocess.Popen(
        [sys.executable, tmp_path / "serving.py"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        answered: dict[int, list[int]] = {number: [] for number in range(8)}

        def ask(number: int) -> bool:
            """Send requests over one connection until a response closes it; raises if a request is reset."""
            with httpx.Client(timeout=30) as client:
                for _ in range(100_000):
                    answer = client.post(f"{url}/v1/models/moody:predict", json={"inputs": [[1.0]]})
                    answered[number].append(answer.status_code)
                    if answer.headers.get("connection") == "close":
                        return True
            return False

        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(ask, number) for number in answered]
            # A client that connects only after the signal is refused.
            until(lambda: all(len(codes) > 5 for codes in answered.values()))
            process.send_signal(signal.SIGTERM)
            assert [client.result() for client in clients] == [True] * 8
        assert {code for codes in answered.values() for code in codes} == {200}
        assert process.stdout.read() == "drained\n"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
