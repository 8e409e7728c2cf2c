"""For any bytes, the response names the problem: never a 500, and the server continues."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from benchmarks.fuzzing.serving import SEEDS, TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.serving import Server

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.lists(st.floats(width=32) | st.integers(-(2**70), 2**70), max_size=4)
NAMES = st.sampled_from(["x", "a", "b", "output", "data", ""])
MODELS = st.sampled_from(["adder", "pair"])


WORDS = (
    b"\r\n", b"\r\n\r\n", b"NaN", b"-1", b"1e999", b"null", b"[]", b"{}", b"9" * 30, b"\xff" * 9, b"\\ud800",
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"0\r\n\r\n",
)  # fmt: skip


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What is expected, or anything else."""
    return good | good | ANYTHING


INPUT = st.fixed_dictionaries(
    {},
    optional={
        "name": mostly(NAMES),
        "shape": mostly(st.sampled_from([[1, 3], [2, 3], [1, 2], [1], [0, 3], [-1, 3], [2**62, 3]])),
        "datatype": mostly(st.sampled_from(["FP32", "INT64", "BF16", "BYTES"])),
        "data": mostly(NUMBERS),
        "parameters": mostly(st.fixed_dictionaries({}, optional={"binary_data_size": mostly(st.integers(-1, 64))})),
    },
)
INFER = st.fixed_dictionaries(
    {},
    optional={
        "id": mostly(st.text(max_size=4)),
        "inputs": mostly(st.lists(mostly(INPUT), max_size=3)),
        "outputs": mostly(st.lists(mostly(st.fixed_dictionaries({"name": mostly(NAMES)})), max_size=2)),
        "parameters": mostly(st.dictionaries(st.sampled_from(["timeout", "priority", "binary_data_output"]), ANYTHING)),
    },
)
PREDICT = st.fixed_dictionaries(
    {},
    optional={
        "instances": mostly(st.lists(mostly(NUMBERS) | st.dictionaries(NAMES, ANYTHING), max_size=3)),
        "inputs": mostly(st.dictionaries(NAMES, mostly(st.lists(NUMBERS, max_size=2)), max_size=3)),
        "signature_name": mostly(st.sampled_from(["serving_default", ""])),
    },
)


def require_sound(answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 404, 405, 413, 415, 501, 503, 504), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]


def as_text(value: Any) -> bytes:
    return json.dumps(value).encode(errors="surrogatepass")


@MANY
@given(model=MODELS, value=mostly(PREDICT))
def test_fuzzed_predict_request_never_returns_500(http: httpx.Client, model: str, value: Any) -> None:
    require_sound(http.post(f"/v1/models/{model}:predict", content=as_text(value)))


@MANY
@given(model=MODELS, value=mostly(INFER), raw=st.binary(max_size=40), size=st.none() | st.integers(0, 400))
def test_fuzzed_infer_request_never_returns_500(
    http: httpx.Client, model: str, value: Any, raw: bytes, size: int | None
) -> None:
    text = as_text(value)
    headers = {"Inference-Header-Content-Length": str(len(text) if size is None else size)}
    require_sound(http.post(f"/v2/models/{model}/infer", content=text + raw, headers=headers))


@MANY
@given(body=st.binary(max_size=200), coding=st.sampled_from(["gzip", "deflate", "br", "identity", ""]))
def test_random_body_and_content_encoding_never_return_500(http: httpx.Client, body: bytes, coding: str) -> None:
    for path in ("/v1/models/adder:predict", "/v2/models/adder/infer"):
        require_sound(http.post(path, content=body, headers={"Content-Encoding": coding}))


@MANY
@given(path=st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#?"), max_size=30))
def test_random_paths_never_return_500(http: httpx.Client, path: str) -> None:
    for start in ("/v1/models/", "/v2/models/", "/v2/", "/"):
        require_sound(http.get(start + path))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_mutated_seeds_are_decoded_or_rejected(name: str, data: st.DataObject) -> None:
    """Good inputs, cut and changed, as a longer fuzzing run begins with them."""
    seed = data.draw(st.sampled_from(SEEDS[name]))
    start = data.draw(st.integers(0, len(seed)))
    middle = data.draw(st.binary(max_size=24) | st.sampled_from(WORDS))
    TARGETS[name](seed)
    TARGETS[name](seed[:start] + middle + seed[start + data.draw(st.integers(0, 24)) :])


def test_server_still_predicts_after_fuzzing(served: Server, http: httpx.Client) -> None:
    answer = http.post("/v1/models/adder:predict", json={"instances": [[1, 2, 3]]})
    assert answer.json() == {"predictions": [[3.0, 4.0, 5.0]]}
