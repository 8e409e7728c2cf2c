"""Fuzz targets of what servers, routers and clients read from each other, and of the state that a server keeps.

Each takes any bytes and raises only on a defect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from manyhands.core import RequestRefused
from manyhands.serving.client import Client
from manyhands.serving.exposition import exposition
from manyhands.serving.folder import LABEL
from manyhands.serving.limits import Limits
from manyhands.serving.model import Model
from manyhands.serving.routing.backend import Address
from manyhands.serving.routing.management import RouterManagement, changes, merged
from manyhands.serving.saved_state import SavedState, StateFolder

from .files import folder


def saved_state(data: bytes) -> None:
    """Read bytes as a server's state of a model; what is accepted is written alike, and cannot forge metrics."""
    states = StateFolder(folder("saved_state"))
    states.path.chmod(0o700)
    (states.path / "m.json").write_bytes(data)
    found, refused = states.read()
    if len(found) + len(refused) != 1:
        raise AssertionError(f"one file is {found} and {refused}")
    for state in found.values():
        if not all(map(LABEL.fullmatch, state.labels)):
            raise AssertionError(f"labels that no one can set: {list(state.labels)}")
        if SavedState.from_dict(json.loads(json.dumps(state.to_dict()))) != state:
            raise AssertionError("another state when it is read again")
        model = Model("m")
        model.labels = dict(state.labels)
        catalogue: Any = SimpleNamespace(models={"m": model}, splits={"m": list(state.shares)})
        lines = [line for line in exposition(catalogue).decode().splitlines() if not line.startswith("# TYPE ")]
        if len(lines) != len(state.labels) + len(state.shares):
            raise AssertionError(f"lines that the state does not have: {lines}")


def backend_answer(data: bytes) -> None:
    """Read bytes as what a backend reports about its models, labels and traffic splits."""

    async def fetch(*words: Any, **options: Any) -> Any:
        return SimpleNamespace(status=200, body=data)

    backend: Any = SimpleNamespace(address=Address("127.0.0.1", 1, 2, 3), fetch=fetch)
    management = RouterManagement(Limits(), None)
    with contextlib.suppress(RequestRefused):
        routing = _LOOP.run_until_complete(management._routing_of(backend))
        for own in ({"labels": {}, "splits": {}}, routing):
            json.dumps(list(changes(own, routing)))
    with contextlib.suppress(RequestRefused):
        state = _LOOP.run_until_complete(management._state_of(backend))
        json.dumps(merged([state, state]))


def client_answer(data: bytes) -> None:
    """Read bytes as the answer of a server: the first byte is the length of its JSON in 4 bytes, or that it is all."""
    size = 4 * data[0] if data[:1] and data[0] < 255 else len(data) - 1
    client = Client("http://127.0.0.1:1")
    wire: Any = SimpleNamespace(send=lambda *words: ({"inference-header-content-length": str(size)}, data[1:]))
    client._wire = wire
    with contextlib.suppress(RequestRefused):
        found = client("m", {"x": np.ones(1, np.float32)})
        if not all(isinstance(one, np.ndarray) for one in (found.values() if isinstance(found, dict) else [found])):
            raise AssertionError(f"an answer that is no array: {found!r}")


_LOOP = asyncio.new_event_loop()
TARGETS: dict[str, Callable[[bytes], None]] = {
    "saved_state": saved_state,
    "backend_answer": backend_answer,
    "client_answer": client_answer,
}
_STATE = {
    "labels": {"stable": 1},
    "shares": [{"model": "m", "version": 1, "weight": 2.0}, {"model": "m", "version": None, "weight": 1}],
    "rejected": [3],
    "asked": [1],
    "unloaded": False,
}
_VERSION = {
    "version": 1, "state": "AVAILABLE", "error": "", "requests": {"OK": 3}, "latency": [0, 3], "batches": 2,
    "rows": 3, "compute": 0.5, "queue": 0, "replicas": [{"device": "cpu", "pid": 1, "rows": 3}],
}  # fmt: skip


def _answers() -> tuple[bytes, ...]:
    head = [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}]
    texts = [{"name": "y", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 10}}]
    plain = json.dumps({"outputs": head}).encode()
    binary = json.dumps({"outputs": texts}).encode()
    binary += b" " * (-len(binary) % 4)
    return b"\xff" + plain, bytes([len(binary) // 4]) + binary + b"\1\0\0\0a\1\0\0\0\xff"


SEEDS: dict[str, Callable[[], tuple[bytes, ...]]] = {
    "saved_state": lambda: (json.dumps(_STATE).encode(),),
    "backend_answer": lambda: (
        json.dumps({"labels": {"m": {"stable": 1}}, "splits": {"m": _STATE["shares"]}}).encode(),
        json.dumps(
            {
                "models": [{"name": "m", "current": 1, "labels": {"stable": 1}, "versions": [_VERSION]}],
                "splits": {"m": _STATE["shares"]},
            }
        ).encode(),
    ),
    "client_answer": _answers,
}
"""Good inputs to begin with, by target."""
