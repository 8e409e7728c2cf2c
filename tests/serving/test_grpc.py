"""gRPC below the clients: health, tokens, deadlines, TensorFlow Serving's services on the wire."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from manyhands.serving import Server
from manyhands.serving.grpc_process import CALL, NAME, GrpcProcess
from manyhands.serving.protocols import health_grpc, open_inference_grpc, tensorflow_grpc

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
def test_predict(served: Server, as_bytes: bool) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    answer = predict(
        served.grpc, tensor(rows, as_bytes=as_bytes), version={"value": 2}, signature_name="serving_default"
    )
    found = answer.outputs["output"]
    assert [dim.size for dim in found.tensor_shape.dim] == [2, 3]
    np.testing.assert_array_equal(np.frombuffer(found.tensor_content, np.float32).reshape(2, 3), rows + 2)
    assert (answer.model_spec.name, answer.model_spec.version.value) == ("adder", 2)


def test_one_value_stands_for_all(served: Server) -> None:
    one = {"dtype": 1, "tensor_shape": {"dim": [{"size": 2}, {"size": 3}]}, "float_val": [5.0]}
    found = predict(served.grpc, one).outputs["output"]
    assert np.frombuffer(found.tensor_content, np.float32).tolist() == [7.0] * 6


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
def test_mistakes(served: Server, change: dict[str, Any], spec: dict[str, Any], code: str, error: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        predict(served.grpc, {**tensor(np.zeros((1, 3), np.float32), as_bytes=True), **change}, **spec)
    assert caught.value.code().name == code  # type: ignore[attr-defined]
    assert error in caught.value.details()  # type: ignore[attr-defined]


def test_status_and_health(served: Server) -> None:
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


def test_a_token_and_a_deadline(start: Start) -> None:
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


def test_calls_without_a_token_never_reach_the_server_s_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused by the process for gRPC: a flood of them costs the server nothing."""
    heard: list[int] = []
    original = GrpcProcess._hear

    def hear(listener: GrpcProcess, kind: int, *rest: Any) -> None:
        heard.append(kind)
        original(listener, kind, *rest)

    monkeypatch.setattr(GrpcProcess, "_hear", hear)
    server = start({"moody": Moody()}, token="secret")
    heard.clear()
    messages = health_grpc.MESSAGES
    asked = "/grpc.health.v1.Health/Check", messages["HealthCheckRequest"](), messages["HealthCheckResponse"]
    for _ in range(20):
        with pytest.raises(grpc.RpcError, match="this server wants a token"):
            call(server.grpc, *asked)
    assert heard == []
    assert call(server.grpc, *asked, metadata=[("authorization", "Bearer secret")]).status == 1
    assert heard == [CALL]


def test_the_process_for_grpc_is_restarted_on_its_port(start: Start) -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    server = start({"moody": Moody()})
    messages = health_grpc.MESSAGES
    asked = "/grpc.health.v1.Health/Check", messages["HealthCheckRequest"](), messages["HealthCheckResponse"]
    assert call(server.grpc, *asked).status == 1
    started = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
    (process,) = [one for one in started if one.name() == NAME]
    assert process.nice() > 0
    process.kill()
    assert call(server.grpc, *asked, wait_for_ready=True, timeout=60).status == 1


def test_triton_s_client_loads_and_unloads_models(start: Start) -> None:
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
        with pytest.raises(InferenceServerException, match="without parameters"):
            client.load_model("moody", config="{}")
        client.load_model("moody")
        assert client.is_model_ready("moody")
        rows = triton_grpc.InferInput("x", [1, 1], "FP32")
        rows.set_data_from_numpy(np.ones((1, 1), np.float32))
        assert client.infer("moody", [rows]).as_numpy("y").tolist() == [[2.0]]
