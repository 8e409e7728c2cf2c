"""The root folder of a run's checkpoints: which checkpoints it has, and which writer may add and remove them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from ..core import CheckpointError
from .checkpoint_format import LAST_NUMBER, MANIFEST, MARKER, CheckpointFolder, best_of, is_whole, read_object
from .disk import Disk

CLAIM = re.compile(r"CLAIM-([0-9]{1,18})")
"""Name of the file by which a writer claims the folder: only the writer with the highest number may write."""
FOLDER = re.compile(r"step-([0-9]{9,18})(?:\.([0-9]{1,9}))?")
LAST_GENERATION = 10**9 - 1
"""The largest generation that a file name can hold."""


TERM_CLAIMS = 10**6
"""Number of claims of one term: those of later terms have higher numbers, whichever is made first."""


class WriterClaim:
    """The claim of one writer on a root folder: earlier writers, such as a suspended process, can no longer write.

    Writers under a coordinator of an earlier `term` cannot claim the folder after those of a later one.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root, self._disk = root, disk
        self.number: int | None = None
        """The number of this writer's claim; None if it has not claimed the folder."""

    def take(self, term: int = 0) -> None:
        """Claim the folder, so that no earlier writer can write; raise OSError, without a claim, if that fails.

        `term` is that of the elected coordinator: CheckpointError is raised after a claim of a later one.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self.number = self._next(term)
        except OSError:
            self.number = None
            raise

    def _next(self, term: int) -> int:
        """Create the next claim file and return its number; of two writers that try the same number, one succeeds."""
        while True:
            before = self._found()
            number = max([term * TERM_CLAIMS, *before]) + 1
            if term and number >= (term + 1) * TERM_CLAIMS:
                raise _superseded(term, number // TERM_CLAIMS)
            require_room("CLAIM-", number, LAST_NUMBER, self._root)
            try:
                self._disk.write(self._root / f"CLAIM-{number}", [])
            except FileExistsError:
                continue
            is_last = max(self._found()) == number
            for other in before if is_last else [number]:
                if other % TERM_CLAIMS:
                    with contextlib.suppress(OSError):
                        (self._root / f"CLAIM-{other}").unlink()
            if is_last:
                self._disk.fsync(self._root)
                return number

    def _found(self) -> list[int]:
        return claims_in(self._root)

    @property
    def is_latest(self) -> bool:
        """Whether no other writer has claimed the folder after this one."""
        return self.number is None or max(self._found(), default=0) <= self.number

    def require_latest(self) -> None:
        """Raise CheckpointError if another writer has claimed the folder after this one."""
        if not self.is_latest:
            raise CheckpointError(
                "only the latest writer of a run may write checkpoints",
                got="an earlier one, such as a process that was suspended",
                remedy="end this process, and let the later writer continue",
            )

    def is_before(self, folder: CheckpointFolder) -> bool:
        """Return whether a checkpoint was written under a later claim than this one."""
        try:
            claim: Any = read_object(folder.path / MANIFEST).get("claim")
        except (OSError, ValueError):
            return False
        return self.number is not None and is_whole(claim) and claim > self.number


class TermClaim:
    """The claim of an elected coordinator on the folder of a run's checkpoints: those of earlier terms cannot write.

    Args:
        root: Folder of the checkpoints; created if it does not exist.
        term: The coordinator's term.
    """

    def __init__(self, root: Path, term: int) -> None:
        self._root, self.term = root, term

    def take(self) -> None:
        """Claim the folder; raise CheckpointError if this term or a later one has claimed it before."""
        self._root.mkdir(parents=True, exist_ok=True)
        try:
            Disk().write(term_file(self._root, self.term), [])
        except FileExistsError:
            raise _superseded(self.term, self.term) from None
        if (latest := max(claims_in(self._root))) > self.term * TERM_CLAIMS:
            term_file(self._root, self.term).unlink()
            raise _superseded(self.term, latest // TERM_CLAIMS)
        Disk().fsync(self._root)

    @property
    def is_latest(self) -> bool:
        """Whether no coordinator of a later term has claimed the folder."""
        return max(claims_in(self._root), default=0) // TERM_CLAIMS <= self.term


def term_file(root: Path, term: int) -> Path:
    """Return the file that exists where the elected coordinator of a term has claimed a folder; it is never removed."""
    return root / f"CLAIM-{term * TERM_CLAIMS}"


def claims_in(root: Path) -> list[int]:
    """Return the numbers of the claims on a folder."""
    names = (CLAIM.fullmatch(path.name) for path in root.iterdir()) if root.is_dir() else ()
    return [int(match[1]) for match in names if match]


def _superseded(term: int, later: int) -> CheckpointError:
    return CheckpointError(
        "only the latest elected coordinator of a run may write it",
        got=f"the coordinator of term {term}, after one of term {later}",
        remedy="end this process; if the etcd that counts terms was replaced, remove the CLAIM files of the run",
    )


class CheckpointRoot:
    """The checkpoints under one root folder."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.path, self._disk = root, disk

    def folders(self) -> list[CheckpointFolder]:
        """Return all checkpoints sorted by step and generation, including unfinished ones."""
        if not self.path.is_dir():
            return []
        matches = ((FOLDER.fullmatch(path.name), path) for path in self.path.iterdir())
        return sorted(
            CheckpointFolder(int(match[1]), int(match[2] or 0), path)
            for match, path in matches
            if match and path.is_dir() and not path.is_symlink()
        )

    def committed(self) -> list[CheckpointFolder]:
        """Return the finished checkpoints sorted by step and generation."""
        return [folder for folder in self.folders() if folder.committed]

    def new_folder(self, step: int) -> CheckpointFolder:
        """Return a new folder for a step; an existing checkpoint of the step stays until the new one is committed."""
        taken = [folder.generation for folder in self.folders() if folder.step == step]
        generation = max(taken, default=-1) + 1
        require_room(f"step-{step:09d}.", generation, LAST_GENERATION, self.path)
        name = f"step-{step:09d}" + (f".{generation}" if generation else "")
        return CheckpointFolder(step, generation, self.path / name)

    def prune(self, written: CheckpointFolder, keep: int, claim: WriterClaim) -> None:
        """Remove all checkpoints but the `keep` newest, the best, `written`, and those written under a later claim."""
        committed = self.committed()
        newest: dict[int, CheckpointFolder] = {folder.step: folder for folder in committed}
        kept = {*sorted(newest.values())[-keep:], written}
        if (best := best_of(list(newest.values()))) is not None:
            kept.add(best)
        for folder in self.folders():
            if folder not in kept and claim.is_latest and not claim.is_before(folder):
                self._remove(folder)

    def _remove(self, folder: CheckpointFolder) -> None:
        """Remove a checkpoint, marker first, so that a crash leaves no partial folder that looks committed."""
        if folder.committed:
            self._disk.remove(folder.path / MARKER)
            self._disk.fsync(folder.path)
        self._disk.remove_folder(folder.path)


def require_room(begin: str, number: int, last: int, root: Path) -> None:
    """Raise CheckpointError if the next number is above `last`, which only a manually created name can cause."""
    if number > last:
        raise CheckpointError(
            f"names in {root} must be numbered below {last}",
            got=f"{begin}{last}",
            remedy="remove the entry of that name",
        )


def describe(root: Path) -> str:
    """Describe the contents of a folder that holds no usable checkpoint, for error messages."""
    if not root.exists():
        return "no such folder"
    if not root.is_dir():
        return f"a file, {root.name}"
    names = sorted(path.name for path in root.iterdir() if not path.name.startswith(".tmp-"))
    if ".metadata" in names:
        return "a torch.distributed.checkpoint folder (.metadata, a pickle that is not read)"
    pickles = [name for name in names if name.endswith((".pt", ".pth", ".ckpt", ".bin", ".pkl"))]
    if pickles:
        return f"pickled files ({first_of(pickles)}), which are not read"
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "a Hugging Face model folder"
    if "program.json" in names or any(name.isdecimal() for name in names):
        return "exported models, which hold no optimizer"
    half = [name for name in names if FOLDER.fullmatch(name)]
    if half:
        return f"checkpoints that were never finished ({first_of(half)})"
    return f"other files ({first_of(names)})" if names else "an empty folder"


def first_of(names: list[str], count: int = 5) -> str:
    """Return the first `count` names as text, with "..." if there are more."""
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
