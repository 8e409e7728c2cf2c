"""Detect what callbacks change in the first replica's model, and apply it to the others.

Variables are compared by torch's version counter. Attributes of the model, its layers, optimizer and losses, and of
objects attached to these, are compared by value: numbers, strings, flags, schedules, functions and arrays.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from keras import Variable, tree
from keras.callbacks import Callback
from keras.initializers import Initializer
from keras.layers import Layer, TorchModuleWrapper
from keras.losses import Loss
from keras.metrics import Metric
from keras.optimizers import Optimizer
from torch import Tensor, nn

from ..core import StrategyError
from ..distributed import Opaque, is_plain, message
from ..training import Hand

Key = tuple[int, str, str]
"""Place of an attribute: index of its owner in a model, name of an object attached to that or "", and its name."""
_RATE = "_learning_rate"
_OWN = {"history", "train_function", "test_function", "predict_function"}
_OWN |= vars(Layer()).keys() - {"_trainable", "training", "activity_regularizer"}
"""Attributes that every replica manages itself and callbacks do not set."""
_SCALARS = (bool, int, float, complex, str, bytes, np.generic, type(None))
_STATE = (nn.Module, Variable, Optimizer, Metric)
_NO_HOLDERS = (nn.Module, Variable, Metric, Callback, Initializer, Tensor, type, FunctionType, MethodType, ModuleType)
MARKED = 1 << 13
"""Number of first elements of an array that are compared."""
DEEPEST = 4
"""Depth to which nested lists and dicts are compared; some contain themselves."""


def variables_of(model: Any) -> list[Any]:
    """Return a model's and its optimizer's variables, in the same order on all replicas; omit unbuilt ones."""
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    return [variable for variable in found if variable._value is not None]


@message
@dataclass(frozen=True)
class Changes:
    """Changes that callbacks have made to a model: packed attributes, and indexes of variables to be broadcast."""

    attributes: dict[Key, Any] = field(default_factory=dict)
    variables: list[int] = field(default_factory=list)

    def follow(self, hand: Hand, model: Any) -> None:
        """Apply the first replica's changes to the other replicas' models; all replicas must call this."""
        if not hand.is_first:
            holders = _holders(model)
            for (number, inner, name), packed in self.attributes.items():
                holder = getattr(holders[number], inner, None) if inner else holders[number]
                # An attached object that could not be sent is missing on this replica.
                if holder is not None:
                    # The setter of learning_rate also updates the variable.
                    setattr(holder, "learning_rate" if name == _RATE else name, _unpacked(packed, hand.device))
        state = variables_of(model)
        for index in self.variables:
            hand.replicas.broadcast(state[index]._value.data)


class ModelSnapshot:
    """Variable versions and attribute values of a model at one moment, to detect later changes."""

    def __init__(self, model: Any) -> None:
        self._model, holders = model, _holders(model)
        self._num_holders = len(holders)
        self._versions = {id(variable): variable._value._version for variable in variables_of(model)}
        # Keeping references prevents that an id is reused.
        self._values = dict(_attributes(holders))
        self._marks = {key: _mark(value) for key, value in self._values.items()}

    def changes(self) -> Changes:
        """Return the changes since the snapshot; raise StrategyError if one of them cannot be sent."""
        holders = _holders(self._model)
        if len(holders) != self._num_holders:
            raise _refused("a layer that was added or removed")
        now = _attributes(holders)
        changed = {key: value for key, value in now if self._marks.get(key, _NOTHING) != _mark(value)}
        packed = {key: _packed(key, value, self._values.get(key, _NOTHING)) for key, value in changed.items()}
        state = enumerate(variables_of(self._model))
        return Changes(
            {key: each for key, each in packed.items() if each is not _NOTHING},
            [index for index, each in state if self._versions.get(id(each)) != each._value._version],
        )


_NOTHING = object()


def plain_attributes(holder: Any) -> dict[str, Any]:
    """Return those attributes of an object that are numbers, strings, flags, or lists and dicts of such values."""
    found = {name: _sent(value) for name, value in vars(holder).items() if _is_plain(value)}
    return {name: value for name, value in found.items() if is_plain(value)}


def _holders(model: Any) -> list[Any]:
    """Return the objects whose attributes affect a step, in the same order on all replicas."""
    layers = model._flatten_layers()
    wrapped = [each for layer in layers if isinstance(layer, TorchModuleWrapper) for each in layer.module.modules()]
    losses = [each for each in tree.flatten(getattr(model, "loss", None)) if isinstance(each, Loss)]
    optimizer = getattr(model, "optimizer", None)
    return [*layers, *wrapped, *losses, *([] if optimizer is None else [optimizer]), *model.variables]


def _attributes(holders: list[Any]) -> Iterator[tuple[Key, Any]]:
    for number, holder in enumerate(holders):
        if isinstance(holder, Variable):
            yield (number, "", "trainable"), holder.trainable
            continue
        for name, value in _steering(holder):
            yield (number, "", name), value
            if hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS):
                yield from (((number, name, inner), each) for inner, each in _steering(value))


def _steering(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the attributes that a callback may set.

    Private attributes are mostly internal to Keras: of these, only scalars and the learning rate.
    """
    # torch stores submodules here instead of in the attributes.
    modules = holder._modules if isinstance(holder, nn.Module) else {}
    for name, value in [*vars(holder).items(), *modules.items()]:
        if name in _OWN:
            continue
        if not name.startswith("_") or isinstance(value, _SCALARS) or name == _RATE:
            yield name, value


def _mark(value: Any, depth: int = DEEPEST) -> Any:
    """Return a fingerprint that is equal as long as a value is unchanged."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return id(value), zlib.crc32(value.flat[:MARKED].tobytes())
    if depth and isinstance(value, (list, tuple)):
        return [_mark(each, depth - 1) for each in value]
    if depth and isinstance(value, dict):
        return {key: _mark(each, depth - 1) for key, each in value.items()}
    return id(value)


def _is_plain(value: Any, depth: int = DEEPEST) -> bool:
    if depth and isinstance(value, (list, tuple)):
        return all(_is_plain(each, depth - 1) for each in value)
    if depth and isinstance(value, dict):
        return all(_is_plain(each, depth - 1) for each in (*value, *value.values()))
    return isinstance(value, _SCALARS)


def _sent(value: Any) -> Any:
    """Return a value in the form that is sent: plain lists and dicts, and tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, list):
        return [_sent(each) for each in value]
    if isinstance(value, dict):
        return {key: _sent(each) for key, each in value.items()}
    return value


def _packed(key: Key, value: Any, before: Any) -> Any:
    """Return an attribute in the form that is sent; `_NOTHING` if neither it nor its earlier value can be sent.

    Raise StrategyError if only the new value cannot be sent. An attribute that could never be sent, such as an open
    file, is ignored: the other replicas have computed their steps without it.
    """
    name = ".".join(part for part in key[1:] if part)
    try:
        state = next((each for each in tree.flatten(value) if isinstance(each, _STATE)), None)
        if state is None:
            return _sendable(value)
    except Exception as error:
        if _can_be_sent(before):
            raise _refused(f"{name}, of type {type(value).__name__}, which cannot be sent") from error
        return _NOTHING
    raise _refused(f"{name}, another {type(state).__name__}")


def _sendable(value: Any) -> Any:
    """Return plain data unchanged, and anything else, such as a schedule or a function, pickled."""
    sent = _sent(value)
    return sent if is_plain(sent) else Opaque.of(sent)


def _can_be_sent(value: Any) -> bool:
    with contextlib.suppress(Exception):
        _sendable(value)
        return value is not _NOTHING
    return False


def _unpacked(packed: Any, device: torch.device) -> Any:
    value = packed.open() if isinstance(packed, Opaque) else packed
    return value.to(device) if isinstance(value, Tensor) else value


def _refused(what: str) -> StrategyError:
    return StrategyError(
        "callbacks run on the first replica, so their changes to the model must be transferable to the other replicas",
        got=what,
        remedy="change only weights, numbers, flags or schedules in a callback; make other changes between two "
        "calls of fit",
    )
