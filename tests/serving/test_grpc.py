"""gRPC services: health, tokens, deadlines, and TensorFlow Serving's services as raw messages."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import time
from typing import Any

import grpc
import grpc.aio
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
from benchmarks.attacks.http2 import ACK, END_HEADERS, HEADERS, SETTINGS, Http2, frame, literal
from torch import Tensor
from tritonclient.utils import InferenceServerException

from manyhands.core import Predictor, SettingsError, Signature, TensorSpec
from manyhands.serving import Server
from manyhands.serving.grpc_process import CALL, NAME, GrpcProcess
from manyhands.serving.limits import Limits
from manyhands.serving.protocols import health_grpc, open_inference_grpc, tensorflow_grpc
from manyhands.serving.protocols.grpc_service import GrpcListener
from manyhands.serving.security import AccessToken

from .conftest import Start
from .test_versions import Moody


def call(port: int, method: str, request: Any, answer: Any, **options: Any) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        asked = channel.unary_unary(method, lambda message: message.SerializeToString(), answer.FromString)
        return asked(request, timeout=options.pop("timeout", 20), **options)


def predict(port: int, tensor: dict[str, Any], **spec: Any) -> Any:
    messages = tensorflow_grpc.MESSAGES
    request = messages["PredictRequest"](model_spec={"name": "adder", **spec}, inputs={"x": tensor})
    return call(port, "/tensorflow.serving.PredictionService/Predict", request, messages["PredictResponse"])


def tensor(values: np.ndarray, *, as_bytes: bool) -> dict[str, Any]:
    content = {"tensor_content": values.tobytes()} if as_bytes else {"float_val": values.ravel().tolist()}
    return {"dtype": 1, "tensor_shape": {"dim": [{"size": n} for n in values.shape]}, **content}


@pytest.mark.parametrize("as_bytes", [True, False])
def test_predict_returns_outputs_and_model_spec(served: Server, as_bytes: bool) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    answer = predict(
        served.grpc, tensor(rows, as_bytes=as_bytes), version={"value": 2}, signature_name="serving_default"
    )
    found = answer.outputs["output"]
    assert [dim.size for dim in found.tensor_shape.dim] == [2, 3]
    np.testing.assert_array_equal(np.array(found.float_val, np.float32).reshape(2, 3), rows + 2)
    assert found.tensor_content == b"", "clients of TensorFlow Serving read the typed field"
    assert (answer.model_spec.name, answer.model_spec.version.value) == ("adder", 2)


def test_tensor_proto_with_one_value_fills_the_whole_shape(served: Server) -> None:
    one = {"dtype": 1, "tensor_shape": {"dim": [{"size": 2}, {"size": 3}]}, "float_val": [5.0]}
    found = predict(served.grpc, one).outputs["output"]
    assert list(found.float_val) == [7.0] * 6


@pytest.mark.parametrize(
    ("change", "spec", "code", "error"),
    [
        ({}, {"version": {"value": 9}}, "NOT_FOUND", "Servable not found for request: Specific(adder, 9)"),
        ({}, {"name": "foo"}, "NOT_FOUND", "Servable not found for request: Latest(foo)"),
        ({}, {"version_label": "no"}, "INVALID_ARGUMENT", "Unrecognized servable version label: no"),
        ({}, {"signature_name": "no"}, "INVALID_ARGUMENT", "not found in signature def"),
        ({"dtype": 2}, {}, "INVALID_ARGUMENT", "must be DT_FLOAT, but got DT_DOUBLE"),
        ({"tensor_content": b"1234"}, {}, "INVALID_ARGUMENT", "should have 12 bytes, but got 4"),
        ({"tensor_shape": {"dim": [{"size": 1}]}}, {}, "INVALID_ARGUMENT", "must be float32[*, 3], but got float32[1]"),
        ({"tensor_shape": {"dim": [{"size": -1}, {"size": 3}]}}, {}, "INVALID_ARGUMENT", "must be float32[*, 3]"),
    ],
)
def test_invalid_predict_request_returns_status_code_and_reason(
    served: Server, change: dict[str, Any], spec: dict[str, Any], code: str, error: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        predict(served.grpc, {**tensor(np.zeros((1, 3), np.float32), as_bytes=True), **change}, **spec)
    assert caught.value.code().name == code  # type: ignore[attr-defined]
    assert error in caught.value.details()  # type: ignore[attr-defined]


def test_model_status_is_available_and_health_is_serving(served: Server) -> None:
    messages = tensorflow_grpc.MESSAGES
    request = messages["GetModelStatusRequest"](model_spec={"name": "adder"})
    method = "/tensorflow.serving.ModelService/GetModelStatus"
    (status,) = call(served.grpc, method, request, messages["GetModelStatusResponse"]).model_version_status
    assert (status.version, status.state, status.status.error_code) == (2, 30, 0)
    messages = health_grpc.MESSAGES
    for service in ("", "adder"):
        request = messages["HealthCheckRequest"](service=service)
        answer = call(served.grpc, "/grpc.health.v1.Health/Check", request, messages["HealthCheckResponse"])
        assert answer.status == health_grpc.SERVING


def test_infer_requires_token_and_enforces_deadline(start: Start) -> None:
    server = start({"moody": Moody()}, token="secret")
    messages = open_inference_grpc.MESSAGES
    contents = {"fp32_contents": [100.0]}
    request = messages["ModelInferRequest"](
        model_name="moody", inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 1], "contents": contents}]
    )
    method = "/inference.GRPCInferenceService/ModelInfer"
    with pytest.raises(grpc.RpcError) as caught:
        call(server.grpc, method, request, messages["ModelInferResponse"])
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    metadata = [("authorization", "Bearer secret")]
    answer = call(server.grpc, method, request, messages["ModelInferResponse"], metadata=metadata)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [101.0]
    with pytest.raises(grpc.RpcError) as caught:
        call(server.grpc, method, request, messages["ModelInferResponse"], metadata=metadata, timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]


def test_unauthenticated_calls_are_rejected_in_the_grpc_process(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused by the gRPC process: a flood of them costs the server nothing."""
    heard: list[int] = []
    original = GrpcProcess._handle_frame

    def hear(listener: GrpcProcess, kind: int, *rest: Any) -> None:
        heard.append(kind)
        original(listener, kind, *rest)

    monkeypatch.setattr(GrpcProcess, "_handle_frame", hear)
    server = start({"moody": Moody()}, token="secret")
    heard.clear()
    messages = health_grpc.MESSAGES
    asked = "/grpc.health.v1.Health/Check", messages["HealthCheckRequest"](), messages["HealthCheckResponse"]
    for _ in range(20):
        with pytest.raises(grpc.RpcError, match="this server requires a token"):
            call(server.grpc, *asked)
    assert heard == []
    assert call(server.grpc, *asked, metadata=[("authorization", "Bearer secret")]).status == 1
    assert heard == [CALL]


TAKE = """
import os, socket, sys
if os.geteuid() == 0:
    os.setuid(65534)
for name in (0, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as sock:
            for option in (name,) if name else ():
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                sock.bind((host, int(sys.argv[1])))
                sock.listen()
            except OSError as error:
                print(error.errno)
            else:
                print("taken")
"""
"""Every way to take a port, as another user if possible."""


def test_port_stays_reserved_while_the_grpc_process_restarts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    server = start({"moody": Moody()})
    messages = health_grpc.MESSAGES
    asked = "/grpc.health.v1.Health/Check", messages["HealthCheckRequest"](), messages["HealthCheckResponse"]
    assert call(server.grpc, *asked).status == 1
    started = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
    (process,) = [one for one in started if one.name() == NAME]
    assert process.nice() > 0
    monkeypatch.setattr("manyhands.serving.grpc_process.RESTART_SECONDS", 2.0)
    process.kill()
    process.wait(120)
    done = subprocess.run([sys.executable, "-c", TAKE, str(server.grpc)], capture_output=True, text=True, check=True)
    # A process of the same user could share the port, which tests that do not run as root cannot try as another one.
    assert done.stdout.startswith(f"{errno.EADDRINUSE}\n" * (6 if os.geteuid() == 0 else 4))
    assert call(server.grpc, *asked, wait_for_ready=True, timeout=60).status == 1


def test_second_server_on_the_same_grpc_port_is_rejected(start: Start) -> None:
    """Both of the same user, whose sockets could share it."""
    server = start({"moody": Moody()})
    with pytest.raises(SettingsError, match="the port must be free"):
        start({"moody": Moody()}, grpc=server.grpc)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The start of HTTP/2: after it gRPC has no reason to close a connection but its limits of time."""


def test_connection_flood_from_one_network_does_not_block_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the listener takes, each from an address of its own, and none of them times out."""
    monkeypatch.setattr("manyhands.serving.protocols.grpc_service.IDLE_SECONDS", 1000)
    monkeypatch.setattr("manyhands.serving.grpc_gate.HANDSHAKE_SECONDS", 1000)

    async def run() -> tuple[grpc.StatusCode, int]:
        limits = Limits(connections=64, connections_per_address=32, idle=1000, receive=1000)
        listener = GrpcListener([], AccessToken(None), limits)
        port = await listener.open("127.0.0.1", 0)
        flood = [
            socket.create_connection(("127.0.0.1", port), source_address=(f"127.0.7.{n}", 0)) for n in range(1, 65)
        ]
        for client in flood:
            client.sendall(PREFACE)
        code = None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await channel.unary_unary("/none/None")(b"", wait_for_ready=True, timeout=20)
            except grpc.aio.AioRpcError as error:
                code = error.code()
        while (num := sum(not _is_over(client) for client in flood)) > 8:
            await asyncio.sleep(0.01)
        for client in flood:
            client.close()
        await listener.close(0)
        return code, num

    assert asyncio.run(asyncio.wait_for(run(), 60)) == (grpc.StatusCode.UNIMPLEMENTED, 8)


def _is_over(client: socket.socket) -> bool:
    """Whether the listener has closed a connection; what it has sent is passed over."""
    client.setblocking(False)
    try:
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_triton_client_loads_and_unloads_models_on_the_management_port(start: Start) -> None:
    server = start({"moody": Moody()}, manage_grpc=0)
    with (
        triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client,
        pytest.raises(InferenceServerException, match=r"PERMISSION_DENIED.*--manage-grpc PORT"),
    ):
        client.unload_model("moody")
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.manage_grpc}") as client:
        client.unload_model("moody")
        assert not client.is_model_ready("moody")
        with pytest.raises(InferenceServerException, match="'moody' has no available versions"):
            client.get_model_metadata("moody")
        with pytest.raises(InferenceServerException, match="'foo' is not found"):
            client.load_model("foo")
        with pytest.raises(InferenceServerException, match="loaded as it is in the server's folder"):
            client.load_model("moody", config="{}")
        client.load_model("moody")
        assert client.is_model_ready("moody")
        rows = triton_grpc.InferInput("x", [1, 1], "FP32")
        rows.set_data_from_numpy(np.ones((1, 1), np.float32))
        assert client.infer("moody", [rows]).as_numpy("y").tolist() == [[2.0]]


class Wide(Predictor):
    """Answers a number with a mebibyte."""

    signature = Signature({"x": TensorSpec("float32", (None, 1))}, {"y": TensorSpec("float32", (None, 1 << 18))})

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": inputs["x"].expand(-1, 1 << 18)}


@pytest.mark.parametrize("acknowledges", [False, True])
def test_client_that_does_not_acknowledge_settings_is_disconnected(start: Start, acknowledges: bool) -> None:
    """The gate acknowledges them for the client, but a client of HTTP/2 must do so too."""
    server = start({"moody": Moody()}, limits=Limits(receive=1.0))
    with socket.create_connection(("127.0.0.1", server.grpc), 5) as client:
        client.sendall(PREFACE + (frame(SETTINGS, ACK, 0, b"") if acknowledges else b""))
        # It is not idle: idle connections are closed in any case.
        client.sendall(frame(HEADERS, 0, 1, b""))
        until = time.monotonic() + 3
        is_closed = False
        while not is_closed and (left := until - time.monotonic()) > 0:
            client.settimeout(left)
            with contextlib.suppress(TimeoutError):
                is_closed = not client.recv(1 << 16)
    assert is_closed is not acknowledges


@pytest.mark.parametrize("acknowledges", [False, True])
def test_flood_of_indexed_headers_takes_no_memory_and_blocks_no_client(start: Start, acknowledges: bool) -> None:
    """One byte encodes a header. Without the limits of the gate, each of these frames took 2 MB and 14 ms."""
    server = start({"moody": Moody()}, token="secret")
    messages, metadata = health_grpc.MESSAGES, [("authorization", "Bearer secret")]
    asked = "/grpc.health.v1.Health/Check", messages["HealthCheckRequest"](), messages["HealthCheckResponse"]
    call(server.grpc, *asked, metadata=metadata)
    process = next(each for each in psutil.Process().children(recursive=True) if each.name() == NAME)
    before = process.memory_info().rss
    sent = frame(HEADERS, END_HEADERS, 1, literal(b":path", b"/a/b") + b"\x40\x01x\x01y" + b"\xbe" * 16000)
    sent += b"".join(frame(HEADERS, END_HEADERS, number, b"\xbe" * 16384) for number in range(3, 23, 2))
    reasons = []
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.grpc), 10) as client:
            with contextlib.suppress(OSError):
                client.sendall(PREFACE + (frame(SETTINGS, ACK, 0, b"") if acknowledges else b"") + sent)
            reasons.append(_all_of(client))
        call(server.grpc, *asked, metadata=metadata, timeout=10)
    assert process.memory_info().rss - before < 32 << 20
    assert any(b"a call may have 116 headers" in reason for reason in reasons)


def test_burst_of_calls_on_a_new_connection_is_answered(start: Start) -> None:
    """More calls than may wait for the first answer of a connection."""
    server = start({"moody": Moody()}, token="secret")
    messages, metadata = health_grpc.MESSAGES, [("authorization", "Bearer secret")]
    request = messages["HealthCheckRequest"]().SerializeToString()

    async def run() -> list[bytes]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            asked = channel.unary_unary("/grpc.health.v1.Health/Check")
            return await asyncio.gather(*(asked(request, timeout=60, metadata=metadata) for _ in range(250)))

    assert set(asyncio.run(run())) == {messages["HealthCheckResponse"](status=1).SerializeToString()}


def _all_of(client: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(OSError):
        while data := client.recv(1 << 16):
            found += data
    return found


def test_unread_grpc_responses_count_toward_the_memory_limit(start: Start) -> None:
    """A client that opens no window for the answers asks for far more of them than the server may hold."""
    server = start({"wide": Wide()}, limits=Limits.holding(8))
    request = open_inference_grpc.MESSAGES["ModelInferRequest"](
        model_name="wide",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 1]}],
        raw_input_contents=[np.ones(1, np.float32).tobytes()],
    ).SerializeToString()
    client = Http2("127.0.0.1", server.grpc)
    client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
    client.read(0.2)
    for _ in range(50):
        number = client.call("/inference.GRPCInferenceService/ModelInfer")
        client.send_data(number, b"\0" + struct.pack(">I", len(request)) + request, is_over=True)
    for _ in range(100):
        client.read(0.1)
        if (num_open := sum(not stream.is_closed for stream in client.streams.values())) <= 8:
            break
    refused = [stream.answer for stream in client.streams.values() if stream.is_closed]
    client.close()
    assert 0 < num_open <= 8
    assert all(b"overloaded: " in answer for answer in refused)
    # What the client left unread is given back.
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as other:
        given = triton_grpc.InferInput("x", [1, 1], "FP32")
        given.set_data_from_numpy(np.ones((1, 1), np.float32))
        for _ in range(20):
            assert other.infer("wide", [given], client_timeout=20).as_numpy("y").shape == (1, 1 << 18)


@pytest.mark.parametrize("limits", [{"receive": 3.0}, {"calls": 4}], ids=["slow", "many"])
def test_clients_that_do_not_read_small_grpc_responses_are_disconnected(start: Start, limits: dict[str, Any]) -> None:
    """The server cannot count what gRPC keeps for a call, so such calls must end."""
    server = start({"moody": Moody()}, limits=Limits(**limits))
    request = open_inference_grpc.MESSAGES["ModelInferRequest"](
        model_name="moody",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 1]}],
        raw_input_contents=[np.ones(1, np.float32).tobytes()],
    ).SerializeToString()
    client, reader = (Http2("127.0.0.1", server.grpc) for _ in range(2))
    client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
    for each in (client, reader):
        each.read(0.3)
    message = b"\0" + struct.pack(">I", len(request)) + request
    for number in range(40):
        client.send_data(client.call("/inference.GRPCInferenceService/ModelInfer"), message, is_over=True)
        client.read(0.01)
        if number % 10 == 0:
            reader.send_data(reader.call("/inference.GRPCInferenceService/ModelInfer"), message, is_over=True)
    until = time.monotonic() + 20
    is_read = False
    while not (client.is_closed and is_read) and time.monotonic() < until:
        client.read(0.1)
        reader.read(0.1)
        is_read = all(stream.is_closed for stream in reader.streams.values())
    assert client.is_closed
    assert is_read
    assert not reader.is_closed
    client.close()
    reader.close()
