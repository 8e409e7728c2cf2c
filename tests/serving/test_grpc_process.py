"""The gRPC process, which reads what clients send: its messages are small, and the server validates them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import numpy as np
import orjson
import pytest

from manyhands.core import RequestRefused, WorkerFailed
from manyhands.distributed import ANSWER as SERVICE_ANSWER
from manyhands.distributed import RESULT, Device, send_frame
from manyhands.distributed.control_channel import FAILURE
from manyhands.launcher import LocalEngine
from manyhands.launcher.pickles import pack
from manyhands.serving import Server
from manyhands.serving.frame_socket import HEAD, FrameError, FrameSocket
from manyhands.serving.grpc_process import (
    ANSWER,
    CALL,
    CANCEL,
    MAX_FRAME_HEAD,
    OUTLINE,
    READY,
    REFUSAL,
    STOP,
    Frontend,
    GrpcProcess,
    read_ready,
)
from manyhands.serving.limits import Limits
from manyhands.serving.protocols import health_grpc, open_inference_grpc, tensorflow_grpc
from manyhands.serving.protocols.grpc_service import SMALL_BYTES
from manyhands.serving.protocols.messages import MAX_OUTLINE
from manyhands.serving.protocols.open_inference_grpc import OpenInferenceGrpc
from manyhands.serving.security import AccessToken

from .conftest import Start
from .test_grpc import call
from .test_versions import Moody

MIB = 1 << 20
INFER, PREDICT = "/inference.GRPCInferenceService/ModelInfer", "/tensorflow.serving.PredictionService/Predict"
UNLOAD, LIVE = "/inference.GRPCInferenceService/RepositoryModelUnload", "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture
def heard(start: Start, monkeypatch: pytest.MonkeyPatch) -> tuple[Server, list[int]]:
    """A server, and the sizes of all messages that its process for gRPC has handed on."""
    sizes: list[int] = []
    original = GrpcProcess._handle_frame

    def hear(listener: GrpcProcess, kind: int, number: int, head: bytes, message: bytes) -> None:
        sizes.append(len(message))
        original(listener, kind, number, head, message)

    monkeypatch.setattr(GrpcProcess, "_handle_frame", hear)
    server = start({"moody": Moody()})
    sizes.clear()
    return server, sizes


def _triton(model: str, size: int) -> Any:
    tensor = {"name": "x", "datatype": "FP32", "shape": [size // 4, 1]}
    return open_inference_grpc.MESSAGES["ModelInferRequest"](
        model_name=model, inputs=[tensor], raw_input_contents=[b"\0" * size]
    )


def _tensorflow(model: str, size: int) -> Any:
    tensor = {"dtype": 1, "tensor_shape": {"dim": [{"size": size // 4}, {"size": 1}]}, "tensor_content": b"\0" * size}
    return tensorflow_grpc.MESSAGES["PredictRequest"](model_spec={"name": model}, inputs={"x": tensor})


@pytest.mark.parametrize(
    ("method", "request_of", "answer"),
    [
        (INFER, _triton, open_inference_grpc.MESSAGES["ModelInferResponse"]),
        (PREDICT, _tensorflow, tensorflow_grpc.MESSAGES["PredictResponse"]),
    ],
    ids=["open inference", "tensorflow"],
)
def test_large_message_for_unknown_model_is_rejected_in_the_grpc_process(
    heard: tuple[Server, list[int]], method: str, request_of: Callable[[str, int], Any], answer: Any
) -> None:
    server, sizes = heard
    with pytest.raises(grpc.RpcError) as caught:
        call(server.grpc, method, request_of("unknown", 8 * MIB), answer)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    assert "unknown" in caught.value.details()  # type: ignore[attr-defined]
    (size,) = sizes
    assert size <= MAX_OUTLINE
    # A model that is served gets all of it, and says itself what is wrong with it.
    with pytest.raises(grpc.RpcError, match="a request may have 4096 rows"):
        call(server.grpc, method, request_of("moody", 8 * MIB), answer)
    assert max(sizes) > 8 * MIB


def test_large_message_to_a_method_without_tensors_is_rejected(heard: tuple[Server, list[int]]) -> None:
    server, sizes = heard
    for method, messages, asked in (
        ("/grpc.health.v1.Health/Check", health_grpc.MESSAGES, {"service": "a" * 2 * MIB}),
        ("/inference.GRPCInferenceService/ModelReady", open_inference_grpc.MESSAGES, {"name": "a" * 2 * MIB}),
    ):
        name = "HealthCheck" if "Health" in method else "ModelReady"
        with pytest.raises(grpc.RpcError, match=f"may have {SMALL_BYTES} bytes, but got 2097") as caught:
            call(server.grpc, method, messages[f"{name}Request"](**asked), messages[f"{name}Response"])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    with pytest.raises(grpc.RpcError) as caught:
        call(server.grpc, "/inference.GRPCInferenceService/Nothing", _triton("moody", 8 * MIB), MESSAGES_OF_NOTHING)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    assert sizes == []


MESSAGES_OF_NOTHING = open_inference_grpc.MESSAGES["ServerLiveResponse"]


def test_oversized_model_name_is_rejected_in_the_grpc_process(heard: tuple[Server, list[int]]) -> None:
    server, sizes = heard
    request = _triton("a" * 2 * MAX_OUTLINE, 2 * MIB)
    with pytest.raises(grpc.RpcError, match=f"that name a model may have {MAX_OUTLINE} bytes"):
        call(server.grpc, INFER, request, open_inference_grpc.MESSAGES["ModelInferResponse"])
    assert sizes == []


# -- a process that has been taken over -------------------------------------------------------------------------------


class TakenOver:
    """The end of the gRPC process in the hands of an attacker, who sends the frames of his choice."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.unloaded: list[str] = []
        self.reports: list[str] = []
        self._reader, self._writer = reader, writer

    def send(self, kind: int, number: int, head: Any = b"", message: bytes = b"") -> None:
        text = head if isinstance(head, bytes) else orjson.dumps(head)
        self._writer.write(HEAD.pack(kind, number, len(text), len(message)) + text + message)

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, int, Any, bytes] | None:
        """Return the next frame of the server; None where it has ended the connection."""
        try:
            kind, number, num_head, num = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        head, message = await self._reader.readexactly(num_head), await self._reader.readexactly(num)
        return kind, number, orjson.loads(head) if head else None, message


def attack(act: Callable[[TakenOver], Awaitable[None]], *, manages: bool = False, **limits: Any) -> TakenOver:
    """Let an attacker speak with the server's end of a listener that has one model, and return what happened."""

    async def run() -> TakenOver:
        ours, theirs = socket.socketpair()
        attacker = TakenOver(*await asyncio.open_unix_connection(sock=theirs))

        async def unload(name: str) -> None:
            attacker.unloaded.append(name)

        def find(name: str, *rest: Any) -> Any:
            raise RequestRefused("NOT_FOUND", f"no model {name}")

        gateway: Any = SimpleNamespace(catalogue=SimpleNamespace(unload=unload, find=find))
        loop, most = asyncio.get_running_loop(), Limits(**limits)
        loop.set_exception_handler(lambda loop, context: attacker.reports.append(context["message"]))
        listener = GrpcProcess([OpenInferenceGrpc(gateway)], AccessToken(None), most, manages=manages)
        listener._is_closing = True
        listener._frames = await FrameSocket.over(
            ours, listener._handle_frame, listener._end, (MAX_FRAME_HEAD, most.body)
        )
        try:
            async with asyncio.timeout(20):
                await act(attacker)
        finally:
            listener._frames.close()
            attacker._writer.close()
            await asyncio.sleep(0)
        return attacker

    return asyncio.run(run())


def head(path: Any, **change: Any) -> dict[str, Any]:
    return {"path": path, "left": None, "headers": {}, **change}


UNLOADING = open_inference_grpc.MESSAGES["RepositoryModelUnloadRequest"](model_name="adder").SerializeToString()


def test_compromised_grpc_process_cannot_manage_models() -> None:
    async def act(attacker: TakenOver) -> None:
        attacker.send(CALL, 1, head(UNLOAD), UNLOADING)
        assert await attacker.answer() is None

    attacker = attack(act)
    assert attacker.unloaded == []
    assert attacker.reports == [
        "the gRPC process sent a call of a method that its listener does not have, and is restarted"
    ]


class Payload:
    """Makes a folder in the process that unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


class Pickling(Frontend):
    """A gRPC process that sends pickles to the server on every socket that it has; `key` is the folder to make."""

    def _run(self) -> NoReturn:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
                for kind in (RESULT, FAILURE, SERVICE_ANSWER):
                    send_frame(sock, kind, b'{"number": 1, "good": true}', [pack(Payload(self.key))])
        os._exit(0)


def test_server_unpickles_nothing_that_a_compromised_grpc_process_sends(engine: LocalEngine, tmp_path: Path) -> None:
    path = tmp_path / "made-by-the-attack"
    token, limits = AccessToken(None), Limits()
    frontend = Pickling("", str(path), "127.0.0.1", 0, token, limits, None, {}, "")
    service = engine.start_service(frontend, Device("cpu"))
    with pytest.raises(WorkerFailed, match="exit code 0"):
        service.ended.result(60)
    assert not path.exists()


def test_management_listener_can_unload_models() -> None:
    async def act(attacker: TakenOver) -> None:
        attacker.send(CALL, 1, head(UNLOAD), UNLOADING)
        assert await attacker.answer() == (ANSWER, 1, None, b"")

    assert attack(act, manages=True).unloaded == ["adder"]


@pytest.mark.parametrize(
    ("kind", "number", "header"),
    [
        (CALL, 1, b"no JSON"),
        (CALL, 1, b"[]"),
        (CALL, 1, head("/unknown/Method")),
        (CALL, 1, head(["a", "list"])),
        (CALL, 1, {"path": LIVE}),
        (CALL, 1, head(LIVE, left="soon")),
        (CALL, 1, head(LIVE, left=True)),
        (CALL, 1, head(LIVE, headers=["authorization"])),
        (CALL, 1, head(LIVE, headers={"authorization": "Bearer x"})),
        (CALL, 1, head(LIVE, headers={"traceparent": 7})),
        (CALL, 1 << 63, head(LIVE)),
        (OUTLINE, 1, head(LIVE)),
        (READY, 0, {"port": 80}),
        (ANSWER, 1, b""),
        (REFUSAL, 1, b"{}"),
        (STOP, 0, b"{}"),
        (200, 1, b""),
    ],
)
def test_invalid_frames_close_the_connection_and_are_reported(kind: int, number: int, header: Any) -> None:
    async def act(attacker: TakenOver) -> None:
        attacker.send(kind, number, header)
        attacker.send(CALL, 2, head(LIVE))
        assert await attacker.answer() is None

    (report,) = attack(act).reports
    assert report.startswith("the gRPC process sent ")


@pytest.mark.parametrize(("num_head", "num_message"), [(MAX_FRAME_HEAD + 1, 0), (0, 2 * MIB), (2**32 - 1, 2**32 - 1)])
def test_oversized_frames_are_rejected_by_their_header(num_head: int, num_message: int) -> None:
    async def act(attacker: TakenOver) -> None:
        attacker.send_raw(HEAD.pack(CALL, 1, num_head, num_message))
        assert await attacker.answer() is None

    (report,) = attack(act, body=MIB, bodies=MIB).reports
    assert f"a frame of {num_head} and {num_message} bytes" in report


def test_duplicate_call_number_closes_the_connection() -> None:
    async def act(attacker: TakenOver) -> None:
        attacker.send_raw(2 * frame(CALL, 1, head(LIVE)))
        assert await attacker.answer() is None

    assert "the number of another one" in attack(act).reports[0]


def frame(kind: int, number: int, header: Any, message: bytes = b"") -> bytes:
    text = orjson.dumps(header)
    return HEAD.pack(kind, number, len(text), len(message)) + text + message


def test_calls_over_the_concurrency_limit_are_rejected() -> None:
    async def act(attacker: TakenOver) -> None:
        attacker.send_raw(b"".join(frame(CALL, number, head(LIVE)) for number in range(8)))
        kinds = [found[0] for _ in range(8) if (found := await attacker.answer()) is not None]
        assert (kinds.count(ANSWER), kinds.count(REFUSAL)) == (4, 4)
        attacker.send(CANCEL, 99)
        attacker.send(CALL, 9, head(LIVE))
        found = await attacker.answer()
        assert found is not None
        assert found[:2] == (ANSWER, 9)

    assert attack(act, calls=4).reports == []


def test_message_sent_without_an_outline_is_validated_in_the_server() -> None:
    """An outline that was not sent, or was answered, does not let a message pass."""

    async def act(attacker: TakenOver) -> None:
        attacker.send(CALL, 1, head(INFER), _triton("unknown", 2 * MIB).SerializeToString())
        found = await attacker.answer()
        assert found is not None
        assert (found[0], found[2]["reason"]) == (REFUSAL, "no model unknown")
        attacker.send(CALL, 2, head(LIVE), b"\x0a" + bytes(2 * MIB))
        found = await attacker.answer()
        assert found is not None
        assert f"may have {SMALL_BYTES} bytes" in found[2]["reason"]

    assert attack(act).reports == []


@pytest.mark.parametrize("value", [b"{}", b'{"port": "80"}', b'{"port": true}', b'{"port": 70000}', b'{"error": 1}'])
def test_ready_message_must_contain_a_port_or_an_error(value: bytes) -> None:
    with pytest.raises(FrameError, match="port"):
        read_ready(value)
    assert read_ready(b'{"port": 80}') == {"port": 80}


def test_large_infer_message_returns_predictions(start: Start) -> None:
    server = start({"moody": Moody()})
    rows = np.ones((4000, 1), np.float32)
    request = _triton("moody", rows.nbytes)
    del request.raw_input_contents[:]
    request.raw_input_contents.append(rows.tobytes())
    request.parameters["padding"].string_param = "a" * 2 * MIB
    answer = call(server.grpc, INFER, request, open_inference_grpc.MESSAGES["ModelInferResponse"])
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [2.0] * 4000
