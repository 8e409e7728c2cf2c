"""The file-system operations of checkpoints and exports, each a method in which a test can inject failures."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import open_regular

CHUNK = 4 << 20
"""Number of bytes that are hashed and written per call: large enough that both run outside the GIL."""
TEMPORARY = ".tmp-"
STALE_SECONDS = 7 * 24 * 3600.0
"""Seconds without a change after which a temporary file or folder is assumed to have no writer on any host."""


@dataclass(frozen=True)
class Digest:
    """A file's size and SHA-256."""

    size: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the digest as JSON-serializable data."""
        return {"size": self.size, "sha256": self.sha256}


class Disk:
    """Every operation that changes files or folders; subclasses in tests inject crashes and errors."""

    def make_folder(self, path: Path) -> None:
        """Create a folder, which must not exist."""
        path.mkdir()

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Digest:
        """Write a new file and return its digest; the file may not survive a power failure before `fsync`."""
        digest, size = hashlib.sha256(), 0
        with path.open("xb", buffering=0) as file:
            for piece in pieces(parts):
                digest.update(piece)
                size += len(piece)
                self.put(file.fileno(), piece)
        return Digest(size, digest.hexdigest())

    def put(self, file: int, piece: memoryview) -> None:
        """Append all bytes of `piece` to an open file descriptor."""
        while piece:
            piece = piece[os.write(file, piece) :]

    def fsync(self, path: Path) -> None:
        """Flush a file or a folder to disk, so that it survives a power failure."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file (replacing an existing one) or a folder (never over one that is not empty)."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file or a link, never the target of a link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and its contents in sorted order: upper case sorts first, so the marker is removed first."""
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self.remove_folder(entry)
            else:
                self.remove(entry)
        self.remove_empty(path)

    def remove_empty(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def discard(self, path: Path) -> None:
        """Remove a folder or file if it exists and can be removed; ignore errors."""
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                self.remove_folder(path)
            else:
                self.remove(path)


def pieces(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Yield the bytes in pieces of at most `CHUNK` bytes."""
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def digest_of(path: Path) -> Digest:
    """Return the size and SHA-256 of a regular file."""
    digest, size = hashlib.sha256(), 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
            size += len(piece)
    return Digest(size, digest.hexdigest())


def replace_file(disk: Disk, path: Path, parts: Iterable[bytes | memoryview]) -> Digest:
    """Write or replace a file atomically: readers see the old file or the new one, never a part of it."""
    temporary = path.parent / temporary_name()
    try:
        digest = disk.write(temporary, parts)
        disk.fsync(temporary)
        disk.rename(temporary, path)
    except Exception:
        disk.discard(temporary)
        raise
    disk.fsync(path.parent)
    return digest


def temporary_name() -> str:
    """Return a unique hidden file name that identifies this process, so that others can detect that it has ended."""
    writer = f"{_host()}.{_pid_space()}.{os.getpid()}.{_started(os.getpid())}"
    return f"{TEMPORARY}{writer}.{uuid.uuid4().hex[:12]}"


def remove_stale(disk: Disk, root: Path) -> list[str]:
    """Remove temporary files and folders whose writer has ended or that are a week old; return their names."""
    stale = [entry for entry in root.glob(f"{TEMPORARY}*") if _writer_is_dead(entry.name) or _is_old(entry)]
    for entry in stale:
        disk.discard(entry)
    return [entry.name for entry in stale]


def _writer_is_dead(name: str) -> bool:
    """Return whether the writer in a temporary name was a process in this process's namespace that has ended.

    A host name and a process id do not identify it: containers may share a host name, each of them has a process 1, and
    the kernel reuses process ids.
    """
    host, space, pid, started = (*name.removeprefix(TEMPORARY).split("."), "", "", "", "")[:4]
    if not space or (host, space) != (_host(), _pid_space()) or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # a process of another user
    return _started(int(pid)) not in ("", started)


def _is_old(entry: Path) -> bool:
    try:
        return time.time() - entry.lstat().st_mtime > STALE_SECONDS
    except OSError:
        return False


def _pid_space() -> str:
    """Return an identifier of the process-id namespace: this boot of the machine, and the container in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256(f"{boot}{os.stat('/proc/self/ns/pid').st_ino}".encode()).hexdigest()[:12]
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; an empty string if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum() or c == "-") or "host"
