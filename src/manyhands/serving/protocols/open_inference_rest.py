"""Open Inference Protocol v2 over HTTP, with binary tensors, compatible with KServe and Triton."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any

from ...core import RequestRefused, Signature, TensorSpec
from ..batcher import Ticket
from ..catalogue import Catalogue
from ..dtypes import BY_TORCH, Array, Kind, fits, from_numbers, from_raw
from ..http import JSON, BadRequest, Body, Request
from ..model import Unknown
from ..parsing import INLINE
from ..texts import Strings, as_array, as_bytes, as_contents, flattened, is_text, text_bytes, unpack
from ..version import Version
from .answer_text import array_pieces
from .classification import class_count, datatype, require_few_classes, top_classes
from .heads import MAX_BYTES, RequestedOutputs, RequestHeads
from .protocol import (
    KEY,
    NOT_HERE,
    TRACE,
    Answer,
    InferenceGateway,
    RestProtocol,
    answer_failure,
    answer_refusal,
    dump_json,
    parse_json,
    refusing,
    require_method,
    shown,
)  # fmt: skip

PATH = re.compile(
    r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/(?P<verb>infer|ready|config|stats))?/?"
)
EXTENSIONS = ["binary_tensor_data", "classification", "schedule_policy", "statistics", "model_configuration"]
"""Extensions of every listener; loading and unloading (`model_repository`) belong to the management listener."""
HEADER = b"inference-header-content-length"
BINARY = b"application/octet-stream"
MAX_ID = 1024
ONLY_BINARY = ("float16", "bfloat16", "bytes")
"""Types of outputs that are sent as binary data, because JSON does not represent them."""


class OpenInferenceRest(RestProtocol):
    """Handler of `/v2`, `/v2/health/…` and `/v2/models/…`."""

    prefix = "/v2"
    extensions: Sequence[str] = EXTENSIONS

    def __init__(self, gateway: InferenceGateway) -> None:
        super().__init__(gateway)
        self._heads = RequestHeads()

    def handle(self, request: Request) -> None:
        path = request.path
        if path == "/v2/models/stats" and "stats" not in self.gateway.catalogue.models:
            require_method(request, "GET", "HEAD")
            request.answer(200, dump_json({"model_stats": all_statistics(self.gateway.catalogue)}))
        elif path.startswith("/v2/models/"):
            match = matched(path)
            if match is None:
                raise BadRequest(404, "Not Found")
            try:
                self._model(request, match)
            except Unknown as unknown:
                raise as_open_inference_error(unknown) from None
        elif path in ("/v2", "/v2/"):
            require_method(request, "GET", "HEAD")
            request.answer(200, dump_json(server_metadata(self.extensions)))
        elif path == "/v2/health/live":
            request.answer(200, b"")
        elif path == "/v2/health/ready":
            request.answer(200 if self.gateway.is_ready and self.gateway.catalogue.is_ready else 400, b"")
        elif path.startswith("/v2/repository/models/"):
            raise BadRequest(403, NOT_HERE)
        elif path == "/v2/repository/index":
            require_method(request, "POST", "GET")
            request.answer(200, dump_json(index(self.gateway.catalogue, is_ready=self._asks_for_ready(request))))
        else:
            raise BadRequest(404, "Not Found")

    def _asks_for_ready(self, request: Request) -> bool:
        body = request.content(self.gateway.limits.head)
        value = parse_json(body, self.gateway.limits.head) if body else None
        return isinstance(value, dict) and value.get("ready") is True

    def _model(self, request: Request, match: re.Match[str]) -> None:
        name, number = match["name"], number_in_path(match["name"], match["version"])
        key = request.headers.get(KEY, b"")
        if match["verb"] == "infer":
            require_method(request, "POST")
            self._infer(request, self.gateway.catalogue.find(name, number, None, key))
        else:
            require_method(request, "GET", "HEAD")
            request.answer(200, self._describe(match["verb"], name, number, key))

    def _describe(self, verb: str | None, name: str, number: int | None, key: bytes) -> bytes:
        catalogue = self.gateway.catalogue
        if verb == "ready":
            require_ready(catalogue, name, number)
            return b""
        if verb == "stats":
            return dump_json({"model_stats": [statistics(version) for version in counted(catalogue, name, number)]})
        version = catalogue.find(name, number, None, key)
        if verb == "config":
            return dump_json(model_config(version))
        return dump_json(model_metadata(version, numbers(catalogue, version, number)))

    def _infer(self, request: Request, version: Version) -> None:
        version.batcher.require_capacity(self.gateway.deadline())
        body = request.content(self.gateway.limits.body)
        size = header_size(request.headers.get(HEADER), len(body))
        text, raw = bytes(memoryview(body)[:size]), memoryview(body)[size:]
        head = self._heads.find(version, text, len(raw)) if len(raw) and size <= MAX_BYTES else None
        if head is not None:
            self._ask(request, version, head.inputs(raw), head.wanted)
            return

        def ask(read: tuple[dict[str, Array], RequestedOutputs, list[str] | None]) -> None:
            inputs, wanted, order = read
            if order is not None and len(raw) and size <= MAX_BYTES:
                self._heads.keep(version, text, order, inputs, wanted)
            self._ask(request, version, inputs, wanted)

        subject, limits = Subject(version.model, version.signature), self.gateway.limits
        args = text, bytes(raw) if size > INLINE else raw, subject, limits.json, limits.values, limits.body
        self.read_then(request, text, ask, read_request, *args)

    def _ask(self, request: Request, version: Version, inputs: dict[str, Array], wanted: RequestedOutputs) -> None:
        if held := sum(map(text_bytes, inputs.values())):
            request.hold(held)
        require_few_classes(wanted.classes, version.signature, len(next(iter(inputs.values()))))

        def then(ticket: Ticket) -> None:
            if ticket.refusal is not None:
                self.refuse(request, ticket.refusal)
            elif wanted.classes:
                self._start(request, self._answer_classes(request, version, ticket.outputs, wanted))
            else:
                arrays = {name: as_contents(ticket.outputs[name]) for name in wanted.outputs}
                self._answer(request, version, arrays, wanted)

        request.cancel = self.gateway.ask(
            version,
            inputs,
            began=request.arrived,
            deadline=self.gateway.deadline(wanted.timeout),
            priority=wanted.priority,
            then=then,
            parent=request.headers.get(TRACE, b""),
        )

    async def _answer_classes(
        self, request: Request, version: Version, outputs: Mapping[str, Array], wanted: RequestedOutputs
    ) -> None:
        """Find the largest values of outputs on another thread, then answer."""
        try:
            arrays = await contents_of(outputs, wanted.outputs, wanted.classes, self.gateway)
            self._answer(request, version, arrays, wanted)
        except BadRequest as error:
            answer_refusal(request, error.status, error.reason)
        except Exception as error:
            answer_failure(request, error)

    def _answer(
        self, request: Request, version: Version, arrays: Mapping[str, Array | Strings], wanted: RequestedOutputs
    ) -> None:
        """Send the requested outputs, with binary data after the JSON."""
        blobs = [array for name, array in arrays.items() if is_binary(name, version, wanted)]
        shapes = tuple([array.shape for array in arrays.values()])
        text = wanted.texts.get(shapes)

        def finish(text: bytes) -> Answer:
            if not blobs:
                return text, JSON, b""
            if len(blobs) == len(arrays) and not any(isinstance(blob, Strings) for blob in blobs):
                wanted.keep(shapes, text)
            extra = b"Inference-Header-Content-Length: %d\r\n" % len(text)
            return b"".join([text, *(array.data for array in blobs)]), BINARY, extra

        pieces = text_pieces(version, wanted, arrays) if text is None else (text,)
        num = sum(array.size for array in arrays.values()) - sum(blob.size for blob in blobs)
        self.answer_pieces(request, pieces, num, finish=finish, coding=coding_of(request))


@dataclass(frozen=True)
class Subject:
    """The part of a version that is needed to read a request."""

    model: str
    signature: Signature


def read_request(
    text: bytes, raw: Body, version: Subject, json: int, values: int, body: int
) -> tuple[dict[str, Array], RequestedOutputs, list[str] | None]:
    """Return a request's arrays, its requested outputs, and the order of its inputs if all of them are binary.

    The last three arguments are the limits of that name.
    """
    is_only_bytes = len(text) == 0 and len(raw) > 0
    value = only_bytes(len(raw), version) if is_only_bytes else parse_json(text, json, values)
    if not isinstance(value, dict):
        raise BadRequest(400, "failed to parse the request JSON: it must be an object")
    inputs = read_inputs(value, memoryview(raw), version, body)
    is_binary = all(map(_is_binary, value["inputs"])) and not any(map(is_text, inputs.values()))
    return (
        inputs,
        read_wanted(value, version),
        [shown(one["name"], MAX_ID) for one in value["inputs"]] if is_binary else None,
    )


@lru_cache(1024)
def matched(path: str) -> re.Match[str] | None:
    """Match a path, with a cache, since clients repeat the same ones."""
    return PATH.fullmatch(path)


def index(catalogue: Catalogue, *, is_ready: bool = False) -> list[dict[str, str]]:
    """Return every version of every model, or the available ones, in the format of the repository extension."""
    return [
        {
            "name": model.name,
            "version": str(version.number),
            "state": "READY" if version.is_available else "LOADING" if not version.error else "UNAVAILABLE",
            **({"reason": version.error} if version.error else {}),
        }
        for model in catalogue.models.values()
        for version in model.versions.values()
        if version.is_available or not is_ready
    ]


def numbers(catalogue: Catalogue, version: Version, number: int | None) -> list[str]:
    """Return the versions that metadata lists: the requested one, or all."""
    return [str(one.number) for one in catalogue.model(version.model).available if number in (None, one.number)]


def counted(catalogue: Catalogue, name: str, number: int | None) -> list[Version]:
    """Return the versions for statistics: the requested one, or all."""
    model = catalogue.models.get(name)
    if number is None and model is not None and model.available:
        return model.available
    try:
        return [catalogue.find(name, number)]
    except Unknown:
        which = (
            f"model '{name}' is not available"
            if model is None
            else f"model version is not available for model '{name}'"
        )
        raise RequestRefused("INVALID_ARGUMENT", f"requested {which}") from None


def require_ready(catalogue: Catalogue, name: str, number: int | None) -> None:
    """Raise Triton's error if a model is not ready or does not exist."""
    try:
        is_ready = bool(catalogue.find(name, number).replicas)
    except RequestRefused:
        is_ready = False
    if not is_ready:
        raise BadRequest(400, "Model version not ready")


def as_open_inference_error(unknown: Unknown) -> RequestRefused:
    """Return Triton's error for an unknown model."""
    which = f"'{unknown.model}'" if unknown.version is None else f"'{unknown.model}' version {unknown.version}"
    what = "has no available versions" if unknown.is_empty else "is not found"
    return RequestRefused("NOT_FOUND", f"Request for unknown model: {which} {what}")


def version_number(model: str, text: str | None) -> int | None:
    """Parse a version from a path or a message."""
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise RequestRefused("INVALID_ARGUMENT", f"failed to get model version from specified version string '{text}'")
    return int(text)


def number_in_path(model: str, text: str | None) -> int | None:
    """Parse a version from a path; raises a 404 if it is not a number."""
    if text and not text.isdecimal():
        raise BadRequest(404, f"Not Found: versions of model '{model}' are numbers, but got '{text[:20]}'")
    return version_number(model, text)


def server_metadata(extensions: Sequence[str]) -> dict[str, Any]:
    """Return the server's metadata."""
    return {"name": "manyhands", "version": metadata.version("manyhands"), "extensions": list(extensions)}


def model_metadata(version: Version, numbers: list[str]) -> dict[str, Any]:
    """Return a model's inputs and outputs."""

    def described(specs: Mapping[str, TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "datatype": BY_TORCH[spec.dtype].open,
                "shape": [-1 if n is None else n for n in spec.shape],
            }
            for name, spec in specs.items()
        ]

    return {
        "name": version.model,
        "versions": numbers,
        "platform": "pytorch",
        "inputs": described(version.signature.inputs),
        "outputs": described(version.signature.outputs),
    }


def model_config(version: Version) -> dict[str, Any]:
    """Return the supported part of Triton's configuration; as in Triton, shapes omit the batch dimension."""

    def described(specs: Mapping[str, TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "data_type": f"TYPE_{_config_type(spec)}",
                "dims": [-1 if n is None else n for n in spec.shape[1:]],
            }
            for name, spec in specs.items()
        ]

    settings = version.batcher.settings
    return {
        "name": version.model,
        "platform": "pytorch",
        "backend": "manyhands",
        "max_batch_size": settings.max_rows,
        "input": described(version.signature.inputs),
        "output": described(version.signature.outputs),
        "dynamic_batching": {"preferred_batch_size": list(settings.sizes), "max_queue_delay_microseconds": 0},
    }


def _config_type(spec: TensorSpec) -> str:
    kind = BY_TORCH[spec.dtype]
    return "STRING" if kind.is_text else kind.open


def statistics(version: Version) -> dict[str, Any]:
    """Return counts and nanoseconds; inferences are rows, as in Triton."""
    metrics = version.metrics
    num_ok, num_all = metrics.codes["OK"], metrics.num_requests
    return {
        "name": version.model,
        "version": str(version.number),
        "inference_count": int(metrics.batches.total),
        "execution_count": metrics.batches.num,
        "inference_stats": {
            "success": {"count": num_ok, "ns": int(metrics.latency.total * 1e9)},
            "fail": {"count": num_all - num_ok, "ns": 0},
            "compute_infer": {"count": metrics.batches.num, "ns": int(metrics.compute * 1e9)},
        },
    }


def all_statistics(catalogue: Catalogue) -> list[dict[str, Any]]:
    """Return the statistics of all available versions of all models."""
    return [statistics(version) for model in catalogue.models.values() for version in model.available]


def header_size(value: bytes | None, length: int) -> int:
    """Return the size of the JSON header, after which the binary data starts."""
    if value is None:
        return length
    if not value.isdigit() or len(value) > 12 or int(value) > length:
        shown = value[:20].decode("latin1")
        raise BadRequest(
            400,
            f"inference header size should be in range (0, {length}), got: {shown} (Inference-Header-Content-Length)",
        )
    return int(value)


def only_bytes(num: int, version: Version | Subject) -> dict[str, Any]:
    """Return the request that a body without JSON represents: one row of the only input, and binary outputs."""
    specs = version.signature.inputs
    name, spec = next(iter(specs.items()))
    if len(specs) > 1 or spec.shape[1:].count(None) > 1:
        raise BadRequest(
            400,
            "a body without JSON is for a model with one input, of one free dimension at most beside its rows, "
            f"but model '{version.model}' takes {len(specs)}; write them as JSON, and its length into the header",
        )
    kind = BY_TORCH[spec.dtype]
    if kind.is_text:
        raise BadRequest(400, f"a body without JSON is for numbers, but model '{version.model}' takes strings")
    step = math.prod(n for n in spec.shape[1:] if n is not None) * kind.numpy.itemsize
    shape = [1, *(num // max(step, 1) if n is None else n for n in spec.shape[1:])]
    entry = {"name": name, "datatype": kind.open, "shape": shape, "parameters": {"binary_data_size": num}}
    return {"inputs": [entry], "parameters": {"binary_data_output": True}}


def read_inputs(value: Mapping[str, Any], raw: memoryview, version: Version | Subject, limit: int) -> dict[str, Array]:
    """Return the arrays of a request, checked against the signature before memory is allocated for them."""
    listed, specs = value.get("inputs"), version.signature.inputs
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise BadRequest(400, "Unable to parse 'inputs': it must be an array of objects")
    names = [shown(one.get("name"), MAX_ID) for one in listed]
    require_names(names, version)
    arrays: dict[str, Array] = {}
    for name, one in zip(names, listed, strict=True):
        shape = checked_shape(one.get("shape"), name, specs[name], version.model)
        require_datatype(one.get("datatype"), name, specs[name], version.model)
        kind = BY_TORCH[specs[name].dtype]
        num = math.prod(shape) * kind.numpy.itemsize
        if num > limit:
            raise BadRequest(413, f"input '{name}' may have {limit} bytes, but got a shape of {num}")
        parameters = one.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if (size is None) != ("data" in one):
            got = "both" if "data" in one else "neither"
            raise BadRequest(400, f"input '{name}' must have one of 'data' and 'binary_data_size', but got {got}")
        if size is None:
            arrays[name] = _from_json(one["data"], name, shape, specs[name])
        elif kind.is_text:
            arrays[name] = texts_from_bytes(_texts_part(raw, size, name, version.model), shape, kind, name)
            raw = raw[size:]
        else:
            arrays[name] = from_bytes(_first(raw, size, num, name, version.model), shape, specs[name])
            raw = raw[num:]
    if len(raw):
        raise BadRequest(400, f"unexpected additional input data for model '{version.model}': {len(raw)} bytes")
    require_rows(arrays, version)
    return {name: arrays[name] for name in specs}


def require_names(names: Sequence[str], version: Version | Subject) -> None:
    """Raise BadRequest unless each input occurs once, and no other."""
    specs, model = version.signature.inputs, version.model
    if names == list(specs):
        return
    given = set(names)
    if len(given) < len(names):
        ((name, _),) = Counter(names).most_common(1)
        raise BadRequest(400, f"input '{name[:64]}' already exists in request for model '{model}'")
    if len(names) != len(specs):
        got, missing = (_quoted(some) for some in (names, [name for name in specs if name not in given]))
        more = f". Got input(s) [{got}], but missing required input(s) [{missing}]" if missing else ""
        raise BadRequest(400, f"expected {len(specs)} inputs but got {len(names)} inputs for model '{model}'{more}")
    for name in names:
        if name not in specs:
            raise BadRequest(400, f"unexpected inference input '{name[:64]}' for model '{model}'")


def _quoted(names: Sequence[str]) -> str:
    return ",".join(f"'{name[:64]}'" for name in names[:20])


def require_rows(arrays: Mapping[str, Array], version: Version | Subject) -> None:
    """Raise BadRequest unless all inputs have the same number of rows, at least one."""
    rows = {len(array) for array in arrays.values()}
    if len(rows) > 1 or 0 in rows:
        rule = f"all inputs of model '{version.model}' must have the same number of rows, at least one"
        raise BadRequest(400, f"{rule}, but got {sorted(rows)}")


def checked_shape(shape: Any, name: str, spec: TensorSpec, model: str) -> tuple[int, ...]:
    """Return a shape that fits the signature; raises BadRequest otherwise."""
    good = isinstance(shape, (list, tuple)) and all(type(n) is int and 0 <= n < 2**40 for n in shape)
    if not good or not fits(tuple(shape), spec):
        wanted = ",".join(str(-1 if n is None else n) for n in spec.shape)
        listed = isinstance(shape, (list, tuple))
        given = ",".join(shown(n, 20) for n in shape[:20]) if listed else shown(shape, 100)
        raise BadRequest(
            400, f"unexpected shape for input '{name}' for model '{model}'. Expected [{wanted}], got [{given}]"
        )
    return tuple(shape)


def require_datatype(datatype: Any, name: str, spec: TensorSpec, model: str) -> None:
    """Raise BadRequest if the data type differs from the signature."""
    wanted = BY_TORCH[spec.dtype].open
    if datatype != wanted:
        raise BadRequest(
            400,
            f"inference input '{name}' data-type is '{shown(datatype, 20)}', but model '{model}' expects '{wanted}'",
        )


def from_bytes(raw: memoryview | bytes, shape: tuple[int, ...], spec: TensorSpec) -> Array:
    """Return raw little-endian elements as an array, without copying."""
    return from_raw(raw, BY_TORCH[spec.dtype].numpy).reshape(shape)


def texts_from_bytes(raw: memoryview | bytes, shape: tuple[int, ...], kind: Kind, name: str) -> Array:
    """Return strings, each after its length, as an array; raises BadRequest if there are more or fewer."""
    num = math.prod(shape)
    with refusing(f"input '{name[:64]}' must have {num} strings of the type {kind.torch}, each after its length"):
        return as_array(unpack(raw, num, kind), shape)


def _texts_part(raw: memoryview, size: object, name: str, model: str) -> memoryview:
    if type(size) is not int or not 0 <= size <= len(raw):
        got = shown(size, 20)
        rule = f"binary_data_size of input '{name}' for model '{model}' must be at most {len(raw)}, the bytes left"
        raise BadRequest(400, f"{rule}, but got {got}")
    return raw[:size]


def _is_binary(one: Mapping[str, Any]) -> bool:
    parameters = one.get("parameters")
    return isinstance(parameters, dict) and parameters.get("binary_data_size") is not None


def require_size(size: object, wanted: int, name: str, model: str) -> None:
    """Raise BadRequest if the number of bytes does not match the shape."""
    if size != wanted:
        got = shown(size, 20)
        raise BadRequest(
            400, f"input byte size mismatch for input '{name}' for model '{model}'. Expected {wanted}, got {got}"
        )


def _first(raw: memoryview, size: object, wanted: int, name: str, model: str) -> memoryview:
    require_size(size, wanted, name, model)
    if wanted > len(raw):
        more = wanted - len(raw)
        raise BadRequest(
            400, f"unexpected size for input '{name}', expecting {more} additional bytes for model '{model}'"
        )
    return raw[:wanted]


def _from_json(data: Any, name: str, shape: tuple[int, ...], spec: TensorSpec) -> Array:
    kind = BY_TORCH[spec.dtype]
    if kind.open in ("FP16", "BF16"):
        raise BadRequest(
            400,
            f"receiving {kind.open} data via JSON is not supported. Please use the binary data format for input {name}",
        )
    with refusing(f"Unable to parse 'data' of input '{name}': expected {kind.open} elements"):
        if kind.is_text:
            items = [as_bytes(item, kind) for item in flattened(data)]
            array = as_array(items, (len(items),))
        else:
            array = from_numbers(data, kind)
    if array.size != math.prod(shape):
        raise BadRequest(400, f"input '{name}' has shape [{','.join(map(str, shape))}], but got {array.size} elements")
    return array.reshape(shape)


def read_wanted(value: Mapping[str, Any], version: Version | Subject) -> RequestedOutputs:
    """Return the requested outputs and their format (default: all as JSON), the timeout and the priority."""
    parameters = value.get("parameters")
    binary = bool(parameters.get("binary_data_output")) if isinstance(parameters, dict) else False
    identity = value.get("id")
    if not isinstance(identity, (str, type(None))) or len(identity or "") > MAX_ID:
        raise BadRequest(400, f"the request's id must be a string of at most {MAX_ID} characters")
    listed = value.get("outputs")
    timeout, priority = read_parameters(value)
    if listed is None or listed == []:
        return RequestedOutputs(identity, dict.fromkeys(version.signature.outputs, binary), timeout, priority)
    outputs: dict[str, bool] = {}
    classes: dict[str, int] = {}
    if not isinstance(listed, list):
        raise BadRequest(400, "Unable to parse 'outputs': it must be an array")
    require_few_outputs(len(listed), version)
    for one in listed:
        name = shown(one.get("name"), MAX_ID) if isinstance(one, dict) else ""
        if name not in version.signature.outputs:
            raise BadRequest(400, f"unexpected inference output '{name[:64]}' for model '{version.model}'")
        own = one.get("parameters")
        own = own if isinstance(own, dict) else {}
        if count := class_count(own.get("classification"), name):
            classes[name] = count
        outputs[name] = bool(own.get("binary_data", binary))
    return RequestedOutputs(identity, outputs, timeout, priority, classes)


def require_few_outputs(num: int, version: Version | Subject) -> None:
    """Raise BadRequest if more outputs are requested than there are."""
    most = len(version.signature.outputs)
    if num > most:
        raise BadRequest(400, f"expected at most {most} requested outputs but got {num} for model '{version.model}'")


def read_parameters(value: Mapping[str, Any]) -> tuple[float | None, int]:
    """Return the request's timeout in seconds, and its priority."""
    parameters = value.get("parameters")
    if not isinstance(parameters, dict):
        return None, 0
    return checked_parameters(parameters.get("timeout"), parameters.get("priority", 0))


def checked_parameters(timeout: object, priority: object) -> tuple[float | None, int]:
    """Validate a timeout in microseconds (0 for none) and a priority; return the timeout in seconds, or None."""
    micros, level = _whole("timeout (microseconds)", 0 if timeout is None else timeout), _whole("priority", priority)
    return micros / 1e6 or None, level


def _whole(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise BadRequest(
            400, f"the parameter {name} must be an integer from 0 to 2**63 - 1, but got {shown(value, 20)!r}"
        )
    return value


def is_binary(name: str, version: Version, wanted: RequestedOutputs) -> bool:
    """Return whether an output is sent as binary data: if requested, and always if JSON cannot represent it."""
    return wanted.outputs[name] or BY_TORCH[version.signature.outputs[name].dtype].torch in ONLY_BINARY


def text_pieces(version: Version, wanted: RequestedOutputs, arrays: Mapping[str, Array | Strings]) -> Iterator[bytes]:
    """Yield a response's JSON."""
    head: dict[str, Any] = {"model_name": version.model, "model_version": str(version.number)}
    if wanted.id:
        head["id"] = wanted.id
    yield dump_json(head)[:-1] + b',"outputs":['
    for number, (name, array) in enumerate(arrays.items()):
        spec = version.signature.outputs[name]
        entry: dict[str, Any] = {"name": name, "datatype": datatype(array, spec), "shape": list(array.shape)}
        if is_binary(name, version, wanted):
            entry["parameters"] = {"binary_data_size": array.nbytes}
            yield (b"," if number else b"") + dump_json(entry)
        elif isinstance(array, Strings):
            yield (b"," if number else b"") + dump_json({**entry, "data": array.texts})
        else:
            yield (b"," if number else b"") + dump_json(entry)[:-1] + b',"data":'
            yield from array_pieces(array.reshape(-1), BY_TORCH[spec.dtype])
            yield b"}"
    yield b"]}"


async def contents_of(
    outputs: Mapping[str, Array], wanted: Iterable[str], classes: Mapping[str, int], gateway: InferenceGateway
) -> dict[str, Array | Strings]:
    """Return the wanted outputs as they are sent, some of them as their largest classes; raises BadRequest."""
    loop, thread = asyncio.get_running_loop(), gateway.compressing
    return {
        name: await loop.run_in_executor(thread, top_classes, outputs[name], classes[name])
        if name in classes
        else as_contents(outputs[name])
        for name in wanted
    }


def coding_of(request: Request) -> bytes:
    """Return the compression that a client accepts, b"gzip" or b"deflate"; empty for none."""
    accepted = request.headers.get(b"accept-encoding", b"")
    return next((coding for coding in (b"gzip", b"deflate") if coding in accepted), b"")
