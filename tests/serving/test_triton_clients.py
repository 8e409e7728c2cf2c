"""Triton's public clients work unchanged: HTTP and gRPC, one after the other and at once, every kind of element."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from torch import Tensor
from tritonclient.utils import InferenceServerException

from manyhands.core import Predictor, Signature, TensorSpec
from manyhands.distributed import resolve
from manyhands.launcher import LocalEngine
from manyhands.serving import Server
from manyhands.serving.dtypes import KINDS, Kind
from manyhands.serving.http import BadRequest
from manyhands.serving.protocols.classification import class_count, require_few_classes

from .conftest import settings_of

ARRAYS = {
    kind.torch: np.array([[0, 1, 1], [1, 0, 0]]).astype(np.float32 if kind.is_bfloat16 else kind.numpy)
    for kind in KINDS
}


class Echo(Predictor):
    """Answers every input with itself."""

    signature = Signature(
        {kind.torch: TensorSpec(kind.torch, (None, 3)) for kind in KINDS},
        {f"{kind.torch}_out": TensorSpec(kind.torch, (None, 3)) for kind in KINDS},
    )

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{name}_out": tensor for name, tensor in inputs.items()}


@pytest.fixture(scope="module")
def server(engine: LocalEngine) -> Iterator[Server]:
    settings = settings_of()
    with Server({"echo": Echo()}, engine, resolve("cpu")[0], settings).start() as found:
        yield found


def inputs(kit: Any, binary: bool | None = None) -> list[Any]:
    made = []
    for kind in KINDS:
        one = kit.InferInput(kind.torch, [2, 3], kind.open)
        options = {} if binary is None else {"binary_data": binary or kind.open in ("FP16", "BF16")}
        one.set_data_from_numpy(ARRAYS[kind.torch], **options)
        made.append(one)
    return made


def check(result: Any) -> None:
    for kind in KINDS:
        np.testing.assert_array_equal(result.as_numpy(f"{kind.torch}_out"), ARRAYS[kind.torch], err_msg=kind.torch)


@contextmanager
def over_http(port: int) -> Iterator[Any]:
    """A client that does nothing when it is collected: gevent does not bear that on another thread."""
    with triton_http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield client
    client.close = lambda: None


def wanted(kit: Any, binary: bool) -> list[Any]:
    def one(kind: Kind) -> Any:
        return kit.InferRequestedOutput(f"{kind.torch}_out", binary_data=binary or kind.open in ("FP16", "BF16"))

    return [one(kind) for kind in KINDS]


@pytest.mark.parametrize("binary", [True, False])
def test_triton_http_client_works_unchanged(server: Server, binary: bool) -> None:
    with over_http(server.http) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        assert client.get_server_metadata()["name"] == "manyhands"
        assert len(client.get_model_metadata("echo")["inputs"]) == len(KINDS)
        assert client.get_model_config("echo")["max_batch_size"] == 64
        outputs = wanted(triton_http, binary)
        check(client.infer("echo", inputs(triton_http, binary), outputs=outputs, request_id="7"))
        for coding in ("gzip", "deflate"):
            packed = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
            check(client.infer("echo", inputs(triton_http, binary), outputs=outputs, **packed))
        assert client.get_inference_statistics("echo")["model_stats"][0]["inference_count"] >= 3
        assert client.get_model_repository_index()[0]["name"] == "echo"


def test_triton_http_client_sends_concurrent_requests(server: Server) -> None:
    async def run() -> None:
        async with triton_http_aio.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
            asked = [client.infer("echo", inputs(triton_http_aio, True)) for _ in range(20)]
            for result in await asyncio.gather(*asked):
                check(result)

    asyncio.run(run())


def test_triton_grpc_client_works_unchanged(server: Server) -> None:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        assert not client.is_model_ready("nothing")
        assert client.get_server_metadata().name == "manyhands"
        assert len(client.get_model_metadata("echo").inputs) == len(KINDS)
        assert client.get_model_config("echo").config.max_batch_size == 64
        result = client.infer("echo", inputs(triton_grpc), request_id="7")
        check(result)
        assert result.get_response().id == "7"
        some = client.infer("echo", inputs(triton_grpc), outputs=[triton_grpc.InferRequestedOutput("int8_out")])
        assert [one.name for one in some.get_response().outputs] == ["int8_out"]
        assert client.get_inference_statistics("echo").model_stats[0].inference_count >= 1
        assert client.get_model_repository_index().models[0].state == "READY"


def test_triton_grpc_client_sends_concurrent_requests(server: Server) -> None:
    async def run() -> None:
        async with triton_grpc_aio.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            for result in await asyncio.gather(*(client.infer("echo", inputs(triton_grpc_aio)) for _ in range(20))):
                check(result)

    asyncio.run(run())


def test_errors_match_triton_messages_and_status_codes(server: Server) -> None:
    wrong = triton_grpc.InferInput("float32", [2, 4], "FP32")
    wrong.set_data_from_numpy(np.zeros((2, 4), np.float32))
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        with pytest.raises(InferenceServerException, match="unexpected shape for input 'float32'") as caught:
            client.infer("echo", [wrong, *inputs(triton_grpc)[1:]])
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'foo' is not found") as caught:
            client.infer("foo", inputs(triton_grpc))
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        with pytest.raises(InferenceServerException, match="expected 13 inputs but got 1"):
            client.infer("echo", inputs(triton_grpc)[:1])
    with over_http(server.http) as client:
        with pytest.raises(InferenceServerException, match="is not found"):
            client.infer("foo", inputs(triton_http))
        with pytest.raises(InferenceServerException):
            client.unload_model("echo")
    with over_http(server.manage) as client:
        assert json.loads(json.dumps(client.get_model_repository_index()))[0]["state"] == "READY"


def classes_of(kit: Any, client: Any, count: int, dtype: str = "float32", **options: Any) -> Any:
    output = kit.InferRequestedOutput(f"{dtype}_out", class_count=count, **options)
    found = client.infer("echo", inputs(kit), outputs=[output]).as_numpy(f"{dtype}_out").tolist()
    # Triton's client returns strings of JSON as they are, and binary ones as bytes.
    return [[one.decode() if isinstance(one, bytes) else one for one in row] for row in found]


@pytest.mark.parametrize(
    ("dtype", "count", "expected"),
    [
        ("float32", 2, [["1.000000:1", "1.000000:2"], ["1.000000:0", "0.000000:1"]]),
        ("int64", 1, [["1:1"], ["1:0"]]),
        ("uint8", 99, [["1:1", "1:2", "0:0"], ["1:0", "0:1", "0:2"]]),
    ],
)
def test_triton_clients_get_the_classes_of_an_output(server: Server, dtype: str, count: int, expected: Any) -> None:
    with over_http(server.http) as client:
        for binary in (True, False):
            assert classes_of(triton_http, client, count, dtype, binary_data=binary) == expected
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        assert classes_of(triton_grpc, client, count, dtype) == expected


def test_classes_of_unsupported_types_and_too_many_classes_are_rejected(server: Server) -> None:
    with over_http(server.http) as http, triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as remote:
        for kit, client in ((triton_http, http), (triton_grpc, remote)):
            with pytest.raises(InferenceServerException, match="due to unsupported type 'BF16'"):
                classes_of(kit, client, 2, "bfloat16")
    with pytest.raises(BadRequest, match="16384 classes, but got 1000 of each of 17 rows for output 'y'"):
        require_few_classes({"y": 2000}, Signature({}, {"y": TensorSpec("float32", (None, 1000))}), 17)
    with pytest.raises(BadRequest, match="must be a number of classes"):
        class_count("2", "y")


def test_statistics_of_all_models_and_extensions_of_each_listener(server: Server) -> None:
    with over_http(server.http) as client:
        assert [one["name"] for one in client.get_inference_statistics()["model_stats"]] == ["echo"]
        assert "model_repository" not in client.get_server_metadata()["extensions"]
    with over_http(server.manage) as client:
        assert "model_repository" in client.get_server_metadata()["extensions"]
        with pytest.raises(InferenceServerException, match="loaded as it is in the server's folder"):
            client.load_model("echo", config='{"max_batch_size": 1}')
