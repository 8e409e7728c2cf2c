"""What benchmarks.triton asks both servers: good requests of all kinds and forms, and every mistake that has a name."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from operator import itemgetter
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from manyhands.serving.dtypes import BY_OPEN, KINDS, Array, Kind, to_numbers

from .serving_works import ROW

RAW = ("FP16", "BF16")
"""Kinds that have no form in JSON."""
ADDER, ECHO = "/v2/models/adder/infer", "/v2/models/echo/infer"
X = [1.0, 2.0, 3.5]


@dataclass(frozen=True)
class Seen:
    """What a client sees of an answer: the status, the words of a refusal, and everything else in a form to compare."""

    status: str
    error: str = ""
    value: Any = None


@dataclass(frozen=True)
class Http:
    """A request as it goes over the wire."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def ask(self, http: int, grpc: int) -> Seen:
        """Status, content type, and the JSON and the tensors of the answer."""
        connection = HTTPConnection("127.0.0.1", http, timeout=30)
        try:
            connection.request(self.method, self.path, self.body, dict(self.headers))
            response = connection.getresponse()
            body, kind = response.read(), response.headers.get("Content-Type", "")
        finally:
            connection.close()
        coding = response.headers.get("Content-Encoding")
        body = gzip.decompress(body) if coding == "gzip" else zlib.decompress(body) if coding == "deflate" else body
        size = response.headers.get("Inference-Header-Content-Length")
        text, blob = (body[: int(size)], body[int(size) :]) if size else (body, b"")
        value = json.loads(text) if text.startswith((b"{", b"[")) else text.decode()
        if response.status != 200:
            return Seen(str(response.status), value["error"] if isinstance(value, dict) else value)
        if isinstance(value, dict) and "model_version" in value:
            found = [("content type", kind), *_outputs(value.pop("outputs"), blob), *value.items()]
            return Seen("200", value=sorted(found, key=itemgetter(0)))
        return Seen("200", value=_described(value))


@dataclass(frozen=True)
class Grpc:
    """A call of GRPCInferenceService."""

    method: str
    message: Any

    def ask(self, http: int, grpc: int) -> Seen:
        """Code, and the fields of the answer."""
        return ask_grpc(grpc, self.method, self.message)


@dataclass(frozen=True)
class Client:
    """A call of Triton's own client, over HTTP or gRPC."""

    kit: Any
    call: Callable[[Any, Any], Any]

    def ask(self, http: int, grpc: int) -> Seen:
        """What the client returns, or raises."""
        port = http if self.kit is triton_http else grpc
        with self.kit.InferenceServerClient(f"127.0.0.1:{port}") as client:
            try:
                seen = Seen("OK", value=self.call(client, self.kit))
            except InferenceServerException as error:
                seen = Seen(str(error.status()), error.message())
        # It closes itself once more when it is collected, and gevent does not bear that on another thread.
        client.close = lambda: None
        return seen


def ask_grpc(port: int, method: str, message: Any) -> Seen:
    """One call."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            answer = getattr(stub, method)(message, timeout=30)
        except grpc.RpcError as error:
            return Seen(error.code().name, str(error.details()))
    value = MessageToDict(answer, preserving_proto_field_name=True)
    if method == "ModelInfer":
        del value["outputs"], value["raw_output_contents"]
        outputs = [
            (one.name, one.datatype, tuple(one.shape), _numbers(raw, one.datatype))
            for one, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        ]
        return Seen("OK", value=sorted([*value.items(), *outputs], key=itemgetter(0)))
    return Seen("OK", value=_described(value))


def _described(value: Any) -> Any:
    """Metadata of a server without its name."""
    if isinstance(value, dict) and "extensions" in value:
        return {"extensions": dict.fromkeys(value["extensions"])}
    return value


def _outputs(listed: Sequence[Mapping[str, Any]], blob: bytes) -> list[tuple[Any, ...]]:
    found = []
    for one in listed:
        size = one.get("parameters", {}).get("binary_data_size")
        if size is None:
            numbers = np.array(one["data"], BY_OPEN[one["datatype"]].numpy)
        else:
            numbers, blob = _numbers(blob[:size], one["datatype"]), blob[size:]
        form = "JSON" if size is None else "bytes"
        found.append((one["name"], one["datatype"], tuple(one["shape"]), numbers, form))
    return [*found, ("bytes left", len(blob))]


def _numbers(raw: bytes, kind: str) -> Array:
    return np.frombuffer(raw, BY_OPEN[kind].numpy)


def example(kind: Kind, rows: int = 2) -> Array:
    """Numbers of a kind, its bounds among them; bfloat16 as its bits."""
    if kind.numpy.kind == "f":
        return np.resize(np.array([0.1, -2.5, 1e4, 0, 7, 0.3], kind.numpy), (rows, 3))
    if kind.numpy.kind == "b":
        return np.resize(np.array([True, False, True, True, False]), (rows, 3))
    bounds = np.iinfo(kind.numpy)
    highest = 0x7F00 if kind.is_bfloat16 else bounds.max
    return np.resize(np.array([bounds.min, highest, 0, 1, 2, 3], kind.numpy), (rows, 3))


def tensor(name: str, kind: str, shape: Sequence[int], data: Any = None, size: int | None = None) -> dict[str, Any]:
    """An input as JSON."""
    entry: dict[str, Any] = {"name": name, "datatype": kind, "shape": list(shape)}
    if data is not None:
        entry["data"] = data
    if size is not None:
        entry["parameters"] = {"binary_data_size": size}
    return entry


def x(**changed: Any) -> dict[str, Any]:
    """The adder's input, with changes."""
    return {**tensor("x", "FP32", [1, 3], X), **changed}


def as_json(*inputs: Mapping[str, Any], path: str = ADDER, **more: Any) -> Http:
    """An inference without bytes."""
    return Http("POST", path, json.dumps({"inputs": list(inputs), **more}).encode())


def as_bytes(inputs: Sequence[Mapping[str, Any]], blob: bytes, path: str = ADDER, **more: Any) -> Http:
    """An inference with bytes behind the JSON."""
    text = json.dumps({"inputs": list(inputs), **more}).encode()
    return Http("POST", path, text + blob, {"Inference-Header-Content-Length": str(len(text))})


def echoed(binary: bool, rows: int = 2) -> tuple[list[dict[str, Any]], bytes]:
    """An input of every kind, as JSON where it has a form there and that is wished for."""
    listed, blob = [], b""
    for kind in KINDS:
        values = example(kind, rows)
        if binary or kind.open in RAW:
            listed.append(tensor(kind.torch, kind.open, values.shape, size=values.nbytes))
            blob += values.tobytes()
        else:
            listed.append(tensor(kind.torch, kind.open, values.shape, values.reshape(-1).tolist()))
    return listed, blob


def over_http() -> Iterator[tuple[str, Http]]:
    """All requests over HTTP, by name."""
    for path in ("/v2", "/v2/", "/v2/health/live", "/v2/health/ready"):
        yield f"GET {path}", Http("GET", path)
    for model in ("echo", "adder", "adder/versions/1", "adder/versions/9", "adder/versions/one", "unknown"):
        for verb in ("", "/ready", "/config", "/stats"):
            yield f"GET {model}{verb}", Http("GET", f"/v2/models/{model}{verb}")
    yield "repository index", Http("POST", "/v2/repository/index")
    yield "repository index of what is ready", Http("POST", "/v2/repository/index", b'{"ready": true}')
    yield "no such path", Http("GET", "/v2/nothing")
    yield "no such verb", Http("POST", "/v2/models/adder/dream", b"{}")
    yield "GET of infer", Http("GET", ADDER)
    yield "POST of metadata", Http("POST", "/v2/models/adder", b"{}")
    yield from _good()
    yield from _mistakes()


def _good() -> Iterator[tuple[str, Http]]:
    yield "flat numbers", as_json(x())
    yield "nested numbers", as_json(x(data=[X]))
    yield "oddly nested numbers", as_json(x(data=[[1.0], [2.0, 3.5]]))
    yield "integers for floats", as_json(x(data=[1, 2, 3]))
    yield "an id", as_json(x(), id="42")
    yield "an empty id", as_json(x(), id="")
    yield "one version", as_json(x(), path="/v2/models/adder/versions/1/infer")
    yield "several rows", as_json(x(shape=[4, 3], data=list(map(float, range(12)))))
    yield "one output", as_json(x(), outputs=[{"name": "output"}])
    yield "no outputs listed", as_json(x(), outputs=[])
    yield "an output as bytes", as_json(x(), outputs=[{"name": "output", "parameters": {"binary_data": True}}])
    yield "all outputs as bytes", as_json(x(), parameters={"binary_data_output": True})
    yield "a priority and a timeout", as_json(x(), parameters={"priority": 1, "timeout": 20_000_000})
    blob = np.array(X, np.float32).tobytes()
    yield "bytes", as_bytes([tensor("x", "FP32", [1, 3], size=12)], blob)
    yield (
        "bytes and JSON",
        as_bytes(
            [tensor("x", "FP32", [1, 3], size=12)],
            blob,
            outputs=[{"name": "output", "parameters": {"binary_data": False}}],
        ),
    )
    yield "nothing but bytes", Http("POST", ADDER, blob, {"Inference-Header-Content-Length": "0"})
    packed = as_json(x())
    yield "gzip", Http("POST", ADDER, gzip.compress(packed.body), {"Content-Encoding": "gzip"})
    yield "deflate", Http("POST", ADDER, zlib.compress(packed.body), {"Content-Encoding": "deflate"})
    yield "a gzip answer", Http("POST", ADDER, packed.body, {"Accept-Encoding": "gzip"})
    raw = [{"name": f"{kind.torch}_out", "parameters": {"binary_data": kind.open in RAW}} for kind in KINDS]
    listed, behind = echoed(False)
    yield "every kind as JSON", as_bytes(listed, behind, ECHO, outputs=raw)
    listed, behind = echoed(True)
    yield "every kind as bytes", as_bytes(listed, behind, ECHO, parameters={"binary_data_output": True})
    yield "inputs in another order", as_bytes(listed[:1] + listed[:0:-1], _turned(behind), ECHO, outputs=raw[::-1])
    yield "kinds without a form as JSON", as_bytes(listed, behind, ECHO)
    yield "no number as JSON", Http("POST", ADDER, as_json(x(data=[1.0, 2.0, float("nan")])).body)
    row = np.random.default_rng(0).random(ROW, np.float32)
    yield "the network", as_json(tensor("x", "FP32", [1, ROW], row.tolist()), path="/v2/models/mlp/infer")
    rows = np.random.default_rng(1).random((64, ROW), np.float32)
    one = tensor("x", "FP32", rows.shape, size=rows.nbytes)
    yield "the network, 64 rows as bytes", as_bytes([one], rows.tobytes(), "/v2/models/mlp/infer")
    yield "what was counted", Http("GET", "/v2/models/mlp/stats")


def _turned(blob: bytes) -> bytes:
    """The bytes of all kinds with all but the first in the opposite order."""
    parts = []
    for kind in KINDS:
        size = 6 * kind.numpy.itemsize
        parts.append(blob[:size])
        blob = blob[size:]
    return b"".join(parts[:1] + parts[:0:-1])


def _mistakes() -> Iterator[tuple[str, Http]]:
    yield "another shape", as_json(x(shape=[1, 4], data=[1, 2, 3, 4]))
    yield "another rank", as_json(x(shape=[3]))
    yield "a negative shape", as_json(x(shape=[-1, 3]))
    yield "a shape of fractions", as_json(x(shape=[1.5, 3]))
    yield "no shape", as_json({"name": "x", "datatype": "FP32", "data": X})
    yield "no rows", as_json(x(shape=[0, 3], data=[]))
    yield "too many rows", as_json(x(shape=[65, 3], data=[0.0] * 195))
    yield "another datatype", as_json(x(datatype="FP64"))
    yield "no such datatype", as_json(x(datatype="FP31"))
    yield "no datatype", as_json({"name": "x", "shape": [1, 3], "data": X})
    yield "another name", as_json(x(name="z"))
    yield "no name", as_json({"datatype": "FP32", "shape": [1, 3], "data": X})
    yield "one input too many", as_json(x(), x(name="z"))
    yield "the same input twice", as_json(x(), x())
    yield "no inputs", as_json()
    yield "no list of inputs", Http("POST", ADDER, b'{"id": "1"}')
    yield "inputs that are no list", Http("POST", ADDER, b'{"inputs": {"x": 1}}')
    yield "too few numbers", as_json(x(data=[1.0, 2.0]))
    yield "too many numbers", as_json(x(data=[1.0, 2.0, 3.0, 4.0]))
    yield "no numbers", as_json({"name": "x", "datatype": "FP32", "shape": [1, 3]})
    yield "texts for numbers", as_json(x(data=["a", "b", "c"]))
    yield "null for a number", as_json(x(data=[1.0, None, 2.0]))
    for kind, value in (("int8", 300), ("int32", 1.5), ("uint8", -1), ("bool", 2), ("bool", 1), ("float16", 1.0)):
        listed, blob = echoed(True)
        at = [one.torch for one in KINDS].index(kind)
        size = [6 * one.numpy.itemsize for one in KINDS]
        listed[at] = tensor(kind, KINDS[at].open, [2, 3], [value] * 6)
        behind = blob[: sum(size[:at])] + blob[sum(size[: at + 1]) :]
        yield f"{value} as {kind}", as_bytes(listed, behind, ECHO, parameters={"binary_data_output": True})
    blob = np.array(X, np.float32).tobytes()
    one = tensor("x", "FP32", [1, 3], size=12)
    yield "bytes that end too early", as_bytes([one], blob[:8])
    yield "bytes after the end", as_bytes([one], blob + b"1234")
    yield "a size of another shape", as_bytes([tensor("x", "FP32", [1, 3], size=8)], blob[:8])
    yield "bytes and numbers at once", as_bytes([tensor("x", "FP32", [1, 3], X, size=12)], blob)
    good = as_bytes([one], blob)
    yield "nothing but bytes for many inputs", Http("POST", ECHO, blob, {"Inference-Header-Content-Length": "0"})
    for length in ("9999", "-1", "many", "0", "3"):
        yield f"a header of {length}", Http("POST", ADDER, good.body, {"Inference-Header-Content-Length": length})
    yield "no JSON", Http("POST", ADDER, b"{")
    yield "a list", Http("POST", ADDER, b"[]")
    yield "nothing", Http("POST", ADDER)
    yield "an id of numbers", as_json(x(), id=7)
    yield "another output", as_json(x(), outputs=[{"name": "nothing"}])
    yield "an output twice", as_json(x(), outputs=[{"name": "output"}, {"name": "output"}])
    yield "outputs that are no list", as_json(x(), outputs={"name": "output"})
    yield "no such model", as_json(x(), path="/v2/models/unknown/infer")
    yield "no such version", as_json(x(), path="/v2/models/adder/versions/9/infer")
    yield "a version that is no number", as_json(x(), path="/v2/models/adder/versions/one/infer")
    yield "rows that differ", as_bytes(*_uneven(), ECHO)
    yield "a body that is no gzip", Http("POST", ADDER, b"12345", {"Content-Encoding": "gzip"})
    yield "an unknown content coding", Http("POST", ADDER, as_json(x()).body, {"Content-Encoding": "br"})
    yield "a timeout of words", as_json(x(), parameters={"timeout": "soon"})


def _uneven() -> tuple[list[dict[str, Any]], bytes]:
    (first, *_), blob = echoed(True, 1)
    (_, *others), behind = echoed(True, 2)
    size = KINDS[0].numpy.itemsize
    return [first, *others], blob[: 3 * size] + behind[6 * size :]


def over_grpc() -> Iterator[tuple[str, Grpc]]:
    """All calls, by name."""
    yield "live", Grpc("ServerLive", messages.ServerLiveRequest())
    yield "ready", Grpc("ServerReady", messages.ServerReadyRequest())
    yield "server metadata", Grpc("ServerMetadata", messages.ServerMetadataRequest())
    yield "repository index", Grpc("RepositoryIndex", messages.RepositoryIndexRequest())
    for name, version in (
        ("echo", ""),
        ("adder", ""),
        ("adder", "1"),
        ("adder", "9"),
        ("adder", "one"),
        ("unknown", ""),
    ):
        for method in ("ModelReady", "ModelMetadata", "ModelConfig"):
            asked = getattr(messages, f"{method}Request")(name=name, version=version)
            yield f"{method} {name} {version}".strip(), Grpc(method, asked)
    for name, version in (("mlp", ""), ("adder", "1"), ("adder", "9"), ("adder", "one"), ("unknown", "")):
        asked = messages.ModelStatisticsRequest(name=name, version=version)
        yield f"statistics {name} {version}".strip(), Grpc("ModelStatistics", asked)
    raw = np.array(X, np.float32).tobytes()
    yield "raw", infer()
    yield "numbers", infer(raw=[], contents={"fp32_contents": X})
    yield "an id", infer(id="42")
    yield "one version", infer(version="1")
    yield "one output", infer(outputs=["output"])
    yield "every kind raw", _every_kind(True)
    yield "every kind as numbers", _every_kind(False)
    rows = np.random.default_rng(1).random((64, ROW), np.float32)
    yield "the network, 64 rows", infer("mlp", shape=rows.shape, raw=[rows.tobytes()])
    yield "another shape", infer(shape=[1, 4], raw=[raw + raw[:4]])
    yield "another rank", infer(shape=[3])
    yield "a negative shape", infer(shape=[-1, 3])
    yield "no shape", infer(shape=[])
    yield "no rows", infer(shape=[0, 3], raw=[b""])
    yield "too many rows", infer(shape=[65, 3], raw=[bytes(12 * 65)])
    yield "another datatype", infer(datatype="FP64", raw=[raw + raw])
    yield "no such datatype", infer(datatype="FP31")
    yield "no datatype", infer(datatype="")
    yield "another name", infer(names=["z"])
    yield "one input too many", infer(names=["x", "z"], raw=[raw, raw])
    yield "the same input twice", infer(names=["x", "x"], raw=[raw, raw])
    yield "no inputs", infer(names=[], raw=[])
    yield "no numbers", infer(raw=[])
    yield "too few numbers", infer(raw=[], contents={"fp32_contents": X[:2]})
    yield "numbers of another kind", infer(raw=[], contents={"fp64_contents": X})
    yield "raw and numbers", infer(contents={"fp32_contents": X})
    yield "raw that ends too early", infer(raw=[raw[:8]])
    yield "one raw too many", infer(raw=[raw, raw])
    yield "another output", infer(outputs=["nothing"])
    yield "no such model", infer("unknown")
    yield "no such version", infer(version="9")
    yield "a version that is no number", infer(version="one")
    yield from _managing()


def _managing() -> Iterator[tuple[str, Grpc]]:
    """Unloads and reloads a model, and returns what a client sees of it; unloading continues after the response."""
    for method in ("RepositoryModelUnload", "RepositoryModelLoad"):
        asked = getattr(messages, f"{method}Request")
        yield f"{method} of an unknown model", Grpc(method, asked(model_name="unknown"))
        yield method, Grpc(method, asked(model_name="numbers"))
        yield f"ready after {method}", Grpc("ModelReady", messages.ModelReadyRequest(name="numbers"))
        yield f"metadata after {method}", Grpc("ModelMetadata", messages.ModelMetadataRequest(name="numbers"))
        yield f"answer after {method}", _every_kind(False)
        yield f"index after {method}", Grpc("RepositoryIndex", messages.RepositoryIndexRequest(ready=True))
        yield f"server ready after {method}", Grpc("ServerReady", messages.ServerReadyRequest())


def infer(
    model: str = "adder",
    *,
    version: str = "",
    id: str = "",
    names: Sequence[str] = ("x",),
    datatype: str = "FP32",
    shape: Sequence[int] = (1, 3),
    raw: Sequence[bytes] | None = None,
    contents: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
) -> Grpc:
    """The adder's request, with changes."""
    request = messages.ModelInferRequest(model_name=model, model_version=version, id=id)
    for one in names:
        request.inputs.add(name=one, datatype=datatype, shape=shape, contents=contents or None)
    request.raw_input_contents.extend([np.array(X, np.float32).tobytes()] if raw is None else raw)
    for one in outputs:
        request.outputs.add(name=one)
    return Grpc("ModelInfer", request)


def _every_kind(raw: bool) -> Grpc:
    fields = {"f4": "fp32", "f8": "fp64", "b1": "bool", "i8": "int64", "u8": "uint64"}
    request = messages.ModelInferRequest(model_name="echo" if raw else "numbers")
    for kind in KINDS:
        if not raw and kind.open in RAW:
            continue
        values = example(kind)
        one = request.inputs.add(name=kind.torch, datatype=kind.open, shape=values.shape)
        if raw:
            request.raw_input_contents.append(values.tobytes())
        else:
            field = fields.get(kind.numpy.str[1:], "uint" if kind.numpy.kind == "u" else "int")
            getattr(one.contents, f"{field}_contents").extend(values.reshape(-1).tolist())
    return Grpc("ModelInfer", request)


def by_clients() -> Iterator[tuple[str, Client]]:
    """All calls of Triton's own clients, by name."""
    for kit in (triton_http, triton_grpc):
        over = "HTTP" if kit is triton_http else "gRPC"
        for name, call in CALLS.items():
            yield f"{name} over {over}", Client(kit, call)
        packed: dict[str, Any] = {"compression_algorithm": "gzip"}
        if kit is triton_http:
            yield f"every kind as JSON over {over}", Client(kit, partial(_infer, binary=False))
            packed = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"}
        yield f"every kind, compressed, over {over}", Client(kit, partial(_infer, **packed))


def _infer(client: Any, kit: Any, *, model: str = "echo", binary: bool = True, num: int = 13, **more: Any) -> Any:
    inputs = []
    for kind in KINDS[:num]:
        inputs.append(kit.InferInput(kind.torch, [2, 3], kind.open))
        form = {} if kit is triton_grpc else {"binary_data": binary or kind.open in RAW}
        inputs[-1].set_data_from_numpy(to_numbers(example(kind), kind), **form)
    outputs = None
    if kit is triton_http:
        outputs = [
            kit.InferRequestedOutput(f"{kind.torch}_out", binary_data=binary or kind.open in RAW) for kind in KINDS
        ]
    found = client.infer(model, inputs, outputs=outputs, **more)
    return {kind.torch: found.as_numpy(f"{kind.torch}_out") for kind in KINDS}


def _one_output(client: Any, kit: Any) -> Any:
    rows = kit.InferInput("x", [1, 3], "FP32")
    rows.set_data_from_numpy(np.array([X], np.float32))
    found = client.infer("adder", [rows], "1", outputs=[kit.InferRequestedOutput("output")], request_id="7")
    return found.as_numpy("output")


def _wrong(client: Any, kit: Any, shape: tuple[int, ...] = (1, 4), kind: str = "FP32") -> Any:
    rows = kit.InferInput("x", list(shape), kind)
    rows.set_data_from_numpy(np.zeros(shape, BY_OPEN[kind].numpy))
    return client.infer("adder", [rows])


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "live": lambda client, kit: client.is_server_live(),
    "ready": lambda client, kit: client.is_server_ready(),
    "a model ready": lambda client, kit: client.is_model_ready("adder", "2"),
    "no such model ready": lambda client, kit: client.is_model_ready("unknown"),
    "no such version ready": lambda client, kit: client.is_model_ready("adder", "9"),
    "every kind": _infer,
    "one version and output": _one_output,
    "another shape": _wrong,
    "another datatype": partial(_wrong, shape=(1, 3), kind="FP64"),
    "no such model": partial(_infer, model="unknown"),
    "no such version": partial(_infer, model_version="9"),
    "an input is missing": partial(_infer, num=12),
    "metadata of no model": lambda client, kit: client.get_model_metadata("unknown"),
    "statistics of no model": lambda client, kit: client.get_inference_statistics("unknown"),
    "configuration of no version": lambda client, kit: client.get_model_config("adder", "9"),
}
