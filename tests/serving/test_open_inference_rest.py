"""The Open Inference Protocol over HTTP: JSON, binary tensors, statuses and messages."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import httpx
import numpy as np
import pytest

from manyhands.serving.protocols.heads import RequestedOutputs, RequestHeads

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
INPUT = {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": ROWS.ravel().tolist()}


class Version:
    """A key."""


def binary(http: httpx.Client, head: dict[str, Any], *blobs: bytes, size: int | None = None) -> httpx.Response:
    text = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(text) if size is None else size)}
    return http.post("/v2/models/adder/infer", content=text + b"".join(blobs), headers=headers)


def test_json_inputs_return_json_outputs(http: httpx.Client) -> None:
    answer = http.post("/v2/models/adder/versions/2/infer", json={"id": "7", "inputs": [INPUT]}).json()
    assert answer == {
        "model_name": "adder",
        "model_version": "2",
        "id": "7",
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [2, 3], "data": (ROWS + 2).ravel().tolist()}],
    }
    nested = {**INPUT, "data": ROWS.tolist()}
    assert http.post("/v2/models/adder/infer", json={"inputs": [nested]}).json()["outputs"] == answer["outputs"]


def test_nan_and_infinity_are_preserved_in_json(http: httpx.Client) -> None:
    one = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [0, 1, 2]}
    text = json.dumps({"inputs": [one]}).replace("[0, 1, 2]", "[NaN, 1, Infinity]")
    (output,) = http.post("/v2/models/adder/infer", content=text.encode()).json()["outputs"]
    assert math.isnan(output["data"][0])
    assert output["data"][1:] == [3.0, math.inf]


def test_binary_inputs_return_binary_outputs(http: httpx.Client) -> None:
    one = {**INPUT, "parameters": {"binary_data_size": 24}}
    del one["data"]
    head = {"inputs": [one], "outputs": [{"name": "output", "parameters": {"binary_data": True}}]}
    for wish in (head, {"inputs": [one], "parameters": {"binary_data_output": True}}):
        # A text that comes again is not read again; the numbers are, and so is what is wrong with them.
        for rows in (ROWS, ROWS * 3, ROWS * 5):
            answer = binary(http, wish, rows.tobytes())
            size = int(answer.headers["Inference-Header-Content-Length"])
            said = json.loads(answer.content[:size])
            assert said["outputs"][0]["parameters"] == {"binary_data_size": 24}
            np.testing.assert_array_equal(np.frombuffer(answer.content[size:], np.float32).reshape(2, 3), rows + 2)
            assert "unexpected additional input data" in binary(http, wish, rows.tobytes(), b"more").json()["error"]
            assert "expecting 4 additional bytes" in binary(http, wish, rows.tobytes()[:-4]).json()["error"]


def test_cached_request_headers_are_kept_per_version_and_bounded() -> None:
    one: Any = Version()
    two: Any = Version()
    inputs = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.int64)}
    heads, wanted = RequestHeads(), RequestedOutputs(None, {"y": True}, None, 0)
    heads.keep(one, b"text", ["b", "a"], inputs, wanted)
    heads.keep(one, b"named", ["b", "a"], inputs, RequestedOutputs("7", {"y": True}, None, 0))
    assert heads.find(two, b"text", 40) is heads.find(one, b"text", 41) is heads.find(one, b"named", 40) is None
    head = heads.find(one, b"text", 40)
    assert head is not None
    read = head.inputs(memoryview(np.array([5, 6]).tobytes() + np.arange(6, dtype=np.float32).tobytes()))
    assert list(read) == ["a", "b"]
    assert read["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["b"].tolist() == [5, 6]
    for number in range(1000):
        heads.keep(two, b"%d" % number, ["b", "a"], inputs, wanted)
    assert heads.find(two, b"0", 40)
    assert heads.find(two, b"999", 40) is None


def test_raw_binary_body_is_decoded_as_one_row(http: httpx.Client) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    answer = http.post("/v2/models/adder/infer", content=ROWS[:1].tobytes(), headers=headers)
    size = int(answer.headers["Inference-Header-Content-Length"])
    np.testing.assert_array_equal(np.frombuffer(answer.content[size:], np.float32), ROWS[0] + 2)
    error = http.post("/v2/models/pair/infer", content=b"1234", headers=headers).json()["error"]
    assert "for a model with one input" in error


def test_gzip_request_gets_gzip_response(http: httpx.Client) -> None:
    rows = np.zeros((4000, 3), np.float32)
    one = {"name": "x", "shape": [4000, 3], "datatype": "FP32", "data": rows.ravel().tolist()}
    body = gzip.compress(json.dumps({"inputs": [one]}).encode())
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    # More rows than may wait are refused only when others wait already, or when they are many times more.
    answer = http.post("/v2/models/adder/infer", content=body, headers=headers)
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.json()["outputs"][0]["data"] == [2.0] * 12000


def test_server_and_model_metadata_endpoints(http: httpx.Client) -> None:
    assert http.get("/v2").json()["name"] == "manyhands"
    assert "binary_tensor_data" in http.get("/v2").json()["extensions"]
    assert http.get("/v2/health/live").status_code == http.get("/v2/health/ready").status_code == 200
    assert http.get("/v2/models/adder/ready").status_code == 200
    assert http.get("/v2/models/pair").json() == {
        "name": "pair",
        "versions": ["1"],
        "platform": "pytorch",
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "b", "datatype": "INT64", "shape": [-1]},
        ],
        "outputs": [
            {"name": "sum", "datatype": "FP32", "shape": [-1]},
            {"name": "twice", "datatype": "INT64", "shape": [-1]},
        ],
    }
    assert http.get("/v2/models/adder/config").json()["max_batch_size"] == 64
    assert http.get("/v2/models/adder/stats").json()["model_stats"][0]["name"] == "adder"
    index = http.post("/v2/repository/index").json()
    assert {(one["name"], one["state"]) for one in index} == {("adder", "READY"), ("pair", "READY")}
    assert http.post("/v2/repository/index", json={"ready": True}).json() == index


def test_metadata_of_unknown_model_or_version_returns_error(http: httpx.Client) -> None:
    for path, status, error in (
        ("foo/ready", 400, "Model version not ready"),
        ("foo/stats", 400, "requested model 'foo' is not available"),
        ("adder/versions/9/stats", 400, "requested model version is not available for model 'adder'"),
        ("adder/versions/one", 404, "Not Found: versions of model 'adder' are numbers, but got 'one'"),
    ):
        answer = http.get(f"/v2/models/{path}")
        assert (answer.status_code, answer.json()) == (status, {"error": error})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"shape": [2, 4]}, "unexpected shape for input 'x' for model 'adder'. Expected [-1,3], got [2,4]"),
        ({"shape": [-1, 3]}, "unexpected shape"),
        ({"shape": [2.5, 3]}, "unexpected shape"),
        ({"shape": None}, "unexpected shape"),
        ({"shape": [2**50, 3]}, "unexpected shape"),
        ({"shape": [0, 3], "data": []}, "same number of rows"),
        ({"datatype": "FP64"}, "inference input 'x' data-type is 'FP64', but model 'adder' expects 'FP32'"),
        ({"name": ["x"]}, "unexpected inference input"),
        ({"name": "z"}, "unexpected inference input 'z' for model 'adder'"),
        ({"data": [1, 2]}, "input 'x' has shape [2,3], but got 2 elements"),
        ({"data": ["a"] * 6}, "Unable to parse 'data' of input 'x'"),
        ({"data": None}, "Unable to parse 'data'"),
        ({"parameters": {"binary_data_size": 24}}, "one of 'data' and 'binary_data_size', but got both"),
    ],
)
def test_invalid_input_tensor_returns_400_with_expected_value(
    http: httpx.Client, change: dict[str, Any], error: str
) -> None:
    answer = http.post("/v2/models/adder/infer", json={"inputs": [{**INPUT, **change}]})
    assert answer.status_code == 400
    assert error in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "Unable to parse 'inputs'"),
        ({"inputs": [1]}, "Unable to parse 'inputs'"),
        ({"inputs": []}, "expected 1 inputs but got 0 inputs for model 'adder'. Got input(s) [], but missing"),
        ({"inputs": [INPUT, INPUT]}, "input 'x' already exists in request"),
        ({"inputs": [INPUT, {**INPUT, "name": "z"}]}, "expected 1 inputs but got 2"),
        ({"inputs": [INPUT], "outputs": {"name": "output"}}, "Unable to parse 'outputs': it must be an array"),
        ({"inputs": [INPUT], "outputs": [{"name": "no"}]}, "unexpected inference output 'no' for model 'adder'"),
        ({"inputs": [INPUT], "id": {"a": 1}}, "id must be a string"),
        ({"inputs": [INPUT], "parameters": {"timeout": "soon"}}, "timeout (microseconds)"),
    ],
)
def test_invalid_request_returns_400_with_expected_value(http: httpx.Client, body: Any, error: str) -> None:
    answer = http.post("/v2/models/adder/infer", json=body)
    assert answer.status_code == 400
    assert error in answer.json()["error"]


def test_oversized_shape_is_rejected_before_allocation(http: httpx.Client) -> None:
    answer = http.post("/v2/models/adder/infer", json={"inputs": [{**INPUT, "shape": [2**39, 3]}]})
    assert answer.status_code == 413


def test_binary_body_of_wrong_length_is_rejected(http: httpx.Client) -> None:
    one = {"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": 24}}
    assert "expecting 14 additional bytes" in binary(http, {"inputs": [one]}, ROWS.tobytes()[:10]).json()["error"]
    short = {**one, "parameters": {"binary_data_size": 20}}
    error = "input byte size mismatch for input 'x' for model 'adder'. Expected 24, got 20"
    assert binary(http, {"inputs": [short]}, ROWS.tobytes()[:20]).json()["error"] == error
    assert "4 bytes" in binary(http, {"inputs": [one]}, ROWS.tobytes() + b"more").json()["error"]
    for size in (10**9, -1):
        answer = binary(http, {"inputs": [one]}, ROWS.tobytes(), size=size)
        assert answer.status_code == 400
        assert "Inference-Header-Content-Length" in answer.json()["error"]


def test_unknown_model_or_version_returns_404_with_its_name(http: httpx.Client) -> None:
    for path, error in (
        ("/v2/models/foo/infer", "Request for unknown model: 'foo' is not found"),
        ("/v2/models/adder/versions/9/infer", "Request for unknown model: 'adder' version 9 is not found"),
    ):
        answer = http.post(path, json={"inputs": [INPUT]})
        assert (answer.status_code, answer.json()) == (404, {"error": error})


def test_request_with_unreachable_deadline_returns_503_or_504(http: httpx.Client) -> None:
    body = {"inputs": [INPUT], "parameters": {"timeout": 1}}
    assert http.post("/v2/models/adder/infer", json=body).status_code in (503, 504)


def test_model_unload_on_the_inference_listener_is_forbidden(http: httpx.Client) -> None:
    refused = http.post("/v2/repository/models/adder/unload")
    assert refused.status_code == 403
    assert "managed on another listener" in refused.json()["error"]
