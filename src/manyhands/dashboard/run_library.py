"""Library of the folders that the dashboard shows; a thread finds and reads them, the most recently changed first."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core import EVENTS, printable
from .log import ACCESS, Log
from .log_source import LogSource
from .metrics import Metrics
from .run import RECORD, RunFolder
from .study import JOURNAL, StudyFolder

DEPTH = 4
"""Depth to which subfolders are searched, enough for studies/NAME/trials/NUMBER in a folder."""
PASSED_OVER = ("checkpoints",)
"""Names of folders that are not searched."""
INTERVAL = 0.5
"""Seconds between two scans."""
LONGEST_ERROR = 500
"""Maximum characters of an error that pages show."""
MOST_FOLDERS = 20_000
"""Maximum number of folders that are searched in each folder of the dashboard, including itself."""
LOCKS = Path("/proc/locks")
"""File in which Linux lists all locked files."""


class Library:
    """Find runs, studies and logs in some folders, and keep their parsed contents up to date.

    Every change gets the next `stamp`, a number. A client sends the last stamp that it has seen, to get the changes
    after it.

    Args:
        folders: Folders to search.
        servers: URLs of servers whose metrics are polled.
    """

    def __init__(self, folders: Sequence[Path], servers: Sequence[str] = ()) -> None:
        self._folders = _named(folders)
        self.servers = [Metrics(url) for url in servers]
        self.sources: dict[str, LogSource] = {}
        self.stamp = 0
        self.has_changed = threading.Condition()
        """Condition that is notified of every change; its lock guards all accesses to the library."""
        self._next = threading.Lock()
        """Lock that a thread holds while it waits for the lock of `has_changed`, so that reading does not starve
        pages."""
        self.error = ""
        """Error of the last scan that failed; empty if none has."""
        self._states: dict[str, str] = {}
        self._scanned_at = float("-inf")
        self._wanted = ""
        self._num_reads = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Context that holds the library's lock; threads that wait for it get it in turn."""
        with self._next:
            self.has_changed.acquire()
        try:
            yield
        finally:
            self.has_changed.release()

    def run(self, closing: threading.Event) -> None:
        """Search and read folders until `closing` is set."""
        while not closing.is_set():
            try:
                is_more = self.refresh()
            except Exception as error:
                # An error during one scan must not end the loop.
                is_more, self.error = False, f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
            if not is_more:
                closing.wait(INTERVAL)

    def watch_servers(self, closing: threading.Event) -> None:
        """Poll the metrics of the servers until `closing` is set.

        This runs in a separate thread, so that a slow server does not delay the reading of folders.
        """
        while not closing.wait(2 * INTERVAL):
            for metrics in self.servers:
                metrics.look()
            with self.turn():
                self.stamp += 1
                self.has_changed.notify_all()

    def refresh(self) -> bool:
        """Search for new folders if `INTERVAL` has passed, and read a slice of a folder with unread data.

        Every second slice is of the folder that has waited longest, so that one without an end does not delay others.

        Returns:
            Whether a slice was read, so that this method should be called again without a pause.
        """
        if time.monotonic() - self._scanned_at > INTERVAL:
            self._scanned_at = time.monotonic()
            self._scan()
            grown = [source for source in self._in_order() if source.signature != source.has_read]
            self._note([source for source in grown if not source.pending and self._read(source)])
        pending = [source for source in self._in_order() if source.pending]
        if not pending:
            return False
        source = pending[0] if self._num_reads % 2 else min(pending, key=lambda source: source.read_last)
        if self._read(source):
            self._note([source])
        return True

    def want(self, name: str) -> LogSource | None:
        """Return the source with an id, which a page shows, and read it before the others; None if there is none."""
        self._wanted = name
        return self.sources.get(name)

    # -- data of the pages; callers hold the lock -----------------------------------------------------------------

    def overview(self, since: int = 0) -> dict[str, Any]:
        """Return the summaries of all sources that have changed after the stamp `since`, and the ids of all sources."""
        changed = [source for source in self.sources.values() if source.stamp > since]
        found: dict[str, Any] = {
            name: [self._content(source, "summary") for source in changed if source.kind == kind]
            for name, kind in (("runs", RunFolder.kind), ("studies", StudyFolder.kind), ("logs", Log.kind))
        }
        pending = sum(source.pending for source in self.sources.values())
        return {"stamp": self.stamp, "ids": list(self.sources), "pending": pending, "error": self.error, **found}

    def detail(self, name: str, kind: str) -> dict[str, Any] | None:
        """Return the data of the page of a source with this id and kind; None if there is none.

        The source is read before the others from now on.
        """
        source = self.want(name)
        return self._content(source, "detail") if source is not None and source.kind == kind else None

    def _content(self, source: LogSource, what: str) -> dict[str, Any]:
        """Return the result of a source's "summary" or "detail" method; if that raises, mark the source as failed."""
        try:
            content = getattr(source, what)()
        except Exception as error:
            content = getattr(self._failed(source, error), what)()
        return dict(content)

    def _failed(self, source: LogSource, error: Exception) -> LogSource:
        """Replace a source whose files could not be parsed by an empty one with the error, and return that."""
        fresh = self.sources[source.id] = type(source)(source.id, source.path)
        fresh.failure = f"it could not be read: {type(error).__name__}: {error}"[:LONGEST_ERROR]
        fresh.signature = fresh.has_read = source.signature
        return fresh

    def plans(self) -> list[dict[str, Any]]:
        """Return all plans, newest first, each with the measurements of the planner and of runs of the same task."""
        found = []
        for source in self.sources.values():
            plans = [source.plan] if isinstance(source, RunFolder) and source.plan else []
            plans += source.plans if isinstance(source, Log) else []
            found += [{**plan, "from": source.id, "points": list(self._points(plan))} for plan in plans]
        return sorted(found, key=lambda plan: -plan["t"])

    def cluster(self) -> list[dict[str, Any]]:
        """Return an entry for every rank of a run and for every device of a server."""
        found = []
        for source in self.sources.values():
            if isinstance(source, RunFolder):
                about = {"id": source.id, "name": source.path.name, "state": source.state, "changed": source.changed}
                places = source.ranks.placed(source.record.get("devices", []))
                found += [{**about, "partition": source.partition is not None, **place} for place in places]
            elif isinstance(source, Log) and source.serving:
                about = {"id": source.id, "name": source.path.name, "state": source.state, "changed": source.changed}
                host = source.serving.get("host") or "this host"
                found += [
                    {**about, "host": host, "device": device, "rank": None, "memory": None}
                    for device in source.serving.get("devices") or []
                ]
        return found

    def _points(self, plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the measured speed-ups of a plan's strategies, and those of runs that can be compared with it."""
        alone = plan.get("alone")
        if not alone:
            return
        for option in plan["options"]:
            if option["measured"]:
                speedup = alone / option["measured"]
                yield {"devices": option["devices"], "speedup": speedup, "what": f"tried: {option['strategy']}"}
        for source in self.sources.values():
            if isinstance(source, RunFolder) and source.step_seconds and _is_of(source, plan):
                speedup = alone / source.step_seconds
                yield {"devices": len(source.record["devices"]), "speedup": speedup, "what": f"run {source.id}"}

    # -- reading --------------------------------------------------------------------------------------------------

    def _read(self, source: LogSource) -> bool:
        """Read a slice of a source, and return whether its data have changed; errors are recorded in the source.

        A source whose files were replaced is read from the start, as an empty one.
        """
        with self.turn():
            self._num_reads += 1
            source.read_last = self._num_reads
            try:
                seen = source.refresh()
            except Exception as error:
                self._failed(source, error)
                return True
            if source.was_replaced:
                self.sources[source.id] = type(source)(source.id, source.path)
            return seen

    def _note(self, changed: Sequence[LogSource]) -> None:
        """Assign the next stamp to the changed sources, and notify threads that wait for changes."""
        with self.turn():
            if changed:
                self.stamp += 1
                for source in changed:
                    source.stamp = self.stamp
                self.has_changed.notify_all()

    def _in_order(self) -> list[LogSource]:
        """Return all sources in the order of reading: the one that a page shows, then the most recently changed."""
        return sorted(
            self.sources.values(),
            key=lambda source: (source.id != self._wanted, -max(source.signature, default=(0, 0))[0]),
        )

    def _scan(self) -> None:
        """Search the folders, add and remove sources accordingly, and update the states of all sources."""
        found = {name: (kind, path) for name, kind, path in self._found()}
        held = _locked_files()
        with self.turn():
            removed = self.sources.keys() - found.keys()
            for name in removed:
                del self.sources[name]
            changed: list[LogSource] = []
            for name, (kind, path) in found.items():
                source = self.sources.get(name)
                if source is None or type(source) is not kind:
                    source = self.sources[name] = kind(name, path)
                    changed.append(source)
                source.signature = _signature(path)
                if isinstance(source, RunFolder) and source.has_ended:
                    continue
                source.is_held = _inode(path / source.lock) in held
                if isinstance(source, RunFolder):
                    source.trial_state = self._trial_state(name)
                if self._states.get(name) != source.state:
                    self._states[name] = source.state
                    changed.append(source)
            if removed:
                self.stamp += 1
        self._note(changed)

    def _trial_state(self, name: str) -> str:
        """Return the state of a trial that has ended, from its study; empty for other runs and running trials.

        The run of a trial does not record its end itself.
        """
        folder, _, number = name.rpartition("/trials/")
        study = self.sources.get(folder)
        if not isinstance(study, StudyFolder) or not number.isdecimal() or int(number) >= len(study.trials):
            return ""
        state = str(study.trials[int(number)]["state"])
        return "" if state == "running" else state

    def _found(self) -> Iterator[tuple[str, type[LogSource], Path]]:
        """Yield id, kind and path of every folder that contains a run, a study or a log."""
        for name, base in self._folders.items():
            for path in itertools.islice(_below(base, DEPTH), MOST_FOLDERS):
                kind = _kind_of(path)
                if kind is not None:
                    yield printable(str(Path(name) / path.relative_to(base))), kind, path


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the folders by name; equal names get numbers appended, as in "runs (2)"."""
    found: dict[str, Path] = {}
    for path in dict.fromkeys(folder.resolve() for folder in folders):
        number = 1
        while (name := path.name if number == 1 else f"{path.name} ({number})") in found:
            number += 1
        found[name] = path
    return found


def _below(path: Path, depth: int) -> Iterator[Path]:
    """Yield a folder and its subfolders down to a depth; links and hidden folders are not followed."""
    yield path
    if not depth:
        return
    try:
        with os.scandir(path) as entries:
            folders = [e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name not in PASSED_OVER]
    except OSError:
        return
    for name in folders:
        if not name.startswith("."):
            yield from _below(path / name, depth - 1)


def _kind_of(path: Path) -> type[LogSource] | None:
    """Return the class for a folder, by the files that it contains; None if it contains no log."""
    if os.path.lexists(path / RECORD):
        return RunFolder
    if os.path.lexists(path / JOURNAL):
        return StudyFolder
    return Log if os.path.lexists(path / EVENTS) else None


def _signature(path: Path) -> tuple[tuple[int, int], ...]:
    """Return the modification times and sizes of a folder's logs, which change with every line."""
    found = []
    for name in (EVENTS, JOURNAL, ACCESS, RECORD):
        try:
            about = (path / name).lstat()
        except OSError:
            continue
        found.append((about.st_mtime_ns, about.st_size))
    return tuple(found)


def _inode(path: Path) -> int | None:
    """Return the inode of a file; None if the file does not exist."""
    try:
        return path.lstat().st_ino
    except OSError:
        return None


def _locked_files() -> set[int]:
    """Return the inodes of files that processes have locked.

    They are read from /proc/locks, because taking a lock to find out could block the process that wants it.
    """
    try:
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[-3].rpartition(":")[2]) for line in lines if "FLOCK" in line and "->" not in line}


def _is_of(run: RunFolder, plan: dict[str, Any]) -> bool:
    """Return whether a run has the task, the batch size and the type of devices (CPU or not) of a plan."""
    record = run.record
    on_cpu = all(str(device).rpartition("/")[2].startswith("cpu") for device in record.get("devices", []))
    is_alike = record.get("task") == plan["task"] and record.get("batch_size") == plan.get("batch_size")
    return bool(is_alike and on_cpu == (" CPU" in plan["cluster"]))
