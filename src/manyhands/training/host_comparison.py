"""Comparison of the code and data of hosts before training, because a difference would cause no error later."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from ..core import SettingsError, Task, event
from ..data import IndexedSource, as_source, data_digest
from ..distributed import World

MAX_NAMED = 5
"""Number of differences that an error names."""


def local_sources() -> dict[str, str]:
    """Return a digest of the source of every module of the project that this program has imported, by name.

    Modules of Python, of installed packages and of manyhands are omitted; hosts compare versions when they join.
    """
    outside = [Path(path).resolve() for path in {*sysconfig.get_paths().values(), str(Path(__file__).parents[1])}]
    found = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        whole = Path(path).resolve()
        if not {"site-packages", "dist-packages"} & set(whole.parts) and not any(
            whole.is_relative_to(folder) for folder in outside
        ):
            with contextlib.suppress(OSError):
                found[name] = hashlib.sha256(whole.read_bytes()).hexdigest()[:16]
    return found


def require_identical(world: World, task: Task, sources: Mapping[str, str], *, allow_different: bool) -> None:
    """Raise SettingsError on all ranks if hosts have imported different code, or would read different data.

    Modules that only one host has imported are not compared. With `allow_different` the differences are reported only.
    """
    own = (world.rank_info.host, dict(sources), _data_of(task))
    all_ = world.gather_objects(own)
    first, code, data = all_[0]
    different = {}
    for host, sources_there, data_there in all_[1:]:
        modules = sorted(name for name in code.keys() & sources_there.keys() if code[name] != sources_there[name])
        found = [f"the source of {name}" for name in modules]
        found += [
            f"{name} ({data_there[name]} instead of {data[name]})" for name in data if data[name] != data_there[name]
        ]
        if found:
            more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
            different[host] = f"{host} differs from {first} in {', '.join(found[:MAX_NAMED])}{more}"
    if not different:
        return
    got = "; ".join(different.values())
    if not allow_different:
        raise SettingsError(
            "all hosts must have the same code and data",
            got=got,
            remedy="copy the same files to all hosts, or pass mh.options.Equality(allow_different=True)",
        )
    if world.is_first:
        world.channel.report(event("notice", text=f"allow_different=True: {got}"))


def _data_of(task: Task) -> dict[str, str]:
    """Return a digest of the task's training and validation data; streams, which may be read only once, have none."""
    found = {}
    for name, data in (("the data", task.data), ("the validation data", task.valid)):
        if data is not None:
            source = as_source(data, collate=task.collate)
            found[name] = data_digest(source) if isinstance(source, IndexedSource) else "a stream"
    return found
