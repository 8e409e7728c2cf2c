"""Public function `export`: write any network as a model that can be served."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import storage
from ..core import ArchiveError, is_scripted
from ..training import input_name

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
PLAIN = (bool, int, float, str, type(None))
"""Types of arguments that are not tensors; they are fixed in the exported model."""
WITHOUT_CACHE = {"use_cache": False, "return_dict": True}
"""Arguments of Hugging Face models: a cache of earlier tokens cannot be passed on between requests."""


def export(
    module: nn.Module,
    example: Any,
    path: str | Path,
    *,
    name: str | None = None,
    outputs: Sequence[str] | None = None,
    dynamic: Mapping[str, Collection[int]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Export a network that was not trained with manyhands as the next version of a model; return its folder.

    The network is traced in evaluation mode, and every row is computed independently of the others, because a server
    joins rows of several requests. What cannot be served like that is refused with the reason: an output without rows,
    rows that depend on each other, a batch size that is fixed in the code, operators that are not on the list.

    Args:
        module: Any `nn.Module`, with the weights that it has now.
        example: A batch of inputs: a tensor, a tuple of tensors in the order of `forward`, or a dict of arguments by
            name, such as the result of a Hugging Face tokenizer. Numbers, bools and strings in a dict are fixed in the
            exported model. Inputs are named as the arguments of `forward`.
        path: Folder of the model, such as "models/digits"; with `name=`, the folder of all models.
        name: Name of the model.
        outputs: Names of the outputs to keep; all by default. A dict or a dataclass, such as the output of a Hugging
            Face model, gives the names. Elements of a tuple are `output_0`, `output_1`; a single tensor is `output`.
        dynamic: Other dimensions than the batch whose size may vary, by input: {"input_ids": [1]} for texts of any
            length.
        extra: JSON values that are stored with the model.

    Example:
        net.load_state_dict(safetensors.torch.load_file("net.safetensors"))
        mh.export(net, images[:2], "models", name="digits")
        mh.serve("models")
    """
    network = _network(module)
    inputs, call = _arguments(network, example)
    free = {each: set(dims) for each, dims in (dynamic or {}).items()}
    if unknown := [each for each in free if each not in inputs]:
        raise ArchiveError(
            f"dynamic must name inputs, which are {', '.join(inputs)}", got=unknown[0], remedy="use one of these names"
        )

    def predict(model: nn.Module, *values: Tensor) -> dict[str, Tensor]:
        return _selected(call(model, values), outputs)

    return storage.export(
        network, predict, inputs, _folder(Path(path), name), free=free, extra=dict(extra or {}), by_rows=True
    )


def _network(module: Any) -> nn.Module:
    """Return the network to trace: that of a compiled one; raise for what is not a plain module."""
    network = getattr(module, "_orig_mod", module)
    if not isinstance(network, nn.Module):
        raise ArchiveError(
            "mh.export needs an nn.Module",
            got=type(module).__name__,
            remedy="pass the network; a run is exported with run.export(path)",
        )
    if is_scripted(network):
        raise ArchiveError(
            "the network must not be compiled by TorchScript", got=type(module).__name__, remedy="pass the original"
        )
    return network


def _folder(path: Path, name: str | None) -> Path:
    if name is not None and not NAME.fullmatch(name):
        raise ArchiveError(
            "the name of a model must consist of letters, digits, dashes and underscores, at most 64 characters",
            got=repr(name)[:100],
            remedy="rename it",
        )
    return path if name is None else path / name


Call = Callable[[nn.Module, Sequence[Tensor]], Any]


def _arguments(network: nn.Module, example: Any) -> tuple[dict[str, Tensor], Call]:
    """Return the inputs by name, and a function that calls the network with their values."""
    if isinstance(example, Mapping):
        inputs = {str(key): torch.as_tensor(value) for key, value in example.items() if not isinstance(value, PLAIN)}
        known = inspect.signature(network.forward).parameters
        is_hugging_face = hasattr(network, "config")
        fixed: dict[str, Any] = {key: value for key, value in WITHOUT_CACHE.items() if is_hugging_face and key in known}
        fixed |= {str(key): value for key, value in example.items() if isinstance(value, PLAIN)}
        return inputs, lambda model, values: model(**dict(zip(inputs, values, strict=True)), **fixed)
    values = list(example) if isinstance(example, tuple | list) else [example]
    names = _positional(network, len(values))
    inputs = {key: torch.as_tensor(value) for key, value in zip(names, values, strict=True)}
    return inputs, lambda model, values: model(*values)


def _positional(network: nn.Module, num: int) -> list[str]:
    """Return names of the first arguments of `forward`."""
    if num == 1:
        return [input_name(network)]
    parameters = inspect.signature(network.forward).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return (names if len(names) >= num else [f"input_{number}" for number in range(num)])[:num]


def _selected(answer: Any, wanted: Sequence[str] | None) -> dict[str, Tensor]:
    """Return the tensors that a network returns, by name; raise for what is not a tensor, unless it is not wanted."""
    found = {"output": answer} if isinstance(answer, Tensor) else dict(_named(answer, ""))
    names = list(found if wanted is None else wanted)
    if missing := [name for name in names if name not in found]:
        raise ArchiveError(
            f"outputs must be names of what the network returns, {', '.join(found) or 'nothing'}",
            got=missing[0],
            remedy="pass outputs= with some of these",
        )
    other = [f"{name}: {type(found[name]).__name__}" for name in names if not isinstance(found[name], Tensor)]
    if other or not names:
        fit = [name for name, value in found.items() if isinstance(value, Tensor)]
        raise ArchiveError(
            "the network must return tensors",
            got=", ".join(other)[:200] or "nothing",
            remedy=f"pass outputs={fit}" if fit else "wrap it in a module that returns a tensor",
        )
    return {name: found[name] for name in names}


def _named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a network's result with their names; None is an output that it does not have."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(part, f"{name}_{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _named(part, f"{name or 'output'}_{number}")
    elif value is not None:
        yield name or "output", value
