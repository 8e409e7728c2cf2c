"""ModelFolder: scans a folder of models in a thread, while the event loop answers requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .folder import (
    MAX_ENTRIES,
    MAX_EXAMINED,
    FolderScan,
    Print,
    VersionFilter,
    VersionPolicy,
    Versions,
    models_in,
    scan_models,
)


class ModelFolder:
    """A folder of models, or none (`root` is None), in which nothing is found; one scan runs at a time."""

    def __init__(self, root: Path | None, policy: VersionPolicy, python: bool, emit: Callable[..., None]) -> None:
        self._root, self._policy, self._python, self._emit = root, policy, python, emit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manyhands-scan")
        self._truncated: set[str] = set()
        """Folders that were reported to have more entries than a scan examines."""

    def close(self) -> None:
        """Scan no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that reads or writes files in the folder, after the scan in progress."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def names(self) -> set[str]:
        """Return the names of all models in the folder."""
        return set() if self._root is None else set(await self.run(models_in, self._root))

    async def scan(self, known: Mapping[str, VersionFilter], names: Collection[str] | None) -> FolderScan:
        """Scan the folder for models of these names, or for all; report folders with too many entries.

        `known` has the filters of models that have one of their own.
        """
        if self._root is None:
            return FolderScan({}, set(), {})
        usual = VersionFilter(self._policy, python=self._python)
        scan: FolderScan = await self.run(scan_models, self._root, known, usual, names)
        for name in sorted(scan.truncated - self._truncated):
            which = f"of the model {name}" if name else "of models"
            rule = f"a scan reads {MAX_ENTRIES} entries of a folder and the manifests of {MAX_EXAMINED} versions"
            remedy = "remove old versions and other folders"
            self._emit("folder_too_large", reason=f"{rule}, but the folder {which} has more; {remedy}", model=name)
        self._truncated = scan.truncated if names is None else self._truncated | scan.truncated
        for name, kind in scan.failed.items():
            self._emit("watch_failed", model=name, reason=kind)
        return scan

    async def all_versions(self, name: str) -> tuple[Path, dict[int, Print]]:
        """Return the folder of a model and all its complete versions."""
        if self._root is None:
            return Path(), {}
        every = VersionFilter(python=self._python)
        scan = await self.run(scan_models, self._root, {name: every}, every, {name})
        path, versions = scan.models.get(name, (self._root / name, Versions({}, {})))
        return path, versions.complete
