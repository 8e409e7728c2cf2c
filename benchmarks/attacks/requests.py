"""Attacks on a running server by requests: each function sends one kind for a few seconds and reports what came of it.

They need the ports of a server with a model `adder` of one input `x` (FP32, rows of 3), and its token where it has one.
An attack has succeeded when the server took what it should refuse, or did not answer a health check during it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from .http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Http2,
    frame,
    literal,
)
from .outcome import Outcome

SECONDS = 2.0
"""For each attack, and for the answer to a health check during it."""
MIB = 1 << 20
INFER = "/v2/models/adder/infer"
PREDICT = "/v1/models/adder:predict"
GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"
GRPC_PREDICT = "/tensorflow.serving.PredictionService/Predict"


@dataclass(frozen=True)
class Target:
    """A running server.

    Attributes:
        http: Port of the inference listener over HTTP.
        grpc: Port of the inference listener over gRPC.
        manage: Port of the management listener over HTTP.
        token: The token for inference; attacks that need none do not send it.
        manage_token: The token for management, for attacks that send it along as a browser extension might.
        connections: How many connections are more than the server takes from one address.
    """

    http: int
    grpc: int
    manage: int
    host: str = "127.0.0.1"
    token: str = ""
    manage_token: str = ""
    connections: int = 2200

    @property
    def headers(self) -> dict[str, str]:
        """What an honest client sends."""
        return {"Host": "localhost", **({"Authorization": f"Bearer {self.token}"} if self.token else {})}

    @property
    def manage_headers(self) -> dict[str, str]:
        """What an honest manager sends."""
        said = {"Authorization": f"Bearer {self.manage_token}"} if self.manage_token else {}
        return {"Host": "localhost", **said}


@dataclass(frozen=True)
class Answer:
    """A status, 0 where the connection ended without one, and the text of the body."""

    status: int
    text: str

    @property
    def reason(self) -> str:
        """What the server said about its refusal."""
        found = re.search(r'"error":\s*"((?:[^"\\]|\\.)*)"', self.text)
        return found[1] if found else ""


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    """The first lines of a request."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def send(port: int, parts: Iterable[bytes], seconds: float = SECONDS, host: str = "127.0.0.1") -> Answer:
    """Send parts of a request until the server answers, and return its answer."""
    until = time.monotonic() + seconds
    with contextlib.closing(socket.create_connection((host, port), seconds)) as connection:
        received = b""
        with contextlib.suppress(OSError):
            for part in parts:
                connection.settimeout(max(0.01, until - time.monotonic()))
                connection.sendall(part)
                if time.monotonic() > until:
                    break
        with contextlib.suppress(OSError):
            while not _is_whole(received) and (left := until + seconds - time.monotonic()) > 0:
                connection.settimeout(left)
                data = connection.recv(1 << 16)
                if not data:
                    break
                received += data
    status = int(received.split(b" ", 2)[1]) if received.startswith(b"HTTP/1.1 ") else 0
    return Answer(status, received.partition(b"\r\n\r\n")[2].decode(errors="replace"))


def _is_whole(received: bytes) -> bool:
    start, _, body = received.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", start)
    return found is not None and b"\r\n\r\n" in received and len(body) >= int(found[1])


def post(target: Target, path: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
    """Send one honest or dishonest request to the inference listener."""
    given = {**target.headers, "Content-Type": "application/json", **(headers or {})}
    return send(target.http, [head("POST", path, {**given, "Content-Length": str(len(body))}), body], host=target.host)


def is_well(target: Target) -> bool:
    """Whether the server answers a health check and an inference."""
    health = send(target.http, [head("GET", "/v2/health/ready", {"Host": "localhost"})], host=target.host)
    answer = post(target, PREDICT, b'{"instances": [[1, 2, 3]]}')
    return health.status == 200 and answer.status == 200


def refused(name: str, target: Target, answers: Iterable[Answer], statuses: Iterable[int]) -> Outcome:
    """The outcome of requests that must all be refused with one of these statuses."""
    found = list(answers)
    good = set(statuses)
    wrong = [answer for answer in found if answer.status not in good]
    detail: dict[str, float | str] = {"requests": len(found), "statuses": str(sorted({a.status for a in found}))}
    if wrong:
        detail["unexpected"] = f"{wrong[0].status} {wrong[0].text[:200]}"
    reasons = [answer.reason for answer in found]
    return Outcome(name, bool(wrong) or not is_well(target), reasons[0] if all(reasons) else "", detail)


def _repeated(piece: bytes, num: int) -> Iterator[bytes]:
    for _ in range(num):
        yield piece


# -- HTTP itself ------------------------------------------------------------------------------------------------------


def header_line(target: Target) -> Outcome:
    """Send one header line of 40 MiB."""
    parts = [b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: ", *_repeated(b"a" * 65536, 640)]
    return refused("header_line", target, [send(target.http, parts, host=target.host)], (431,))


def url_line(target: Target) -> Outcome:
    """Send one URL of 40 MiB."""
    parts = [b"GET /", *_repeated(b"a" * 65536, 640)]
    return refused("url_line", target, [send(target.http, parts, host=target.host)], (414, 431))


def many_headers(target: Target) -> Outcome:
    """Send ten thousand header lines."""
    parts = [b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n", *_repeated(b"A: b\r\n" * 100, 100), b"\r\n"]
    return refused("many_headers", target, [send(target.http, parts, host=target.host)], (431,))


def _chunked(target: Target) -> bytes:
    return head("POST", PREDICT, {**target.headers, "Transfer-Encoding": "chunked"})


def trailers(target: Target) -> Outcome:
    """Send trailers without end after a chunked body."""
    parts = [_chunked(target), b"1\r\na\r\n0\r\n", b"X: ", *_repeated(b"a" * 65536, 320)]
    return refused("trailers", target, [send(target.http, parts, host=target.host)], (400, 431))


def chunk_extensions(target: Target) -> Outcome:
    """Send a chunk extension without end."""
    parts = [_chunked(target), b"1;x=", *_repeated(b"a" * 65536, 320)]
    return refused("chunk_extensions", target, [send(target.http, parts, host=target.host)], (400, 431))


def tiny_chunks(target: Target) -> Outcome:
    """Send a body as millions of chunks of one byte."""
    parts = [_chunked(target), *_repeated(b"1\r\n1\r\n" * 10000, 450)]
    return refused("tiny_chunks", target, [send(target.http, parts, host=target.host)], (400, 413))


def empty_lines(target: Target) -> Outcome:
    """Send nothing but empty lines."""
    return refused("empty_lines", target, [send(target.http, _repeated(b"\r\n" * 8192, 320), host=target.host)], (400,))


def trailer_headers(target: Target) -> Outcome:
    """Give the token only in a trailer, where it must not count."""
    if not target.token:
        return Outcome("trailer_headers", False, "the server has no token")
    body = b'{"instances": [[1, 2, 3]]}'
    start = head("POST", PREDICT, {"Host": "localhost", "Transfer-Encoding": "chunked"})
    rest = b"%x\r\n%b\r\n0\r\nAuthorization: Bearer %b\r\n\r\n" % (len(body), body, target.token.encode())
    return refused("trailer_headers", target, [send(target.http, [start, rest], host=target.host)], (401,))


def idle_connections(target: Target) -> Outcome:
    """Open more connections than one address may have, and say nothing."""
    open_: list[socket.socket] = []
    try:
        with contextlib.suppress(OSError):
            for _ in range(target.connections):
                open_.append(socket.create_connection((target.host, target.http), SECONDS))
        well = is_well(target)
        closed = sum(_is_closed(connection) for connection in open_)
    finally:
        for connection in open_:
            connection.close()
    reason = "the connections that were idle longest are closed" if closed else "all connections fit"
    return Outcome("idle_connections", not well, reason, {"requests": len(open_), "closed": closed})


def slow_heads(target: Target) -> Outcome:
    """Begin more requests than one address may have connections, and never finish them."""
    open_: list[socket.socket] = []
    try:
        with contextlib.suppress(OSError):
            for _ in range(target.connections):
                open_.append(socket.create_connection((target.host, target.http), SECONDS))
                open_[-1].sendall(b"GET /v2 HTTP/1.1\r\nA:")
        well = is_well(target)
        answers = [answer for answer in map(_pending, open_) if answer]
    finally:
        for connection in open_:
            connection.close()
    reason = Answer(503, answers[0].decode(errors="replace")).reason if answers else "all connections fit"
    return Outcome("slow_heads", not well, reason, {"requests": len(open_), "refused": len(answers)})


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _pending(connection: socket.socket) -> bytes:
    connection.setblocking(False)
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def pipelined(target: Target) -> Outcome:
    """Send a hundred thousand requests without waiting for an answer."""
    one = head("GET", "/v2/none", target.headers)
    until = time.monotonic() + SECONDS
    sent = 0
    with contextlib.closing(socket.create_connection((target.host, target.http), SECONDS)) as connection:
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            while time.monotonic() < until and sent < 100_000:
                connection.sendall(one * 100)
                sent += 100
        answer = connection.recv(65536).decode(errors="replace")
    found = Answer(int(answer.split(" ", 2)[1]), answer.partition("\r\n\r\n")[2])
    return Outcome("pipelined", not is_well(target), found.reason, {"requests": sent, "status": found.status})


def upgrades(target: Target) -> Outcome:
    """Ask for other protocols, and for permission to send too much."""
    h2c = {**target.headers, "Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"}
    expect = {**target.headers, "Expect": "100-continue", "Content-Length": str(1 << 40)}
    answers = [
        send(target.http, [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], host=target.host),
        send(target.http, [head("GET", "/v2/none", h2c)], host=target.host),
        send(target.http, [head("POST", PREDICT, expect)], host=target.host),
    ]
    return refused("upgrades", target, answers, (400, 404, 413))


# -- bodies -----------------------------------------------------------------------------------------------------------


@cache
def _bombs() -> tuple[bytes, bytes]:
    plain = b"[" * (64 * MIB)
    return gzip.compress(plain, 1), zlib.compress(plain, 1)


def gzip_bomb(target: Target) -> Outcome:
    """Send a quarter of a MiB that becomes 64 MiB, as JSON and as tensors, with both codings."""
    packed, deflated = _bombs()
    answers = []
    for path, more in ((PREDICT, {}), (INFER, {"Inference-Header-Content-Length": "10"})):
        answers.append(post(target, path, packed, {"Content-Encoding": "gzip", **more}))
        answers.append(post(target, path, deflated, {"Content-Encoding": "deflate", **more}))
    return refused("gzip_bomb", target, answers, (413,))


def json_lists(target: Target) -> Outcome:
    """Send 31 MiB of empty lists, and as many as are read."""
    answers = []
    for path, size in ((PREDICT, 31 * MIB), (PREDICT, 7 * MIB), (INFER, MIB)):
        answers.append(post(target, path, b'{"instances": [%b[]]}' % (b"[]," * (size // 3))))
    return refused("json_lists", target, answers, (400, 413, 503))


def json_numbers(target: Target) -> Outcome:
    """Send millions of numbers, NaN, strings and objects that no model wants."""
    pieces = (b"1,", b"NaN,", b'"a",', b'{"a":1},')
    texts = [b'{"instances": [%b0]}' % (piece * (2 * MIB // len(piece))) for piece in pieces]
    return refused("json_numbers", target, [post(target, PREDICT, text) for text in texts], (400, 413, 503))


def json_shapes(target: Target) -> Outcome:
    """Send deep nesting, double keys, half surrogates, base64, long names and numbers beyond all bounds."""
    deep = b"[" * 100_000
    texts = [
        b'{"instances": %b' % deep,
        b'{"instances": [[1,2,3]], "signature_name": {"a": %b}}' % (b'{"a":' * 1000 + b"1" + b"}" * 1000),
        b'{"instances": [["\\ud800", 2, NaN]]}',
        b'{"instances": [{"b64": "%b"}]}' % (b"A" * MIB),
        b'{"instances": [%b]}' % (b"1" * 5000),
        b'{"%b": 1}' % (b"k" * MIB),
        b'{"instances": [[1e999, 2, "3"]]}',
    ]
    return refused("json_shapes", target, [post(target, PREDICT, text) for text in texts], (400, 413))


def _infer(shape: list[int], data: str = "[]", **more: object) -> bytes:
    entry = f'{{"name": "x", "datatype": "FP32", "shape": {json.dumps(shape)}, "data": {data}}}'
    rest = "".join(f', "{name}": {value}' for name, value in more.items())
    return f'{{"inputs": [{entry}]{rest}}}'.encode()


def parameters(target: Target) -> Outcome:
    """Send timeouts, priorities, ids and outputs beyond all bounds."""
    huge, good = "1" + "0" * 400, ([1, 3], "[1,2,3]")
    bounds = [huge, "NaN", "-1", "true", '"1"', "1e999", "[]"]
    texts = [_infer(*good, parameters=f'{{"{name}": {value}}}') for name in ("timeout", "priority") for value in bounds]
    # A NaN elsewhere makes Python's own parser read the text, which knows integers of any size.
    texts.append(_infer(*good, parameters=f'{{"timeout": {huge}, "other": NaN}}'))
    texts.append(_infer(*good, id=json.dumps("i" * MIB)))
    texts.append(_infer(*good, outputs=json.dumps([{"name": "output"}] * 10_000)))
    texts.append(b'{"inputs": [%b]}' % b",".join([b'{"name": "x"}'] * 10_000))
    return refused("parameters", target, [post(target, INFER, text) for text in texts], (400,))


def zero_rows(target: Target) -> Outcome:
    """Ask for hundreds of billions of rows that have no elements, and for many real ones, in every protocol."""
    many = 549_755_813_888
    answers = [
        post(target, "/v2/models/free/infer", _infer([many, 0])),
        post(target, "/v2/models/free/infer", _infer([0, 5])),
        post(target, INFER, _infer([many, 3])),
        post(target, "/v1/models/free:predict", b'{"instances": [%b[]]}' % (b"[]," * 5000)),
        post(target, PREDICT, b'{"instances": [%b[1,2,3]]}' % (b"[1,2,3]," * 5000)),
    ]
    binary = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%d,0],"parameters":{"binary_data_size":0}}]}' % many
    length = {"Inference-Header-Content-Length": str(len(binary))}
    answers.append(post(target, "/v2/models/free/infer", binary, length))
    answers += [_call(target, path, message) for path, message in grpc_rows(many)]
    return refused("zero_rows", target, answers, (400, 413))


def grpc_rows(many: int) -> list[tuple[str, bytes]]:
    """Messages of both gRPC protocols with so many empty rows."""
    size = _varint(many)
    shape = _field(3, size + b"\x00")
    tensor = _field(1, b"x") + _field(2, b"FP32") + shape
    infer = _field(1, b"free") + _field(5, tensor) + _field(7, b"")
    dims = _field(2, b"\x08" + size) + _field(2, b"\x08\x00")
    proto = b"\x08\x01" + _field(2, dims)
    predict = _field(1, _field(1, b"free")) + _field(2, _field(1, b"x") + _field(2, proto))
    return [(GRPC_INFER, infer), (GRPC_PREDICT, predict)]


def _varint(value: int) -> bytes:
    found = b""
    while value >= 128:
        found += bytes([value % 128 + 128])
        value //= 128
    return found + bytes([value])


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number * 8 + 2) + _varint(len(payload)) + payload


# -- gRPC -------------------------------------------------------------------------------------------------------------

_CODES = {b"3": 400, b"4": 504, b"5": 404, b"7": 403, b"8": 429, b"12": 501, b"13": 500, b"14": 503, b"16": 401}


def _call(target: Target, path: str, message: bytes, headers: dict[str, str] | None = None) -> Answer:
    """One whole call over gRPC; its status as HTTP would have it."""
    connection = Http2(target.host, target.grpc)
    try:
        said = {"authorization": f"Bearer {target.token}"} if target.token else {}
        number = connection.call(path, said if headers is None else headers)
        data = struct.pack(">BI", 0, len(message)) + message
        until = time.monotonic() + SECONDS
        while data and time.monotonic() < until and not connection.is_closed:
            data = data[connection.send_data(number, data, is_over=True) :]
            connection.read(0.001)
        while not connection.streams[number].is_closed and time.monotonic() < until and not connection.is_closed:
            connection.read(0.05)
        if connection.goaway:
            return Answer(0, json.dumps({"error": connection.goaway.decode(errors="replace")}))
        return _status(connection.streams[number].answer)
    finally:
        connection.close()


def _status(block: bytes) -> Answer:
    """The status and the message among the literals of an answer's headers."""
    found = re.search(rb"grpc-status[\x01\x02](\d{1,2})", block, re.S)
    # The length of a text is one byte, or two where it has 127 characters or more.
    text = re.search(rb"grpc-message(?:\x7f.|[^\x7f])(.{1,400})", block, re.S)
    if found is None:
        return Answer(0, "")
    reason = "".join(chr(c) for c in text[1] if 32 <= c < 127) if text else ""
    return Answer(_CODES.get(found[1], 0), json.dumps({"error": reason}))


def grpc_memory(target: Target, num: int = 60, size: int = 8 * MIB, *, with_token: bool = False) -> Outcome:
    """Begin many large messages without a token, and never finish them."""
    headers = {"authorization": f"Bearer {target.token}"} if with_token else {}
    connection = Http2(target.host, target.grpc)
    try:
        connection.read(0.1)
        for _ in range(num):
            connection.send_data(connection.call(GRPC_INFER, headers), struct.pack(">BI", 0, size))
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and not connection.is_closed:
            live = [number for number, stream in connection.streams.items() if not stream.is_closed]
            sent = sum(
                connection.send_data(number, bytes(min(16384, size - connection.streams[number].sent)))
                for number in live
                if connection.streams[number].sent < size
            )
            if not live:
                break
            connection.read(0.001 if sent else 0.02)
        total = sum(stream.sent for stream in connection.streams.values())
        answers = [_status(stream.answer) for stream in connection.streams.values() if stream.is_closed]
    finally:
        connection.close()
    reason = answers[0].reason if answers else ""
    detail: dict[str, float | str] = {"requests": num, "sent_mib": total / MIB, "refused": len(answers)}
    return Outcome("grpc_memory", total > 64 * MIB or not is_well(target), reason, detail)


def grpc_metadata(target: Target) -> Outcome:
    """Send metadata of half a MiB."""
    answer = _call(target, GRPC_INFER, b"", {f"x-{number}": "a" * 8000 for number in range(64)})
    return Outcome("grpc_metadata", answer.status == 200 or not is_well(target), answer.reason, {"got": answer.status})


def grpc_headers(target: Target) -> Outcome:
    """Send blocks of indexed headers, a byte each, without acknowledging the settings, on ever new connections."""
    first = literal(b":path", GRPC_INFER.encode()) + b"\x40\x01x\x01y"
    num = sent = 0
    received = b""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        num += 1
        with contextlib.suppress(OSError), socket.create_connection((target.host, target.grpc), SECONDS) as connection:
            connection.settimeout(max(0.01, until - time.monotonic()))
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            for number in range(1, 201, 2):
                block = (first if number == 1 else b"") + b"\xbe" * 16000
                connection.sendall(frame(HEADERS, END_HEADERS, number, block))
                sent += len(block)
        with contextlib.suppress(OSError), socket.create_connection((target.host, target.grpc), SECONDS) as connection:
            # One that waits for the reason.
            connection.settimeout(max(0.01, until - time.monotonic()))
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, b"\x82" * 1000))
            received = received or connection.recv(1 << 16)
    reason = received[17:].decode(errors="replace") if len(received) > 17 and received[3] == GOAWAY else ""
    detail: dict[str, float | str] = {"requests": num, "sent_mib": sent / MIB}
    return Outcome("grpc_headers", not reason or not is_well(target), reason, detail)


def grpc_floods(target: Target) -> Outcome:
    """Send floods of control frames: pings, settings, resets, empty frames."""
    sent = num_calls = 0
    goaway = b""
    for flood in (_pings, _settings, _resets, _empties):
        connection = Http2(target.host, target.grpc)
        try:
            connection.read(0.05)
            until = time.monotonic() + SECONDS / 4
            while time.monotonic() < until and not connection.is_closed:
                connection.send(flood(connection))
                sent += 100
                connection.read(0.001)
            goaway = goaway or connection.goaway
            num_calls += len(connection.streams)
        finally:
            connection.close()
    reason = goaway.decode(errors="replace") or "all frames were taken and cost nothing"
    return Outcome("grpc_floods", not is_well(target), reason, {"requests": num_calls, "frames": sent})


def _pings(connection: Http2) -> bytes:
    return frame(PING, 0, 0, bytes(8)) * 100


def _settings(connection: Http2) -> bytes:
    return frame(SETTINGS, 0, 0, b"") * 100


def _resets(connection: Http2) -> bytes:
    sent = b""
    for _ in range(100):
        number = connection.call(GRPC_INFER)
        sent += frame(RST_STREAM, 0, number, struct.pack(">I", 8))
    return sent


def _empties(connection: Http2) -> bytes:
    number = connection.call(GRPC_INFER)
    return frame(DATA, 0, number, b"") * 99 + frame(DATA, END_STREAM, number, b"") + frame(HEADERS, 0, number + 2, b"")


def grpc_parse_bomb(target: Target) -> Outcome:
    """Send messages whose parts take many times their bytes when they are parsed."""
    empties = _field(1, b"adder") + b"\x2a\x00" * (MIB // 2)
    numbers = _field(1, b"adder") + _field(5, _field(1, b"x") + _field(5, _field(6, bytes(3 * MIB))))
    unpacked = _field(1, b"adder") + _field(5, _field(1, b"x") + _field(5, b"\x35\x00\x00\x00\x00" * (MIB // 5)))
    answers = [_call(target, GRPC_INFER, message) for message in (empties, numbers, unpacked)]
    return refused("grpc_parse_bomb", target, answers, (400,))


def grpc_management(target: Target) -> Outcome:
    """Manage models on the inference listener."""
    unload = _field(2, b"adder")
    answers = [
        _call(target, "/inference.GRPCInferenceService/RepositoryModelUnload", unload),
        _call(target, "/inference.GRPCInferenceService/RepositoryModelLoad", unload),
        _call(target, "/tensorflow.serving.ModelService/HandleReloadConfigRequest", _field(1, _field(1, b""))),
        post(target, "/v2/repository/models/adder/unload", b"{}"),
        post(target, "/manage/models/adder/unload", b"{}"),
    ]
    return refused("grpc_management", target, answers, (403, 404))


# -- web pages --------------------------------------------------------------------------------------------------------


def cross_site(target: Target) -> Outcome:
    """Send what a browser sends for a page of another origin, and for a page whose name was bound to this machine."""
    json_, text = {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}
    pages: list[dict[str, str]] = [
        {"Origin": "https://evil.example", **text},
        {"Origin": "null", **json_},
        {"Sec-Fetch-Site": "cross-site", **json_},
        {"Sec-Fetch-Site": "same-site", **json_},
        {"Host": "evil.example", "Origin": "http://evil.example", **json_},
        {"Host": "evil.example:8502", **json_},
        text,
        {"Content-Type": "application/x-www-form-urlencoded"},
    ]
    answers = []
    for page in pages:
        headers = {**target.manage_headers, **page, "Content-Length": "2"}
        for path in ("/manage/models/adder/unload", "/v2/repository/models/adder/unload"):
            answers.append(send(target.manage, [head("POST", path, headers), b"{}"], host=target.host))
    foreign = {**target.headers, **pages[0]}
    answers.append(post(target, PREDICT, b'{"instances": [[1, 2, 3]]}', foreign))
    return refused("cross_site", target, answers, (403, 415, 421))


def without_token(target: Target) -> Outcome:
    """Send large bodies without a token, or with a wrong one: they must be refused before they are read."""
    if not target.token:
        return Outcome("without_token", False, "the server has no token")
    answers = []
    for said in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"bearer {target.token}x"}):
        start = head("POST", PREDICT, {"Host": "localhost", "Content-Length": str(100 * MIB), **said})
        answers.append(send(target.http, [start], host=target.host))
    health = head("POST", "/v2/health/live", {"Host": "localhost", "Content-Length": str(7 * MIB)})
    answers.append(send(target.http, [health], host=target.host))
    return refused("without_token", target, answers, (401, 413))


ATTACKS: tuple[Callable[[Target], Outcome], ...] = (
    header_line, url_line, many_headers, trailers, chunk_extensions, tiny_chunks, empty_lines, trailer_headers,
    idle_connections, slow_heads, pipelined, upgrades, gzip_bomb, json_lists, json_numbers, json_shapes, parameters,
    zero_rows, grpc_memory, grpc_metadata, grpc_headers, grpc_floods, grpc_parse_bomb, grpc_management, cross_site,
    without_token,
)  # fmt: skip
