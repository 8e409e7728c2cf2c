"""OpenAPI description of the REST interface, and a standalone page that shows it."""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any

import orjson

_ERRORS = {
    400: "The request does not fit the model; the text contains what was expected and what was received.",
    401: "The server requires a token.",
    403: "A web page of another origin sent the request, or management is not available on this port.",
    404: "No such model or version.",
    405: "The path requires another method.",
    413: "The body, or a tensor in it, is too large.",
    415: "The body must be gzip, deflate or not compressed.",
    421: "The Host header is not a name of the server.",
    431: "The request line and headers are too large.",
    503: "The queue is full, or the version is being unloaded; retry after the time in Retry-After.",
    504: "The deadline has passed.",
}
_NAME = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
}
_VERSION = {
    "name": "version",
    "in": "path",
    "required": True,
    "schema": {"type": "integer", "minimum": 1, "maximum": 10**9},
}
_LABEL = {
    "name": "label",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
}
_WHICH = {"": [], "/versions/{version}": [_VERSION], "/labels/{label}": [_LABEL]}
_SCHEMAS: dict[str, Any] = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    "Predict": {
        "type": "object",
        "description": "Rows (instances) or columns (inputs), never both.",
        "properties": {
            "signature_name": {"type": "string", "enum": ["serving_default", ""]},
            "instances": {
                "type": "array",
                "minItems": 1,
                "description": "Rows: each has numbers, or an object by input.",
            },
            "inputs": {"description": "All rows of the only input, or an object by input."},
        },
        "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    },
    "Predictions": {
        "type": "object",
        "properties": {"predictions": {"type": "array"}, "outputs": {}},
        "oneOf": [{"required": ["predictions"]}, {"required": ["outputs"]}],
    },
    "Examples": {
        "type": "object",
        "required": ["examples"],
        "properties": {
            "signature_name": {"type": "string", "enum": ["serving_default", ""]},
            "context": {"type": "object", "description": "Features that all examples have."},
            "examples": {"type": "array", "minItems": 1, "items": {"type": "object"}},
        },
    },
    "Results": {"type": "object", "required": ["results"], "properties": {"results": {"type": "array"}}},
    "Infer": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {
                "type": "object",
                "properties": {
                    "timeout": {"type": "integer", "description": "Microseconds."},
                    "priority": {"type": "integer", "description": "Requests with lower values are computed first."},
                    "binary_data_output": {"type": "boolean"},
                },
            },
            "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
            "outputs": {
                "type": "array",
                "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
    },
    "Tensor": {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer"}},
            "datatype": {"type": "string", "examples": ["FP32"]},
            "data": {"type": "array"},
            "parameters": {"type": "object"},
        },
    },
    "Inferred": {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
        },
    },
    "Status": {"type": "object", "required": ["model_version_status"]},
    "Metadata": {"type": "object", "required": ["model_spec", "metadata"]},
    "Object": {"type": "object"},
    "List": {"type": "array", "items": {"type": "object"}},
}


@cache
def document() -> dict[str, Any]:
    """Return the description of every path for clients."""
    from importlib import metadata

    paths: dict[str, Any] = {}
    for which, parameters in _WHICH.items():
        base, named = f"/v1/models/{{model}}{which}", [_NAME, *parameters]
        kind = which.split("/")[1].removesuffix("s") if which else "newest version"
        paths[base] = {"get": _operation(f"Status of a model ({kind})", named, "Status")}
        paths[f"{base}/metadata"] = {"get": _operation(f"Signature of a model ({kind})", named, "Metadata")}
        for verb, body, answer in (
            ("predict", "Predict", "Predictions"),
            ("classify", "Examples", "Results"),
            ("regress", "Examples", "Results"),
        ):
            paths[f"{base}:{verb}"] = {"post": _operation(f"{verb} ({kind})", named, answer, body)}
        if "label" in which:
            continue
        base = f"/v2/models/{{model}}{which}"
        paths[f"{base}/infer"] = {"post": _operation(f"infer ({kind})", named, "Inferred", "Infer")}
        for path, text in (("", "Metadata"), ("/config", "Configuration"), ("/stats", "Statistics")):
            paths[f"{base}{path}"] = {"get": _operation(f"{text} of a model ({kind})", named, "Object")}
        paths[f"{base}/ready"] = {"get": _operation(f"Whether a model is ready ({kind})", named, None)}
    paths["/v2"] = {"get": _operation("Name, version and extensions of the server", [], "Object")}
    paths["/v2/repository/index"] = {"post": _operation("All models and versions", [], "List")}
    for what in ("live", "ready"):
        paths[f"/v2/health/{what}"] = {"get": _operation(f"Whether the server is {what}", [], None)}
    paths["/metrics"] = {"get": _operation("Metrics for Prometheus", [], "text")}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "manyhands serve",
            "version": metadata.version("manyhands"),
            "description": "The REST APIs of TensorFlow Serving (v1) and of the Open Inference Protocol (v2).",
        },
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(summary: str, parameters: list[Any], answer: str | None, body: str | None = None) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "The answer."}
    if answer == "text":
        good["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif answer is not None:
        good["content"] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": summary[0].upper() + summary[1:],
        "parameters": parameters,
        "responses": {
            "200": good,
            **{str(status): {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
    }
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}},
        }
    return operation


@cache
def as_json() -> bytes:
    """Return the document as JSON."""
    return orjson.dumps(document())


@cache
def as_page() -> bytes:
    """Return the document as plain HTML, without scripts and external resources."""
    described = document()
    rows = []
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = body.get("$ref", "").rpartition("/")[2]
            taken = f'<a href="#{name}">{name}</a>' if name else ""
            cells = (method.upper(), f"<code>{escape(path)}</code>", escape(operation["summary"]), taken)
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    schemas = "".join(
        f'<h2 id="{name}">{name}</h2><pre>{escape(orjson.dumps(schema, option=orjson.OPT_INDENT_2).decode())}</pre>'
        for name, schema in described["components"]["schemas"].items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>manyhands serve</title>'
        "<style>body{font:16px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em}"
        "td{padding:.2em 1em .2em 0;vertical-align:top}code,pre{font-size:14px}</style>"
        f"<h1>manyhands serve {escape(described['info']['version'])}</h1><p>{escape(described['info']['description'])} "
        'As <a href="/openapi.json">OpenAPI</a>.</p>'
        f"<table>{''.join(rows)}</table>{schemas}</html>"
    ).encode()
