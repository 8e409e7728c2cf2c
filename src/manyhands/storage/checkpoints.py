"""A folder of checkpoints: written atomically by a background thread, verified by digest when read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..core import CheckpointError, fields, parse_json, read_file, read_json
from .disk import Digest, Disk, digest_of, remove_stale, temporary_name
from .tensors import Snapshot, read_tensors, write_tensors

FORMAT = 1
MARKER = "COMMITTED"
MODEL, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.safetensors", "random.safetensors"
AVERAGES, POLICY = "averages.safetensors", "policy.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
CLAIM = re.compile(r"CLAIM-([0-9]{1,18})")
"""The number of a writer's claim on the folder: only the writer with the highest number may write."""
LAST_CLAIM, LAST_GENERATION = 10**18 - 1, 10**9 - 1
"""The largest numbers that file names can hold."""
FOLDER = re.compile(r"step-([0-9]{9,18})(?:\.([0-9]{1,9}))?")
JSON_LIMIT = 64 << 20
"""Maximum size in bytes of a manifest or a state file."""


def _whole(value: Any) -> bool:
    """Return whether the value is a non-negative integer that fits into a file name."""
    return type(value) is int and 0 <= value <= LAST_CLAIM


_DIGEST = fields.having(size=_whole, sha256=lambda value: isinstance(value, str))
MANIFEST_FIELDS = {
    "format": _whole,
    "step": _whole,
    "score": fields.maybe(fields.number),
    "claim": fields.maybe(_whole),
    "files": fields.named(_DIGEST),
}
STATE_FIELDS = {
    "step": _whole,
    "state": fields.mapping,
    "optimizers": fields.named(fields.having(state=fields.named(fields.mapping), groups=fields.listed(fields.mapping))),
}


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to resume, in memory."""

    step: int
    model: dict[str, Tensor]
    """Parameters and buffers by the names of the original module."""
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Optimizer key to what `optimizer_state` returns."""
    state: dict[str, Any] = field(default_factory=dict)
    """JSON-serializable: the feed's position, schedule, epoch, best score, metrics, strategy spec."""
    random: dict[str, Tensor] = field(default_factory=dict)
    """Generator states, such as "rank0.cpu"."""
    averages: dict[str, Tensor] = field(default_factory=dict)
    """Moving averages of some of the model's tensors, if they are kept."""
    policy: dict[str, Tensor] = field(default_factory=dict)
    """State that a lossy synchronization policy keeps between steps, if there is one."""

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The model's tensors, with averages in place of the tensors they were computed from."""
        return {**self.model, **self.averages}


@dataclass(frozen=True)
class _Copy:
    """A copy of a checkpoint made when `save` was called, ready to be written."""

    step: int
    score: float | None
    tensors: dict[str, Callable[[], dict[str, Tensor]]]
    """By file: a function that returns the copies, on the CPU."""
    text: bytes


@dataclass(frozen=True, order=True)
class _Folder:
    """A committed or unfinished checkpoint on disk; saving a step again creates the next generation."""

    step: int
    generation: int
    path: Path

    @property
    def committed(self) -> bool:
        return (self.path / MARKER).is_file()


def _warn(error: Exception) -> None:
    warnings.warn(f"a checkpoint could not be written: {error}", RuntimeWarning, stacklevel=3)


def _notice(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class CheckpointStore:
    """Store checkpoints under one root folder, with one writer and any number of readers.

    `save` copies the tensors and returns; a background thread writes them. An error in that thread does not stop the
    caller: `on_error` gets it in the next `save`, `wait` or `close`, and the last good checkpoint stays on disk.

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
        if keep < 1:
            raise CheckpointError("keep must be at least 1", got=keep, remedy="pass keep=2")
        self.root, self.keep = Path(root), keep
        self.blocked_seconds = 0.0
        """Seconds for which `save` blocked its caller."""
        self._written_seconds = 0.0
        self._writing_since: float | None = None
        self._on_error, self._on_notice, self._disk = on_error, on_notice, disk or Disk()
        self._snapshots = {name: Snapshot() for name in (MODEL, OPTIMIZER, RANDOM, AVERAGES, POLICY)}
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        self._claim: int | None = None
        remove_stale(self._disk, self.root)

    @property
    def written_seconds(self) -> float:
        """Seconds that the background thread has spent writing, including the write in progress."""
        since = self._writing_since
        return self._written_seconds + (0.0 if since is None else time.perf_counter() - since)

    def claim(self) -> None:
        """Make this store the only writer: earlier writers, such as a suspended process, can no longer write."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._claim = self._claimed()
        except OSError as error:
            self._claim = None
            self._on_error(error)

    def _claimed(self) -> int:
        """Create the next claim file and return its number; of two writers that try the same number, one succeeds."""
        while True:
            before = self._claims()
            number = max(before, default=0) + 1
            _require_room("CLAIM-", number, LAST_CLAIM, self.root)
            try:
                self._disk.write(self.root / f"CLAIM-{number}", [])
            except FileExistsError:
                continue
            is_last = max(self._claims()) == number
            for other in before if is_last else [number]:
                with contextlib.suppress(OSError):
                    (self.root / f"CLAIM-{other}").unlink()
            if is_last:
                self._disk.fsync(self.root)
                return number

    def _claims(self) -> list[int]:
        names = (CLAIM.fullmatch(path.name) for path in self.root.iterdir()) if self.root.is_dir() else ()
        return [int(match[1]) for match in names if match]

    @property
    def _holds(self) -> bool:
        """Whether no other writer has claimed the folder after this one."""
        return self._claim is None or max(self._claims(), default=0) <= self._claim

    def _require_claim(self) -> None:
        if not self._holds:
            raise CheckpointError(
                "only the latest generation of a run may write checkpoints",
                got="an earlier one",
                remedy="let the later generation write",
            )

    def save(self, checkpoint: Checkpoint, *, score: float | None = None) -> None:
        """Copy a checkpoint now and write it in the background; the checkpoint with the lowest score is the best."""
        began = time.perf_counter()
        self.wait()
        copy = self._copy(checkpoint, score)
        self._thread = threading.Thread(target=self._write_safely, args=(copy,), name="checkpoint-writer")
        self._thread.start()
        self.blocked_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the background write is finished, then report its errors to `on_error`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        errors, self._errors = self._errors, []
        for error in errors:
            self._on_error(error)

    def close(self) -> None:
        """Finish writing and free the memory of the copies."""
        self.wait()
        for snapshot in self._snapshots.values():
            snapshot.clear()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the steps that have a committed checkpoint, ascending."""
        return sorted({folder.step for folder in self._committed()})

    def best(self) -> int | None:
        """Return the step of the committed checkpoint with the lowest score."""
        folder = _best(self._committed())
        return None if folder is None else folder.step

    def newest_model(self) -> Path | None:
        """Return the model file of the newest committed checkpoint, unverified, for reading its header."""
        committed = self._committed()
        return committed[-1].path / MODEL if committed else None

    def load(self, step: int | None = None, *, before: int | None = None) -> Checkpoint:
        """Return the checkpoint of a step, or the newest intact one; report skipped corrupt ones to `on_notice`."""
        self.wait()
        folders = [f for f in reversed(self._committed()) if step is None or f.step == step]
        folders = [f for f in folders if before is None or f.step < before]
        bad: list[str] = []
        for folder in folders:
            try:
                found = _read(folder)
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

    def _folders(self) -> list[_Folder]:
        if not self.root.is_dir():
            return []
        matches = ((FOLDER.fullmatch(path.name), path) for path in self.root.iterdir())
        return sorted(
            _Folder(int(match[1]), int(match[2] or 0), path)
            for match, path in matches
            if match and path.is_dir() and not path.is_symlink()
        )

    def _committed(self) -> list[_Folder]:
        return [folder for folder in self._folders() if folder.committed]

    def _copy(self, checkpoint: Checkpoint, score: float | None) -> _Copy:
        step = checkpoint.step
        if not isinstance(step, int) or not 0 <= step < 10**18:
            raise CheckpointError(
                "a step must be a whole number of at least 0", got=repr(step), remedy="pass such a number"
            )
        slots, plain = _parted(checkpoint.optimizers)
        tensors = {MODEL: checkpoint.model, OPTIMIZER: slots, RANDOM: checkpoint.random}
        if checkpoint.averages:
            tensors[AVERAGES] = checkpoint.averages
        if checkpoint.policy:
            tensors[POLICY] = checkpoint.policy
        return _Copy(
            step=step,
            score=None if score is None or math.isnan(score) else float(score),
            tensors={name: self._snapshots[name].take(part) for name, part in tensors.items()},
            text=_json({"format": FORMAT, "step": step, "state": checkpoint.state, "optimizers": plain}),
        )

    def _write_safely(self, copy: _Copy) -> None:
        began = self._writing_since = time.perf_counter()
        temporary = self.root / temporary_name()
        try:
            tensors = {name: fetch() for name, fetch in copy.tensors.items()}
            _require_numbers(tensors[MODEL])
            self._require_claim()
            self.root.mkdir(parents=True, exist_ok=True)
            folder = self._target(copy.step)
            try:
                self._write(copy, tensors, temporary, folder.path)
            except Exception:
                # If the rename did not happen, the folder at the target belongs to another writer.
                mine = folder.path if not temporary.exists() else temporary
                self._disk.discard(mine)
                raise
            self._prune(folder)
        except Exception as error:
            self._errors.append(error)
        self._writing_since = None
        self._written_seconds += time.perf_counter() - began

    def _target(self, step: int) -> _Folder:
        """Return the folder for a step; an existing one of the same step stays until the new one is committed."""
        taken = [folder.generation for folder in self._folders() if folder.step == step]
        generation = max(taken, default=-1) + 1
        _require_room(f"step-{step:09d}.", generation, LAST_GENERATION, self.root)
        name = f"step-{step:09d}" + (f".{generation}" if generation else "")
        return _Folder(step, generation, self.root / name)

    def _write(self, copy: _Copy, tensors: dict[str, dict[str, Tensor]], temporary: Path, target: Path) -> None:
        disk = self._disk
        disk.make_folder(temporary)
        files = {name: write_tensors(disk, temporary / name, part) for name, part in tensors.items()}
        files[STATE] = disk.write(temporary / STATE, [copy.text])
        listed = {name: digest.to_dict() for name, digest in files.items()}
        manifest = {"format": FORMAT, "step": copy.step, "score": copy.score, "claim": self._claim, "files": listed}
        digest = disk.write(temporary / MANIFEST, [_json(manifest)])
        for name in (*files, MANIFEST):
            disk.fsync(temporary / name)
        disk.fsync(temporary)
        disk.rename(temporary, target)
        disk.fsync(self.root)
        self._commit(target, digest)

    def _commit(self, target: Path, manifest: Digest) -> None:
        """Write the commit marker last, after fsync: a folder that has it is complete on disk."""
        self._require_claim()
        waiting = target / f".{MARKER}"
        self._disk.write(waiting, [_marker(manifest.sha256)])
        self._disk.fsync(waiting)
        self._disk.rename(waiting, target / MARKER)
        self._disk.fsync(target)
        self._disk.fsync(self.root)

    def _prune(self, written: _Folder) -> None:
        """Remove all but the newest, the best and the one just written; keep folders written under a later claim."""
        committed = self._committed()
        newest: dict[int, _Folder] = {folder.step: folder for folder in committed}
        kept = {*sorted(newest.values())[-self.keep :], written}
        if (best := _best(list(newest.values()))) is not None:
            kept.add(best)
        for folder in self._folders():
            if folder not in kept and self._holds and not self._is_later(folder):
                self._remove(folder)

    def _is_later(self, folder: _Folder) -> bool:
        """Return whether a writer that claimed the root after this one wrote this folder."""
        try:
            claim: Any = _object(folder.path / MANIFEST).get("claim")
        except (OSError, ValueError):
            return False
        return self._claim is not None and _whole(claim) and claim > self._claim

    def _remove(self, folder: _Folder) -> None:
        """Remove a checkpoint, marker first, so that a crash leaves no partial folder that looks committed."""
        if folder.committed:
            self._disk.remove(folder.path / MARKER)
            self._disk.fsync(folder.path)
        self._disk.remove_folder(folder.path)


def _require_room(begin: str, number: int, last: int, root: Path) -> None:
    """Raise if the next number does not fit into a file name; counting alone does not reach it."""
    if number > last:
        raise CheckpointError(
            f"names in {root} must be numbered below {last}",
            got=f"{begin}{last}",
            remedy="remove the entry of that name",
        )


def _require_numbers(model: Mapping[str, Tensor]) -> None:
    """Raise if the model contains NaN, so that it does not become the newest checkpoint; masks may hold infinity."""
    for name, tensor in model.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise CheckpointError("a checkpoint must not contain NaN", got=f"NaN in {name}")


def check_matches(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise unless the checkpoint holds exactly the tensors of this model."""
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
    if texts := [f"{len(names)} {kind} ({_first(names)})" for kind, names in found.items() if names]:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} must contain the tensors of {type(model).__name__}",
            got=", ".join(texts),
            remedy="load it into the model from which it was saved, or start a new run in another folder",
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
        return f"pickled files ({_first(pickles)}), which are not read"
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "a Hugging Face model folder"
    if "program.json" in names or any(name.isdecimal() for name in names):
        return "exported models, which hold no optimizer"
    half = [name for name in names if FOLDER.fullmatch(name)]
    if half:
        return f"checkpoints that were never finished ({_first(half)})"
    return f"other files ({_first(names)})" if names else "an empty folder"


def _read(folder: _Folder) -> Checkpoint:
    """Read a checkpoint after verifying the digest of every file."""
    try:
        manifest = _manifest(folder.path)
        for name, recorded in manifest["files"].items():
            size = (folder.path / name).lstat().st_size
            if size != recorded["size"] or digest_of(folder.path / name).to_dict() != recorded:
                raise CheckpointError(
                    "every file must have the digest in the manifest", got=f"another digest of {name}"
                )
        state = _object(folder.path / STATE)
        if not fields.holds(state, STATE_FIELDS) or {state["step"], manifest["step"]} != {folder.step}:
            raise CheckpointError(f"{STATE} must describe a checkpoint of its step", got="other fields or steps")
        return _assembled(folder.path, state, set(manifest["files"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("a checkpoint must be complete", got=f"{type(error).__name__}: {error}") from error


def _manifest(path: Path) -> dict[str, Any]:
    text = read_file(path / MANIFEST, JSON_LIMIT)
    if read_file(path / MARKER, JSON_LIMIT) != _marker(hashlib.sha256(text).hexdigest()):
        raise CheckpointError("the manifest must have the digest in the marker", got="another digest")
    manifest = parse_json(text)
    if not isinstance(manifest, dict) or not fields.holds(manifest, MANIFEST_FIELDS):
        raise CheckpointError(f"{MANIFEST} must list files with their digests", got="other fields")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"a checkpoint must have format {FORMAT}",
            got=manifest["format"],
            remedy="read it with the version of manyhands that wrote it",
        )
    if set(manifest["files"]) - {AVERAGES, POLICY} != {MODEL, OPTIMIZER, RANDOM, STATE}:
        raise CheckpointError("a manifest must list the four files", got=", ".join(manifest["files"]))
    return dict(manifest)


def _assembled(path: Path, text: dict[str, Any], files: set[str]) -> Checkpoint:
    optimizers: dict[str, dict[str, Any]] = text["optimizers"]
    for key, tensor in read_tensors(path / OPTIMIZER).items():
        optimizer, _, tail = key.partition("/")
        parameter, _, slot = tail.rpartition("/")
        optimizers[optimizer]["state"][parameter][slot] = tensor
    return Checkpoint(
        step=text["step"],
        model=read_tensors(path / MODEL),
        optimizers=optimizers,
        state=text["state"],
        random=read_tensors(path / RANDOM),
        averages=read_tensors(path / AVERAGES) if AVERAGES in files else {},
        policy=read_tensors(path / POLICY) if POLICY in files else {},
    )


def _parted(optimizers: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizers' tensors under flat keys, and the remaining state for JSON."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for key, data in optimizers.items():
        state: dict[str, dict[str, Any]] = {}
        for parameter, slot, value in _slots(data["state"], state):
            if "/" in key or "/" in slot:
                raise CheckpointError("keys of optimizers and slots must not contain a slash", got=f"{key!r}, {slot!r}")
            if isinstance(value, Tensor):
                tensors[f"{key}/{parameter}/{slot}"] = value
            else:
                state[parameter][slot] = value
        plain[key] = {**data, "state": state}
    return tensors, plain


def _slots(state: Mapping[str, Mapping[str, Any]], seen: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for parameter, slots in state.items():
        seen[parameter] = {}
        for slot, value in slots.items():
            yield parameter, slot, value


def _best(folders: list[_Folder]) -> _Folder | None:
    scored = [(score, folder) for folder in folders if (score := _score(folder)) is not None]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def _score(folder: _Folder) -> float | None:
    try:
        score = _object(folder.path / MANIFEST)["score"]
        return None if score is None or math.isnan(score) else float(score)
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _object(path: Path) -> dict[str, Any]:
    return read_json(path, JSON_LIMIT)


def _json(value: object) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "the state of a checkpoint must consist of JSON types",
            got=str(error),
            remedy="convert it to numbers and strings",
        ) from error


def _marker(sha256: str) -> bytes:
    return f"{sha256}\n".encode()


def _first(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
