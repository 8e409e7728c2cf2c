"""Authentication between ranks: torch's store and gloo have none, so data read from them is verified here.

The ranks that joined at the same rendezvous (a generation) share a key. It signs values in the store (`SignedStore`),
confirms every connection of a new group (`confirm`), and authenticates every message of Python values by an HMAC over
its group, source, number and content (`ObjectGather`), which is checked before anything is decoded. Tensors are not
authenticated.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ..core import RunError
from .messages import InvalidMessage, decode, encode

TAG_BYTES = hashlib.sha256().digest_size
FRAME_BYTES = 1024
"""Bytes that every rank sends in the first round of an exchange; a longer message follows in a second round."""
MAX_BYTES = 1 << 32
"""Maximum bytes of one rank's message."""
POLL_SECONDS = 0.05
_LENGTH = struct.Struct("<Q")
_INLINE_BYTES = FRAME_BYTES - _LENGTH.size - TAG_BYTES

Context = str | int | bytes


class NotAuthentic(RunError):
    """Raised when data that a rank read was not written by a rank of its job."""


class RankKey:
    """The key of the ranks of one generation; without a secret, its codes detect corrupt but not forged messages."""

    def __init__(self, secret: bytes) -> None:
        self.is_secret = bool(secret)
        self._mac = hmac.new(secret, digestmod="sha256")

    @classmethod
    def none(cls) -> RankKey:
        """Return the key of ranks that share no secret."""
        return cls(b"")

    @classmethod
    def random(cls) -> RankKey:
        """Return a key that no other process has."""
        return cls(secrets.token_bytes(TAG_BYTES))

    def tag(self, *context: Context, payload: bytes | memoryview = b"") -> bytes:
        """Return the authentication code (HMAC-SHA256) of a payload in its context."""
        mac = self._mac.copy()
        # A MessagePack array is self-delimiting, so no other split of context and payload has the same code.
        mac.update(msgspec.msgpack.encode(context))
        mac.update(payload)
        return mac.digest()

    def accepts(self, tag: bytes | memoryview, *context: Context, payload: bytes | memoryview = b"") -> bool:
        """Return whether an authentication code is correct for a payload in its context; compares in constant time."""
        return hmac.compare_digest(tag, self.tag(*context, payload=payload))


class SignedStore(dist.Store):
    """A store whose values are signed; gloo and NCCL read their peers' addresses through it.

    A value without a valid signature is not returned. It is read again for `patience` seconds, because the authentic
    value may still replace one that a foreign process wrote under a guessed name. Then NotAuthentic is raised.
    """

    def __init__(self, store: dist.Store, key: RankKey, patience: float) -> None:
        super().__init__()
        self._store, self._key, self._patience = store, key, patience

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._key.tag("store", key, payload=data) + data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._patience
        while True:
            found = self._store.get(key)
            tag, data = found[:TAG_BYTES], found[TAG_BYTES:]
            if self._key.accepts(tag, "store", key, payload=data):
                return data
            if time.monotonic() > deadline:
                raise NotAuthentic(
                    f"the value of {key!r} in the ranks' store has no valid signature: a process that is not part of "
                    f"this job has written it. Find that process, or restrict access to this network"
                )
            time.sleep(POLL_SECONDS)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> dist.Store:
        """Return the unsigned store, for NCCL's monitoring threads: they must not wait for Python."""
        return self._store.clone()  # type: ignore[attr-defined,no-any-return]


class ObjectGather:
    """Exchange authenticated Python values within one group.

    All ranks call it in the same order, so their message numbers match.
    """

    def __init__(self, key: RankKey, group: str, rank: int) -> None:
        self._key, self._group, self._rank = key, group, rank
        self._number = 0

    def __call__(self, value: Any, all_gather: Callable[[Tensor], Tensor]) -> list[Any]:
        """Return the values of all ranks, in rank order.

        Args:
            value: This rank's value: plain data, as defined in `distributed.messages`.
            all_gather: Function that stacks the byte tensors of all ranks, which have the same length.

        Raises:
            NotAuthentic: A message is not from the expected rank, or is not the next one.
        """
        payload = encode(value)
        if len(payload) > MAX_BYTES:
            raise RunError(
                f"a message between ranks must have at most {MAX_BYTES} bytes, but got {len(payload)}; send it in parts"
            )
        number, self._number = self._number, self._number + 1
        # A longer message is announced by its own code, so no length is trusted before it is authenticated.
        first = payload if len(payload) <= _INLINE_BYTES else self._tag(self._rank, number, 1, payload)
        frames = _rows(all_gather(_tensor(self._make_frame(number, len(payload), first))))
        heads = [self._verify_frame(source, number, frame) for source, frame in enumerate(frames)]
        longest = max((length for length, _ in heads if length > _INLINE_BYTES), default=0)
        rest = frames
        if longest:
            large = payload if len(payload) > _INLINE_BYTES else b""
            rest = _rows(all_gather(_tensor(large.ljust(longest, b"\0"))))
        return [self._value(source, number, *head, rest[source]) for source, head in enumerate(heads)]

    def _tag(self, source: int, number: int, part: int, payload: bytes | memoryview) -> bytes:
        return self._key.tag("objects", self._group, source, number, part, payload=payload)

    def _make_frame(self, number: int, length: int, content: bytes) -> bytes:
        head = _LENGTH.pack(length)
        frame = head + self._tag(self._rank, number, 0, head + content) + content
        return frame.ljust(FRAME_BYTES, b"\0")

    def _verify_frame(self, source: int, number: int, frame: memoryview) -> tuple[int, memoryview]:
        """Return the length of a message and its content, or the code of content that follows in the second round."""
        (length,) = _LENGTH.unpack_from(frame)
        start = _LENGTH.size + TAG_BYTES
        content = frame[start : start + (length if length <= _INLINE_BYTES else TAG_BYTES)]
        expected = self._tag(source, number, 0, bytes(frame[: _LENGTH.size]) + content)
        if not hmac.compare_digest(expected, frame[_LENGTH.size : start]) or length > MAX_BYTES:
            raise self._forgery_error(source, number)
        return length, content

    def _value(self, source: int, number: int, length: int, content: memoryview, rest: memoryview) -> Any:
        if length > _INLINE_BYTES:
            tag, content = content, rest[:length]
            if not hmac.compare_digest(self._tag(source, number, 1, content), tag):
                raise self._forgery_error(source, number)
        try:
            return decode(content, is_authentic=self._key.is_secret)
        except InvalidMessage as error:
            raise NotAuthentic(f"rank {source} sent an invalid message: {error}") from None

    def _forgery_error(self, source: int, number: int) -> NotAuthentic:
        return NotAuthentic(
            f"message {number} of rank {source} in group {self._group} has no valid authentication code: it was "
            f"changed in transit, or a process that is not part of this job has taken that rank's connection. "
            f"Restrict access to this network"
        )


def confirm(key: RankKey, group: dist.ProcessGroup, name: str, nonces: Mapping[int, bytes], timeout: float) -> None:
    """Verify that every connection of a new gloo group leads to a rank of this job.

    Gloo's listeners accept the first peer that connects and sends the number of a connection. Therefore each two ranks
    exchange codes over their connection, computed from the key and from fresh random numbers of all ranks.

    Args:
        key: The key of this generation.
        group: The new group.
        name: The name that all ranks of the group use for it.
        nonces: A fresh random number of each rank of the whole world, from the signed store.
        timeout: Seconds that a peer may take.

    Raises:
        NotAuthentic: A peer did not send the expected code in time.
    """
    ranks = dist.get_process_group_ranks(group)
    mine = dist.get_rank()
    fresh = b"".join(nonces[rank] for rank in ranks)

    def code(source: int, to: int) -> bytes:
        return key.tag("confirm", name, source, to, payload=fresh)

    others = [rank for rank in ranks if rank != mine]
    codes = {rank: torch.empty(TAG_BYTES, dtype=torch.uint8) for rank in others}
    sent = {rank: _tensor(code(mine, rank)) for rank in others}
    works = [(rank, dist.irecv(codes[rank], rank, group=group)) for rank in others]
    works += [(rank, dist.isend(sent[rank], rank, group=group)) for rank in others]
    for rank, work in works:
        assert work is not None
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise NotAuthentic(
                f"rank {rank} did not confirm its connection in group {name} within {timeout:.0f} s: it has failed, or "
                f"a process that is not part of this job has taken its connection"
            ) from error
    for rank, given in codes.items():
        if not hmac.compare_digest(code(rank, mine), given.numpy().tobytes()):
            raise NotAuthentic(
                f"the connection to rank {rank} in group {name} leads to a process that is not part of this job. Find "
                f"that process, or restrict access to this network"
            )


def _rows(stacked: Tensor) -> list[memoryview]:
    return [memoryview(row) for row in stacked.numpy()]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
