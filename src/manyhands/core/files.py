"""Open and parse files that another program, or an attacker, may have written.

A folder of runs, models or checkpoints may hold a FIFO, a device, a link or a damaged file where a plain file is
expected. These functions never block when they open one, follow links only on request, read at most a given number of
bytes, and raise `FileError` with the reason.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import FileError, UsageError

LINE_LIMIT = 4 << 20
"""Maximum bytes of one line of a log or a journal."""
DEPTH_LIMIT = 64
"""Maximum nesting of JSON: deeper than anything manyhands writes, and far from Python's recursion limit."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, follow_links: bool = False) -> int:
    """Open a regular file without blocking and return its descriptor.

    The kind is checked on the open descriptor, so a file that is replaced between a check and the open is found too.

    Raises:
        FileError: The path is a FIFO, a socket, a device, a folder, or a symbolic link (unless `follow_links`). To be
            written, a file must have no other name (hard link).
        OSError: The file cannot be opened for another reason, for example because it does not exist.
    """
    safe = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow_links else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags & ~os.O_TRUNC | safe, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EMLINK):
            raise _not_regular(path) from None
        raise
    found = os.fstat(file)
    is_writing = bool(flags & (os.O_WRONLY | os.O_RDWR))
    if not stat.S_ISREG(found.st_mode) or (is_writing and found.st_nlink > 1):
        os.close(file)
        raise _not_regular(path) if not stat.S_ISREG(found.st_mode) else _not_alone(path)
    if flags & os.O_TRUNC:
        os.ftruncate(file, 0)
    return file


def _not_alone(path: str | Path) -> FileError:
    # Another name may lead to a file that was never meant to be written, or to the original of a copy.
    return FileError(
        f"{path} must have no other name to be written", got="a hard link", remedy="replace it by a copy of the file"
    )


def _not_regular(path: str | Path) -> FileError:
    try:
        kind = _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "another kind of file")
    except OSError:
        kind = "another kind of file"
    return FileError(f"{path} must be a regular file", got=kind, remedy="remove it, or copy the file again")


@contextlib.contextmanager
def opened(path: str | Path, *, follow_links: bool = False) -> Iterator[Path]:
    """Open a regular file, and yield a path to its open descriptor for libraries that accept only paths."""
    file = open_regular(path, follow_links=follow_links)
    try:
        name = Path(f"/dev/fd/{file}")
        # Without /dev/fd, the path itself; its kind was just checked.
        yield name if name.exists() else Path(path)
    finally:
        os.close(file)


def read_file(path: str | Path, limit: int, *, follow_links: bool = False) -> bytes:
    """Return the content of a regular file; raise FileError if it has more than `limit` bytes."""
    with os.fdopen(open_regular(path, follow_links=follow_links), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise FileError(f"{path} must have at most {limit:,} bytes", got="a larger file", remedy="copy the file again")
    return data


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically: write a temporary file beside it and rename that to `path`.

    A symbolic link at `path` is replaced; a symbolic link in the place of the temporary file raises FileError.
    """
    temporary = path.with_suffix(".tmp")
    with os.fdopen(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def read_json(path: str | Path, limit: int, *, follow_links: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of at most `limit` bytes; raise FileError if it contains something else."""
    value = parse_json(read_file(path, limit, follow_links=follow_links))
    if not isinstance(value, dict):
        raise FileError(
            f"{path} must contain a JSON object", got=type(value).__name__, remedy="repair it, or copy the file again"
        )
    return value


def require_format(file: str, found: object, newest: int, error: type[UsageError] = FileError) -> None:
    """Raise `error` for a file in a newer format than `newest`, the newest one that this version can read."""
    if type(found) is int and found > newest:
        raise error(
            f"{file} must have format {newest} or older",
            got=f"{found}, which a newer version of manyhands has written",
            remedy="upgrade manyhands",
        )


def parse_json(data: bytes) -> Any:
    """Parse JSON in UTF-8; raise FileError if it is invalid, or nested more than `DEPTH_LIMIT` levels deep.

    >>> parse_json(b'{"a": [1]}')
    {'a': [1]}
    """
    try:
        value = json.loads(data.decode())
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise FileError(
            "JSON must be valid", got=str(error)[:200], remedy="repair it, or copy the file again"
        ) from None
    if data.count(b"[") + data.count(b"{") > DEPTH_LIMIT:
        _require_shallow(value)
    return value


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH_LIMIT + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> FileError:
    return FileError(
        f"JSON must be nested at most {DEPTH_LIMIT} levels deep", got="a deeper text", remedy="use fewer levels"
    )


def read_lines(file: BinaryIO, limit: int = LINE_LIMIT) -> Iterator[bytes | None]:
    """Yield the lines of a file, and None for each line of more than `limit` bytes, which is not kept in memory."""
    while line := file.readline(limit + 1):
        if len(line) <= limit:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(limit)
        yield None
