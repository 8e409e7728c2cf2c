"""Messages between ranks keep values and types, and untrusted bytes run no code."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import SendError, SettingsError
from manyhands.distributed.authentication import FRAME_BYTES, NotAuthentic, ObjectGather, RankKey
from manyhands.distributed.messages import InvalidMessage, Opaque, decode, encode, is_plain
from manyhands.testing import run_threads
from manyhands.testing.contracts import any_value, same

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
        | st.lists(st.floats(width=32)).map(torch.tensor)
        | st.lists(st.integers(0, 255)).map(lambda numbers: np.array(numbers, dtype=np.uint8))
    ),
    max_leaves=20,
)


@given(values)
@settings(max_examples=80, deadline=None)
def test_plain_values_round_trip_through_encode_and_decode(value: Any) -> None:
    assert identical(decode(encode(value)), value)


def identical(one: Any, other: Any) -> bool:
    """As `same`, with NaN inside of tensors, complex numbers and containers equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(identical, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    # The order of a set's text is that of its history.
    return one == other if isinstance(one, set | frozenset) else repr(one) == repr(other) or same(one, other)


@given(values, st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_gather_objects_preserves_plain_values_of_any_length(value: Any, length: int) -> None:
    sent = [value, "x" * length]
    for found in run_threads(lambda world: world.gather_objects(sent if world.rank else None), 2):
        assert found[0] is None
        assert identical(found[1], sent)


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_random_bytes_decode_or_raise_invalid_message(data: bytes) -> None:
    with contextlib.suppress(InvalidMessage):
        decode(data, is_authentic=False)


def test_corrupted_messages_decode_or_raise_invalid_message() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        data = bytearray(encode(any_value(draw)))
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(InvalidMessage):
            decode(bytes(data))


def test_unsafe_numpy_dtype_strings_are_rejected() -> None:
    for name in ("(9**9**9)f4", "O", "i4,i4", "V8", "|O8", "<f8,"):
        content = msgspec.msgpack.encode([name, [1], 0])
        body = msgspec.msgpack.encode(msgspec.msgpack.Ext(10, content))
        data = len(body).to_bytes(8, "little") + body
        with pytest.raises(InvalidMessage, match="dtype"):
            decode(data + bytes(64))


def test_excessive_nesting_and_false_lengths_are_rejected() -> None:
    deep = b"\x91" * 200_000
    with pytest.raises(InvalidMessage):
        decode(len(deep).to_bytes(8, "little") + deep)
    for shape in ([1 << 40], [-1], [1 << 62, 1 << 62], [True]):
        body = msgspec.msgpack.encode(msgspec.msgpack.Ext(9, msgspec.msgpack.encode(["float32", shape, 0])))
        with pytest.raises(InvalidMessage):
            decode(len(body).to_bytes(8, "little") + body + bytes(64))


@pytest.mark.parametrize(
    "value", [print, object(), Counter("ab"), OrderedDict(a=1), torch.nn.Parameter(torch.ones(1)), [range(3)]]
)
def test_non_plain_values_are_rejected_before_sending(value: Any) -> None:
    assert not is_plain(value)
    with pytest.raises(SendError, match="plain data"):
        encode(value)


def test_self_referencing_value_is_rejected() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(SendError, match="contain themselves"):
        encode(value)


class Marker:
    """Sets an environment variable where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, ("MANYHANDS_UNPICKLED", "1")


def test_pickle_is_loaded_only_with_a_shared_key() -> None:
    data = encode([Opaque.of({"a": Counter("aab")})])
    assert decode(data)[0].open() == {"a": Counter("aab")}
    forged = decode(encode(Opaque(pickle.dumps(Marker()))), is_authentic=False)
    with pytest.raises(SettingsError, match="Set MANYHANDS_TOKEN"):
        forged.open()

    def exchange(world: Any) -> str:
        without_key = ObjectGather(RankKey.none(), "whole", world.rank)
        try:
            return str(without_key(Opaque.of(Counter()), world.all_gather)[0].open())
        except SettingsError as error:
            return str(error)

    assert all("launched without a token" in text for text in run_threads(exchange, 2))


@pytest.mark.parametrize("size", [1, FRAME_BYTES, 3 * FRAME_BYTES])
def test_messages_signed_with_a_different_key_are_rejected(size: int) -> None:
    def exchange(world: Any) -> str:
        objects = ObjectGather(RankKey(bytes([world.rank]) * 32), "whole", world.rank)
        try:
            return str(objects("x" * size, world.all_gather))
        except NotAuthentic as error:
            return str(error)

    first, second = run_threads(exchange, 2)
    assert "message 0 of rank 1 in group whole has no valid authentication code" in first
    assert "message 0 of rank 0" in second


def test_boundary_numbers_round_trip() -> None:
    edges = [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, -math.inf, 5e-324]
    assert decode(encode(edges)) == edges
    assert decode(encode(tuple(edges))) == tuple(edges)
