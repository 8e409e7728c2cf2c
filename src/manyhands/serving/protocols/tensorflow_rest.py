"""TensorFlow Serving's REST API: predict with rows or columns, classify, regress, status, metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from ...core import RequestRefused, Signature, TensorSpec
from ..batcher import Ticket
from ..dtypes import BY_TORCH, Array, fits, from_numbers
from ..http import BadRequest, Request
from ..texts import from_lists, text_bytes
from ..version import Version
from .answer_text import array_pieces, class_pieces, list_pieces, num_values, row_pieces
from .examples import rows_of, scores_of, values_of
from .protocol import KEY, TRACE, RestProtocol, dump_json, parse_json, refusing, require_method, shown
from .rows import LARGEST, SMALLEST, fast_rows

PATH = re.compile(
    r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>\d{1,18})|/labels/(?P<label>[^/:]+))?"
    r"(?:(?P<metadata>/metadata)|:(?P<verb>predict|classify|regress))?"
)
SIGNATURE = "serving_default"
Write = Callable[[Mapping[str, Array]], Iterator[bytes]]


class TensorflowRest(RestProtocol):
    """Handler of `/v1/models/NAME[/versions/N|/labels/L][:predict|:classify|:regress|/metadata]`."""

    prefix = "/v1"

    def handle(self, request: Request) -> None:
        match = matched(request.path)
        if match is None:
            raise BadRequest(400, f"Malformed request: {request.method} {request.path[:200]}")
        verb = match["verb"]
        number = int(match["version"]) if match["version"] else None
        if verb is not None:
            require_method(request, "POST")
            version = self.gateway.catalogue.find(match["name"], number, match["label"], request.headers.get(KEY, b""))
            self._infer(request, version, verb)
        else:
            require_method(request, "GET", "HEAD")
            if match["metadata"]:
                version = self.gateway.catalogue.find(match["name"], number, match["label"])
                request.answer(200, dump_json(metadata(version)))
            else:
                request.answer(200, dump_json(self._status(match["name"], number, match["label"])))

    def _infer(self, request: Request, version: Version, verb: str) -> None:
        deadline, limits = self.gateway.deadline(), self.gateway.limits
        # Before the body is parsed: a refusal must be cheap.
        version.batcher.require_capacity(deadline)
        body = bytes(request.content(limits.json))
        is_fast = verb == "predict" and SMALLEST < len(body) <= LARGEST
        rows = fast_rows(body, version.signature) if is_fast else None

        def ask(read: tuple[dict[str, Array], bool]) -> None:
            inputs, by_rows = read
            self._ask(request, version, inputs, writer(version.signature, verb, by_rows), deadline)

        if rows is not None:
            ask(({next(iter(version.signature.inputs)): rows}, True))
        else:
            self.read_then(request, body, ask, read_text, body, limits.json, limits.values, version.signature, verb)

    def _ask(self, request: Request, version: Version, inputs: dict[str, Array], write: Write, deadline: float) -> None:
        if held := sum(map(text_bytes, inputs.values())):
            request.hold(held)

        def then(ticket: Ticket) -> None:
            refusal = ticket.refusal
            if refusal is None:
                try:
                    num = sum(map(num_values, ticket.outputs.values()))
                    self.answer_pieces(request, write(ticket.outputs), num)
                except RequestRefused as error:
                    refusal = error
            if refusal is not None:
                self.refuse(request, refusal)

        parent = request.headers.get(TRACE, b"")
        request.cancel = self.gateway.ask(
            version, inputs, began=request.arrived, deadline=deadline, then=then, parent=parent
        )

    def _status(self, name: str, number: int | None, label: str | None) -> dict[str, Any]:
        model = self.gateway.catalogue.model(name)
        if number is not None or label is not None:
            number = model.find(None, label).number if label is not None else number
            shown = [version for version in model.versions.values() if version.number == number]
            if not shown:
                raise RequestRefused("NOT_FOUND", f"Could not find version {number} of model {name}")
        else:
            shown = [model.versions[n] for n in sorted(model.versions, reverse=True)]
        return {
            "model_version_status": [
                {
                    "version": str(version.number),
                    "state": version.state,
                    "status": {
                        "error_code": "UNKNOWN" if version.error else "OK",
                        "error_message": version.error,
                    },
                }
                for version in shown
            ]
        }


@lru_cache(1024)
def matched(path: str) -> re.Match[str] | None:
    """Match a path, with a cache, since clients repeat the same ones."""
    return PATH.fullmatch(path)


def metadata(version: Version) -> dict[str, Any]:
    """Return a version's signature in TensorFlow Serving's nested format."""

    def described(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        return {
            name: {
                "dtype": BY_TORCH[spec.dtype].tensorflow,
                "tensor_shape": {
                    "dim": [{"size": str(-1 if n is None else n), "name": ""} for n in spec.shape],
                    "unknown_rank": False,
                },
                "name": f"{SIGNATURE}_{name}:0",
            }
            for name, spec in specs.items()
        }

    signature = {
        "inputs": described(version.signature.inputs),
        "outputs": described(version.signature.outputs),
        "method_name": "tensorflow/serving/predict",
        "defaults": {},
    }
    return {
        "model_spec": {"name": version.model, "signature_name": "", "version": str(version.number)},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE: signature}}},
    }


def read_text(text: bytes, limit: int, values: int, signature: Signature, verb: str) -> tuple[dict[str, Array], bool]:
    """Return the arrays of a request, and whether they came as rows."""
    value = parse_json(text, limit, values)
    return parse_predict(value, signature) if verb == "predict" else (parse_examples(value, signature, values), True)


def writer(signature: Signature, verb: str, by_rows: bool) -> Write:
    """Return a function that writes a response: class and score pairs for classify, a number per row for regress."""
    if verb == "classify":
        return lambda outputs: _results(class_pieces(scores_of(outputs, signature)))
    if verb == "regress":
        return lambda outputs: _results(list_pieces(values_of(outputs, signature)))
    return lambda outputs: answer_pieces(outputs, signature, by_rows)


def parse_examples(value: Any, signature: Signature, most: int) -> dict[str, Array]:
    """Return the arrays of a list of examples and their common context."""
    _require_signature(value)
    examples, context = value.get("examples"), value.get("context", {})
    if not isinstance(examples, list) or not examples:
        raise BadRequest(400, "When calling classify or regress, 'examples' must be a list with at least one element")
    if not all(isinstance(one, dict) for one in (*examples, context)):
        raise BadRequest(400, "Example must be JSON object with the features as keys")
    return rows_of([_as_lists(one) for one in examples], _as_lists(context), signature, most)


def _as_lists(features: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: value if isinstance(value, list) else [value] for name, value in features.items()}


def _results(pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield b'{"results":'
    yield from pieces
    yield b"}"


def _require_signature(value: Any) -> None:
    if not isinstance(value, dict):
        raise BadRequest(400, "JSON Value: must be an object")
    name = value.get("signature_name")
    if name not in (None, "", SIGNATURE):
        raise BadRequest(400, f'Serving signature name: "{shown(name, 64)}" not found in signature def')


def parse_predict(value: Any, signature: Signature) -> tuple[dict[str, Array], bool]:
    """Return the arrays of a predict request, and whether they came as rows."""
    _require_signature(value)
    by_rows, by_columns = "instances" in value, "inputs" in value
    if by_rows == by_columns:
        raise BadRequest(
            400,
            "Not formatted correctly: either 'inputs' or 'instances', not both"
            if by_rows
            else "Missing 'inputs' or 'instances' key",
        )
    columns = _from_rows(value["instances"], signature) if by_rows else _from_columns(value["inputs"], signature)
    if columns.keys() != signature.inputs.keys():
        raise BadRequest(
            400,
            f"the inputs must be {{{', '.join(signature.inputs)}}}, but got {{{', '.join(map(str, columns))[:200]}}}",
        )
    arrays = {name: _array(name, columns[name], spec) for name, spec in signature.inputs.items()}
    rows = {len(array) for array in arrays.values()}
    if len(rows) > 1:
        raise BadRequest(400, f"all inputs must have the same number of rows, but got {sorted(rows)}")
    if rows == {0}:
        raise BadRequest(400, "a request must have at least one row, but got none")
    return arrays, by_rows


def _from_rows(rows: Any, signature: Signature) -> dict[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise BadRequest(400, "Request instances must be a list with at least one element")
    if not isinstance(rows[0], dict) or _is_encoded(rows[0], signature):
        if len(signature.inputs) != 1:
            raise BadRequest(400, f"instances must be objects with the inputs {{{', '.join(signature.inputs)}}}")
        return {next(iter(signature.inputs)): rows}
    if not all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
        raise BadRequest(400, "all instances must have the same keys")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _is_encoded(row: dict[str, Any], signature: Signature) -> bool:
    """Return whether a row is a string in base64, the only input, and not an object of inputs by name."""
    specs = list(signature.inputs.values())
    return row.keys() == {"b64"} and len(specs) == 1 and BY_TORCH[specs[0].dtype].is_text


def _from_columns(columns: Any, signature: Signature) -> dict[str, Any]:
    if isinstance(columns, dict):
        return columns
    if len(signature.inputs) != 1:
        raise BadRequest(400, f"inputs must be an object with the keys {{{', '.join(signature.inputs)}}}")
    return {next(iter(signature.inputs)): columns}


def _array(name: str, values: Any, spec: TensorSpec) -> Array:
    kind = BY_TORCH[spec.dtype]
    with refusing(f"input '{name}' must be {spec}, but got lists that are ragged or hold something else"):
        array = from_lists(values, len(spec.shape), kind) if kind.is_text else from_numbers(values, kind)
    if not fits(array.shape, spec):
        raise BadRequest(400, f"input '{name}' must be {spec}, but got {TensorSpec(spec.dtype, array.shape)}")
    return array


def answer_pieces(outputs: Mapping[str, Array], signature: Signature, by_rows: bool) -> Iterator[bytes]:
    """Yield a response by rows or columns, as requested; the name is omitted if there is one output."""
    kinds = {name: BY_TORCH[signature.outputs[name].dtype] for name in outputs}
    yield b'{"predictions":' if by_rows else b'{"outputs":'
    if len(outputs) == 1:
        ((name, array),) = outputs.items()
        yield from array_pieces(array, kinds[name])
    elif by_rows:
        yield from row_pieces(outputs, kinds)
    else:
        for number, (name, array) in enumerate(outputs.items()):
            yield (b"," if number else b"{") + dump_json(name) + b":"
            yield from array_pieces(array, kinds[name])
        yield b"}"
    yield b"}"
