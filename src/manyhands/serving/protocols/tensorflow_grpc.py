"""TensorFlow Serving over gRPC: Predict, and the status of models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core import RequestRefused, TensorSpec
from ..http import BadRequest
from ..kinds import BY_NUMBER, BY_TORCH, Array, fits
from ..version import Version
from .grpc_service import GrpcService, Method, key_of
from .messages import make_messages
from .tensorflow_rest import SIGNATURE

_SPEC = [
    "name 1 string",
    "version 2 Int64Value",
    "signature_name 3 string",
    "version_label 4 string",
]
MESSAGES = make_messages(
    "tensorflow.serving",
    {
        "Int64Value": ["value 1 int64"],
        "ModelSpec": _SPEC,
        "Dim": ["size 1 int64", "name 2 string"],
        "TensorShapeProto": ["dim 2 *Dim", "unknown_rank 3 bool"],
        "TensorProto": [
            "dtype 1 int32",
            "tensor_shape 2 TensorShapeProto",
            "version_number 3 int32",
            "tensor_content 4 bytes",
            "float_val 5 *float",
            "double_val 6 *double",
            "int_val 7 *int32",
            "int64_val 10 *int64",
            "bool_val 11 *bool",
            "half_val 13 *int32",
            "uint32_val 16 *uint32",
            "uint64_val 17 *uint64",
        ],
        "PredictRequest": ["model_spec 1 ModelSpec", "inputs 2 map TensorProto", "output_filter 3 *string"],
        "PredictResponse": ["outputs 1 map TensorProto", "model_spec 2 ModelSpec"],
        "GetModelStatusRequest": ["model_spec 1 ModelSpec"],
        "StatusProto": ["error_code 1 int32", "error_message 2 string"],
        "ModelVersionStatus": ["version 1 int64", "state 2 int32", "status 3 StatusProto"],
        "GetModelStatusResponse": ["model_version_status 1 *ModelVersionStatus"],
    },
)
STATES = {"START": 10, "LOADING": 20, "AVAILABLE": 30, "UNLOADING": 40, "END": 50}
UNKNOWN = 2
VALUES = {
    "float32": "float_val", "float64": "double_val", "int64": "int64_val", "bool": "bool_val", "float16": "half_val",
    "bfloat16": "half_val", "uint32": "uint32_val", "uint64": "uint64_val", "int32": "int_val", "int16": "int_val",
    "int8": "int_val", "uint8": "int_val", "uint16": "int_val",
}  # fmt: skip
"""Where numbers lie that are not sent as bytes; halves lie there as their bits."""


class PredictionService(GrpcService):
    """`tensorflow.serving.PredictionService`."""

    name = "tensorflow.serving.PredictionService"

    def methods(self) -> Mapping[str, tuple[Method, Any, Any]]:
        return {"Predict": (self._predict, MESSAGES["PredictRequest"], MESSAGES["PredictResponse"])}

    async def _predict(self, request: Any, context: Any) -> Any:
        spec = request.model_spec
        if spec.signature_name not in ("", SIGNATURE):
            raise BadRequest(400, f'Serving signature name: "{spec.signature_name[:64]}" not found in signature def')
        number = spec.version.value if spec.HasField("version") else None
        version = self.desk.catalogue.find(spec.name, number, spec.version_label or None, key_of(context))
        outputs = await self.ask(context, version, read_inputs(request, version))
        wanted = list(request.output_filter) or list(outputs)
        for name in wanted:
            if name not in outputs:
                raise BadRequest(400, f"output tensor alias not found in signature: {name[:64]}")
        return MESSAGES["PredictResponse"](
            outputs={name: as_proto(outputs[name], version.signature.outputs[name]) for name in wanted},
            model_spec={"name": version.model, "version": {"value": version.number}, "signature_name": SIGNATURE},
        )


class ModelService(GrpcService):
    """`tensorflow.serving.ModelService`; the list of models is the folder, so it cannot be replaced from here."""

    name = "tensorflow.serving.ModelService"

    def methods(self) -> Mapping[str, tuple[Method, Any, Any]]:
        messages = MESSAGES["GetModelStatusRequest"], MESSAGES["GetModelStatusResponse"]
        return {"GetModelStatus": (self._status, *messages)}

    async def _status(self, request: Any, context: Any) -> Any:
        spec = request.model_spec
        model = self.desk.catalogue.model(spec.name)
        number = spec.version.value if spec.HasField("version") else None
        if spec.version_label:
            number = model.find(label=spec.version_label).number
        shown = [model.versions[n] for n in sorted(model.versions, reverse=True) if number in (None, n)]
        if not shown:
            raise RequestRefused("NOT_FOUND", f"Could not find version {number} of model {spec.name}")
        return MESSAGES["GetModelStatusResponse"](
            model_version_status=[
                {
                    "version": version.number,
                    "state": STATES[version.state],
                    "status": {"error_code": UNKNOWN if version.error else 0, "error_message": version.error},
                }
                for version in shown
            ]
        )


def read_inputs(request: Any, version: Version) -> dict[str, Array]:
    """The arrays of a request."""
    specs = version.signature.inputs
    if set(request.inputs) != set(specs):
        raise BadRequest(
            400, f"the inputs are {{{', '.join(specs)}}}, but got {{{', '.join(sorted(request.inputs))[:200]}}}"
        )
    arrays = {name: _read(name, request.inputs[name], spec) for name, spec in specs.items()}
    rows = {len(array) for array in arrays.values()}
    if len(rows) > 1 or rows == {0}:
        raise BadRequest(400, f"all inputs have the same number of rows, but got {sorted(rows)}")
    return arrays


def _read(name: str, proto: Any, spec: TensorSpec) -> Array:
    kind = BY_TORCH[spec.dtype]
    if proto.dtype != kind.number:
        came = BY_NUMBER[proto.dtype].tensorflow if proto.dtype in BY_NUMBER else str(proto.dtype)
        raise BadRequest(400, f"input '{name}' must be {kind.tensorflow}, but got {came}")
    shape = tuple(dim.size for dim in proto.tensor_shape.dim)
    if any(size < 0 for size in shape) or not fits(shape, spec):
        raise BadRequest(400, f"input '{name}' must be {spec}, but got {TensorSpec(spec.dtype, shape)}")
    num = math.prod(shape)
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
    # TensorFlow lets one value stand for all of them.
    return np.broadcast_to(array, (num,)).reshape(shape)


def as_proto(array: Array, spec: TensorSpec) -> dict[str, Any]:
    """An array as TensorFlow's message, its elements as bytes."""
    return {
        "dtype": BY_TORCH[spec.dtype].number,
        "tensor_shape": {"dim": [{"size": size} for size in array.shape]},
        "tensor_content": array.tobytes(),
    }
