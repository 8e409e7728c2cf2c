"""The file-system operations that the store uses, each a method in which a test can inject failures."""

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
"""Bytes per call: large enough that writing and hashing run outside the GIL."""
TEMPORARY = ".tmp-"
STALE_SECONDS = 7 * 24 * 3600.0
"""Seconds without a change after which a temporary is taken to have no writer, on any host."""


@dataclass(frozen=True)
class Digest:
    """A file's size and SHA-256."""

    size: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the digest as JSON-serializable data."""
        return {"size": self.size, "sha256": self.sha256}


class Disk:
    """Every operation that changes the disk; subclasses inject crashes and errors."""

    def make_folder(self, path: Path) -> None:
        """Create a new folder."""
        path.mkdir()

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Digest:
        """Write a new file and return its digest; it is not durable before `fsync`."""
        digest, size = hashlib.sha256(), 0
        with path.open("xb", buffering=0) as file:
            for piece in pieces(parts):
                digest.update(piece)
                size += len(piece)
                self.put(file.fileno(), piece)
        return Digest(size, digest.hexdigest())

    def put(self, file: int, piece: memoryview) -> None:
        """Append one piece to an open file."""
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
    """Return the digest of a regular file as it is on disk."""
    digest, size = hashlib.sha256(), 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
            size += len(piece)
    return Digest(size, digest.hexdigest())


def replace_file(disk: Disk, path: Path, parts: Iterable[bytes | memoryview]) -> Digest:
    """Write a file atomically: readers see the old one or the new one, never a part."""
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
    """Return a hidden name that identifies the writing process, so that others can detect when it has ended."""
    writer = f"{_host()}.{_pid_space()}.{os.getpid()}.{_started(os.getpid())}"
    return f"{TEMPORARY}{writer}.{uuid.uuid4().hex[:12]}"


def remove_stale(disk: Disk, root: Path) -> list[str]:
    """Remove temporaries whose writer has ended or that did not change for a week; return their names."""
    stale = [entry for entry in root.glob(f"{TEMPORARY}*") if _writer_is_dead(entry.name) or _is_old(entry)]
    for entry in stale:
        disk.discard(entry)
    return [entry.name for entry in stale]


def _writer_is_dead(name: str) -> bool:
    """Return whether the writer was a process in this process's namespace, and has ended.

    A host name and a process id are not enough: containers may share a host name, and every one of them has a process
    1; and a process id is used again.
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
    """Return when a process was started, in the kernel's own count; empty where there is none of that id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum() or c == "-") or "host"
