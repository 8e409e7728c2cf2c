"""Fuzz targets of the serving package: a function per decoder that takes any bytes and raises only on a defect.

A decoder may refuse (`BadRequest`, `RequestRefused`); what it accepts must fit the signature. Everything else that is
raised, and memory that stays counted, is a defect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.attacks.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    literal,
)
from manyhands.core import RequestRefused, Signature, TensorSpec
from manyhands.serving.app import Access
from manyhands.serving.connections import Slot
from manyhands.serving.http import BadRequest, Request
from manyhands.serving.http2_frames import ClientFrames, FrameRefused, ServerFrames
from manyhands.serving.http_connection import Connection
from manyhands.serving.http_listener import HttpListener
from manyhands.serving.limits import Limits
from manyhands.serving.protocols import open_inference_grpc, tensorflow_grpc
from manyhands.serving.protocols.messages import require_light
from manyhands.serving.protocols.open_inference_rest import HEADER, Subject, header_size, read_request
from manyhands.serving.protocols.rows import fast_rows
from manyhands.serving.protocols.tensorflow_messages import MESSAGES
from manyhands.serving.protocols.tensorflow_rest import parse_predict, read_text
from manyhands.serving.security import AccessToken, Sites

SIGNATURE = Signature(
    {"x": TensorSpec("float32", (None, 3)), "n": TensorSpec("int64", (None,))}, {"y": TensorSpec("float32", (None,))}
)
SUBJECT = Subject("m", SIGNATURE)
STRINGS = Subject(
    "m",
    Signature({"t": TensorSpec("string", (None,)), "b": TensorSpec("bytes", (None, 2))}, SIGNATURE.outputs),
)
ONE = Signature({"x": TensorSpec("float32", (None, 3))}, SIGNATURE.outputs)
LIMITS = Limits(head=1024, headers=20, body=4096, json=4096, values=1024, bodies=8192, connections=4)
REFUSED = (BadRequest, RequestRefused)


class Transport:
    """A client's side without a network: keeps what is written, and whether the connection is over."""

    def __init__(self) -> None:
        self.written, self.is_over = bytearray(), False

    def get_extra_info(self, name: str) -> Any:
        """Return the client's address."""
        return ("127.0.0.1", 1)

    def write(self, data: bytes) -> None:
        """Keep an answer."""
        self.written += data

    def is_closing(self) -> bool:
        """Return whether it is over."""
        return self.is_over

    def can_write_eof(self) -> bool:
        """Return whether one direction can be closed."""
        return True

    def close(self) -> None:
        """End it."""
        self.is_over = True

    abort = close

    def _nothing(self) -> None:
        """Do nothing."""

    write_eof = pause_reading = resume_reading = _nothing


def http(data: bytes) -> None:
    """Feed a connection with bytes in two ways of cutting them: nothing fails, and nothing stays behind."""
    answers = {bytes(_LOOP.run_until_complete(_talk(data, size))) for size in (5, 16384)}
    for answer in answers:
        for status in answer.split(b"HTTP/1.1 ")[1:]:
            if status.startswith(b"500"):
                raise AssertionError(f"answered with 500: {status[:200]!r}")


def http2_frames(data: bytes) -> None:
    """Feed the gate of gRPC with bytes in two ways of cutting them: it forwards the same, or refuses either way."""
    ways = [_checked(data, size) for size in (7, 16384)]
    if ways[0] != ways[1]:
        raise AssertionError(f"forwarded {ways[0]!r} and {ways[1]!r}")
    answers = ServerFrames()
    found = [answers.has_message(data[start : start + 7]) for start in range(0, len(data), 7)]
    if any(found) != ServerFrames().has_message(data):
        raise AssertionError("a message was found in one way only")


def _checked(data: bytes, size: int) -> bytes | None:
    frames = ClientFrames(LIMITS, lambda: 0.0)
    try:
        return b"".join(frames.take(data[start : start + size]) for start in range(0, len(data), size))
    except FrameRefused:
        return None


def json_v1(data: bytes) -> None:
    """Read a text as a request of TensorFlow Serving's REST API, in every way there is."""
    for verb in ("predict", "classify", "regress"):
        with contextlib.suppress(*REFUSED):
            arrays, _ = read_text(data, LIMITS.json, LIMITS.values, SIGNATURE, verb)
            require_fitting(arrays)
    rows = fast_rows(data, ONE)
    if rows is not None:
        slow, _ = parse_predict(json.loads(data), ONE)
        np.testing.assert_array_equal(rows, slow["x"])


def json_v2(data: bytes) -> None:
    """Read a text as a request of the Open Inference Protocol."""
    _read_v2(data, b"")


def binary(data: bytes) -> None:
    """Read bytes as a text and the tensors behind it; the first two bytes say where the text ends."""
    length, rest = data[:2], data[2:]
    size = int.from_bytes(length, "big") % (len(rest) + 1)
    _read_v2(rest[:size], rest[size:])
    with contextlib.suppress(*REFUSED):
        if not 0 <= header_size(data[:12], len(rest)) <= len(rest):
            raise AssertionError("a text that ends behind its body")


def grpc_open_inference(data: bytes) -> None:
    """Read bytes as each message of the Open Inference Protocol; a request's tensors must fit."""
    _parse_all(data, open_inference_grpc.MESSAGES)
    request = _parsed(data, open_inference_grpc.MESSAGES["ModelInferRequest"])
    if request is not None:
        with contextlib.suppress(*REFUSED):
            require_fitting(open_inference_grpc.read_inputs(request, SUBJECT))


def grpc_tensorflow(data: bytes) -> None:
    """Read bytes as each message of TensorFlow Serving; a request's tensors must fit."""
    _parse_all(data, MESSAGES)
    request = _parsed(data, MESSAGES["PredictRequest"])
    if request is not None:
        with contextlib.suppress(*REFUSED):
            shapes = tensorflow_grpc.read_shapes(request, SUBJECT, LIMITS.body)
            require_fitting(tensorflow_grpc.read_inputs(request, SUBJECT, shapes))


def strings(data: bytes) -> None:
    """Read bytes as a request with strings, in the protocol that the first byte selects; the next two end the text."""
    kind, size, rest = data[:1], int.from_bytes(data[1:3], "big"), data[3:]
    with contextlib.suppress(*REFUSED):
        require_strings(_STRING_READERS[kind[0] % len(_STRING_READERS) if kind else 0](rest, size % (len(rest) + 1)))


def _strings_v1(data: bytes, size: int) -> Any:
    return read_text(data, LIMITS.json, LIMITS.values, STRINGS.signature, "predict")[0]


def _strings_examples(data: bytes, size: int) -> Any:
    return read_text(data, LIMITS.json, LIMITS.values, STRINGS.signature, "classify")[0]


def _strings_v2(data: bytes, size: int) -> Any:
    return read_request(data[:size], data[size:], STRINGS, LIMITS.json, LIMITS.values, LIMITS.body)[0]


def _strings_open_inference(data: bytes, size: int) -> Any:
    request = _parsed(data, open_inference_grpc.MESSAGES["ModelInferRequest"])
    return None if request is None else open_inference_grpc.read_inputs(request, STRINGS)


def _strings_tensorflow(data: bytes, size: int) -> Any:
    request = _parsed(data, MESSAGES["PredictRequest"])
    if request is None:
        return None
    return tensorflow_grpc.read_inputs(request, STRINGS, tensorflow_grpc.read_shapes(request, STRINGS, LIMITS.body))


_STRING_READERS = (_strings_v1, _strings_examples, _strings_v2, _strings_open_inference, _strings_tensorflow)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "http": http,
    "http2_frames": http2_frames,
    "json_v1": json_v1,
    "json_v2": json_v2,
    "binary": binary,
    "grpc_open_inference": grpc_open_inference,
    "grpc_tensorflow": grpc_tensorflow,
    "strings": strings,
}

_OPENING = PREFACE + frame(SETTINGS, 0, 0, bytes(6))
_GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
_TEXT = b'{"instances": [{"x": [1, 2, 3], "n": 4}]}'
_INPUTS = [
    {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]},
    {"name": "n", "shape": [1], "datatype": "INT64", "data": [4]},
]
_SIZED = json.dumps(
    {
        "inputs": [
            {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": 12}},
            {"name": "n", "shape": [1], "datatype": "INT64", "parameters": {"binary_data_size": 8}},
        ]
    }
).encode()
_STRING_TEXT = json.dumps(
    {
        "inputs": [
            {"name": "t", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}},
            {"name": "b", "shape": [1, 2], "datatype": "BYTES", "parameters": {"binary_data_size": 10}},
        ]
    }
).encode()
SEEDS: dict[str, tuple[bytes, ...]] = {
    "http": (
        _GET,
        _GET * 3,
        b"POST /v1/models/m:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nT: u\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: evil\r\nOrigin: null\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ),
    "http2_frames": (
        _OPENING,
        _OPENING + frame(HEADERS, END_HEADERS, 1, literal(b"a", b"b")) + frame(DATA, 1, 1, bytes(20)),
        _OPENING + frame(HEADERS, 0x28, 1, bytes([2, 0, 0, 0, 0, 0, 0x82, 0, 0])) + frame(CONTINUATION, 4, 1, b"\x84"),
        _OPENING + frame(SETTINGS, ACK, 0, b"") + frame(PING, 0, 0, bytes(8)) * 3,
    ),
    "json_v1": (_TEXT, b'{"instances": [[1, 2.5, -3e4]]}', b'{"examples": [{"x": [1, 2, 3], "n": [NaN]}]}'),
    "json_v2": (json.dumps({"inputs": _INPUTS}).encode(), json.dumps({"id": "a", "inputs": _INPUTS}).encode()),
    "binary": (len(_SIZED).to_bytes(2, "big") + _SIZED + bytes(20), bytes(22)),
    "grpc_open_inference": (
        open_inference_grpc.MESSAGES["ModelInferRequest"](
            model_name="m",
            inputs=[
                {"name": "x", "datatype": "FP32", "shape": [1, 3], "contents": {"fp32_contents": [1, 2, 3]}},
                {"name": "n", "datatype": "INT64", "shape": [1], "contents": {"int64_contents": [4]}},
            ],
            parameters={"timeout": {"int64_param": 5}},
        ).SerializeToString(),
    ),
    "grpc_tensorflow": (
        MESSAGES["PredictRequest"](
            model_spec={"name": "m", "version": {"value": 1}},
            inputs={
                "x": {"dtype": 1, "tensor_shape": {"dim": [{"size": 1}, {"size": 3}]}, "tensor_content": bytes(12)},
                "n": {"dtype": 9, "tensor_shape": {"dim": [{"size": 1}]}, "int64_val": [4]},
            },
        ).SerializeToString(),
    ),
    "strings": (
        b"\0\0\0" + b'{"instances": [{"t": "a", "b": ["b", {"b64": "AAE="}]}]}',
        b"\1\0\0" + b'{"examples": [{"t": "a", "b": ["b", "c"]}]}',
        b"\2" + len(_STRING_TEXT).to_bytes(2, "big") + _STRING_TEXT + b"\1\0\0\0a" + b"\0\0\0\0\2\0\0\0\xff\0",
        b"\3\0\0"
        + open_inference_grpc.MESSAGES["ModelInferRequest"](
            inputs=[
                {"name": "t", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"a"]}},
                {"name": "b", "datatype": "BYTES", "shape": [1, 2], "contents": {"bytes_contents": [b"b", b"\xff"]}},
            ],
        ).SerializeToString(),
        b"\4\0\0"
        + MESSAGES["PredictRequest"](
            inputs={
                "t": {"dtype": 7, "tensor_shape": {"dim": [{"size": 1}]}, "string_val": [b"a"]},
                "b": {"dtype": 7, "tensor_shape": {"dim": [{"size": 1}, {"size": 2}]}, "string_val": [b"b"]},
            },
        ).SerializeToString(),
    ),
}
"""Good inputs to begin with, by target."""


def require_fitting(arrays: Any) -> None:
    """Raise where arrays are not what the signature says."""
    if set(arrays) != {"x", "n"} or arrays["x"].dtype != np.float32 or arrays["n"].dtype != np.int64:
        raise AssertionError("other inputs than the signature has")
    if arrays["x"].shape[1:] != (3,) or arrays["n"].shape != arrays["x"].shape[:1]:
        raise AssertionError(f"shapes that do not fit: {arrays['x'].shape}, {arrays['n'].shape}")


def require_strings(arrays: Any) -> None:
    """Raise where arrays are not strings as the signature says."""
    if arrays is None:
        return
    if set(arrays) != {"t", "b"} or not all(isinstance(item, bytes) for one in arrays.values() for item in one.flat):
        raise AssertionError("other inputs than the signature has")
    for item in arrays["t"].flat:
        item.decode()
    if arrays["b"].shape[1:] != (2,) or arrays["t"].shape != arrays["b"].shape[:1]:
        raise AssertionError(f"shapes that do not fit: {arrays['t'].shape}, {arrays['b'].shape}")


def _read_v2(text: bytes, raw: bytes) -> None:
    with contextlib.suppress(*REFUSED):
        arrays, _, _ = read_request(text, raw, SUBJECT, LIMITS.json, LIMITS.values, LIMITS.body)
        require_fitting(arrays)


def _parsed(data: bytes, kind: Any) -> Any:
    from google.protobuf.message import DecodeError

    try:
        require_light(data, kind)
        return kind.FromString(data)
    except (DecodeError, RequestRefused):
        return None


def _parse_all(data: bytes, messages: dict[str, Any]) -> None:
    for kind in messages.values():
        message = _parsed(data, kind)
        if message is not None:
            message.SerializeToString()


def _answer(request: Request) -> None:
    """Read the body as a protocol does, and answer with its length."""
    request.headers.get(HEADER)
    try:
        request.answer(200, b"%d" % len(request.content(LIMITS.body)))
    except BadRequest as error:
        request.answer(error.status, error.reason.encode())
    except RequestRefused as refusal:
        request.answer(503, refusal.reason.encode())


async def _talk(data: bytes, size: int) -> bytes:
    listener = HttpListener(_answer, LIMITS, None, Access(AccessToken(None), Sites("127.0.0.1")))
    slot = Slot("127.0.0.1", lambda: None)
    listener.budget.enter(slot)
    connection, transport = Connection(listener, slot), Transport()
    connection.connection_made(transport)
    position = 0
    while position < len(data) and not transport.is_over:
        view = connection.get_buffer(-1)
        num = min(size, len(view), len(data) - position)
        view[:num] = data[position : position + num]
        connection.buffer_updated(num)
        position += num
        await asyncio.sleep(0)
    for _ in range(len(data) // 16 + 2):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    if listener.bodies.num_bytes or listener.connections or listener.budget:
        raise AssertionError(f"{listener.bodies.num_bytes} bytes stay counted after the connection")
    return bytes(transport.written)


_LOOP = asyncio.new_event_loop()
