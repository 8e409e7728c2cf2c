"""Weights to start from: files of state dicts, folders of Hugging Face, exports and checkpoints, by their names.

Names and shapes come from headers where the format has them, so that a file of another network is refused early.
Of pickles only tensors are read (`weights_only`).
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
from .archives import MANIFEST, WEIGHTS, versions
from .checkpoints import CheckpointStore, describe
from .tensors import load_state_dict

SAFE, PICKLED = ".safetensors", (".pt", ".pth", ".bin", ".ckpt")
FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""How Hugging Face names the weights of a folder, the better first."""
INDEX_LIMIT = 64 << 20
"""Bytes of an index that lists the files of the weights."""
INSIDE = ("state_dict", "model_state_dict", "model", "module", "network", "net", "weights")
"""Keys under which training scripts put a state dict beside other things."""
PREFIXES = ("_orig_mod.", "module.", "model.")
"""What torch.compile, DistributedDataParallel and Lightning put before the plain module's names."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Weights:
    """Where weights come from, and how their names become the network's."""

    source: Path | Mapping[str, Tensor]
    strict: bool = True
    """Whether every tensor must have its counterpart; otherwise what fits is taken."""
    rename: Mapping[str, str] | None = None
    """Beginnings of names in the source, and what stands there in the network."""

    def __str__(self) -> str:
        return str(self.source) if isinstance(self.source, Path) else f"a state dict of {len(self.source)} tensors"


def weights(
    path: str | Path | Mapping[str, Tensor], *, strict: bool = True, rename: Mapping[str, str] | None = None
) -> Weights:
    """Weights for `fit(start_from=...)` that do not fit as they are.

    `strict=False` takes what fits and leaves the rest of the network as it was made; `rename` changes how names begin.

    >>> weights("resnet.safetensors", strict=False, rename={"backbone.": "encoder."}).strict
    False
    """
    return Weights(path if isinstance(path, Mapping) else Path(path).expanduser().absolute(), strict, rename)


@dataclass(frozen=True)
class Found:
    """Weights that are there: shapes at once, values when they are asked for."""

    shapes: Shapes
    load: Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]]
    """The tensors, and the averages that were kept of some of them."""


@dataclass(frozen=True)
class Match:
    """Which tensor of the source belongs to which name of the network."""

    names: dict[str, str]
    """The network's names, and those in the source."""
    notices: list[str]

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values by the network's own names."""
        return {name: tensors[theirs] for name, theirs in self.names.items()}


def open_weights(source: Path | Mapping[str, Tensor]) -> Found:
    """Finds weights and reads their names and shapes."""
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
        f"weights are a run, a {SAFE} file, a state dict in {', '.join(PICKLED)}, a Hugging Face or an exported folder",
        got=f"{source}, which {'is another kind of file' if source.exists() else 'does not exist'}",
        remedy="pass one of these",
    )


def match(shapes: Shapes, model: nn.Module, weights: Weights) -> Match:
    """Brings the source's names to the network's; raises where they do not fit, listing what does not."""
    held = {n: value for n, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    names, notices = _renamed(shapes, held, weights)
    there = {id(held[name]) for name in names if name in held}
    # A tied weight is often stored once: the network has it under its other name already.
    missing = [name for name, tensor in held.items() if name not in names and id(tensor) not in there]
    unexpected = [theirs for name, theirs in names.items() if name not in held]
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
            f"{weights} must hold the tensors of {type(model).__name__}",
            got=", ".join(texts),
            remedy=_remedy(missing, unexpected, bool(fitting)),
        )
    if texts:
        notices.append(f"of {weights} {len(fitting)} tensors are taken; {', '.join(texts)}")
    return Match(fitting, notices)


def check_values(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuses values, by the network's own names, that would fit by shape and mean something else.

    Of a tied weight that differs under its two names one would win by chance; packed whole numbers are no weights.
    """
    held = {name: value for name, value in model.state_dict(keep_vars=True).items() if name in tensors}
    first_names: dict[int, str] = {}
    for name, target in held.items():
        if target.is_floating_point() and not tensors[name].is_floating_point():
            raise CheckpointError(
                "weights are numbers with a point",
                got=f"{name} as {tensors[name].dtype}".replace("torch.", ""),
                remedy="pass weights that are not quantised",
            )
        first = first_names.setdefault(id(target), name)
        if first != name and not torch.equal(tensors[first], tensors[name]):
            raise CheckpointError(
                f"{first} and {name} are one and the same in this network",
                got="different values for them",
                remedy="leave one of them out, or build the network with two",
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
            "a folder to start from is a run, an exported model, or a Hugging Face folder with "
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
    """The weights of an exported version, or of the newest one under a model's folder."""
    if not (folder / MANIFEST).is_file():
        found = versions(folder)
        if not found:
            return None
        folder = folder / str(found[-1])
    return folder / WEIGHTS


def _listed(index: Path) -> list[Path]:
    """The files that an index names; only such as lie beside it."""
    try:
        names = sorted(set(read_json(index, INDEX_LIMIT, follow_links=True)["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} must list the files of the weights", got=f"{type(error).__name__}: {error}"
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not os.path.isfile(index.parent / name):
            raise CheckpointError(f"{index} lists files beside it", got=repr(name), remedy="fetch the whole folder")
    return [index.parent / name for name in names]


def _header(path: Path) -> Shapes:
    try:
        # Folders of Hugging Face's cache hold links to the files themselves.
        with opened(path, follow_links=True) as found, safe_open(found, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} must be a whole safetensors file", got=str(error)) from error


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled state dict; torch itself refuses whatever else a pickle could do."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of old ways of saving, which are the author's
            with opened(path, follow_links=True) as file:
                loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:
        raise _refused(path, error) from None
    inside = [loaded[key] for key in INSIDE if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping)]
    for candidate in (*inside, loaded):
        tensors = _tensors(candidate)
        if tensors:
            return tensors
    raise CheckpointError(
        f"{path} must hold a state dict", got=f"a {type(loaded).__name__} without tensors", remedy="save one"
    )


def _refused(path: Path, error: Exception) -> CheckpointError:
    """Why torch did not read a file, in words of our own: its advice is to trust the file."""
    held = re.search(r"GLOBAL (\S+)|(\S+) which is not in the allowed", str(error))
    if isinstance(error, pickle.UnpicklingError) and held is not None:
        return CheckpointError(
            "of a pickle only plain tensors are read, because it can execute code",
            got=f"{path.name} with {held[1] or held[2]} in it",
            remedy="where you trust it, save model.state_dict() of it with torch.save or as .safetensors",
        )
    return CheckpointError(
        f"{path} must be a whole file of torch.save", got=_damage(path), remedy="copy or download it again"
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
    """The tensors of a state dict that a person passes; what a module keeps besides them is left out."""
    tensors = _tensors(values)
    if not tensors:
        held = ", ".join(f"{name!r}: {type(value).__name__}" for name, value in list(values.items())[:3])
        raise CheckpointError(
            "the values of a state dict are tensors", got=f"{{{held}}}", remedy="pass model.state_dict()"
        )
    return tensors


def _tensors(value: Any) -> dict[str, Tensor]:
    items = value.items() if isinstance(value, Mapping) else ()
    return {name: tensor for name, tensor in items if isinstance(name, str) and isinstance(tensor, Tensor)}


def _renamed(shapes: Shapes, held: Mapping[str, Tensor], weights: Weights) -> tuple[dict[str, str], list[str]]:
    """Names as the network has them to those of the source: renamed as asked, or by the change that fits best."""
    asked = {_begin(name, weights.rename or {}): name for name in shapes}
    best, most, notices = asked, len(_fitting(asked, shapes, held)), []
    if len(asked) != len(shapes):
        raise CheckpointError(
            "rename gives every tensor a name of its own", got=repr(weights.rename), remedy="narrow it"
        )
    for label, change, at_least in _changes(asked, held):
        changed = {change(name): theirs for name, theirs in asked.items()}
        count = len(_fitting(changed, shapes, held))
        if len(changed) == len(asked) and count > most and count >= at_least:
            best, most, notices = changed, count, [f"names of {weights} were taken {label}"]
    return best, notices


def _changes(names: Mapping[str, str], held: Mapping[str, Tensor]) -> list[tuple[str, Callable[[str], str], int]]:
    """Ways in which names of one and the same network differ: words for it, the change, how many must fit then."""
    usual = [order for count in (1, 2, 3) for order in itertools.permutations(PREFIXES, count)]
    present = [order for order in usual if any(order[0] in name for name in names)]
    changes = [(f"without {''.join(order)!r}", _stripper(order), 1) for order in present]
    first = next(iter(names), "")
    parents = {name.removesuffix(first) for name in held if first and name.endswith(f".{first}")}
    # To put them into one part of the network is a guess, so then all of them must fit.
    return [*changes, *((f"under {parent!r}", parent.__add__, len(names)) for parent in sorted(parents))]


def _stripper(prefixes: tuple[str, ...]) -> Callable[[str], str]:
    def strip(name: str) -> str:
        for prefix in prefixes:
            # A network may be compiled in parts, so that this one stands anywhere.
            name = name.replace(prefix, "") if prefix == "_orig_mod." else name.removeprefix(prefix)
        return name

    return strip


def _begin(name: str, rename: Mapping[str, str]) -> str:
    start = next((start for start in rename if name.startswith(start)), None)
    return name if start is None else rename[start] + name.removeprefix(start)


def _fitting(names: Mapping[str, str], shapes: Shapes, held: Mapping[str, Tensor]) -> dict[str, str]:
    return {n: theirs for n, theirs in names.items() if n in held and shapes[theirs] == tuple(held[n].shape)}


def _remedy(missing: list[str], unexpected: list[str], some_fit: bool) -> str:
    hints = ["pass weights of this network"]
    for name in missing[:1]:
        ends = [theirs for theirs in unexpected if theirs.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
        for theirs in difflib.get_close_matches(name, ends, n=1, cutoff=0.3) or ends[:1]:
            end = len(name.rsplit(".", 1)[-1])
            hints.append(f"rename with mh.weights(path, rename={{{theirs[:-end]!r}: {name[:-end]!r}}})")
    if some_fit:
        hints.append("take what fits with mh.weights(path, strict=False)")
    return ", or ".join(hints)


def _some(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
