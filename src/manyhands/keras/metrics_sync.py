"""Synchronization of metrics and other model state: after a step every replica has what one device would have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from keras import ops
from keras.layers import BatchNormalization
from keras.src.backend.torch.trainer import TorchTrainer
from torch import Tensor

from ..training import Hand
from .batch_share import MicroBatchRows
from .step import current_step

Path = tuple[str, ...]
_STEPS = ("train_step", "test_step", "compute_metrics")


class Measures:
    """Sums a step's changes of metrics over micro-batches and replicas; with a model, also those of layers' state."""

    def __init__(self, metrics: Sequence[Any], hand: Hand, model: Any = None) -> None:
        self._metrics, self._hand, self._model = metrics, hand, model
        self._before = {id(variable): variable.value.clone() for variable in self._counted()}
        self._added: dict[int, Tensor] = {}
        self._logs: dict[Path, Tensor] = {}
        self._versions = {id(variable): variable._value._version for variable in _own_state(model)}
        self._is_plain = all(getattr(type(model), name, None) is getattr(TorchTrainer, name) for name in _STEPS)
        """Whether the model uses Keras' own step methods, whose logs are only results of metrics."""
        self._results: set[Path] = set()
        """Paths of the last micro-batch's logs that are results of metrics."""
        self._mixed: list[Tensor] = []
        self._has_rows = self._has_first_row = False
        self.has_failed = False
        """Whether any replica had reported a failure at the last synchronization."""

    def take(self, logs: Any, rows: MicroBatchRows) -> None:
        """Add a micro-batch's changes of the metrics, and reset the metrics; a borrowed row adds nothing."""
        self._results = self._results_in(logs)
        self._has_rows |= not rows.is_padding
        self._has_first_row |= not rows.is_padding and rows.start == 0
        for variable in self._counted():
            before = self._before.setdefault(id(variable), torch.zeros_like(variable.value))
            if not rows.is_padding:
                added = variable.value.double() - before.double()
                self._added[id(variable)] = self._added.get(id(variable), 0) + added
            variable.assign(before)
        for path, value in _flat(logs):
            weighed = torch.as_tensor(value).detach().double() * rows.weight
            self._logs[path] = self._logs.get(path, 0) + weighed.cpu()
        state = [variable._value.double() * rows.weight for variable in self._moved()]
        self._mixed = [a + b for a, b in zip(self._mixed, state, strict=True)] if self._mixed else state

    def _moved(self) -> list[Any]:
        """Return the layers' state variables that this step has changed."""
        return [v for v in _own_state(self._model) if v._value._version != self._versions.get(id(v), -1)]

    def joined(self, logs: Any, *, has_failed: bool = False) -> Any:
        """Sum the metrics over all replicas and return the step's logs computed from the sums.

        The flag `has_failed` is piggybacked on the exchange, so that all replicas know it afterwards.
        """
        metrics = self._counted()
        extra = sorted(path for path, value in self._logs.items() if value.dim() == 0)
        tensors = [self._added.get(id(v), torch.zeros_like(v.value, dtype=torch.float64)) for v in metrics]
        if not self._has_first_row:
            tensors = [
                torch.zeros_like(t) if v.aggregation == "only_first_replica" else t
                for t, v in zip(tensors, metrics, strict=True)
            ]
        piggybacked = torch.tensor([self._has_rows, has_failed], dtype=torch.float64)
        piggybacked, *sums = _summed(
            self._hand, [piggybacked, *tensors, *(self._logs[path] for path in extra), *self._mixed]
        )
        present, failed = piggybacked
        self.has_failed = bool(failed)
        sums[: len(metrics)] = [
            total / present if variable.aggregation == "mean" else total
            for total, variable in zip(sums, metrics, strict=False)
        ]
        for variable, added in zip(metrics, sums, strict=False):
            variable.assign((self._before[id(variable)].double() + added).to(variable.value.dtype))
        for variable, mixed in zip(self._moved(), sums[len(sums) - len(self._mixed) :], strict=True):
            variable.assign(mixed.to(variable.value.dtype))
        results_by_path = dict(zip(extra, sums[len(metrics) :], strict=False))
        results: dict[str, Any] = {}
        if self._results:
            results = self._model.get_metrics_result() if self._is_plain else _results_of(self._metrics)
        return _filled(
            logs, results_by_path | {path: results[path[-1]] for path in self._results if path[-1] in results}
        )

    def _results_in(self, logs: Any) -> set[Path]:
        """Return the paths in `logs` that are results of metrics.

        A custom step may log another number under the name of a metric.
        """
        values = dict(_flat(logs))
        if self._is_plain or not values:
            return set(values)
        results = _results_of(self._metrics)
        return {path for path, value in values.items() if path[-1] in results and _is_same(value, results[path[-1]])}

    def _counted(self) -> list[Any]:
        """Return the metrics' variables without duplicates."""
        return list({id(variable): variable for metric in self._metrics for variable in metric.variables}.values())


def by_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Mean.update_state` so that within a step a scalar is weighted by this replica's share of the rows."""

    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = current_step()
        if step is not None and not step.is_plain_sum and sample_weight is None and not len(ops.shape(values)):
            sample_weight = step.rows.weight
        return original(self, values, sample_weight)

    return update_state


def _summed(hand: Hand, tensors: list[Tensor]) -> list[Tensor]:
    if not tensors:
        return []
    flat = torch.cat([tensor.to(hand.device).reshape(-1) for tensor in tensors])
    hand.replicas.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _flat(logs: Any, before: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each entry of a step's logs, in which the metrics of `compile` are a nested dict."""
    for name, value in logs.items() if isinstance(logs, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value, (*before, name))
        else:
            yield (*before, name), value


def _filled(logs: Any, results_by_path: dict[Path, Any], before: Path = ()) -> Any:
    """Return `logs` with the values in `results_by_path`, computed over all replicas, at their paths."""
    if not isinstance(logs, dict):
        return results_by_path.get(before, logs)
    return {name: _filled(value, results_by_path, (*before, name)) for name, value in logs.items()}


def _results_of(metrics: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in metrics:
        if getattr(metric, "built", True):
            result = metric.result()
            found.update(result if isinstance(result, dict) else {metric.name: result})
    return found


def _is_same(value: Any, result: Any) -> bool:
    return bool(np.array_equal(ops.convert_to_numpy(value), ops.convert_to_numpy(result), equal_nan=True))


def _own_state(model: Any) -> list[Any]:
    """Return the floating-point state that layers update from their inputs.

    The statistics of BatchNormalization are omitted, because they are synchronized in the forward pass.
    """
    if model is None:
        return []
    synchronized = {
        id(variable)
        for layer in model._flatten_layers()
        if isinstance(layer, BatchNormalization)
        for variable in layer.variables
    }
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) not in synchronized and variable._value.is_floating_point()
    ]
