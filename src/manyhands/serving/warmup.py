"""Warm-up with recorded requests, which every replica computes before a version takes over.

A file NAME.jsonl has one request to the model NAME per line, in the format of `:predict`. A server can record them.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import RequestRefused, SettingsError, open_regular
from .batcher import Arrays, Ticket
from .dtypes import BY_TORCH, Array, Kind, to_numbers
from .http import BadRequest
from .protocols.answer_text import text_lists
from .protocols.protocol import parse_json
from .protocols.tensorflow_rest import parse_predict
from .texts import text_bytes
from .version import Version

MAX_REQUESTS, MAX_BYTES = 100, 1 << 20
"""Maximum requests per model, and bytes of each."""
_PATIENCE = 600.0


class Warmup:
    """Send the recorded requests of a model to every replica of a version."""

    def __init__(self, folder: Path, emit: Callable[..., None]) -> None:
        require_folder(folder, "warmup")
        self._folder, self._emit = folder, emit

    async def __call__(self, version: Version) -> None:
        """Compute all recorded requests; those that do not fit this version are counted by status and skipped."""
        path = self._folder / f"{version.model}.jsonl"
        if not path.is_file():
            return
        with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
            lines = [line for line in (file.readline(MAX_BYTES + 1) for _ in range(MAX_REQUESTS)) if line.strip()]
        codes: Counter[str] = Counter()
        try:
            for replica in list(version.replicas):
                version.batcher.workers = [replica]
                for line in lines:
                    codes[await self._ask(version, line)] += 1
        finally:
            # A replica may have died and been replaced in the meantime.
            version.batcher.workers = list(version.replicas)
        self._emit("warmed_up", model=version.model, version=version.number, requests=dict(codes))

    async def _ask(self, version: Version, line: bytes) -> str:
        over: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        try:
            inputs, _ = parse_predict(parse_json(line, MAX_BYTES), version.signature)
            rows = len(next(iter(inputs.values())))
            version.batcher.submit(inputs, rows, deadline=time.monotonic() + _PATIENCE, done=over.set_result)
        except BadRequest:
            return "INVALID_ARGUMENT"
        except RequestRefused as refusal:
            return refusal.code
        ticket = await over
        return "OK" if ticket.refusal is None else ticket.refusal.code


class WarmupRecorder:
    """Record the first requests of every model in the format of the warm-up."""

    def __init__(self, folder: Path) -> None:
        require_folder(folder, "record")
        self._folder = folder
        self._counts: Counter[str] = Counter()

    def __call__(self, version: Version, inputs: Arrays) -> None:
        """Record a request, unless it is too large or enough were recorded."""
        if (
            self._counts[version.model] >= MAX_REQUESTS
            or sum(array.nbytes + text_bytes(array) for array in inputs.values()) > MAX_BYTES // 8
        ):
            return
        self._counts[version.model] += 1
        specs = version.signature.inputs
        values = {name: _values(array, BY_TORCH[specs[name].dtype]) for name, array in inputs.items()}
        path = self._folder / f"{version.model}.jsonl"
        with os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
            file.write(json.dumps({"inputs": values}) + "\n")


def _values(array: Array, kind: Kind) -> Any:
    return text_lists(array, kind) if kind.is_text else to_numbers(array, kind).tolist()


def require_folder(folder: Path, what: str) -> None:
    """Raise SettingsError if a path is not a folder."""
    if not folder.is_dir():
        raise SettingsError(
            f"{what} must be a folder with a file NAME.jsonl for each model",
            got=f"{str(folder)!r}, which is not a folder",
            remedy="create it first",
        )
