"""TensorFlow Serving's REST API: responses, status codes and messages."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest


def test_predict_accepts_row_and_column_format(http: httpx.Client) -> None:
    answer = http.post("/v1/models/adder:predict", json={"instances": [[1, 2, 3], [4, 5, 6]]})
    assert answer.json() == {"predictions": [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]}
    answer = http.post("/v1/models/adder/versions/2:predict", json={"inputs": [[1, 2, 3]]})
    assert answer.json() == {"outputs": [[3.0, 4.0, 5.0]]}
    answer = http.post(
        "/v1/models/adder:predict", json={"inputs": {"x": [[1, 2, 3]]}, "signature_name": "serving_default"}
    )
    assert answer.json() == {"outputs": [[3.0, 4.0, 5.0]]}
    answer = http.post("/v1/models/adder:predict", json={"instances": [{"x": [1, 2, 3]}]})
    assert answer.json() == {"predictions": [[3.0, 4.0, 5.0]]}


def test_predict_with_several_inputs_and_outputs(http: httpx.Client) -> None:
    rows = [{"a": [1, 2], "b": 3}, {"a": [0, 0], "b": 1}]
    answer = http.post("/v1/models/pair:predict", json={"instances": rows})
    assert answer.json() == {"predictions": [{"sum": 6.0, "twice": 6}, {"sum": 1.0, "twice": 2}]}
    answer = http.post("/v1/models/pair:predict", json={"inputs": {"a": [[1, 2]], "b": [3]}})
    assert answer.json() == {"outputs": {"sum": [6.0], "twice": [6]}}


def test_nan_and_infinity_are_accepted_and_returned(http: httpx.Client) -> None:
    answer = http.post("/v1/models/adder:predict", content=b'{"instances": [[NaN, Infinity, -Infinity]]}')
    (row,) = answer.json()["predictions"]
    assert math.isnan(row[0])
    assert row[1:] == [math.inf, -math.inf]


def test_status_and_metadata_endpoints(http: httpx.Client) -> None:
    state = {"version": "2", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    for path in ("/v1/models/adder", "/v1/models/adder/versions/2"):
        assert http.get(path).json() == {"model_version_status": [state]}
    answer = http.get("/v1/models/adder/metadata").json()
    assert answer["model_spec"] == {"name": "adder", "signature_name": "", "version": "2"}
    signature = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["x"]["dtype"] == "DT_FLOAT"
    assert [dim["size"] for dim in signature["inputs"]["x"]["tensor_shape"]["dim"]] == ["-1", "3"]


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/v1/models/foo", 404, "Servable not found for request: Latest(foo)"),
        ("/v1/models/adder/versions/9/metadata", 404, "Servable not found for request: Specific(adder, 9)"),
        ("/v1/models/adder/labels/no/metadata", 400, "Unrecognized servable version label: no"),
        ("/v1/models/adder/versions/x", 400, "Malformed request: GET /v1/models/adder/versions/x"),
        ("/v1/nothing", 400, "Malformed request: GET /v1/nothing"),
        ("/v1/models/adder:predict", 405, "Method Not Allowed: GET"),
        ("/v1/models/..%2f..%2fetc", 404, "Servable not found for request: Latest(..%2f..%2fetc)"),
        ("/nothing", 404, "Not Found"),
    ],
)
def test_unknown_paths_return_error_status_and_message(http: httpx.Client, path: str, status: int, error: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.json()) == (status, {"error": error})


@pytest.mark.parametrize(
    ("model", "body", "error"),
    [
        ("adder", {}, "Missing 'inputs' or 'instances' key"),
        ("adder", {"inputs": [], "instances": []}, "not both"),
        ("adder", [1], "must be an object"),
        ("adder", {"instances": []}, "at least one element"),
        ("adder", {"instances": 3}, "must be a list"),
        ("adder", {"instances": [[1, 2]]}, "input 'x' must be float32[*, 3], but got float32[1, 2]"),
        ("adder", {"instances": [[1, 2, 3], [1]]}, "ragged"),
        ("adder", {"instances": [["a", "b", "c"]]}, "hold something else"),
        ("adder", {"instances": [["1", "2", "3"]]}, "hold something else"),
        ("adder", {"instances": [[True, False, True]]}, "hold something else"),
        ("adder", {"instances": [[1, None, 3]]}, "hold something else"),
        ("adder", {"instances": [{"b64": "AAAA"}]}, "the inputs must be {x}, but got {b64}"),
        ("adder", {"inputs": {"y": [[1, 2, 3]]}}, "the inputs must be {x}, but got {y}"),
        ("adder", {"instances": [[1, 2, 3]], "signature_name": "other"}, 'Serving signature name: "other"'),
        ("pair", {"instances": [[1, 2]]}, "objects with the inputs {a, b}"),
        ("pair", {"instances": [{"a": [1, 2], "b": 1}, {"a": [1, 2]}]}, "same keys"),
        ("pair", {"inputs": {"a": [[1, 2]], "b": [1, 2]}}, "same number of rows"),
        ("pair", {"inputs": {"a": [[1, 2]], "b": [1.5]}}, "must be int64[*]"),
        ("pair", {"inputs": {"a": [[1, 2]], "b": [2**70]}}, "must be int64[*]"),
    ],
)
def test_invalid_predict_input_returns_400_with_reason(http: httpx.Client, model: str, body: Any, error: str) -> None:
    answer = http.post(f"/v1/models/{model}:predict", json=body)
    assert answer.status_code == 400
    assert error in answer.json()["error"]


def test_malformed_json_returns_400_parse_error(http: httpx.Client) -> None:
    halves = (rb'{"signature_name": "\ud800", "x": NaN}', b'{"signature_name": "\xed\xa0\x80", "x": NaN}')
    for text in (b"", b"{", b"\xff", b"[" * 60_000, b'{"instances": NaN', b"NaN" + b"[" * 60_000, *halves):
        answer = http.post("/v1/models/adder:predict", content=text)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("JSON parse error")


def test_prometheus_metrics_are_served_under_both_paths(http: httpx.Client) -> None:
    http.post("/v1/models/adder:predict", json={"instances": [[1, 2, 3]]})
    for path in ("/metrics", "/monitoring/prometheus/metrics"):
        text = http.get(path).text
        assert 'manyhands_requests_total{model="adder",version="2",code="OK"}' in text
        assert ':tensorflow:serving:request_count{model_name="adder",version="2",status="OK"}' in text
        assert 'manyhands_batch_rows_bucket{model="adder",version="2",le="+Inf"}' in text
