"""Weights to start from: state-dict files, Hugging Face folders, exports and checkpoints, matched by name.

Names and shapes are read from headers where the format has them, so that weights of another network are rejected early.
From pickles only tensors are read (`weights_only`).
"""

from __future__ import annotations

import difflib
import itertools
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..core import CheckpointError, FileError, open_regular, opened, read_json
from .archive_folders import MANIFEST, WEIGHTS, versions
from .checkpoint_root import describe
from .checkpoints import CheckpointStore
from .tensors import load_state_dict, require_storable

SAFE, PICKLED = ".safetensors", (".pt", ".pth", ".bin", ".ckpt")
FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Hugging Face's file names for weights in a folder, in order of preference."""
INDEX_LIMIT = 64 << 20
"""Maximum size in bytes of an index that lists weight files."""
INSIDE = ("state_dict", "model_state_dict", "model", "module", "network", "net", "weights")
"""Keys under which training scripts store a state dict next to other data."""
PREFIXES = ("_orig_mod.", "module.", "model.")
"""Prefixes that torch.compile, DistributedDataParallel and Lightning add to names."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Weights:
    """A source of weights, and how the names in it map to those of a network."""

    source: Path | Mapping[str, Tensor]
    strict: bool = True
    """Whether every tensor must have a counterpart; otherwise only those that match are loaded."""
    rename: Mapping[str, str] | None = None
    """Maps prefixes of names in the source to prefixes in the network."""

    def __str__(self) -> str:
        return str(self.source) if isinstance(self.source, Path) else f"a state dict of {len(self.source)} tensors"


def weights(
    path: str | Path | Mapping[str, Tensor], *, strict: bool = True, rename: Mapping[str, str] | None = None
) -> Weights:
    """Describe weights for `fit(start_from=...)` that need renaming or match only in part.

    Args:
        path: A run, a file of weights, a Hugging Face folder, an exported model, or a state dict.
        strict: Whether all tensors must match; False loads those that match, and leaves the others initialized.
        rename: Maps prefixes of the source's names to prefixes of the network's names.

    >>> weights("resnet.safetensors", strict=False, rename={"backbone.": "encoder."}).strict
    False
    """
    return Weights(path if isinstance(path, Mapping) else Path(path).expanduser().absolute(), strict, rename)


@dataclass(frozen=True)
class Found:
    """Weights of an existing source: their shapes are known, and `load` reads their values."""

    shapes: Shapes
    load: Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]]
    """Function that returns the tensors, and the saved moving averages of some of them, by name."""


@dataclass(frozen=True)
class Match:
    """Mapping of a network's names to those of a source of weights, and notices about it for the user."""

    names: dict[str, str]
    """The network's names, mapped to those in the source."""
    notices: list[str]

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the source's tensors by the network's names."""
        return {name: tensors[source_name] for name, source_name in self.names.items()}


def open_weights(source: Path | Mapping[str, Tensor]) -> Found:
    """Find weights and read their names and shapes; raise CheckpointError if there are none."""
    if isinstance(source, Mapping):
        tensors = _required_tensors(source)
        return Found({name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda: (tensors, {}))
    if source.is_dir():
        return _open_folder(source)
    if source.suffix == SAFE and source.is_file():
        return Found(_header(source), lambda: (load_state_dict(source), {}))
    if source.suffix in PICKLED and source.is_file():
        pickled = _unpickled(source)
        return Found({name: tuple(tensor.shape) for name, tensor in pickled.items()}, lambda: (pickled, {}))
    raise CheckpointError(
        f"weights must be a run, a {SAFE} file, a state dict in {', '.join(PICKLED)}, a Hugging Face folder or an "
        "exported model",
        got=f"{source}, which {'is another kind of file' if source.exists() else 'does not exist'}",
        remedy="pass one of these",
    )


def match(shapes: Shapes, model: nn.Module, weights: Weights) -> Match:
    """Match the source's names and shapes with those of a network; raise CheckpointError with the differences."""
    held = {n: value for n, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    names, notices = _renamed(shapes, held, weights)
    there = {id(held[name]) for name in names if name in held}
    # A tied weight is often stored once; then the network gets it under its other name.
    missing = [name for name, tensor in held.items() if name not in names and id(tensor) not in there]
    unexpected = [source_name for name, source_name in names.items() if name not in held]
    fitting = _fitting(names, shapes, held)
    other = [
        f"{name} is {shapes[names[name]]} and should be {tuple(tensor.shape)}"
        for name, tensor in held.items()
        if name in names and name not in fitting
    ]
    listed = {"missing": missing, "unexpected": unexpected, "of another shape": other}
    texts = [f"{len(items)} {kind} ({_some(items)})" for kind, items in listed.items() if items]
    if texts and (weights.strict or not fitting):
        raise CheckpointError(
            f"{weights} must contain the tensors of {type(model).__name__}",
            got=", ".join(texts),
            remedy=_remedy(missing, unexpected, bool(fitting)),
        )
    if texts:
        notices.append(f"{len(fitting)} tensors of {weights} are loaded; {', '.join(texts)}")
    return Match(fitting, notices)


def check_values(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise CheckpointError for tensors that match the network by name and shape, but whose values are wrong.

    These are tied weights with different values under their two names, and quantized integers instead of weights.
    """
    held = {name: value for name, value in model.state_dict(keep_vars=True).items() if name in tensors}
    first_names: dict[int, str] = {}
    for name, target in held.items():
        if target.is_floating_point() and not tensors[name].is_floating_point():
            raise CheckpointError(
                "weights must be floating-point numbers",
                got=f"{name} as {tensors[name].dtype}".replace("torch.", ""),
                remedy="pass weights that are not quantized",
            )
        first = first_names.setdefault(id(target), name)
        if first != name and not torch.equal(tensors[first], tensors[name]):
            raise CheckpointError(
                f"{first} and {name} are one tensor in this network, so their values must be equal",
                got="different values",
                remedy="omit one of them, or build the network with two tensors",
            )


def _open_folder(folder: Path) -> Found:
    store = CheckpointStore(folder)
    if (newest := store.newest_model()) is not None:

        def load() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            checkpoint = store.load()
            return checkpoint.model, checkpoint.averages

        return Found(_header(newest), load)
    if (exported := _exported(folder)) is not None:
        return open_weights(exported)
    name = next((name for name in FOLDER_FILES if (folder / name).is_file()), None)
    if name is None:
        raise CheckpointError(
            "a folder of weights must be a run, an exported model, or a Hugging Face folder with "
            + " or ".join(FOLDER_FILES[::2]),
            got=f"{folder}: {describe(folder)}",
            remedy="pass one of these, or a file of weights",
        )
    if not name.endswith(".json"):
        return open_weights(folder / name)
    parts = [open_weights(path) for path in _listed(folder / name)]
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    return Found(shapes, lambda: ({name: t for part in parts for name, t in part.load()[0].items()}, {}))


def _exported(folder: Path) -> Path | None:
    """Return the weights file of an exported version, or of the newest one in a model folder; None if there is none."""
    if not (folder / MANIFEST).is_file():
        found = versions(folder)
        if not found:
            return None
        folder = folder / str(found[-1])
    return folder / WEIGHTS


def _listed(index: Path) -> list[Path]:
    """Return the files that an index lists; only files in the same folder are accepted."""
    try:
        names = sorted(set(read_json(index, INDEX_LIMIT, follow_links=True)["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} must list the files of the weights",
            got=f"{type(error).__name__}: {error}",
            remedy="download the whole folder again",
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not os.path.isfile(index.parent / name):
            raise CheckpointError(
                f"{index} must list files in its own folder", got=repr(name), remedy="download the whole folder"
            )
    return [index.parent / name for name in names]


def _header(path: Path) -> Shapes:
    try:
        # Folders in Hugging Face's cache hold symbolic links to the files.
        with opened(path, follow_links=True) as found, safe_open(found, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} must be a complete safetensors file", got=str(error), remedy="copy or download the file again"
        ) from error


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickled state dict; torch rejects everything else in a pickle."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about old formats, which the user of the file cannot change
            with opened(path, follow_links=True) as file:
                loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:
        raise _refused(path, error) from None
    inside = [loaded[key] for key in INSIDE if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping)]
    for candidate in (*inside, loaded):
        tensors = _tensors(candidate)
        if tensors:
            # torch does not check the indices of sparse tensors in a file: computing with them writes to any address.
            return {name: require_storable(name, tensor) for name, tensor in tensors.items()}
    raise CheckpointError(
        f"{path} must contain a state dict",
        got=f"{type(loaded).__name__} without tensors",
        remedy="save model.state_dict()",
    )


def _refused(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that torch could not read, instead of torch's, which advises to trust the file."""
    held = re.search(r"GLOBAL (\S+)|(\S+) which is not in the allowed", str(error))
    if isinstance(error, pickle.UnpicklingError) and held is not None:
        return CheckpointError(
            "only plain tensors are read from a pickle, because it can execute code",
            got=f"{path.name} with {held[1] or held[2]} in it",
            remedy="if you trust the file, save its model.state_dict() with torch.save or as .safetensors",
        )
    return CheckpointError(
        f"{path} must be a complete file of torch.save", got=_damage(path), remedy="copy or download it again"
    )


def _damage(path: Path) -> str:
    try:
        with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
            begin = file.read(16)
    except (OSError, FileError) as error:
        return str(error)
    if not begin:
        return "an empty file"
    if begin.startswith(b"PK"):
        return (
            "a damaged one" if zipfile.is_zipfile(path) else f"one that ends early, after {path.stat().st_size} bytes"
        )
    return "a damaged one" if begin.startswith(b"\x80") else f"a file that begins with {begin!r}"


def _required_tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict that the user passed, without other values; raise if there are none."""
    tensors = _tensors(values)
    if not tensors:
        held = ", ".join(f"{name!r}: {type(value).__name__}" for name, value in list(values.items())[:3])
        raise CheckpointError(
            "the values of a state dict must be tensors", got=f"{{{held}}}", remedy="pass model.state_dict()"
        )
    return tensors


def _tensors(value: Any) -> dict[str, Tensor]:
    items = value.items() if isinstance(value, Mapping) else ()
    return {name: tensor for name, tensor in items if isinstance(name, str) and isinstance(tensor, Tensor)}


def _renamed(shapes: Shapes, held: Mapping[str, Tensor], weights: Weights) -> tuple[dict[str, str], list[str]]:
    """Return the source's names by the network's, and notices.

    The names are renamed as requested, and by the usual change of prefixes with which most tensors match.
    """
    asked = {_begin(name, weights.rename or {}): name for name in shapes}
    best, most, notices = asked, len(_fitting(asked, shapes, held)), []
    if len(asked) != len(shapes):
        raise CheckpointError(
            "rename must give every tensor a unique name", got=repr(weights.rename), remedy="use longer prefixes"
        )
    for label, change, at_least in _changes(asked, held):
        changed = {change(name): source_name for name, source_name in asked.items()}
        count = len(_fitting(changed, shapes, held))
        if len(changed) == len(asked) and count > most and count >= at_least:
            best, most, notices = changed, count, [f"names of {weights} were taken {label}"]
    return best, notices


def _changes(names: Mapping[str, str], held: Mapping[str, Tensor]) -> list[tuple[str, Callable[[str], str], int]]:
    """Return usual changes of names, each as a description, a function, and the minimum number of matching tensors."""
    usual = [order for count in (1, 2, 3) for order in itertools.permutations(PREFIXES, count)]
    present = [order for order in usual if any(order[0] in name for name in names)]
    changes = [(f"without {''.join(order)!r}", _stripper(order), 1) for order in present]
    first = next(iter(names), "")
    parents = {name.removesuffix(first) for name in held if first and name.endswith(f".{first}")}
    # Loading all tensors into one submodule is a guess, so all of them must match.
    return [*changes, *((f"under {parent!r}", parent.__add__, len(names)) for parent in sorted(parents))]


def _stripper(prefixes: tuple[str, ...]) -> Callable[[str], str]:
    def strip(name: str) -> str:
        for prefix in prefixes:
            # A network may be compiled in parts, so this prefix can occur anywhere in a name.
            name = name.replace(prefix, "") if prefix == "_orig_mod." else name.removeprefix(prefix)
        return name

    return strip


def _begin(name: str, rename: Mapping[str, str]) -> str:
    start = next((start for start in rename if name.startswith(start)), None)
    return name if start is None else rename[start] + name.removeprefix(start)


def _fitting(names: Mapping[str, str], shapes: Shapes, held: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        n: source_name for n, source_name in names.items() if n in held and shapes[source_name] == tuple(held[n].shape)
    }


def _remedy(missing: list[str], unexpected: list[str], some_fit: bool) -> str:
    hints = ["pass weights of this network"]
    for name in missing[:1]:
        ends = [source_name for source_name in unexpected if source_name.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
        for source_name in difflib.get_close_matches(name, ends, n=1, cutoff=0.3) or ends[:1]:
            end = len(name.rsplit(".", 1)[-1])
            hints.append(f"rename with mh.storage.weights(path, rename={{{source_name[:-end]!r}: {name[:-end]!r}}})")
    if some_fit:
        hints.append("take what fits with mh.storage.weights(path, strict=False)")
    return ", or ".join(hints)


def _some(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
