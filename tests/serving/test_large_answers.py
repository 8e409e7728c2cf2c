"""Large answers are made in small steps and compressed on another thread: others are answered at the same time."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from torch import Tensor

import manyhands as mh
from manyhands.core import Predictor, Signature, TensorSpec
from manyhands.serving import Server
from manyhands.serving.dtypes import BY_TORCH, to_numbers
from manyhands.serving.http import BadRequest
from manyhands.serving.limits import Limits
from manyhands.serving.protocols.answer_text import PIECE, array_pieces, row_pieces
from manyhands.serving.protocols.classification import MAX_RANKED, top_classes
from manyhands.serving.protocols.tensorflow_grpc import write_proto

from .conftest import Start, publish, settings_of
from .test_tensorflow_grpc import MESSAGES, call

WIDTH, ROWS = 1000, 256
WIDEST = 100_000
LARGEST = 300 << 10
"""More bytes than any step may write; the whole answers have ten times as many."""


class Grid(Predictor):
    """A row of a thousand numbers for each number: the number itself and its multiples."""

    def __init__(self, outputs: tuple[str, ...] = ("y",), width: int = WIDTH) -> None:
        self.outputs, self.width = outputs, width

    @property
    def signature(self) -> Signature:
        spec = TensorSpec("float32", (None, self.width))
        return Signature({"x": TensorSpec("float32", (None, 1))}, dict.fromkeys(self.outputs, spec))

    def run(self, inputs: Any) -> dict[str, Tensor]:
        return dict.fromkeys(self.outputs, inputs["x"] * torch.arange(1, self.width + 1) / 7)


Steps = tuple[list[int], list[str]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The sizes of all texts that are written in one step, and the threads that compress."""
    sizes: list[int] = []
    threads: list[str] = []

    def sized(original: Callable[..., Any]) -> Callable[..., Any]:
        def dumps(*args: Any, **options: Any) -> Any:
            text = original(*args, **options)
            sizes.append(len(text))
            return text

        return dumps

    def threaded(original: Callable[..., bytes]) -> Callable[..., bytes]:
        def compress(*args: Any, **options: Any) -> bytes:
            threads.append(threading.current_thread().name)
            return original(*args, **options)

        return compress

    for module in (json, orjson):
        monkeypatch.setattr(module, "dumps", sized(module.dumps))
    for packer in (gzip, zlib):
        monkeypatch.setattr(packer, "compress", threaded(packer.compress))
    return sizes, threads


def v1(first: float = 1.0, rows: int = ROWS) -> bytes:
    return b'{"instances": [[%b]%b]}' % (_number(first), b",[1.0]" * (rows - 1))


def v2(first: float = 1.0) -> bytes:
    data = b",".join([_number(first), *[b"1.0"] * (ROWS - 1)])
    return b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [%d, 1], "data": [%b]}]}' % (ROWS, data)


def _number(value: float) -> bytes:
    return b"NaN" if math.isnan(value) else b"%g" % value


@pytest.fixture(scope="module")
def grids(engine: Any) -> Any:
    from manyhands.distributed import resolve

    models = {"one": Grid(), "two": Grid(("y", "z")), "wide": Grid(width=WIDEST)}
    with Server(models, engine, resolve("cpu")[0], settings_of()).start() as server:
        yield server


ASKED = {
    "rows": ("/v1/models/one:predict", v1),
    "rows of two outputs": ("/v1/models/two:predict", v1),
    "classes": ("/v1/models/one:classify", lambda first: b'{"examples": [%b]}' % _examples(first)),
    "open inference": ("/v2/models/one/infer", v2),
    "open inference of two outputs": ("/v2/models/two/infer", v2),
}


def _examples(first: float) -> bytes:
    return b",".join(b'{"x": %b}' % _number(value) for value in [first, *[1.0] * (ROWS - 1)])


@pytest.mark.parametrize("first", [1.0, math.nan], ids=["finite", "NaN"])
@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=list(ASKED))
def test_large_response_is_serialized_in_small_chunks(
    grids: Server, steps: Steps, path: str, body: Callable[[float], bytes], first: float
) -> None:
    sizes, _ = steps
    found = httpx.post(grids.url + path, content=body(first), timeout=60, headers={"accept-encoding": "identity"})
    assert found.status_code == 200, found.text[:300]
    assert len(found.content) > 5 * LARGEST
    assert max(sizes) < LARGEST
    value = json.loads(found.text)
    assert _numbers(value) == pytest.approx(_wanted(path, first), rel=1e-6, nan_ok=True)


def test_classes_of_a_wide_row_are_serialized_in_small_chunks(grids: Server, steps: Steps) -> None:
    sizes, _ = steps
    found = httpx.post(f"{grids.url}/v1/models/wide:classify", content=b'{"examples": [{"x": 7}]}', timeout=60)
    (row,) = found.json()["results"]
    assert (row[0], row[-1], len(row)) == (["0", 1.0], [str(WIDEST - 1), float(WIDEST)], WIDEST)
    assert max(sizes) < LARGEST


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_largest_classes_are_found_on_another_thread(
    grids: Server, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, original = [], np.argsort

    def argsort(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*args, **options)

    monkeypatch.setattr(np, "argsort", argsort)
    kit, port = (triton_http, grids.http) if protocol == "http" else (triton_grpc, grids.grpc)
    given, wanted = kit.InferInput("x", [1, 1], "FP32"), kit.InferRequestedOutput("y", class_count=1)
    given.set_data_from_numpy(np.ones((1, 1), np.float32))
    with kit.InferenceServerClient(f"127.0.0.1:{port}") as client:
        ((found,),) = client.infer("wide", [given], outputs=[wanted]).as_numpy("y").tolist()
    assert found.endswith(b":99999")
    assert [name.rpartition("_")[0] for name in threads] == ["manyhands-compressing"]


def test_classes_of_a_huge_output_are_refused_in_little_memory() -> None:
    output = np.zeros((1, MAX_RANKED + 1), np.uint8)
    tracemalloc.start()
    with pytest.raises(BadRequest, match="at most 4194304 values, but got 4194305"):
        top_classes(output, 1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_numbers_of_a_large_tensor_are_written_in_small_steps() -> None:
    """Integers have no bytes that could be copied, and each of them is an object."""
    array, num_turns = np.arange(200_000, dtype=np.int32).reshape(1, -1), 0

    async def run() -> Any:
        nonlocal num_turns
        proto = MESSAGES["TensorProto"]()
        writing = asyncio.ensure_future(write_proto(proto, array, TensorSpec("int32", (None, None))))
        while not writing.done():
            num_turns += 1
            await asyncio.sleep(0)
        return proto

    assert list(asyncio.run(run()).int_val) == array[0].tolist()
    assert num_turns > 100


def _numbers(value: Any) -> list[float]:
    """The first and the last row of an answer's first output."""
    if "outputs" in value:
        data = value["outputs"][0]["data"]
        return [*data[:WIDTH], *data[-WIDTH:]]
    rows = value.get("predictions") or [[score for _, score in row] for row in value["results"]]
    first, last = ((row["y"] if isinstance(row, dict) else row) for row in (rows[0], rows[-1]))
    return [*first, *last]


def _wanted(path: str, first: float) -> list[float]:
    return [scale * number / 7 for scale in (first, 1.0) for number in range(1, WIDTH + 1)]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [False, True])
def test_large_response_is_compressed_on_another_thread(grids: Server, steps: Steps, coding: str, binary: bool) -> None:
    _, threads = steps
    body = v2()[:-1] + (b', "parameters": {"binary_data_output": true}}' if binary else b"}")
    path = f"{grids.url}/v2/models/one/infer"
    plain = httpx.post(path, content=body, timeout=60, headers={"accept-encoding": "identity"})
    found = httpx.post(path, content=body, timeout=60, headers={"accept-encoding": coding})
    assert found.headers["content-encoding"] == coding
    assert found.content == plain.content
    assert threads
    assert all(name.startswith("manyhands-compressing") for name in threads)


def test_large_response_counts_toward_the_memory_limit(start: Start) -> None:
    server = start({"one": Grid()}, limits=Limits(body=1 << 20, bodies=1 << 20, json=1 << 20))
    url = f"{server.url}/v1/models/one:predict"
    refused = httpx.post(url, content=v1(), timeout=60)
    assert refused.status_code == 503
    assert refused.json()["error"].startswith("overloaded: ")
    assert len(httpx.post(url, content=v1(rows=16), timeout=60).json()["predictions"]) == 16


def test_classify_returns_all_classes_of_a_wide_output_over_grpc(grids: Server) -> None:
    examples = [{"features": {"feature": {"x": {"float_list": {"value": [1.0]}}}}}] * 20
    request = MESSAGES["ClassificationRequest"](
        model_spec={"name": "one"}, input={"example_list": {"examples": examples}}
    )
    method = "/tensorflow.serving.PredictionService/Classify"
    answer = call(grids.grpc, method, request, MESSAGES["ClassificationResponse"])
    assert [len(row.classes) for row in answer.result.classifications] == [WIDTH] * 20


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize(
    "shape",
    [
        (0,), (3,), (2, 0), (PIECE + 1,), (2, PIECE + 1), (PIECE + 1, 2), (2, 2, PIECE), (1, 3, 5), (5000, 3, 1),
        (PIECE + 1, 0), (1, 1 << 18, 0), (2, 0, PIECE), (2, 2, PIECE, 0),
    ],
)  # fmt: skip
def test_chunked_json_serialization_matches_the_whole_array(dtype: str, shape: tuple[int, ...]) -> None:
    kind = BY_TORCH[dtype]
    numbers = (np.arange(math.prod(shape)) % 251).reshape(shape).astype(np.float32)
    array = (numbers.view(np.uint32) >> 16).astype(np.uint16) if kind.is_bfloat16 else numbers.astype(kind.numpy)
    pieces = list(array_pieces(array, kind))
    assert json.loads(b"".join(pieces)) == to_numbers(array, kind).tolist()
    assert max(map(len, pieces)) < LARGEST
    rows = [{"a": row, "b": row} for row in to_numbers(array, kind).tolist()]
    assert json.loads(b"".join(row_pieces({"a": array, "b": array}, {"a": kind, "b": kind}))) == rows


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_nan_and_infinity_are_serialized_like_tensorflow_serving_and_triton(dtype: str) -> None:
    kind = BY_TORCH[dtype]
    array = np.zeros((3, PIECE), kind.numpy)
    array[0, 0], array[1, 7], array[2, -1] = np.nan, np.inf, -np.inf
    text = b"".join(array_pieces(array, kind))
    assert (text.count(b"NaN"), text.count(b"-Infinity"), text.count(b"Infinity")) == (1, 1, 2)
    np.testing.assert_array_equal(np.array(json.loads(text), kind.numpy), array)
    row = next(iter(json.loads(b"".join(row_pieces({"a": array[:, 0], "b": array}, {"a": kind, "b": kind})))))
    assert math.isnan(row["a"])
    assert math.isnan(row["b"][0])


def test_many_small_rows_of_one_request_are_computed_in_few_batches(adder: Path, tmp_path: Path, start: Start) -> None:
    publish(adder, tmp_path / "adder", 1)
    server = start(tmp_path, queue_rows=30_000)
    rows = np.arange(60_000, dtype=np.float32).reshape(-1, 3)
    with mh.serving.Client(server.url) as client:
        np.testing.assert_array_equal(client("adder", rows), rows + 1)
    stats = httpx.get(f"{server.url}/v2/models/adder/stats").json()["model_stats"][0]
    assert stats["inference_count"] == len(rows)
    assert stats["execution_count"] < len(rows) / 64 / 2
