"""TensorFlow Serving's PredictionService over gRPC: predict, classify, regress, multi-inference, and metadata."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ...core import RequestRefused, TensorSpec
from ..dtypes import BY_NUMBER, BY_TORCH, Array, Kind, fits, from_raw
from ..http import BadRequest
from ..texts import MAX_TEXTS, OBJECT_BYTES, TooManyTexts, as_array, checked, text_bytes
from ..version import Version
from .examples import Features, rows_of, scores_of, values_of
from .grpc_service import GrpcService, Method, key_of
from .protocol import refusing
from .tensorflow_messages import MESSAGES
from .tensorflow_rest import SIGNATURE

VALUES = {
    "float32": "float_val", "float64": "double_val", "int64": "int64_val", "bool": "bool_val", "float16": "half_val",
    "bfloat16": "half_val", "uint32": "uint32_val", "uint64": "uint64_val", "int32": "int_val", "int16": "int_val",
    "int8": "int_val", "uint8": "int_val", "uint16": "int_val",
}  # fmt: skip
"""Fields of numbers that are not sent as bytes; half-precision numbers are stored as their bits."""
PACKED = {"float_val": 5 << 3 | 2, "double_val": 6 << 3 | 2, "bool_val": 11 << 3 | 2}
"""Keys of packed fields in which an element has the bytes that it has in memory."""


class PredictionService(GrpcService):
    """`tensorflow.serving.PredictionService`."""

    name = "tensorflow.serving.PredictionService"
    addressed: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "Predict": (1,),
        "Classify": (1,),
        "Regress": (1,),
        "MultiInference": (1,),
    }

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

    def require_served(self, request: Any, context: Any) -> None:
        self._find(
            _require_tasks(request.tasks).model_spec if hasattr(request, "tasks") else request.model_spec, context
        )

    async def _predict(self, request: Any, context: Any) -> Any:
        version = self._find(request.model_spec, context)
        if len(request.output_filter) > len(version.signature.outputs):
            most, got = len(version.signature.outputs), len(request.output_filter)
            raise BadRequest(400, f"output_filter may have {most} names, but got {got}")
        shapes = read_shapes(request, version, self.gateway.limits.body)
        # One value may represent all elements, so arrays can be larger than their message.
        with self.gateway.bodies.holding(max(0, num_bytes(request, shapes, version) - request.ByteSize())):
            outputs = await self.ask(context, version, read_inputs(request, version, shapes))
        wanted = list(dict.fromkeys(request.output_filter)) or list(outputs)
        for name in wanted:
            if name not in outputs:
                raise BadRequest(400, f"output tensor alias not found in signature: {name[:64]}")
        specs = version.signature.outputs
        with self.gateway.bodies.holding(NUMBER_BYTES * sum(outputs[name].size for name in wanted)):
            answer = MESSAGES["PredictResponse"](model_spec=_spec(version))
            for name in wanted:
                await write_proto(answer.outputs[name], outputs[name], specs[name])
        return answer

    async def _classify(self, request: Any, context: Any) -> Any:
        version, outputs = await self._examples(request.model_spec, request.input, context)
        with self.gateway.bodies.holding(_bytes_of_classes(outputs)):
            result = await _classification(version, outputs)
        return MESSAGES["ClassificationResponse"](result=result, model_spec=_spec(version))

    async def _regress(self, request: Any, context: Any) -> Any:
        version, outputs = await self._examples(request.model_spec, request.input, context)
        return MESSAGES["RegressionResponse"](result=await _regression(version, outputs), model_spec=_spec(version))

    async def _multi_inference(self, request: Any, context: Any) -> Any:
        """Answer several tasks from one computation."""
        first = _require_tasks(request.tasks)
        version, outputs = await self._examples(first.model_spec, request.input, context)
        answer = MESSAGES["MultiInferenceResponse"]()
        with self.gateway.bodies.holding(_bytes_of_classes(outputs)):
            for task in request.tasks:
                field, work = METHODS[task.method_name]
                answer.results.add(model_spec=_spec(version), **{field: await work(version, outputs)})
        return answer

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
        examples = [_features(example) for example in listed.examples]
        rows = rows_of(examples, shared, version.signature, self.gateway.limits.values)
        with self.gateway.bodies.holding(sum(map(text_bytes, rows.values()))):
            return version, await self.ask(context, version, rows)

    def _find(self, spec: Any, context: Any) -> Version:
        if spec.signature_name not in ("", SIGNATURE):
            raise BadRequest(400, f'Serving signature name: "{spec.signature_name[:64]}" not found in signature def')
        number = spec.version.value if spec.HasField("version") else None
        return self.gateway.catalogue.find(spec.name, number, spec.version_label or None, key_of(context))


def _require_tasks(tasks: Sequence[Any]) -> Any:
    """Return the first of some tasks, which must all refer to one model."""
    if not tasks:
        raise BadRequest(400, "a MultiInferenceRequest must have at least one task")
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
            raise BadRequest(400, "all tasks of a MultiInferenceRequest must name the same version and signature")
        seen.add(task.method_name)
    return tasks[0]


def _features(example: Any) -> Features:
    found = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("one")
        found[name] = list(getattr(feature, kind).value) if kind is not None else []
    return found


def _bytes_of_classes(outputs: Mapping[str, Array]) -> int:
    return CLASS_BYTES * sum(array.size for array in outputs.values())


async def _classification(version: Version, outputs: Mapping[str, Array]) -> Any:
    """Make the classes of all rows, in steps between which other requests are handled."""
    result, num = MESSAGES["ClassificationResult"](), 0
    for row in scores_of(outputs, version.signature):
        classes = result.classifications.add().classes
        for number, score in enumerate(row):
            classes.add(label=str(number), score=float(score))
            num += 1
            if num % STEP == 0:
                await asyncio.sleep(0)
    return result


async def _regression(version: Version, outputs: Mapping[str, Array]) -> Any:
    return MESSAGES["RegressionResult"](
        regressions=[{"value": value} for value in values_of(outputs, version.signature)]
    )


METHODS: dict[str, tuple[str, Callable[[Version, Mapping[str, Array]], Awaitable[Any]]]] = {
    "tensorflow/serving/classify": ("classification_result", _classification),
    "tensorflow/serving/regress": ("regression_result", _regression),
}
STEP = 1024
"""Number of classes or numbers that are made in one turn of the event loop, which takes at most a millisecond."""
NUMBER_BYTES, CLASS_BYTES = 8, 64
"""Bytes that a number, or a class with its score, takes in a message at most."""
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


Shapes = Mapping[str, tuple[int, ...]]


def read_shapes(request: Any, version: Version, limit: int) -> Shapes:
    """Return the shapes of a request's arrays, which have at most `limit` bytes together when they are decoded.

    Nothing is allocated for them.
    """
    specs = version.signature.inputs
    if set(request.inputs) != set(specs):
        raise BadRequest(
            400, f"the inputs must be {{{', '.join(specs)}}}, but got {{{', '.join(sorted(request.inputs))[:200]}}}"
        )
    shapes = {name: _shape(name, request.inputs[name], spec) for name, spec in specs.items()}
    rows = {shape[0] for shape in shapes.values()}
    if len(rows) > 1 or rows == {0}:
        raise BadRequest(400, f"all inputs must have the same number of rows, but got {sorted(rows)}")
    num = num_bytes(request, shapes, version)
    if num > limit:
        raise BadRequest(400, f"the inputs may have {limit} bytes together, but got shapes of {num} bytes")
    return shapes


def num_bytes(request: Any, shapes: Shapes, version: Version) -> int:
    """Return the bytes of a request's arrays, which have these shapes; one value may represent all elements."""
    specs = version.signature.inputs
    return sum(_bytes(request.inputs[name], specs[name], shape) for name, shape in shapes.items())


def _bytes(proto: Any, spec: TensorSpec, shape: tuple[int, ...]) -> int:
    num, kind = math.prod(shape), BY_TORCH[spec.dtype]
    if not kind.is_text:
        return num * kind.numpy.itemsize
    sizes = [len(value) for value in proto.string_val]
    return OBJECT_BYTES * num + (num * sizes[0] if len(sizes) == 1 else sum(sizes))


def read_inputs(request: Any, version: Version, shapes: Shapes) -> dict[str, Array]:
    """Return the arrays of a request, whose shapes have been checked."""
    return {
        name: _read(name, request.inputs[name], spec, shapes[name]) for name, spec in version.signature.inputs.items()
    }


def _shape(name: str, proto: Any, spec: TensorSpec) -> tuple[int, ...]:
    kind = BY_TORCH[spec.dtype]
    if proto.dtype != kind.number:
        given = BY_NUMBER[proto.dtype].tensorflow if proto.dtype in BY_NUMBER else str(proto.dtype)
        raise BadRequest(400, f"input '{name}' must be {kind.tensorflow}, but got {given}")
    shape = tuple(dim.size for dim in proto.tensor_shape.dim)
    if any(size < 0 for size in shape) or not fits(shape, spec):
        raise BadRequest(400, f"input '{name}' must be {spec}, but got {TensorSpec(spec.dtype, shape)}")
    return shape


def _read(name: str, proto: Any, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    kind, num = BY_TORCH[spec.dtype], math.prod(shape)
    if kind.is_text:
        return _texts(name, proto, kind, shape)
    if proto.tensor_content:
        if len(proto.tensor_content) != num * kind.numpy.itemsize:
            wanted = num * kind.numpy.itemsize
            raise BadRequest(400, f"input '{name}' should have {wanted} bytes, but got {len(proto.tensor_content)}")
        return from_raw(proto.tensor_content, kind.numpy).reshape(shape)
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


def _texts(name: str, proto: Any, kind: Kind, shape: tuple[int, ...]) -> Array:
    values, num = proto.string_val, math.prod(shape)
    with refusing(f"input '{name}' must have strings of the type {kind.torch}"):
        if num > MAX_TEXTS:
            raise TooManyTexts
        if len(values) not in (1, num):
            raise BadRequest(400, f"input '{name}' should have {num} strings in string_val, but got {len(values)}")
        items = [checked(value, kind) for value in values]
        return as_array(items if len(items) == num else items * num, shape)


async def write_proto(proto: Any, array: Array, spec: TensorSpec) -> None:
    """Write an array into TensorFlow's message, its elements in the field of their type, as TensorFlow Serving does.

    Many elements are written in steps between which other requests are handled.
    """
    proto.dtype = BY_TORCH[spec.dtype].number
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    if BY_TORCH[spec.dtype].is_text:
        proto.string_val.extend(array.ravel().tolist())
        return
    field = VALUES[spec.dtype]
    if field in PACKED:
        # Little-endian elements are the encoding of a packed field, so no Python object is made for any of them.
        content = array.tobytes()
        proto.MergeFromString(bytes([PACKED[field]]) + varint(len(content)) + content)
        return
    values = (array.view(np.uint16) if field == "half_val" else array).reshape(-1)
    for start in range(0, len(values), STEP):
        getattr(proto, field).extend(values[start : start + STEP].tolist())
        if start:
            await asyncio.sleep(0)


def varint(number: int) -> bytes:
    """Return a number as Protocol Buffers encode it.

    >>> varint(1), varint(300)
    (b'\\x01', b'\\xac\\x02')
    """
    digits = []
    while number >= 128:
        digits.append(number % 128 + 128)
        number //= 128
    return bytes([*digits, number])
