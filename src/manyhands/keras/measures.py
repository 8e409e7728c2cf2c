"""Metrics and other state of a model over all replicas: after a step every replica has what one device would have."""

from __future__ import annotations

from typing import Any

import torch
from keras.layers import BatchNormalization
from torch import Tensor

from ..training import Hand
from .share import Rows


class Measures:
    """The state that one step of a model adds to."""

    def __init__(self, model: Any, hand: Hand) -> None:
        self._model, self._hand = model, hand
        self._before = {id(variable): variable.value.clone() for variable in _of_metrics(model)}
        self._added: dict[int, Tensor] = {}
        self._logs: dict[str, Tensor] = {}
        self._versions = {id(variable): variable._value._version for variable in _own_state(model)}
        self._mixed: list[Tensor] = []
        self._has_rows = self._has_first_row = False

    def take(self, logs: Any, rows: Rows) -> None:
        """What a micro-batch has added; a borrowed row adds nothing."""
        self._has_rows |= not rows.is_ghost
        self._has_first_row |= not rows.is_ghost and rows.start == 0
        for variable in _of_metrics(self._model):
            before = self._before.setdefault(id(variable), torch.zeros_like(variable.value))
            if not rows.is_ghost:
                added = variable.value.double() - before.double()
                self._added[id(variable)] = self._added.get(id(variable), 0) + added
            variable.assign(before)
        for name, value in logs.items() if isinstance(logs, dict) else ():
            weighed = torch.as_tensor(value).detach().double() * rows.weight
            self._logs[name] = self._logs.get(name, 0) + weighed.cpu()
        state = [variable._value.double() * rows.weight for variable in self._moved()]
        self._mixed = [a + b for a, b in zip(self._mixed, state, strict=True)] if self._mixed else state

    def _moved(self) -> list[Any]:
        """State of layers that this step has changed."""
        return [v for v in _own_state(self._model) if v._value._version != self._versions.get(id(v), -1)]

    def joined(self, logs: Any) -> Any:
        """Puts the sums over all replicas into the metrics; returns what the step has to tell, over all of them."""
        metrics = list(_of_metrics(self._model))
        extra = sorted(name for name, value in self._logs.items() if value.dim() == 0)
        tensors = [self._added.get(id(v), torch.zeros_like(v.value, dtype=torch.float64)) for v in metrics]
        if not self._has_first_row:
            tensors = [
                torch.zeros_like(t) if v.aggregation == "only_first_replica" else t
                for t, v in zip(tensors, metrics, strict=True)
            ]
        present = torch.tensor(float(self._has_rows), dtype=torch.float64)
        present, *sums = _summed(self._hand, [present, *tensors, *(self._logs[name] for name in extra), *self._mixed])
        sums[: len(metrics)] = [
            total / present if variable.aggregation == "mean" else total
            for total, variable in zip(sums, metrics, strict=False)
        ]
        for variable, added in zip(metrics, sums, strict=False):
            variable.assign((self._before[id(variable)].double() + added).to(variable.value.dtype))
        for variable, mixed in zip(self._moved(), sums[len(sums) - len(self._mixed) :], strict=True):
            variable.assign(mixed.to(variable.value.dtype))
        if not isinstance(logs, dict):
            return logs
        told = dict(zip(extra, sums[len(metrics) :], strict=False))
        results = self._model.get_metrics_result() if logs.keys() & _names(self._model) else {}
        return {name: results.get(name, told.get(name, value)) for name, value in logs.items()}


def _summed(hand: Hand, tensors: list[Tensor]) -> list[Tensor]:
    if not tensors:
        return []
    flat = torch.cat([tensor.to(hand.device).reshape(-1) for tensor in tensors])
    hand.replicas.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _of_metrics(model: Any) -> list[Any]:
    found = {id(variable): variable for metric in model.metrics for variable in metric.variables}
    return list(found.values())


def _names(model: Any) -> set[str]:
    return {name for metric in model.metrics for name in (metric.name, *_inner(metric))}


def _inner(metric: Any) -> list[str]:
    if not getattr(metric, "built", True) or not hasattr(metric, "metrics"):
        return []
    result = metric.result()
    return list(result) if isinstance(result, dict) else []


def _own_state(model: Any) -> list[Any]:
    """State that layers may move by what they see; batch statistics are those of all replicas already."""
    synchronised = {
        id(variable)
        for layer in model._flatten_layers()
        if isinstance(layer, BatchNormalization)
        for variable in layer.variables
    }
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) not in synchronised and variable._value.is_floating_point()
    ]
