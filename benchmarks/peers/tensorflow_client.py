"""What TensorFlow Serving's own client asks, with its own messages and stubs; runs in TensorFlow's environment.

`python -m benchmarks.peers.tensorflow_client PORT DTYPE...` prints a line for each thing that holds or does not.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

SECONDS = 30
ROWS = np.array([[0, 1, 2], [3, 4, 5]], np.float32)
AVAILABLE = get_model_status_pb2.ModelVersionStatus.AVAILABLE


class Conformance:
    """Every check is a method that raises where something is not as TensorFlow Serving does it."""

    def __init__(self, port: int, dtypes: list[str]) -> None:
        self._port, self._dtypes = port, dtypes
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._asks = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(channel)

    def predict_every_dtype(self) -> None:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "echo"
        request.model_spec.signature_name = "serving_default"
        sent = {name: ROWS.astype(tf.as_dtype(name).as_numpy_dtype) for name in self._dtypes}
        for name, array in sent.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
        answer = self._asks.Predict(request, SECONDS)
        assert set(answer.outputs) == {f"{name}_out" for name in sent}
        for name, array in sent.items():
            found = tf.make_ndarray(answer.outputs[f"{name}_out"])
            assert found.dtype == array.dtype, name
            assert (found == array).all(), name
        spec = answer.model_spec
        assert (spec.name, spec.version.value, spec.signature_name) == ("echo", 1, "serving_default")

    def predict_with_values_instead_of_bytes(self) -> None:
        request = self._predict("adder")
        request.inputs["x"].CopyFrom(tf.make_tensor_proto(0.5, shape=(2, 3), dtype=tf.float32))
        assert request.inputs["x"].float_val
        assert (self._numbers(self._asks.Predict(request, SECONDS)) == 1.5).all()

    def predict_a_version_and_some_outputs(self) -> None:
        request = self._predict("adder", ROWS)
        request.model_spec.version.value = 1
        answer = self._asks.Predict(request, SECONDS)
        assert answer.model_spec.version.value == 1
        assert self._asks.Predict(self._predict("adder", ROWS), SECONDS).model_spec.version.value == 2
        request.output_filter.extend(answer.outputs)
        assert set(self._asks.Predict(request, SECONDS).outputs) == set(answer.outputs)
        request.output_filter.append("nothing")
        self._refused(lambda: self._asks.Predict(request, SECONDS), "INVALID_ARGUMENT")

    def predict_asynchronously(self) -> None:
        async def ask() -> Any:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{self._port}") as channel:
                stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
                return await asyncio.gather(*(stub.Predict(self._predict("adder", ROWS + i)) for i in range(8)))

        for i, answer in enumerate(asyncio.run(ask())):
            assert (self._numbers(answer) == ROWS + i + 1).all()

    def classify(self) -> None:
        request = classification_pb2.ClassificationRequest()
        request.model_spec.name = "scores"
        request.input.example_list.examples.extend([example(), example()])
        for one in self._asks.Classify(request, SECONDS).result.classifications:
            assert [(each.label, each.score) for each in one.classes] == [("0", 10.0), ("1", 20.0)]

    def regress(self) -> None:
        request = regression_pb2.RegressionRequest()
        request.model_spec.name = "value"
        shared = request.input.example_list_with_context
        shared.examples.append(example(with_n=False))
        shared.context.CopyFrom(tf.train.Example(features=tf.train.Features(feature={"n": number(7)})))
        assert [one.value for one in self._asks.Regress(request, SECONDS).result.regressions] == [13.0]

    def multi_inference(self) -> None:
        request = inference_pb2.MultiInferenceRequest()
        for method in ("classify", "regress"):
            task = request.tasks.add(method_name=f"tensorflow/serving/{method}")
            task.model_spec.name = "value"
        request.input.example_list.examples.append(example())
        first, second = self._asks.MultiInference(request, SECONDS).results
        assert first.classification_result.classifications[0].classes[0].score == 10.0
        assert second.regression_result.regressions[0].value == 10.0

    def metadata(self) -> None:
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = "scores"
        answer = self._asks.GetModelMetadata(request, SECONDS)
        found = get_model_metadata_pb2.SignatureDefMap()
        assert answer.metadata["signature_def"].Unpack(found)
        signature = found.signature_def["serving_default"]
        assert tf.as_dtype(signature.inputs["n"].dtype) == tf.int64
        assert tf.TensorShape(signature.inputs["x"].tensor_shape).as_list() == [None, 3]
        assert signature.method_name == tf.saved_model.PREDICT_METHOD_NAME
        assert answer.model_spec.version.value == 1

    def status(self) -> None:
        assert self._status("adder") == {1: AVAILABLE, 2: AVAILABLE}
        assert self._status("adder", 2) == {2: AVAILABLE}
        self._refused(lambda: self._status("adder", 9), "NOT_FOUND")
        self._refused(lambda: self._status("nothing"), "NOT_FOUND")

    def mistakes(self) -> None:
        unknown = self._predict("nothing", ROWS)
        text = self._refused(lambda: self._asks.Predict(unknown, SECONDS), "NOT_FOUND")
        assert text == "Servable not found for request: Latest(nothing)", text
        for wrong in (ROWS[:, :2], ROWS.astype(np.int32), np.float32(1)):
            request = self._predict("adder", wrong)
            self._refused(lambda request=request: self._asks.Predict(request, SECONDS), "INVALID_ARGUMENT")
        request = self._predict("adder", ROWS)
        request.model_spec.version_label = "nobody"
        self._refused(lambda: self._asks.Predict(request, SECONDS), "INVALID_ARGUMENT")
        self._refused(lambda: self._asks.Predict(self._predict("adder"), SECONDS), "INVALID_ARGUMENT")

    def reload(self) -> None:
        request = model_management_pb2.ReloadConfigRequest()
        one = request.config.model_config_list.config.add(name="adder", base_path="/models/adder", model_platform="x")
        one.model_version_policy.specific.versions.append(1)
        one.version_labels["stable"] = 1
        answer = self._models.HandleReloadConfigRequest(request, SECONDS)
        assert answer.status.error_code == 0, answer.status.error_message
        assert self._status("adder")[1] == AVAILABLE
        self._refused(lambda: self._status("scores"), "NOT_FOUND")
        labelled = self._predict("adder", ROWS)
        labelled.model_spec.version_label = "stable"
        assert self._asks.Predict(labelled, SECONDS).model_spec.version.value == 1

    def _predict(self, model: str, rows: Any = None) -> Any:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = model
        if rows is not None:
            request.inputs["x"].CopyFrom(tf.make_tensor_proto(rows))
        return request

    def _numbers(self, answer: Any) -> Any:
        (output,) = answer.outputs.values()
        return tf.make_ndarray(output)

    def _status(self, model: str, version: int | None = None) -> dict[int, int]:
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = model
        if version is not None:
            request.model_spec.version.value = version
        answer = self._models.GetModelStatus(request, SECONDS)
        return {one.version: one.state for one in answer.model_version_status}

    def _refused(self, ask: Callable[[], object], code: str) -> str:
        try:
            ask()
        except grpc.RpcError as error:
            found, text = error.code().name, str(error.details())
        else:
            found, text = "OK", ""
        assert found == code, f"{found} instead of {code}: {text}"
        return text


def number(value: int) -> Any:
    """A feature of an example."""
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))


def example(with_n: bool = True) -> Any:
    """The row 1, 2, 3, and 4."""
    features = {"x": tf.train.Feature(float_list=tf.train.FloatList(value=[1.0, 2.0, 3.0]))}
    if with_n:
        features["n"] = number(4)
    return tf.train.Example(features=tf.train.Features(feature=features))


def main() -> None:
    """Runs all checks, in the order in which they are written: the last one changes what is served."""
    checks = Conformance(int(sys.argv[1]), sys.argv[2:])
    failed = 0
    for name in [name for name in vars(Conformance) if not name.startswith("_")]:
        try:
            getattr(checks, name)()
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}")
        else:
            print(f"holds  {name}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
