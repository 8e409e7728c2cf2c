"""Open Inference Protocol v2 over gRPC, with Triton's extensions that apply here."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar

import numpy as np

from ...core import RequestRefused, TensorSpec
from ..dtypes import BY_TORCH, Array, Kind, from_numbers
from ..http import BadRequest
from ..model import Unknown
from ..texts import MAX_TEXTS, Strings, TooManyTexts, as_array, checked, text_bytes
from ..version import Version
from .classification import class_count, datatype, require_few_classes
from .grpc_service import GrpcService, Method, key_of
from .management import require_no_parameters
from .messages import make_messages
from .open_inference_rest import (
    EXTENSIONS,
    MAX_ID,
    all_statistics,
    as_open_inference_error,
    checked_parameters,
    checked_shape,
    contents_of,
    counted,
    from_bytes,
    index,
    model_config,
    model_metadata,
    numbers,
    require_datatype,
    require_few_outputs,
    require_names,
    require_rows,
    require_size,
    server_metadata,
    statistics,
    texts_from_bytes,
    version_number,
)
from .protocol import refusing

_NAMED = ["name 1 string", "version 2 string"]
_MANAGED = ["repository_name 1 string", "model_name 2 string", "parameters 3 map ModelRepositoryParameter"]
MESSAGES = make_messages(
    "inference",
    {
        "ServerLiveRequest": [],
        "ServerLiveResponse": ["live 1 bool"],
        "ServerReadyRequest": [],
        "ServerReadyResponse": ["ready 1 bool"],
        "ModelReadyRequest": _NAMED,
        "ModelReadyResponse": ["ready 1 bool"],
        "ServerMetadataRequest": [],
        "ServerMetadataResponse": ["name 1 string", "version 2 string", "extensions 3 *string"],
        "ModelMetadataRequest": _NAMED,
        "TensorMetadata": ["name 1 string", "datatype 2 string", "shape 3 *int64"],
        "ModelMetadataResponse": [
            "name 1 string",
            "versions 2 *string",
            "platform 3 string",
            "inputs 4 *TensorMetadata",
            "outputs 5 *TensorMetadata",
        ],
        "InferParameter": [
            "bool_param 1 ?bool",
            "int64_param 2 ?int64",
            "string_param 3 ?string",
            "double_param 4 ?double",
            "uint64_param 5 ?uint64",
        ],
        "InferTensorContents": [
            "bool_contents 1 *bool",
            "int_contents 2 *int32",
            "int64_contents 3 *int64",
            "uint_contents 4 *uint32",
            "uint64_contents 5 *uint64",
            "fp32_contents 6 *float",
            "fp64_contents 7 *double",
            "bytes_contents 8 *bytes",
        ],
        "InferInputTensor": [
            "name 1 string",
            "datatype 2 string",
            "shape 3 *int64",
            "parameters 4 map InferParameter",
            "contents 5 InferTensorContents",
        ],
        "InferRequestedOutputTensor": ["name 1 string", "parameters 2 map InferParameter"],
        "ModelInferRequest": [
            "model_name 1 string",
            "model_version 2 string",
            "id 3 string",
            "parameters 4 map InferParameter",
            "inputs 5 *InferInputTensor",
            "outputs 6 *InferRequestedOutputTensor",
            "raw_input_contents 7 *bytes",
        ],
        "InferOutputTensor": ["name 1 string", "datatype 2 string", "shape 3 *int64"],
        "ModelInferResponse": [
            "model_name 1 string",
            "model_version 2 string",
            "id 3 string",
            "outputs 5 *InferOutputTensor",
            "raw_output_contents 6 *bytes",
        ],
        "ModelConfigRequest": _NAMED,
        "ModelInput": ["name 1 string", "data_type 2 int32", "dims 4 *int64"],
        "ModelOutput": ["name 1 string", "data_type 2 int32", "dims 3 *int64"],
        "ModelConfig": [
            "name 1 string",
            "platform 2 string",
            "max_batch_size 4 int32",
            "input 5 *ModelInput",
            "output 6 *ModelOutput",
            "backend 17 string",
        ],
        "ModelConfigResponse": ["config 1 ModelConfig"],
        "ModelStatisticsRequest": _NAMED,
        "StatisticDuration": ["count 1 uint64", "ns 2 uint64"],
        "InferStatistics": [
            "success 1 StatisticDuration",
            "fail 2 StatisticDuration",
            "compute_infer 5 StatisticDuration",
        ],
        "ModelStatistics": [
            "name 1 string",
            "version 2 string",
            "inference_count 4 uint64",
            "execution_count 5 uint64",
            "inference_stats 6 InferStatistics",
        ],
        "ModelStatisticsResponse": ["model_stats 1 *ModelStatistics"],
        "RepositoryIndexRequest": ["repository_name 1 string", "ready 2 bool"],
        "ModelIndex": ["name 1 string", "version 2 string", "state 3 string", "reason 4 string"],
        "RepositoryIndexResponse": ["models 1 *ModelIndex"],
        "ModelRepositoryParameter": [
            "bool_param 1 ?bool",
            "int64_param 2 ?int64",
            "string_param 3 ?string",
            "bytes_param 4 ?bytes",
        ],
        "RepositoryModelLoadRequest": _MANAGED,
        "RepositoryModelLoadResponse": [],
        "RepositoryModelUnloadRequest": _MANAGED,
        "RepositoryModelUnloadResponse": [],
    },
)
DATA_TYPES = {
    "BOOL": 1, "UINT8": 2, "UINT16": 3, "UINT32": 4, "UINT64": 5, "INT8": 6, "INT16": 7, "INT32": 8, "INT64": 9,
    "FP16": 10, "FP32": 11, "FP64": 12, "STRING": 13, "BF16": 14,
}  # fmt: skip
"""Data type numbers of Triton's model configuration."""
CONTENTS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip


class OpenInferenceGrpc(GrpcService):
    """The service `inference.GRPCInferenceService`."""

    name = "inference.GRPCInferenceService"
    managing = ("RepositoryModelLoad", "RepositoryModelUnload")
    addressed: ClassVar[Mapping[str, tuple[int, ...]]] = {"ModelInfer": (1, 2)}

    def methods(self) -> Mapping[str, tuple[Method, Any, Any]]:
        found: dict[str, Method] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        return {
            name: (method, MESSAGES[f"{name}Request"], MESSAGES[f"{name}Response"]) for name, method in found.items()
        }

    def require_served(self, request: Any, context: Any) -> None:
        self._find(request.model_name, request.model_version, key_of(context))

    def _find(self, name: str, version: str, key: bytes = b"") -> Version:
        try:
            return self.gateway.catalogue.find(name, version_number(name, version), None, key)
        except Unknown as unknown:
            raise as_open_inference_error(unknown) from None

    async def _live(self, request: Any, context: Any) -> Any:
        return MESSAGES["ServerLiveResponse"](live=True)

    async def _ready(self, request: Any, context: Any) -> Any:
        return MESSAGES["ServerReadyResponse"](ready=self.gateway.is_ready and self.gateway.catalogue.is_ready)

    async def _model_ready(self, request: Any, context: Any) -> Any:
        number = version_number(request.name, request.version)
        try:
            self.gateway.catalogue.find(request.name, number)
        except RequestRefused:
            return MESSAGES["ModelReadyResponse"](ready=False)
        return MESSAGES["ModelReadyResponse"](ready=True)

    async def _metadata(self, request: Any, context: Any) -> Any:
        return MESSAGES["ServerMetadataResponse"](**server_metadata(EXTENSIONS))

    async def _model_metadata(self, request: Any, context: Any) -> Any:
        version = self._find(request.name, request.version)
        listed = numbers(self.gateway.catalogue, version, version_number(request.name, request.version))
        return MESSAGES["ModelMetadataResponse"](**model_metadata(version, listed))

    async def _config(self, request: Any, context: Any) -> Any:
        config = model_config(self._find(request.name, request.version))
        del config["dynamic_batching"]
        for one in (*config["input"], *config["output"]):
            one["data_type"] = DATA_TYPES[one["data_type"].removeprefix("TYPE_")]
        return MESSAGES["ModelConfigResponse"](config=config)

    async def _statistics(self, request: Any, context: Any) -> Any:
        if not request.name:
            return MESSAGES["ModelStatisticsResponse"](model_stats=all_statistics(self.gateway.catalogue))
        shown = counted(self.gateway.catalogue, request.name, version_number(request.name, request.version))
        return MESSAGES["ModelStatisticsResponse"](model_stats=[statistics(version) for version in shown])

    async def _index(self, request: Any, context: Any) -> Any:
        listed = index(self.gateway.catalogue, is_ready=request.ready)
        return MESSAGES["RepositoryIndexResponse"](models=listed)

    async def _load(self, request: Any, context: Any) -> Any:
        require_no_parameters(request.parameters)
        await self._managed(self.gateway.catalogue.load(request.model_name))
        return MESSAGES["RepositoryModelLoadResponse"]()

    async def _unload(self, request: Any, context: Any) -> Any:
        await self._managed(self.gateway.catalogue.unload(request.model_name))
        return MESSAGES["RepositoryModelUnloadResponse"]()

    async def _managed(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Unknown as unknown:
            raise as_open_inference_error(unknown) from None

    async def _infer(self, request: Any, context: Any) -> Any:
        version = self._find(request.model_name, request.model_version, key_of(context))
        inputs = read_inputs(request, version)
        if len(request.id) > MAX_ID:
            raise BadRequest(400, f"the request's id must have at most {MAX_ID} characters, but got {len(request.id)}")
        require_few_outputs(len(request.outputs), version)
        wanted = [one.name for one in request.outputs] or list(version.signature.outputs)
        for name in wanted:
            if name not in version.signature.outputs:
                raise BadRequest(400, f"unexpected inference output '{name[:64]}' for model '{version.model}'")
        classes = read_classes(request.outputs, version)
        require_few_classes(classes, version.signature, len(next(iter(inputs.values()))))
        parameters = plain(request.parameters)
        timeout, priority = checked_parameters(parameters.get("timeout"), parameters.get("priority", 0))
        with self.gateway.bodies.holding(sum(map(text_bytes, inputs.values()))):
            outputs = await self.ask(context, version, inputs, timeout, priority)
        return answer(request.id, version, await contents_of(outputs, wanted, classes, self.gateway))


def plain(parameters: Any) -> dict[str, Any]:
    """Return the values of a message's parameters."""
    return {name: getattr(value, value.WhichOneof("one") or "int64_param") for name, value in parameters.items()}


def read_classes(outputs: Any, version: Version) -> dict[str, int]:
    """Return the number of classes of each output that is requested as such."""
    counts = {one.name: class_count(plain(one.parameters).get("classification"), one.name) for one in outputs}
    return {name: count for name, count in counts.items() if count}


def read_inputs(request: Any, version: Version) -> dict[str, Array]:
    """Return the arrays of a request, from raw bytes or from lists of numbers."""
    specs, raw = version.signature.inputs, request.raw_input_contents
    require_names([one.name for one in request.inputs], version)
    if raw and len(raw) != len(request.inputs):
        raise BadRequest(400, f"expected {len(request.inputs)} raw inputs but got {len(raw)}")
    arrays: dict[str, Array] = {}
    for position, one in enumerate(request.inputs):
        spec, model = specs[one.name], version.model
        shape = checked_shape(list(one.shape), one.name, spec, model)
        require_datatype(one.datatype, one.name, spec, model)
        if not raw:
            arrays[one.name] = _from_contents(one, shape, spec, model)
        elif one.HasField("contents"):
            which = f"'{one.name}' for model '{model}'"
            raise BadRequest(400, f"contents field must not be specified when using raw_input_contents for {which}")
        elif BY_TORCH[spec.dtype].is_text:
            arrays[one.name] = texts_from_bytes(raw[position], shape, BY_TORCH[spec.dtype], one.name)
        else:
            require_size(len(raw[position]), _num_bytes(shape, spec), one.name, model)
            arrays[one.name] = from_bytes(raw[position], shape, spec)
    require_rows(arrays, version)
    return {name: arrays[name] for name in specs}


def _num_bytes(shape: tuple[int, ...], spec: TensorSpec) -> int:
    return math.prod(shape) * BY_TORCH[spec.dtype].numpy.itemsize


def _from_contents(one: Any, shape: tuple[int, ...], spec: TensorSpec, model: str) -> Array:
    kind = BY_TORCH[spec.dtype]
    if kind.is_text:
        return _from_texts(one, shape, kind)
    if kind.open not in CONTENTS:
        raise BadRequest(400, f"input '{one.name}' of {kind.open} must be sent as raw contents")
    values = list(getattr(one.contents, CONTENTS[kind.open]))
    if not values and one.contents.ListFields():
        given = one.contents.ListFields()[0][0].name.removesuffix("_contents").upper()
        raise BadRequest(
            400,
            f"unexpected explicit tensor data for input tensor '{one.name}' for model '{model}' of type '{given}', "
            f"expected datatype '{kind.open}'",
        )
    if not values and 0 not in shape:
        raise BadRequest(400, f"unable to find data for input tensor '{one.name}' for model '{model}' in request.")
    require_size(len(values) * kind.numpy.itemsize, _num_bytes(shape, spec), one.name, model)
    try:
        return (np.array(values, bool) if kind.open == "BOOL" else from_numbers(values, kind)).reshape(shape)
    except (TypeError, OverflowError):
        raise BadRequest(400, f"input '{one.name}' must have {kind.open} elements") from None


def _from_texts(one: Any, shape: tuple[int, ...], kind: Kind) -> Array:
    values = one.contents.bytes_contents
    with refusing(f"input '{one.name}' must have strings of the type {kind.torch}"):
        if len(values) > MAX_TEXTS:
            raise TooManyTexts
        if len(values) != math.prod(shape):
            raise BadRequest(400, f"input '{one.name}' has shape {list(shape)}, but got {len(values)} strings")
        return as_array((checked(value, kind) for value in values), shape)


def answer(identity: str, version: Version, outputs: Mapping[str, Array | Strings]) -> Any:
    """Return a response with raw bytes: clients ignore lists of numbers."""
    specs = version.signature.outputs
    return MESSAGES["ModelInferResponse"](
        model_name=version.model,
        model_version=str(version.number),
        id=identity,
        outputs=[
            {"name": name, "datatype": datatype(array, specs[name]), "shape": array.shape}
            for name, array in outputs.items()
        ],
        raw_output_contents=[array.tobytes() for array in outputs.values()],
    )
