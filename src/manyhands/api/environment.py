"""Description of the environment in which a run was started, for its record."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HIDDEN = "***"
SECRET = re.compile(
    r"(?i)pass(word|phrase|wd)?$|pwd|secret|token(?!i)|(^|[-_])key|api-?key|auth(?!or)|credential|cookie"
)
"""Names of arguments whose values are not recorded."""
OPAQUE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_=+.-]{32,}|(hf|sk|gh[a-z]|glpat)[-_][A-Za-z0-9_-]{8,}")
"""Words that may be secrets, whatever their names are."""
LONGEST_COMMAND = 2000
"""Maximum characters of the command line that are recorded."""
MOST_REFS = 1 << 20
"""Maximum bytes of a file of the Git repository that are read."""


def environment() -> dict[str, Any]:
    """Return host, platform and command line of this program, and the commit of the Git repository in which it runs."""
    found = {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "command": shlex.join(without_secrets(sys.argv))[:LONGEST_COMMAND],
    }
    return {**found, **git_commit(Path.cwd())}


def without_secrets(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command line, with values that may be secrets replaced.

    >>> list(without_secrets(["train.py", "--api-key", "abc", "--token=def", "s3://me:pw@host/x", "lr=0.1"]))
    ['train.py', '--api-key', '***', '--token=***', 's3://***@host/x', 'lr=0.1']
    """
    is_value = False
    for word in words:
        name, separator, value = word.partition("=")
        if is_value and not word.startswith("-"):
            yield HIDDEN
        elif separator and (SECRET.search(name) or OPAQUE.fullmatch(value)):
            yield f"{name}={HIDDEN}"
        elif OPAQUE.fullmatch(word):
            yield HIDDEN
        else:
            yield re.sub(r"://[^/@\s]*@", f"://{HIDDEN}@", word)
        is_value = word.startswith("-") and not separator and bool(SECRET.search(name))


def git_commit(folder: Path) -> dict[str, str]:
    """Return commit and branch of the Git repository that contains a folder; nothing if there is none.

    The files of the repository are read, because Git itself may run programs that the repository names.
    """
    for path in (folder, *folder.parents):
        if (path / ".git").exists():
            try:
                return _head(path / ".git")
            except (OSError, ValueError):
                break
    return {}


def _head(git: Path) -> dict[str, str]:
    if git.is_file():  # a worktree or a submodule, whose data is elsewhere
        git = git.parent / _text(git).removeprefix("gitdir:").strip()
    head = _text(git / "HEAD")
    if not head.startswith("ref: "):
        return _checked(head)
    name = head.removeprefix("ref: ")
    common = git / _text(git / "commondir") if (git / "commondir").is_file() else git
    branch = {"branch": name.removeprefix("refs/heads/")}
    for base in (git, common):
        if ".." not in name and (base / name).is_file():
            return {**_checked(_text(base / name)), **branch}
    packed = _text(common / "packed-refs") if (common / "packed-refs").is_file() else ""
    found = next((line.split()[0] for line in packed.splitlines() if line.endswith(f" {name}")), "")
    return {**_checked(found), **branch}


def _checked(commit: str) -> dict[str, str]:
    return {"commit": commit} if re.fullmatch(r"[0-9a-f]{40,64}", commit) else {}


def _text(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.read(MOST_REFS).strip()
