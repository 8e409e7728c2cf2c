"""The files of a checkpoint: names, manifest and state, and how they are verified and read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core import CheckpointError, fields, parse_json, read_file, read_json, require_format
from .disk import digest_of
from .tensors import read_tensors

FORMAT = 1
MARKER = "COMMITTED"
MODEL, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.safetensors", "random.safetensors"
AVERAGES, POLICY = "averages.safetensors", "policy.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
LAST_NUMBER = 10**18 - 1
"""The largest step, file size or number of a writer's claim: 18 digits fit into a file name."""
JSON_LIMIT = 64 << 20
"""Maximum size in bytes of a manifest or a state file."""


def is_whole(value: Any) -> bool:
    """Return whether the value is a non-negative integer that fits into a file name."""
    return type(value) is int and 0 <= value <= LAST_NUMBER


_DIGEST = fields.having(size=is_whole, sha256=lambda value: isinstance(value, str))
MANIFEST_FIELDS = {
    "format": is_whole,
    "step": is_whole,
    "score": fields.maybe(fields.number),
    "claim": fields.maybe(is_whole),
    "files": fields.named(_DIGEST),
}
STATE_FIELDS = {
    "step": is_whole,
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
    """By name of an optimizer: the result of `optimizer_state`."""
    state: dict[str, Any] = field(default_factory=dict)
    """JSON-serializable: the feed's position, schedule, epoch, best score, metrics, strategy spec."""
    random: dict[str, Tensor] = field(default_factory=dict)
    """States of random generators by name, such as "rank0.cpu"."""
    averages: dict[str, Tensor] = field(default_factory=dict)
    """Moving averages of some of the model's tensors, by their names; empty if the run has none."""
    policy: dict[str, Tensor] = field(default_factory=dict)
    """State that a lossy sync policy keeps between steps; empty if the run has none."""

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The model's tensors, with averages in place of the tensors they were computed from."""
        return {**self.model, **self.averages}


@dataclass(frozen=True, order=True)
class CheckpointFolder:
    """The folder of a committed or unfinished checkpoint; saving a step again creates one of the next generation."""

    step: int
    generation: int
    path: Path

    @property
    def committed(self) -> bool:
        return (self.path / MARKER).is_file()


def read_checkpoint(folder: CheckpointFolder) -> Checkpoint:
    """Return the checkpoint in a folder; raise CheckpointError if a file is missing or has another digest."""
    try:
        manifest = _manifest(folder.path)
        for name, recorded in manifest["files"].items():
            size = (folder.path / name).lstat().st_size
            if size != recorded["size"] or digest_of(folder.path / name).to_dict() != recorded:
                raise CheckpointError(
                    "every file must have the digest in the manifest", got=f"another digest of {name}"
                )
        state = read_object(folder.path / STATE)
        if not fields.holds(state, STATE_FIELDS) or {state["step"], manifest["step"]} != {folder.step}:
            raise CheckpointError(f"{STATE} must describe a checkpoint of its step", got="other fields or steps")
        return _assembled(folder.path, state, set(manifest["files"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("a checkpoint must be complete", got=f"{type(error).__name__}: {error}") from error


def _manifest(path: Path) -> dict[str, Any]:
    text = read_file(path / MANIFEST, JSON_LIMIT)
    if read_file(path / MARKER, JSON_LIMIT) != marker_of(hashlib.sha256(text).hexdigest()):
        raise CheckpointError("the manifest must have the digest in the marker", got="another digest")
    manifest = parse_json(text)
    if isinstance(manifest, dict):
        require_format(str(path), manifest.get("format"), FORMAT, CheckpointError)
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


def split_optimizers(optimizers: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizers' tensors under flat keys, and the remaining state for JSON."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for key, data in optimizers.items():
        state: dict[str, dict[str, Any]] = {parameter: {} for parameter in data["state"]}
        for parameter, slots in data["state"].items():
            for slot, value in slots.items():
                if "/" in key or "/" in slot:
                    raise CheckpointError(
                        "keys of optimizers and slots must not contain a slash",
                        got=f"{key!r} and {slot!r}",
                        remedy="rename them",
                    )
                if isinstance(value, Tensor):
                    tensors[f"{key}/{parameter}/{slot}"] = value
                else:
                    state[parameter][slot] = value
        plain[key] = {**data, "state": state}
    return tensors, plain


def best_of(folders: list[CheckpointFolder]) -> CheckpointFolder | None:
    """Return the checkpoint with the lowest score; None if no checkpoint has a score."""
    scored = [(score, folder) for folder in folders if (score := _score(folder)) is not None]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def _score(folder: CheckpointFolder) -> float | None:
    try:
        score = read_object(folder.path / MANIFEST)["score"]
        return None if score is None or math.isnan(score) else float(score)
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    return read_json(path, JSON_LIMIT)


def to_json(value: object) -> bytes:
    """Return a value as compact JSON; raise CheckpointError if it contains a type that JSON lacks."""
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "the state of a checkpoint must consist of JSON types",
            got=str(error),
            remedy="convert it to numbers and strings",
        ) from error


def marker_of(sha256: str) -> bytes:
    """Return the content of the marker file of a finished checkpoint: the digest of its manifest."""
    return f"{sha256}\n".encode()
