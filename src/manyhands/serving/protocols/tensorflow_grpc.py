"""TensorFlow Serving's PredictionService over gRPC: predict, classify, regress, multi-inference, and metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core import RequestRefused, TensorSpec
from ..dtypes import BY_NUMBER, BY_TORCH, Array, fits
from ..http import BadRequest
from ..version import Version
from .examples import Features, classes_of, rows_of, values_of
from .grpc_service import GrpcService, Method, key_of
from .tensorflow_messages import MESSAGES
from .tensorflow_rest import SIGNATURE

VALUES = {
    "float32": "float_val", "float64": "double_val", "int64": "int64_val", "bool": "bool_val", "float16": "half_val",
    "bfloat16": "half_val", "uint32": "uint32_val", "uint64": "uint64_val", "int32": "int_val", "int16": "int_val",
    "int8": "int_val", "uint8": "int_val", "uint16": "int_val",
}  # fmt: skip
"""Fields of numbers that are not sent as bytes; half-precision numbers are stored as their bits."""


class PredictionService(GrpcService):
    """`tensorflow.serving.PredictionService`."""

    name = "tensorflow.serving.PredictionService"

    def methods(self) -> Mapping[str, tuple[Method, Any, Any]]:
        return {
            "Predict": (self._predict, MESSAGES["PredictRequest"], MESSAGES["PredictResponse"]),
            "Classify": (self._classify, MESSAGES["ClassificationRequest"], MESSAGES["ClassificationResponse"]),
            "Regress": (self._regress, MESSAGES["RegressionRequest"], MESSAGES["RegressionResponse"]),
            "MultiInference": (
                self._multi_inference, MESSAGES["MultiInferenceRequest"], MESSAGES["MultiInferenceResponse"],
            ),
            "GetModelMetadata": (
                self._metadata, MESSAGES["GetModelMetadataRequest"], MESSAGES["GetModelMetadataResponse"],
            ),
        }  # fmt: skip

    async def _predict(self, request: Any, context: Any) -> Any:
        version = self._find(request.model_spec, context)
        if len(request.output_filter) > len(version.signature.outputs):
            most, got = len(version.signature.outputs), len(request.output_filter)
            raise BadRequest(400, f"output_filter may have {most} names, but got {got}")
        outputs = await self.ask(context, version, read_inputs(request, version, self.desk.limits.body))
        wanted = list(request.output_filter) or list(outputs)
        for name in wanted:
            if name not in outputs:
                raise BadRequest(400, f"output tensor alias not found in signature: {name[:64]}")
        return MESSAGES["PredictResponse"](
            outputs={name: as_proto(outputs[name], version.signature.outputs[name]) for name in wanted},
            model_spec=_spec(version),
        )

    async def _classify(self, request: Any, context: Any) -> Any:
        version, outputs = await self._examples(request.model_spec, request.input, context)
        return MESSAGES["ClassificationResponse"](result=_classification(version, outputs), model_spec=_spec(version))

    async def _regress(self, request: Any, context: Any) -> Any:
        version, outputs = await self._examples(request.model_spec, request.input, context)
        return MESSAGES["RegressionResponse"](result=_regression(version, outputs), model_spec=_spec(version))

    async def _multi_inference(self, request: Any, context: Any) -> Any:
        """Answer several tasks from one computation."""
        first = _require_tasks(request.tasks)
        version, outputs = await self._examples(first.model_spec, request.input, context)
        return MESSAGES["MultiInferenceResponse"](
            results=[
                {"model_spec": _spec(version), **METHODS[task.method_name](version, outputs)} for task in request.tasks
            ]
        )

    async def _metadata(self, request: Any, context: Any) -> Any:
        if not request.HasField("model_spec"):
            raise BadRequest(400, "Missing ModelSpec")
        if not request.metadata_field:
            raise BadRequest(400, "GetModelMetadataRequest must specify at least one metadata_field")
        for field in request.metadata_field:
            if field != FIELD:
                raise BadRequest(400, f"Metadata field {field[:64]} is not supported")
        version = self._find(request.model_spec, context)
        signature = {
            "inputs": _described(version.signature.inputs),
            "outputs": _described(version.signature.outputs),
            "method_name": "tensorflow/serving/predict",
        }
        packed = MESSAGES["SignatureDefMap"](signature_def={SIGNATURE: signature}).SerializeToString()
        return MESSAGES["GetModelMetadataResponse"](
            model_spec={"name": version.model, "version": {"value": version.number}},
            metadata={FIELD: {"type_url": "type.googleapis.com/tensorflow.serving.SignatureDefMap", "value": packed}},
        )

    async def _examples(self, spec: Any, asked: Any, context: Any) -> tuple[Version, Mapping[str, Array]]:
        version = self._find(spec, context)
        kind = asked.WhichOneof("one") or "example_list"
        listed = getattr(asked, kind)
        shared = _features(listed.context) if kind == "example_list_with_context" else {}
        rows = rows_of([_features(example) for example in listed.examples], shared, version.signature)
        return version, await self.ask(context, version, rows)

    def _find(self, spec: Any, context: Any) -> Version:
        if spec.signature_name not in ("", SIGNATURE):
            raise BadRequest(400, f'Serving signature name: "{spec.signature_name[:64]}" not found in signature def')
        number = spec.version.value if spec.HasField("version") else None
        return self.desk.catalogue.find(spec.name, number, spec.version_label or None, key_of(context))


def _require_tasks(tasks: Sequence[Any]) -> Any:
    """Return the first of some tasks, which must all refer to one model."""
    if not tasks:
        raise BadRequest(400, "a MultiInferenceRequest has at least one task")
    seen = set()
    for task in tasks:
        if not task.model_spec.name:
            raise BadRequest(400, "Found ModelSpec with an empty model name.")
        if task.model_spec.name != tasks[0].model_spec.name:
            raise BadRequest(400, "All ModelSpecs in a MultiInferenceRequest must access the same model name.")
        if task.method_name not in METHODS:
            raise RequestRefused("UNIMPLEMENTED", f"Unsupported signature method_name: {task.method_name[:64]}")
        if task.method_name in seen:
            raise BadRequest(400, f"Duplicate evaluation of signature: {task.model_spec.signature_name[:64]}")
        if task.model_spec != tasks[0].model_spec:
            raise BadRequest(400, "all tasks of a MultiInferenceRequest must ask the same version and signature")
        seen.add(task.method_name)
    return tasks[0]


def _features(example: Any) -> Features:
    found = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("one")
        found[name] = list(getattr(feature, kind).value) if kind is not None else []
    return found


def _classification(version: Version, outputs: Mapping[str, Array]) -> dict[str, Any]:
    rows = classes_of(outputs, version.signature)
    return {"classifications": [{"classes": [{"label": n, "score": score} for n, score in row]} for row in rows]}


def _regression(version: Version, outputs: Mapping[str, Array]) -> dict[str, Any]:
    return {"regressions": [{"value": value} for value in values_of(outputs, version.signature)]}


METHODS = {
    "tensorflow/serving/classify": lambda version, outputs: {
        "classification_result": _classification(version, outputs)
    },
    "tensorflow/serving/regress": lambda version, outputs: {"regression_result": _regression(version, outputs)},
}
FIELD = "signature_def"


def _spec(version: Version) -> dict[str, Any]:
    return {"name": version.model, "version": {"value": version.number}, "signature_name": SIGNATURE}


def _described(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    return {
        name: {
            "name": f"{SIGNATURE}_{name}:0",
            "dtype": BY_TORCH[spec.dtype].number,
            "tensor_shape": {"dim": [{"size": -1 if size is None else size} for size in spec.shape]},
        }
        for name, spec in specs.items()
    }


def read_inputs(request: Any, version: Version, limit: int) -> dict[str, Array]:
    """Return the arrays of a request."""
    specs = version.signature.inputs
    if set(request.inputs) != set(specs):
        raise BadRequest(
            400, f"the inputs are {{{', '.join(specs)}}}, but got {{{', '.join(sorted(request.inputs))[:200]}}}"
        )
    arrays = {name: _read(name, request.inputs[name], spec, limit) for name, spec in specs.items()}
    rows = {len(array) for array in arrays.values()}
    if len(rows) > 1 or rows == {0}:
        raise BadRequest(400, f"all inputs have the same number of rows, but got {sorted(rows)}")
    return arrays


def _read(name: str, proto: Any, spec: TensorSpec, limit: int) -> Array:
    kind = BY_TORCH[spec.dtype]
    if proto.dtype != kind.number:
        came = BY_NUMBER[proto.dtype].tensorflow if proto.dtype in BY_NUMBER else str(proto.dtype)
        raise BadRequest(400, f"input '{name}' must be {kind.tensorflow}, but got {came}")
    shape = tuple(dim.size for dim in proto.tensor_shape.dim)
    if any(size < 0 for size in shape) or not fits(shape, spec):
        raise BadRequest(400, f"input '{name}' must be {spec}, but got {TensorSpec(spec.dtype, shape)}")
    num = math.prod(shape)
    if num * kind.numpy.itemsize > limit:
        raise BadRequest(400, f"input '{name}' may have {limit} bytes, but got a shape of {num * kind.numpy.itemsize}")
    if proto.tensor_content:
        if len(proto.tensor_content) != num * kind.numpy.itemsize:
            wanted = num * kind.numpy.itemsize
            raise BadRequest(400, f"input '{name}' should have {wanted} bytes, but got {len(proto.tensor_content)}")
        return np.frombuffer(proto.tensor_content, kind.numpy).reshape(shape)
    values = getattr(proto, VALUES[spec.dtype])
    if len(values) not in (1, num):
        raise BadRequest(400, f"input '{name}' should have {num} elements, but got {len(values)}")
    try:
        array = (
            np.array(values, np.uint16).view(kind.numpy)
            if "half" in VALUES[spec.dtype]
            else np.array(values, kind.numpy)
        )
    except OverflowError:
        raise BadRequest(400, f"input '{name}' must be {kind.tensorflow}") from None
    # TensorFlow allows a single value for all elements.
    return np.broadcast_to(array, (num,)).reshape(shape)


def as_proto(array: Array, spec: TensorSpec) -> dict[str, Any]:
    """Return an array as TensorFlow's message, its elements as bytes."""
    return {
        "dtype": BY_TORCH[spec.dtype].number,
        "tensor_shape": {"dim": [{"size": size} for size in array.shape]},
        "tensor_content": array.tobytes(),
    }
