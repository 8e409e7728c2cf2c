"""Every decoder on arbitrary input: a valid result or a rejection, and no other error."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
import zlib
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.core import RequestRefused, SettingsError, Signature, TensorSpec
from manyhands.serving import Server
from manyhands.serving.dtypes import BY_TORCH, KINDS, from_numbers
from manyhands.serving.folder import VersionPolicy
from manyhands.serving.http import BadRequest, Inflating
from manyhands.serving.protocols import open_inference_grpc, tensorflow_grpc, tensorflow_rest
from manyhands.serving.protocols.heads import RequestedOutputs, RequestHeads
from manyhands.serving.protocols.open_inference_rest import header_size, read_inputs, version_number
from manyhands.serving.protocols.protocol import parse_json
from manyhands.serving.protocols.rows import fast_rows
from manyhands.serving.protocols.tensorflow_messages import MESSAGES
from manyhands.serving.routing.backend import Address
from manyhands.serving.slots import Dims

from .test_fuzz import ANYTHING

MANY = settings(max_examples=60, deadline=None)
SIGNATURE = Signature(
    {"x": TensorSpec("float32", (None, 3)), "n": TensorSpec("int64", (None,))}, {"y": TensorSpec("float32", (None,))}
)
REFUSED = (BadRequest, RequestRefused)


class Version:
    """As much of one as decoders look at."""

    model, signature = "m", SIGNATURE


def require_fitting(arrays: Any) -> None:
    assert set(arrays) == {"x", "n"}
    assert arrays["x"].dtype == np.float32
    assert arrays["x"].shape[1:] == (3,)
    assert arrays["n"].shape == arrays["x"].shape[:1]


NUMBERS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=7)
SHAPES = st.sampled_from([[1, 3], [1], [2, 3], [2], [0, 3], [0], [-1, 3], [2**62], []])
TENSORS = st.builds(
    lambda name, datatype, shape, contents: {
        "name": name, "datatype": datatype, "shape": shape,
        "contents": {"fp32_contents": contents, "int64_contents": contents},
    },
    st.sampled_from(["x", "n", "z"]), st.sampled_from(["FP32", "INT64", "BYTES", ""]), SHAPES, NUMBERS,
)  # fmt: skip


@MANY
@given(tensors=st.lists(TENSORS, max_size=3), raw=st.lists(st.binary(max_size=24), max_size=3))
def test_any_open_inference_request_is_decoded_or_rejected(tensors: list[Any], raw: list[bytes]) -> None:
    request = open_inference_grpc.MESSAGES["ModelInferRequest"](inputs=tensors, raw_input_contents=raw)
    with contextlib.suppress(*REFUSED):
        require_fitting(open_inference_grpc.read_inputs(request, Version()))  # type: ignore[arg-type]


PROTOS = st.builds(
    lambda dtype, shape, content, floats, wholes: {
        "dtype": dtype, "tensor_shape": {"dim": [{"size": n} for n in shape]}, "tensor_content": content,
        "float_val": floats, "int64_val": wholes,
    },
    st.sampled_from([1, 9, 7, 0, 99]), SHAPES, st.binary(max_size=24), NUMBERS, NUMBERS,
)  # fmt: skip


@MANY
@given(inputs=st.dictionaries(st.sampled_from(["x", "n", "z"]), PROTOS))
@example(
    inputs={
        "x": {"dtype": 1, "tensor_shape": {"dim": [{"size": 2**40}, {"size": 3}]}, "float_val": [1.0]},
        "n": {"dtype": 9, "tensor_shape": {"dim": [{"size": 2**40}]}, "int64_val": [1]},
    }
)
def test_any_tensor_proto_is_decoded_within_the_size_limit_or_rejected(inputs: dict[str, Any]) -> None:
    request = MESSAGES["PredictRequest"](inputs=inputs)
    with contextlib.suppress(*REFUSED):
        version: Any = Version()
        arrays = tensorflow_grpc.read_inputs(request, version, tensorflow_grpc.read_shapes(request, version, 1000))
        require_fitting(arrays)
        assert arrays["x"].nbytes <= 1000


@MANY
@given(value=ANYTHING | st.fixed_dictionaries({"examples": st.lists(st.dictionaries(st.sampled_from("xn"), ANYTHING))}))
def test_any_rest_examples_are_parsed_or_rejected(value: Any) -> None:
    with contextlib.suppress(*REFUSED):
        require_fitting(tensorflow_rest.parse_examples(value, SIGNATURE, 1000))


@MANY
@given(data=st.binary(max_size=200), name=st.sampled_from(sorted(MESSAGES)))
def test_random_bytes_raise_only_decode_error(data: bytes, name: str) -> None:
    with contextlib.suppress(DecodeError):
        MESSAGES[name].FromString(data).SerializeToString()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [60, 64, 65, 300, 900])
@pytest.mark.parametrize("inner", [[], [1], ["x"], [{}]])
def test_lists_nested_deeper_than_python_calls_are_rejected(kind: Any, depth: int, inner: Any) -> None:
    values = inner
    for _ in range(depth):
        values = [values]
    with contextlib.suppress(ValueError, TypeError):
        assert from_numbers(values, kind).ndim > 60


@MANY
@given(values=ANYTHING, kind=st.sampled_from(KINDS))
def test_from_numbers_returns_the_declared_dtype_or_raises(values: Any, kind: Any) -> None:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        assert from_numbers(values, kind).dtype == kind.numpy


@MANY
@given(data=st.binary(max_size=100), coding=st.sampled_from([b"gzip", b"deflate"]), limit=st.integers(0, 50))
@example(data=zlib.compress(b"\0" * 10**6), coding=b"deflate", limit=10)
def test_decompressed_body_never_exceeds_the_limit(data: bytes, coding: bytes, limit: int) -> None:
    request: Any = SimpleNamespace(
        body=data, headers={b"content-encoding": coding}, inflation=100, hold=lambda num: None
    )
    with contextlib.suppress(BadRequest):
        for step in Inflating(request, coding, limit).steps():
            step()
        assert len(request.body) <= limit


@MANY
@given(text=st.text(max_size=20), raw=st.binary(max_size=20), length=st.integers(0, 1000))
@example(text="\u00b2", raw=b"", length=0)
def test_random_header_sizes_versions_and_addresses_are_parsed_or_rejected(text: str, raw: bytes, length: int) -> None:
    with contextlib.suppress(*REFUSED):
        assert 0 <= header_size(raw, length) <= length
    with contextlib.suppress(*REFUSED):
        version_number("m", text)
    for parse in (VersionPolicy.parse, Address.parse):
        with contextlib.suppress(SettingsError):
            parse(text)


@MANY
@given(message=st.binary(max_size=40))
def test_output_shapes_from_a_replica_are_unpacked_or_rejected(message: bytes) -> None:
    with contextlib.suppress(struct.error):
        assert len(Dims(SIGNATURE.inputs.values()).unpack(message, 0)) == 2


@pytest.mark.parametrize(
    "method",
    [
        "tensorflow.serving.PredictionService/Predict",
        "inference.GRPCInferenceService/ModelInfer",
        "grpc.health.v1.Health/Check",
    ],
)
def test_undecodable_grpc_message_returns_invalid_argument(served: Server, method: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{method}")(b"\xff\xff\xff", timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert "the message is no" in caught.value.details()  # type: ignore[attr-defined]


@MANY
@given(
    rows=st.lists(
        st.lists(st.floats(width=32) | st.integers(-(2**70), 2**70) | st.none() | st.booleans(), max_size=4), max_size=4
    )
    | st.lists(st.lists(st.floats(allow_nan=False), min_size=3, max_size=3), max_size=4)
)
def test_fast_row_parser_matches_the_general_parser(rows: Any) -> None:
    signature = Signature({"x": SIGNATURE.inputs["x"]}, SIGNATURE.outputs)
    text = json.dumps({"instances": rows}).encode()
    fast = fast_rows(text, signature)
    if fast is not None:
        slow, _ = tensorflow_rest.parse_predict(parse_json(text, 10_000), signature)
        np.testing.assert_array_equal(fast, slow["x"])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1]",
        b"{}",
        b'{"instances": 1}',
        b'{"instances": [1]}',
        b'{"instances": [], "a": 1}',
        b"\xff",
        b"[" * 5000,
    ],
)
def test_fast_row_parser_returns_none_for_malformed_input(text: bytes) -> None:
    assert fast_rows(text, Signature({"x": SIGNATURE.inputs["x"]}, {})) is None


def test_strings_among_integers_are_rejected_without_allocating_memory() -> None:
    values = [["x" * 24_000, *[0] * 99]]
    tracemalloc.start()
    try:
        with pytest.raises(TypeError, match="elements must be int64"):
            from_numbers(values, BY_TORCH["int64"])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bools_of_any_bytes_become_zero_or_one() -> None:
    """Compiled code may add the byte of a bool to an index."""
    version: Any = Version()
    version.signature = Signature({"x": TensorSpec("bool", (None,))}, {})
    raw = bytes(range(256)) + b"\xff" * 8
    wanted = [0, *[1] * 263]
    message = open_inference_grpc.MESSAGES["ModelInferRequest"](
        inputs=[{"name": "x", "datatype": "BOOL", "shape": [264]}], raw_input_contents=[raw]
    )
    proto = {"dtype": 10, "tensor_shape": {"dim": [{"size": 264}]}, "tensor_content": raw}
    one = {"name": "x", "datatype": "BOOL", "shape": [264], "parameters": {"binary_data_size": 264}}
    heads = RequestHeads()
    read, outputs = read_inputs({"inputs": [one]}, memoryview(raw), version, 1000), RequestedOutputs(None, {}, None, 0)
    heads.keep(version, b"text", ["x"], read, outputs)
    head = heads.find(version, b"text", len(raw))
    assert head is not None
    for found in (
        read,
        head.inputs(memoryview(raw)),
        open_inference_grpc.read_inputs(message, version),
        tensorflow_grpc.read_inputs(
            tensorflow_grpc.MESSAGES["PredictRequest"](inputs={"x": proto}), version, {"x": (264,)}
        ),
    ):
        assert found["x"].view(np.uint8).tolist() == wanted
