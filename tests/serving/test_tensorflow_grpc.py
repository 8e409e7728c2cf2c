"""TensorFlow Serving over gRPC beyond predict: examples, metadata, another list of models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands.core import Predictor, RequestRefused, Signature, TensorSpec
from manyhands.serving import Server
from manyhands.serving.dtypes import BY_TORCH
from manyhands.serving.limits import Bodies, Limits
from manyhands.serving.protocols.tensorflow_grpc import VALUES, PredictionService, read_inputs, write_proto
from manyhands.serving.protocols.tensorflow_messages import MESSAGES

from .conftest import Start, publish, settings_of
from .test_grpc import call


class Scores(Predictor):
    """Two scores of three numbers, or their sum."""

    def __init__(self, width: int) -> None:
        self.width = width

    @property
    def signature(self) -> Signature:
        inputs = {"x": TensorSpec("float32", (None, 3)), "n": TensorSpec("int64", (None,))}
        return Signature(inputs, {"answer": TensorSpec("float32", (None, self.width))})

    def run(self, inputs: Any) -> dict[str, Tensor]:
        total = inputs["x"].sum(1, keepdim=True) + inputs["n"][:, None]
        return {"answer": torch.cat([total * (i + 1) for i in range(self.width)], 1)}


def feature(*values: float) -> dict[str, Any]:
    kind = "int64_list" if all(isinstance(value, int) for value in values) else "float_list"
    return {kind: {"value": values}}


def example(**features: Any) -> dict[str, Any]:
    return {"features": {"feature": features}}


ROW = example(x=feature(1.0, 2.0, 3.0), n=feature(4))
NAMES = {
    "Classify": "Classification",
    "Regress": "Regression",
    "MultiInference": "MultiInference",
    "GetModelMetadata": "GetModelMetadata",
}


def ask(server: Server, method: str, **values: Any) -> Any:
    name = NAMES[method]
    request = MESSAGES[f"{name}Request"](**values)
    return call(server.grpc, f"/tensorflow.serving.PredictionService/{method}", request, MESSAGES[f"{name}Response"])


@pytest.fixture(scope="module")
def scored(engine: Any) -> Any:
    from manyhands.distributed import resolve

    models = {"scores": Scores(2), "value": Scores(1)}
    with Server(models, engine, resolve("cpu")[0], settings_of()).start() as server:
        yield server


def test_classify_and_regress_return_results_for_examples(scored: Server) -> None:
    spec, rows = {"name": "scores"}, {"example_list": {"examples": [ROW, ROW]}}
    answer = ask(scored, "Classify", model_spec=spec, input=rows)
    found = [[(one.label, one.score) for one in row.classes] for row in answer.result.classifications]
    assert found == 2 * [[("0", 10.0), ("1", 20.0)]]
    assert (answer.model_spec.name, answer.model_spec.version.value) == ("scores", 1)
    shared = {
        "example_list_with_context": {"examples": [example(x=feature(1.0, 1.0, 1.0))], "context": example(n=feature(7))}
    }
    answer = ask(scored, "Regress", model_spec={"name": "value"}, input=shared)
    assert [one.value for one in answer.result.regressions] == [10.0]


def test_multi_inference_returns_classification_and_regression(scored: Server) -> None:
    methods = ["tensorflow/serving/classify", "tensorflow/serving/regress"]
    tasks = [{"model_spec": {"name": "value"}, "method_name": method} for method in methods]
    answer = ask(scored, "MultiInference", tasks=tasks, input={"example_list": {"examples": [ROW]}})
    first, second = answer.results
    assert first.classification_result.classifications[0].classes[0].score == 10.0
    assert second.regression_result.regressions[0].value == 10.0


def test_model_metadata_contains_the_signature(scored: Server) -> None:
    answer = ask(scored, "GetModelMetadata", model_spec={"name": "scores"}, metadata_field=["signature_def"])
    packed = answer.metadata["signature_def"]
    assert packed.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    signature = MESSAGES["SignatureDefMap"].FromString(packed.value).signature_def["serving_default"]
    assert signature.method_name == "tensorflow/serving/predict"
    assert [dim.size for dim in signature.inputs["x"].tensor_shape.dim] == [-1, 3]
    assert (signature.inputs["n"].dtype, signature.outputs["answer"].dtype) == (9, 1)


def examples(*listed: Any) -> dict[str, Any]:
    return {"input": {"example_list": {"examples": listed}}}


@pytest.mark.parametrize(
    ("method", "values", "code", "error"),
    [
        ("Classify", {}, "INVALID_ARGUMENT", "Input is empty."),
        ("Classify", examples(example(n=feature(1))), "INVALID_ARGUMENT", "Feature: x (data type: float32) is req"),
        (
            "Classify", examples(example(x=feature(1.0), n=feature(1))), "INVALID_ARGUMENT",
            "Key: x.  Number of values != expected.  values size: 1 but output shape: [3]",
        ),
        (
            "Classify", examples(example(x=feature(1.0, 2.0, 3.0), n=feature(1.5))), "INVALID_ARGUMENT",
            "Key: n.  Data types don't match. Expected type: int64",
        ),
        ("Regress", examples(ROW), "FAILED_PRECONDITION", "a row's output must be one number"),
        ("Regress", {"model_spec": {"name": "foo"}}, "NOT_FOUND", "Servable not found for request: Latest(foo)"),
        ("GetModelMetadata", {}, "INVALID_ARGUMENT", "must specify at least one metadata_field"),
        ("GetModelMetadata", {"metadata_field": ["x"]}, "INVALID_ARGUMENT", "Metadata field x is not supported"),
        ("MultiInference", {}, "INVALID_ARGUMENT", "at least one task"),
        (
            "MultiInference", {"tasks": [{"model_spec": {"name": "scores"}, "method_name": "no"}]}, "UNIMPLEMENTED",
            "Unsupported signature method_name: no",
        ),
    ],
)  # fmt: skip
def test_invalid_request_returns_status_code_and_reason(
    scored: Server, method: str, values: dict[str, Any], code: str, error: str
) -> None:
    spec = {} if method == "MultiInference" else {"model_spec": {"name": "scores"}}
    with pytest.raises(grpc.RpcError) as caught:
        ask(scored, method, **{**spec, **values})
    assert caught.value.code().name == code  # type: ignore[attr-defined]
    assert error in caught.value.details()  # type: ignore[attr-defined]


def test_classify_and_regress_over_rest(scored: Server) -> None:
    row = {"x": [1, 2, 3], "n": 4}
    with httpx.Client(base_url=scored.url) as http:
        answer = http.post("/v1/models/scores:classify", json={"examples": [row]})
        assert answer.json() == {"results": [[["0", 10.0], ["1", 20.0]]]}
        body = {"examples": [{"x": [1, 2, 3]}], "context": {"n": 4}, "signature_name": "serving_default"}
        assert http.post("/v1/models/value:regress", json=body).json() == {"results": [10.0]}
        for wrong in ({}, {"examples": []}, {"examples": [3]}, {"examples": [{"x": "text", "n": 1}]}, [1]):
            answer = http.post("/v1/models/scores:classify", json=wrong)
            assert answer.status_code == 400
            assert answer.json()["error"]


def reload(server: Server, *configs: dict[str, Any]) -> Any:
    request = MESSAGES["ReloadConfigRequest"](config={"model_config_list": {"config": configs}})
    method = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
    return call(server.manage_grpc, method, request, MESSAGES["ReloadConfigResponse"])


def test_reload_config_changes_served_models_and_versions(start: Start, adder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        for number in (1, 2):
            publish(adder, tmp_path / name, number)
    server = start(tmp_path, manage_grpc=0)

    def served() -> dict[str, list[int]]:
        models = server.state()["models"]
        return {
            model["name"]: [v["version"] for v in model["versions"] if v["state"] == "AVAILABLE"] for model in models
        }

    assert served() == {"one": [2], "two": [2]}
    specific = {"specific": {"versions": [1, 2]}}
    config = {"name": "one", "base_path": "/models/one", "model_version_policy": specific, "version_labels": {"old": 1}}
    assert reload(server, config).status.error_code == 0
    assert served() == {"one": [1, 2], "two": []}
    answer = httpx.post(f"{server.url}/v1/models/one/labels/old:predict", json={"instances": [[1, 2, 3]]})
    assert answer.json() == {"predictions": [[2.0, 3.0, 4.0]]}
    for wrong, code in (
        ({"name": "three"}, "NOT_FOUND"),
        ({"name": "one", "base_path": "/etc"}, "INVALID_ARGUMENT"),
        ({"name": "one", "version_labels": {"new": 9}}, "FAILED_PRECONDITION"),
        ({"name": "one", "version_labels": {'"} 1\nmanyhands_available{': 2}}, "INVALID_ARGUMENT"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            reload(server, wrong)
        assert caught.value.code().name == code  # type: ignore[attr-defined]
    reload(server, {"name": "one"}, {"name": "two"})
    assert served()["two"] == [2]


def test_reload_config_requires_the_management_token_and_listener(start: Start, adder: Path, tmp_path: Path) -> None:
    publish(adder, tmp_path / "one", 1)
    server = start(tmp_path, token="secret", manage_token="other", manage_grpc=0)
    request = MESSAGES["ReloadConfigRequest"](config={"model_config_list": {"config": []}})
    method = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
    for port, token, code in (
        (server.grpc, "secret", "PERMISSION_DENIED"),
        (server.grpc, "other", "UNAUTHENTICATED"),
        (server.manage_grpc, "secret", "UNAUTHENTICATED"),
    ):
        metadata = [("authorization", f"Bearer {token}")]
        with pytest.raises(grpc.RpcError) as caught:
            call(port, method, request, MESSAGES["ReloadConfigResponse"], metadata=metadata)
        assert caught.value.code().name == code  # type: ignore[attr-defined]


class Wide(Predictor):
    """The sum of two rows of any length."""

    @property
    def signature(self) -> Signature:
        inputs = {name: TensorSpec("float32", (None, None)) for name in "ab"}
        return Signature(inputs, {"sum": TensorSpec("float32", (None, 1))})

    def run(self, inputs: Any) -> dict[str, Tensor]:
        return {"sum": (inputs["a"] + inputs["b"]).sum(1, keepdim=True)}


def filled(*shape: int, number: int = 1, **field: Any) -> dict[str, Any]:
    """A TensorProto with one value for all elements."""
    return {
        "dtype": number,
        "tensor_shape": {"dim": [{"size": n} for n in shape]},
        **(field or {"float_val": [1.0]}),
    }


def fill(server: Server, *shape: int) -> Any:
    tensors = {name: filled(*shape) for name in "ab"}
    request = MESSAGES["PredictRequest"](model_spec={"name": "wide"}, inputs=tensors)
    assert request.ByteSize() < 100
    return call(server.grpc, "/tensorflow.serving.PredictionService/Predict", request, MESSAGES["PredictResponse"])


def test_broadcast_tensor_value_counts_at_its_expanded_size(start: Start) -> None:
    server = start({"wide": Wide()}, limits=Limits(body=1 << 20, bodies=1 << 20, json=1 << 20))
    answer = fill(server, 1, 100_000)
    assert list(answer.outputs["sum"].float_val) == [200_000.0]
    with pytest.raises(grpc.RpcError, match="may have 1048576 bytes together, but got shapes of 1600000 bytes"):
        fill(server, 1, 200_000)


class FakeGateway(SimpleNamespace):
    """A gateway with one model, which answers with the number of bytes that are held during the request."""

    def find(self, *which: Any) -> Any:
        return SimpleNamespace(model="only", number=1, signature=self.signature)

    @property
    def catalogue(self) -> Any:
        return self


@pytest.mark.parametrize(
    ("dtype", "field"),
    [
        ("float32", "float_val"),
        ("float64", "double_val"),
        ("float16", "half_val"),
        ("bfloat16", "half_val"),
        ("int8", "int_val"),
        ("uint16", "int_val"),
        ("int32", "int_val"),
        ("int64", "int64_val"),
        ("bool", "bool_val"),
        ("uint32", "uint32_val"),
        ("uint64", "uint64_val"),
    ],
)
def test_decoded_bytes_count_toward_the_body_limit_during_a_call(dtype: str, field: str) -> None:
    kind = BY_TORCH[dtype]
    signature = Signature({"x": TensorSpec(dtype, (None, None))}, {"y": TensorSpec("int64", (None,))})
    gateway: Any = FakeGateway(signature=signature, bodies=Bodies(100_000), limits=Limits(body=100_000))
    context = SimpleNamespace(invocation_metadata=lambda: ())

    class Counting(PredictionService):
        async def ask(self, *args: Any, **options: Any) -> Any:
            return {"y": np.array([gateway.bodies.num_bytes])}

    tensor = filled(2, 5000, number=kind.number, **{field: [1]})
    request = MESSAGES["PredictRequest"](model_spec={"name": "only"}, inputs={"x": tensor})
    answer = asyncio.run(Counting(gateway)._predict(request, context))
    (held,) = answer.outputs["y"].int64_val
    assert held == 10_000 * kind.numpy.itemsize - request.ByteSize()
    assert gateway.bodies.num_bytes == 0
    gateway.bodies.take(95_000)
    with pytest.raises(RequestRefused, match="overloaded: 95000 bytes of requests are waiting"):
        asyncio.run(Counting(gateway)._predict(request, context))


def test_string_values_in_a_tensor_proto_are_rejected(scored: Server) -> None:
    """A TensorProto may carry texts in field 8; no network takes them, and each of them counts as a part."""
    texts = b"".join(b"\x42\x02ab" for _ in range(9000))
    inner = MESSAGES["TensorProto"](**filled(1, 3)).SerializeToString() + texts
    tensors = {"x": MESSAGES["TensorProto"].FromString(inner), "n": filled(1, number=9, int64_val=[1])}
    spec = {"name": "scores"}
    method = "/tensorflow.serving.PredictionService/Predict"
    for x, reason in (
        (tensors["x"], "a PredictRequest may have 8192 parts, but got more"),
        (filled(1, 3, number=7, float_val=[1.0]), "input 'x' must be DT_FLOAT, but got DT_STRING"),
    ):
        request = MESSAGES["PredictRequest"](model_spec=spec, inputs={**tensors, "x": x})
        with pytest.raises(grpc.RpcError, match=reason):
            call(scored.grpc, method, request, MESSAGES["PredictResponse"])


class Rows(Predictor):
    """The first of a thousand numbers."""

    @property
    def signature(self) -> Signature:
        return Signature({"x": TensorSpec("float32", (None, 1000))}, {"y": TensorSpec("float32", (None, 1))})

    def run(self, inputs: Any) -> dict[str, Tensor]:
        return {"y": inputs["x"][:, :1]}


def test_example_context_counts_once_per_example_toward_the_limit(start: Start) -> None:
    """Examples of two bytes, of which each takes the numbers of the context."""
    server = start({"rows": Rows()})
    context = example(x=feature(*[1.0] * 1000))

    def regress(num: int) -> Any:
        listed = {"example_list_with_context": {"examples": [{}] * num, "context": context}}
        return ask(server, "Regress", model_spec={"name": "rows"}, input=listed)

    assert len(regress(3).result.regressions) == 3
    with pytest.raises(grpc.RpcError, match="examples may have 2097152 numbers together with their context"):
        regress(3000)
    body = {"examples": [{}] * 3000, "context": {"x": [1.0] * 1000}}
    refused = httpx.post(f"{server.url}/v1/models/rows:regress", json=body)
    assert (refused.status_code, "but got 3000000" in refused.text) == (413, True)


@pytest.mark.parametrize("dtype", sorted(VALUES))
def test_outputs_are_sent_in_the_field_of_their_type(dtype: str) -> None:
    kind, spec = BY_TORCH[dtype], TensorSpec(dtype, (None, 3))
    bits = np.random.default_rng(0).integers(0, 256, (2, 3, kind.numpy.itemsize), np.uint8)
    array = bits.view(kind.numpy)[..., 0] if dtype != "bool" else bits[..., 0] > 127
    found = MESSAGES["TensorProto"]()
    asyncio.run(write_proto(found, array, spec))
    values = getattr(found, VALUES[dtype])
    assert (len(values), found.tensor_content) == (6, b"")
    by_value = MESSAGES["TensorProto"](
        dtype=kind.number, tensor_shape={"dim": [{"size": 2}, {"size": 3}]}, **{VALUES[dtype]: list(values)}
    )
    assert found.SerializeToString() == by_value.SerializeToString()
    request = MESSAGES["PredictRequest"](inputs={"x": found})
    back = read_inputs(request, SimpleNamespace(signature=Signature({"x": spec}, {})), {"x": (2, 3)})["x"]  # type: ignore[arg-type]
    assert back.tobytes() == array.tobytes()
