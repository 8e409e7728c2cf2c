"""Catalogue of the served models: watches the folder; loads, switches, drains and rolls back versions."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import random
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ..core import FileError, RequestRefused
from .folder import (
    NAME,
    FolderScan,
    Print,
    VersionFilter,
    VersionPolicy,
    Versions,
)
from .model import Model, Unknown
from .model_folder import ModelFolder
from .options import Batching, Replicas, Rollout
from .saved_state import FOLDER, SavedState, StateFolder, TrafficShare
from .version import ReplicaPlacement, Version, end_all, without_folders
from .version_loader import VersionLoader

_MODELS_PER_TURN = 50
"""Number of models that a look starts to handle before the event loop answers requests again."""


@dataclass(frozen=True, kw_only=True)
class CatalogueSettings:
    """Which models are served, and how versions are replaced."""

    root: Path | None = None
    given: Mapping[str, Any] | None = None
    """Predictors by name: an `mh.Predictor`, or an object that `PythonModel` takes."""
    rollout: Rollout
    batching: Batching
    replicas: Replicas = field(default_factory=Replicas)
    drain: float = 30.0
    """Seconds for in-flight requests to finish when a version is unloaded."""

    @functools.cached_property
    def policy(self) -> VersionPolicy:
        """The versions that are served."""
        return VersionPolicy.parse(self.rollout.versions)


class Catalogue:
    """Served models by name. All methods run on the server's event loop."""

    def __init__(self, settings: CatalogueSettings, place: ReplicaPlacement, emit: Callable[..., None]) -> None:
        self.settings = settings
        self.models: dict[str, Model] = {}
        self.splits: dict[str, list[TrafficShare]] = {}
        self._emit = emit
        self.loader = VersionLoader(self.models, place, settings.batching, settings.replicas, settings.drain, emit)
        self._watching: asyncio.Future[None] | None = None
        self._busy: dict[tuple[str, str], asyncio.Task[None]] = {}
        """What the watch has started, by its kind and the name of the model."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Lock per model, so that its versions are loaded in order."""
        self._folder = ModelFolder(settings.root, settings.policy, settings.replicas.trust_python, emit)
        self._listed: set[str] | None = None
        """Names of the models selected by `reload`; None for all models of the folder."""
        kept = settings.rollout.state or (settings.root / FOLDER if settings.root is not None else None)
        self._states = StateFolder(kept) if kept is not None else None
        self._unsaved = ""
        """Why the last state could not be written, as reported."""

    async def start(self) -> None:
        """Load all models and start watching the folder; a model that fails to load does not affect the others."""
        await self._restore()
        given = [self.models.setdefault(name, Model(name)) for name in self.settings.given or {}]
        wanted = [model for model in given if not model.is_unloaded]
        for outcome in await asyncio.gather(*map(self._load_given, wanted), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        if self.settings.root is not None:
            first = await self._begin_refreshes(first=True)
            # A model that takes long to load does not keep the others from their next versions.
            self._watching = asyncio.ensure_future(self._watch())
            await asyncio.gather(*first, return_exceptions=True)

    async def stop(self) -> None:
        """Stop watching the folder, then drain and end all versions."""
        watching = [*self._busy.values(), *([self._watching] if self._watching is not None else [])]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        self._folder.close()
        # Versions that are being unloaded end by themselves.
        await self.loader.wait_ended()
        await end_all([v for model in self.models.values() for v in model.versions.values()], self.settings.drain)

    @property
    def is_ready(self) -> bool:
        """Whether every model that existed at the start, or has answered before, has a replica that can answer.

        A broken or empty model that is added later does not make the server unready.
        """
        return all(model.is_alive or model.is_unloaded or not model.is_awaited for model in self.models.values())

    def find(self, name: str, version: int | None = None, label: str | None = None, key: bytes = b"") -> Version:
        """Return the version that answers a request; equal keys always get the same share of a traffic split."""
        split = self.splits.get(name)
        if split is not None and version is None and label is None:
            share = _pick(split, key)
            name, version = share.model, share.version
        model = self.models.get(name)
        if model is None:
            raise Unknown(name, version)
        return model.find(version, label)

    def model(self, name: str) -> Model:
        """Return the model of a name; raises Unknown if there is none."""
        if name not in self.models:
            raise Unknown(name)
        return self.models[name]

    def set_split(self, name: str, shares: list[TrafficShare]) -> None:
        """Split a name's requests by weight among versions or models; an empty list removes the split."""
        if not NAME.fullmatch(name):
            raise RequestRefused(
                "INVALID_ARGUMENT",
                f"a model name must consist of letters, digits, dashes and underscores, but got {name[:64]!r}",
            )
        for share in shares:
            if not 0 < share.weight < math.inf:
                raise RequestRefused("INVALID_ARGUMENT", f"weights must be numbers above 0, but got {share.weight}")
            self.model(share.model).require(share.version)
        if shares:
            self.splits[name] = shares
        else:
            self.splits.pop(name, None)
        self._emit("split", model=name, shares=[vars(share) for share in shares])

    async def set_label(self, name: str, label: str, version: int | None) -> None:
        """Assign a label to a loaded version of a model; None removes the label."""
        self.model(name).set_label(label, version)
        self._emit("label", model=name, label=label, version=version)
        await self.save(name)

    async def save(self, *names: str) -> None:
        """Write what was set under these names, so that it survives a restart; failures are reported."""
        if self._states is None:
            return
        for name in names:
            model = self.models.get(name) or Model(name)
            state = SavedState(
                labels=dict(model.labels),
                shares=tuple(self.splits.get(name, ())),
                rejected=frozenset(model.rejected),
                asked=frozenset(model.asked),
                is_unloaded=model.is_unloaded,
            )
            try:
                await self._folder.run(self._states.write, name, state)
            except (OSError, FileError) as error:
                reason = without_folders(str(getattr(error, "strerror", None) or error))
                if reason != self._unsaved:
                    self._emit("state_not_saved", model=name, reason=f"{reason}; a restart loses what was set")
                self._unsaved = reason
            else:
                self._unsaved = ""

    async def _restore(self) -> None:
        """Restore labels and splits from before a restart; the versions that they name are loaded too."""
        if self._states is None:
            return
        states, refused = await self._folder.run(self._states.read)
        for name, reason in refused.items():
            self._emit("state_refused", model=name, reason=without_folders(reason))
        there = set(self.settings.given or ()) | await self._folder.names()
        for name, state in states.items():
            if name in there:
                model = self.models.setdefault(name, Model(name))
                model.labels, model.is_unloaded = dict(state.labels), state.is_unloaded
                model.rejected, model.asked = set(state.rejected), set(state.asked)
            if state.shares:
                self.splits[name] = list(state.shares)
            for label, version in state.labels.items():
                self._emit("label", model=name, label=label, version=version)
            if state.shares:
                self._emit("split", model=name, shares=[vars(share) for share in state.shares])

    async def load(self, name: str, version: int | None = None) -> None:
        """Load a model or version on request, even if it was rolled back or unloaded before; raises on failure."""
        if name not in self.models and name not in (await self._scan({name})).models:
            raise Unknown(name, version)
        model = self.models.setdefault(name, Model(name))
        model.is_unloaded = False
        if version is not None:
            model.asked.add(version)
            model.rejected.discard(version)
        else:
            model.rejected.clear()
        self.loader.forget_failures(model)
        if name in (self.settings.given or {}) and model.current is None:
            await self._load_given(model)
        await self.refresh({name})
        failed = [v.detail for v in model.versions.values() if v.error and version in (None, v.number)]
        if failed:
            raise RequestRefused("FAILED_PRECONDITION", f"failed to load '{name}': {failed[0]}")
        if not model.versions:
            self.models.pop(name, None)
        if not model.versions or (version is not None and version not in model.versions):
            model.asked.discard(version)
            raise Unknown(name, version)
        await self.save(name)

    async def unload(self, name: str) -> None:
        """Drain and end every version of a model."""
        model = self.model(name)
        model.is_unloaded = True
        await self.save(name)
        await end_all(list(model.versions.values()), self.settings.drain)
        model.forget_ended()

    async def reload(
        self, policies: Mapping[str, VersionPolicy | None], labels: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Serve exactly these models from now on, with these version policies and labels."""
        if self.settings.root is None:
            raise RequestRefused(
                "FAILED_PRECONDITION",
                "this server does not load its models from a folder, so its list of models cannot be replaced",
            )
        there = await self._folder.names()
        for name in policies:
            if name not in there:
                raise Unknown(name)
        self._listed = set(policies)
        for name in [name for name, model in self.models.items() if name not in policies and not model.is_unloaded]:
            await self.unload(name)
        for name, policy in policies.items():
            model = self.models.setdefault(name, Model(name))
            model.policy, model.is_unloaded = policy, False
        await self.refresh(set(policies))
        for name, named in labels.items():
            model = self.models[name]
            model.labels = {}
            for label, version in named.items():
                model.set_label(label, version)
        await self.save(*policies)
        self._emit("reloaded", models=sorted(policies))

    async def roll_back(self, name: str, reason: str = "asked for") -> int:
        """Reject the current version and serve the one before, immediately if it is still loaded; return its number."""
        model = self.model(name)
        path, there = await self._folder.all_versions(name)
        current = model.current
        if current is None:
            raise Unknown(name)
        known = {*there, *(version.number for version in model.available)}
        older = [number for number in known if number < current.number and number not in model.rejected]
        if not older:
            raise RequestRefused("FAILED_PRECONDITION", f"{name} has no version before {current.number}")
        model.rejected.add(current.number)
        if not any(version.number in older for version in model.available):
            async with self._turn(name):
                if self.settings.rollout.unload_first:
                    await self.loader.end(model, current)
                await self.loader.load(model, max(older), path, there[max(older)])
        self.loader.switch(model)
        if model.current is None or model.current is current:
            model.rejected.discard(current.number)
            raise RequestRefused("FAILED_PRECONDITION", f"version {max(older)} of {name} could not be loaded")
        ended = self._end_splits(name, current.number)
        self._emit("rolled_back", model=name, version=current.number, to=model.current.number, reason=reason)
        await self.save(name, *ended)
        return model.current.number

    def _end_splits(self, name: str, version: int) -> list[str]:
        """End the traffic split of a model whose version was rolled back, and that version's shares of other splits.

        Returns the names of the other splits.
        """
        changed = []
        for alias, shares in list(self.splits.items()):
            if any(share.model == name and share.version == version for share in shares):
                rest = [share for share in shares if share.model != name or share.version != version]
                self.set_split(alias, [] if alias == name else rest)
                changed += [alias] if alias != name else []
        return changed

    async def refresh(self, names: Collection[str]) -> None:
        """Scan the folder once; load new versions of these models and unload unwanted ones."""
        found = (await self._scan(names)).models
        await asyncio.gather(*(self._refresh_model(name, *found[name]) for name in found))

    async def _begin_refreshes(self, *, first: bool = False) -> list[asyncio.Task[None]]:
        """Scan the folder once and handle each model in a task, except those that are still being handled."""
        tasks = []
        scan = await self._scan(None)
        for index, (name, (path, there)) in enumerate(scan.models.items()):
            tasks += self._begin("look", name, partial(self._refresh_model, name, path, there, first=first))
            if index % _MODELS_PER_TURN == _MODELS_PER_TURN - 1:
                await asyncio.sleep(0)
        return tasks

    def _begin(self, kind: str, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> list[asyncio.Task[None]]:
        """Start a task unless one of this kind still runs for the model; return it, if there is one."""
        if (kind, name) in self._busy:
            return []

        async def run() -> None:
            try:
                await work()
            except Exception as error:
                # An error in one model must not affect the others.
                self._emit("watch_failed", model=name, reason=type(error).__name__)

        self._busy[kind, name] = task = asyncio.ensure_future(run())
        task.add_done_callback(lambda _: self._busy.pop((kind, name)))
        return [task]

    async def _refresh_model(self, name: str, path: Path, there: Versions, *, first: bool = False) -> None:
        async with self._turn(name):
            model = self.models.setdefault(name, Model(name))
            model.is_awaited |= first and bool(there.complete)
            for number, reason in there.refused.items():
                self.loader.refuse(model, number, path, reason)
            for number, reason in there.incomplete.items():
                self.loader.refuse(model, number, path, reason, is_ours=True)
            await self._settle(model, path, there.complete)

    def _turn(self, name: str) -> asyncio.Lock:
        """Return the lock of a model, which exists as long as it is used."""
        return self._turns.setdefault(name, asyncio.Lock())

    async def _scan(self, names: Collection[str] | None) -> FolderScan:
        """Scan the folder for these models, or for all that are served."""
        if self._listed is not None:
            names = self._listed if names is None else self._listed & set(names)
        return await self._folder.scan({name: self._filter(model) for name, model in self.models.items()}, names)

    def _filter(self, model: Model) -> VersionFilter:
        # A version that was loaded on request or has a label may not be among the latest ones.
        first = model.asked | _named(model, self.splits)
        policy = None if first else model.policy or self.settings.policy
        python = self.settings.replicas.trust_python
        return VersionFilter(policy, frozenset(model.rejected), frozenset(first), python)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.settings.rollout.poll)
            try:
                for name, model in list(self.models.items()):
                    if ("rollback", name) not in self._busy and (reason := model.verdict(self.settings.rollout)):
                        self._begin("rollback", name, partial(self.roll_back, name, reason))
                await self._begin_refreshes()
            except Exception as error:
                # An error during one scan must not end the watch.
                self._emit("watch_failed", reason=type(error).__name__)

    async def _settle(self, model: Model, path: Path, there: Mapping[int, Print]) -> None:
        if model.is_unloaded:
            return
        policy = model.policy or self.settings.policy
        wanted = policy.wanted(set(there) - model.rejected) | ((model.asked | _named(model, self.splits)) & set(there))
        unloaded = (
            await self.loader.end_surplus(model, {n: there[n] for n in wanted}, _named(model, self.splits))
            if self.settings.rollout.unload_first
            else []
        )
        for number in sorted(wanted):
            await self.loader.load(model, number, path, there[number])
        if unloaded and not model.available:
            _, before = await self._folder.all_versions(model.name)
            if unloaded[-1] in before:
                await self.loader.load(model, unloaded[-1], path, before[unloaded[-1]])
        self.loader.switch(model)
        # Keep every version while none is available; during a rollout guard's trial keep the previous one.
        if model.current is None:
            return
        on_probation = time.monotonic() - model.taken_over < self.settings.rollout.probation
        keep = {*wanted, *_named(model, self.splits)}
        if on_probation and model.before is not None:
            keep.add(model.before.number)
        for version in model.available:
            if version.number not in keep and version is not model.current:
                self.loader.end_later(model, version)

    async def _load_given(self, model: Model) -> None:
        assert self.settings.given is not None
        async with self._turn(model.name):
            await self.loader.load_given(model, self.settings.given[model.name])


def _named(model: Model, splits: Mapping[str, list[TrafficShare]]) -> set[int]:
    """Return the version numbers of a model that labels and traffic splits refer to."""
    shares = (share for split in splits.values() for share in split)
    split = {share.version for share in shares if share.model == model.name and share.version is not None}
    return split | set(model.labels.values())


def _pick(split: list[TrafficShare], key: bytes) -> TrafficShare:
    """Return the share of a traffic split for a key, or a random one without a key."""
    # The choice of the share needs no cryptographic randomness.
    chance = random.random()  # noqa: S311
    point = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64 if key else chance
    point *= sum(share.weight for share in split)
    for share in split:
        point -= share.weight
        if point < 0:
            return share
    return split[-1]
