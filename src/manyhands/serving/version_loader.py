"""VersionLoader: loads versions of models, a few at a time, retries failed loads with backoff, and ends versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from .folder import PYTHON_FILE, Print
from .model import Model
from .options import Batching, Replicas
from .replica import READING
from .replica_process import Exported, Given, PredictorSource, PythonFolder
from .version import END, ReplicaPlacement, Version, nothing, without_folders

MAX_LOADS, MAX_RETRIES = 4, 2
"""Models that are loaded at a time, and how many of these may be models whose last load failed."""
_FASTEST_RETRY, _SLOWEST_RETRY = 1.0, 60.0


@dataclass
class Attempt:
    """Failed load of a version: its fingerprint, and when to retry."""

    print: Print
    next: float
    wait: float


class LoadSlots:
    """Limits how many models are loaded at a time.

    Models whose last load failed share fewer slots: one that takes its whole time again and again delays only models
    of its kind.
    """

    def __init__(self) -> None:
        self._all, self._retries = asyncio.Semaphore(MAX_LOADS), asyncio.Semaphore(MAX_RETRIES)

    @asynccontextmanager
    async def hold(self, *, has_failed: bool) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        async with AsyncExitStack() as held:
            if has_failed:
                await held.enter_async_context(self._retries)
            await held.enter_async_context(self._all)
            yield


class VersionLoader:
    """Loads and ends the versions of a catalogue's models, and reports it. All methods run on the event loop."""

    def __init__(
        self,
        models: Mapping[str, Model],
        place: ReplicaPlacement,
        batching: Batching,
        replicas: Replicas,
        drain: float,
        emit: Callable[..., None],
    ) -> None:
        self._models, self._place, self._batching, self._replicas = models, place, batching, replicas
        self._drain, self._emit = drain, emit
        self.warm_up: Callable[[Version], Awaitable[None]] = nothing
        """Called with a version before it becomes available."""
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._slots = LoadSlots()
        self._ending: set[asyncio.Task[None]] = set()

    def is_missing(self, model: Model, number: int) -> bool:
        """Return whether a version is neither loaded nor being loaded."""
        known = model.versions.get(number)
        return known is None or known.is_over

    def forget_failures(self, model: Model) -> None:
        """Load versions that failed again without waiting for their retry."""
        for key in [key for key in self._attempts if key[0] == model.name]:
            del self._attempts[key]

    def refuse(self, model: Model, number: int, path: Path, reason: str, *, is_ours: bool = False) -> None:
        """Report a version that cannot be loaded in the log and in the model's status, once per reason.

        With `is_ours` the reason holds nothing that the model's author wrote, so that clients may see it.
        """
        known = model.versions.get(number)
        if known is not None and (not known.is_over or known.detail == without_folders(reason)):
            return
        version = self._version(model, number, Exported(path / str(number), self._replicas))
        version.state = END
        version.fail(READING, reason)
        version.error = version.detail if is_ours else version.error
        self._emit("version_failed", model=model.name, version=number, reason=version.detail)

    async def load_given(self, model: Model, given: object) -> None:
        """Load a model that was passed as an object; raises on failure."""
        async with self._slots.hold(has_failed=False):
            if self.is_missing(model, 1):
                await self._version(model, 1, Given(given, self._replicas)).load(quietly=self._is_serving)
        self.switch(model)

    async def load(self, model: Model, number: int, path: Path, print_: Print) -> None:
        """Load a version in the background; on failure nothing changes, and the load is retried with backoff.

        While this call waited for its turn, the version may have been loaded or the model unloaded.
        """
        if not self._may_load(model, number, print_):
            return
        attempt = self._attempts.get((model.name, number))
        async with self._slots.hold(has_failed=any(name == model.name for name, _ in self._attempts)):
            if self._may_load(model, number, print_):
                await self._load_in_slot(model, number, path / str(number), print_, attempt)

    def _may_load(self, model: Model, number: int, print_: Print) -> bool:
        return not model.is_unloaded and self.is_missing(model, number) and self._is_due(model, number, print_)

    def _is_due(self, model: Model, number: int, print_: Print) -> bool:
        attempt = self._attempts.get((model.name, number))
        return attempt is None or attempt.print != print_ or time.monotonic() >= attempt.next

    async def _load_in_slot(
        self, model: Model, number: int, path: Path, print_: Print, attempt: Attempt | None
    ) -> None:
        version = self._version(model, number, self._source(path, print_))
        self._emit("version_loading", model=model.name, version=number)
        try:
            await version.load(quietly=self._is_serving)
        except Exception:
            wait = min(2 * attempt.wait, _SLOWEST_RETRY) if attempt is not None else _FASTEST_RETRY
            self._attempts[model.name, number] = Attempt(print_, time.monotonic() + wait, wait)
            self._emit("version_failed", model=model.name, version=number, reason=version.detail)
        else:
            self.forget_failures(model)
            self.switch(model)

    def _source(self, path: Path, print_: Print) -> PredictorSource:
        """Return where a version is loaded from; Python code only if the operator trusts it."""
        if self._replicas.trust_python and any(name == PYTHON_FILE for name, *_ in print_):
            return PythonFolder(path)
        return Exported(path, self._replicas)

    @property
    def _is_serving(self) -> bool:
        """Whether any version is serving, so that loading must not take its cores."""
        return any(model.available for model in self._models.values())

    def _version(self, model: Model, number: int, source: PredictorSource) -> Version:
        version = Version(model.name, number, source, self._place, self._batching)
        version.warm_up = self.warm_up
        version.on_event = lambda kind, **values: self._emit(kind, model=model.name, version=number, **values)
        model.versions[number] = version
        return version

    def switch(self, model: Model) -> None:
        """Let a model's newest version answer, if it does not yet."""
        if model.take_over() and model.current is not None:
            model.is_awaited = True
            self._emit("version_available", model=model.name, version=model.current.number)

    async def end(self, model: Model, version: Version) -> None:
        """Drain and end a version."""
        await version.end(self._drain)
        model.forget_ended()
        self._emit("version_ended", model=model.name, version=version.number)

    def end_later(self, model: Model, version: Version) -> None:
        """Drain and end a version in a task."""
        task = asyncio.ensure_future(self.end(model, version))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def end_surplus(self, model: Model, wanted: Mapping[int, Print], named: Collection[int]) -> list[int]:
        """Before a load, end the versions that are neither wanted nor referred to; return their numbers."""
        if not any(self.is_missing(model, n) and self._is_due(model, n, print_) for n, print_ in wanted.items()):
            return []
        going = [version for version in model.available if version.number not in wanted and version.number not in named]
        for version in going:
            await self.end(model, version)
        return [version.number for version in going]

    async def wait_ended(self) -> None:
        """Wait for the versions that are being ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)
