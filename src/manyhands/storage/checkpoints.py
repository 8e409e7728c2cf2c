"""A folder of checkpoints: written atomically by a background thread, verified by digest when read."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..core import CheckpointError
from .checkpoint_format import (
    AVERAGES,
    FORMAT,
    MANIFEST,
    MARKER,
    MODEL,
    OPTIMIZER,
    POLICY,
    RANDOM,
    STATE,
    Checkpoint,
    best_of,
    marker_of,
    read_checkpoint,
    split_optimizers,
    to_json,
)
from .checkpoint_root import CheckpointRoot, WriterClaim, describe, first_of
from .disk import Digest, Disk, remove_stale, temporary_name
from .tensors import Snapshot, write_tensors


@dataclass(frozen=True)
class _Copy:
    """The copy of a checkpoint that `save` made, to be written in the background."""

    step: int
    score: float | None
    tensors: dict[str, Callable[[], dict[str, Tensor]]]
    """By file name: a function that returns the copied tensors on the CPU."""
    text: bytes


def _warn(error: Exception) -> None:
    warnings.warn(f"a checkpoint could not be written: {error}", RuntimeWarning, stacklevel=3)


def _notice(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class CheckpointStore:
    """Store checkpoints under one root folder, with one writer and any number of readers.

    `save` copies the tensors and returns; a background thread writes them. An error in that thread does not stop the
    caller: the next `save`, `wait` or `close` passes it to `on_error`, and the last good checkpoint stays on disk.

    Args:
        root: Folder of the checkpoints; created by the first `save`.
        keep: Number of newest checkpoints to keep, in addition to the best one.
        on_error: Called with an error of the background thread; by default warns.
        on_notice: Called with a text about a corrupt checkpoint that was skipped; by default warns.
        disk: File-system operations; tests pass one that fails.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as root, CheckpointStore(Path(root)) as store:
    ...     store.save(Checkpoint(step=10, model={"w": torch.ones(2)}), score=0.5)
    ...     store.load().model["w"]
    tensor([1., 1.])
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int = 2,
        on_error: Callable[[Exception], None] = _warn,
        on_notice: Callable[[str], None] = _notice,
        disk: Disk | None = None,
    ) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise CheckpointError("keep must be at least 1", got=repr(keep), remedy="pass keep=2")
        self.root, self.keep = Path(root), keep
        self.blocked_seconds = 0.0
        """Seconds for which all calls of `save` have blocked their caller."""
        self._written_seconds = 0.0
        self._writing_since: float | None = None
        self._on_error, self._on_notice, self._disk = on_error, on_notice, disk or Disk()
        self._snapshots = {name: Snapshot() for name in (MODEL, OPTIMIZER, RANDOM, AVERAGES, POLICY)}
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        self._folders = CheckpointRoot(self.root, self._disk)
        self._claim = WriterClaim(self.root, self._disk)
        remove_stale(self._disk, self.root)

    @property
    def written_seconds(self) -> float:
        """Seconds that the background thread has spent writing, including the write in progress."""
        since = self._writing_since
        return self._written_seconds + (0.0 if since is None else time.perf_counter() - since)

    def claim(self, term: int = 0) -> None:
        """Make this store the only writer; earlier writers, such as a suspended process, can no longer write.

        `term` is that of the elected coordinator, if there is one: CheckpointError is raised after a later one.
        """
        try:
            self._claim.take(term)
        except OSError as error:
            self._on_error(error)

    def save(self, checkpoint: Checkpoint, *, score: float | None = None) -> None:
        """Copy a checkpoint now and write it in the background.

        Args:
            checkpoint: The state to save.
            score: The lower, the better; the checkpoint with the lowest score is kept.
        """
        began = time.perf_counter()
        self.wait()
        copy = self._copy(checkpoint, score)
        self._thread = threading.Thread(target=self._write_safely, args=(copy,), name="checkpoint-writer")
        self._thread.start()
        self.blocked_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the background thread has finished writing, then pass its errors to `on_error`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        errors, self._errors = self._errors, []
        for error in errors:
            self._on_error(error)

    def close(self) -> None:
        """Wait until the background thread has finished writing, and free the memory of the copies."""
        self.wait()
        for snapshot in self._snapshots.values():
            snapshot.clear()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the steps that have a committed checkpoint, ascending."""
        return sorted({folder.step for folder in self._folders.committed()})

    def best(self) -> int | None:
        """Return the step of the committed checkpoint with the lowest score; None if none has a score."""
        folder = best_of(self._folders.committed())
        return None if folder is None else folder.step

    def newest_model(self) -> Path | None:
        """Return the model file, unverified, of the newest committed checkpoint; None if there is no checkpoint."""
        committed = self._folders.committed()
        return committed[-1].path / MODEL if committed else None

    def load(self, step: int | None = None, *, before: int | None = None) -> Checkpoint:
        """Return the newest intact checkpoint; corrupt ones are skipped and reported to `on_notice`.

        Args:
            step: Consider only checkpoints of this step.
            before: Consider only checkpoints of earlier steps than this one.

        Raises:
            CheckpointError: There is no such intact checkpoint.
        """
        self.wait()
        folders = [f for f in reversed(self._folders.committed()) if step is None or f.step == step]
        folders = [f for f in folders if before is None or f.step < before]
        bad: list[str] = []
        for folder in folders:
            try:
                found = read_checkpoint(folder)
            except CheckpointError as error:
                bad.append(f"{folder.path.name}: {error}")
                continue
            for text in bad:
                self._on_notice(f"skipped a corrupt checkpoint and loaded {folder.path.name} instead; {text}")
            return found
        raise self._nothing(step, bad)

    def _nothing(self, step: int | None, bad: list[str]) -> CheckpointError:
        which = "a complete checkpoint" if step is None else f"a complete checkpoint of step {step}"
        steps = ", ".join(map(str, self.steps()))
        found = "; ".join(bad) if bad else f"steps {steps}" if steps else describe(self.root)
        return CheckpointError(
            f"{self.root} must contain {which}", got=found, remedy="pass another folder or step, or start a new run"
        )

    def _copy(self, checkpoint: Checkpoint, score: float | None) -> _Copy:
        step = checkpoint.step
        if not isinstance(step, int) or not 0 <= step < 10**18:
            raise CheckpointError(
                "a step must be a whole number of at least 0", got=repr(step), remedy="pass the number of taken steps"
            )
        slots, plain = split_optimizers(checkpoint.optimizers)
        tensors = {MODEL: checkpoint.model, OPTIMIZER: slots, RANDOM: checkpoint.random}
        if checkpoint.averages:
            tensors[AVERAGES] = checkpoint.averages
        if checkpoint.policy:
            tensors[POLICY] = checkpoint.policy
        return _Copy(
            step=step,
            score=None if score is None or math.isnan(score) else float(score),
            tensors={name: self._snapshots[name].take(part) for name, part in tensors.items()},
            text=to_json({"format": FORMAT, "step": step, "state": checkpoint.state, "optimizers": plain}),
        )

    def _write_safely(self, copy: _Copy) -> None:
        began = self._writing_since = time.perf_counter()
        temporary = self.root / temporary_name()
        try:
            tensors = {name: fetch() for name, fetch in copy.tensors.items()}
            _require_numbers(tensors[MODEL])
            self._claim.require_latest()
            self.root.mkdir(parents=True, exist_ok=True)
            folder = self._folders.new_folder(copy.step)
            try:
                self._write(copy, tensors, temporary, folder.path)
            except Exception:
                # If the rename did not happen, the folder at the target belongs to another writer.
                mine = folder.path if not temporary.exists() else temporary
                self._disk.discard(mine)
                raise
            self._folders.prune(folder, self.keep, self._claim)
        except Exception as error:
            self._errors.append(error)
        self._writing_since = None
        self._written_seconds += time.perf_counter() - began

    def _write(self, copy: _Copy, tensors: dict[str, dict[str, Tensor]], temporary: Path, target: Path) -> None:
        disk = self._disk
        disk.make_folder(temporary)
        files = {name: write_tensors(disk, temporary / name, part) for name, part in tensors.items()}
        files[STATE] = disk.write(temporary / STATE, [copy.text])
        listed = {name: digest.to_dict() for name, digest in files.items()}
        manifest = {"format": FORMAT, "step": copy.step, "score": copy.score, "claim": self._claim.number}
        digest = disk.write(temporary / MANIFEST, [to_json({**manifest, "files": listed})])
        for name in (*files, MANIFEST):
            disk.fsync(temporary / name)
        disk.fsync(temporary)
        disk.rename(temporary, target)
        disk.fsync(self.root)
        self._commit(target, digest)

    def _commit(self, target: Path, manifest: Digest) -> None:
        """Write the commit marker last, after fsync: a folder that has it is complete on disk."""
        self._claim.require_latest()
        waiting = target / f".{MARKER}"
        self._disk.write(waiting, [marker_of(manifest.sha256)])
        self._disk.fsync(waiting)
        self._disk.rename(waiting, target / MARKER)
        self._disk.fsync(target)
        self._disk.fsync(self.root)


def _require_numbers(model: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the model contains NaN: it must not become the newest checkpoint.

    Infinity is allowed, since masks may contain it.
    """
    for name, tensor in model.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise CheckpointError(
                "a checkpoint must not contain NaN",
                got=f"NaN in {name}",
                remedy="lower the learning rate, or clip the gradients",
            )


def check_matches(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise CheckpointError unless a checkpoint has exactly the tensors of a model, with the same shapes."""
    have = checkpoint.model
    want = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    missing = [name for name in want if name not in have]
    unexpected = [name for name in have if name not in want]
    shapes = [
        f"{name} is {tuple(have[name].shape)} and should be {tuple(tensor.shape)}"
        for name, tensor in want.items()
        if name in have and have[name].shape != tensor.shape
    ]
    found = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if texts := [f"{len(names)} {kind} ({first_of(names)})" for kind, names in found.items() if names]:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} must contain the tensors of {type(model).__name__}",
            got=", ".join(texts),
            remedy="load it into the model from which it was saved, or start a new run in another folder",
        )
