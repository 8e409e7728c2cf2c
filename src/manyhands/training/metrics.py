"""Metrics: functions are averaged over the replicas; metric objects merge their state first, then compute.

The area under a curve over all samples is not the mean of the replicas' areas, so objects are merged before they
compute: torchmetrics by their declared states and reductions, user-defined ones by their `merge(other)`.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import Mean, Task, TaskError
from ..data import map_leaves
from ..distributed import Opaque, World, is_plain

Arguments = Callable[[Any, Any], Any]
Function = Callable[[Any, Any], "Tensor | Mean | float"]

_OF_LAST_BATCHES = "torchmetrics.wrappers.running"


class MetricSums:
    """Totals and counts by name: the loss, and metrics that are plain functions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor | Mean | float, num_samples: int) -> None:
        """Add the mean over some samples."""
        if num_samples == 0:
            # A padding row only keeps collectives in step; its value need not even be finite.
            pair = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        elif isinstance(value, Mean):
            pair = torch.stack([value.total.double(), value.count.double()])
        else:
            mean = torch.as_tensor(value, dtype=torch.float64, device=self._world.device)
            pair = torch.stack([mean * num_samples, torch.full_like(mean, num_samples)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def means(self) -> dict[str, float]:
        """Return the means over all samples of all replicas; NaN where nothing was counted. A collective."""
        if not self._sums:
            return {}
        table = torch.stack(list(self._sums.values()))
        self._world.all_reduce(table)
        pairs = zip(self._sums, table.tolist(), strict=True)
        return {name: float(total / count) if count else math.nan for name, (total, count) in pairs}


class Meter(ABC):
    """A metric object in use: it is updated with this replica's samples, then merged with those of the others."""

    def __init__(self, name: str, metric: Any, arguments: Arguments | None, device: torch.device) -> None:
        self.name, self.metric, self.device = name, metric, device
        self.num_samples = 0
        """Samples that this replica's metric was updated with."""
        self._arguments = arguments or self.usual_arguments

    @abstractmethod
    def usual_arguments(self, outputs: Any, batch: Any) -> Any:
        """Return the arguments of `update` where the task does not define them."""

    @property
    @abstractmethod
    def obstacle(self) -> str:
        """Why the metrics of several replicas cannot be merged; empty when they can."""

    @abstractmethod
    def pack(self) -> Any:
        """Return the metric's state on the CPU, ready to be sent."""

    @abstractmethod
    def join(self, packed: Sequence[tuple[Any, int]]) -> None:
        """Merge the states of all replicas, given with the number of samples of each."""

    def caution(self, given: Any) -> str:
        """Return a warning about a metric that gets these arguments; empty when there is none."""
        return ""

    def given(self, outputs: Any, batch: Any) -> Any:
        """Return the arguments of the metric's `update`: a dict, a tuple, or one value."""
        return self._arguments(outputs, batch)

    def update(self, outputs: Any, batch: Any, num_samples: int) -> None:
        """Update the metric with some samples."""
        given = self.given(outputs, batch)
        if isinstance(given, Mapping):
            self.metric.update(**given)
        else:
            self.metric.update(*(given if isinstance(given, tuple) else (given,)))
        self.num_samples += num_samples

    def values(self) -> dict[str, float]:
        """Return what the metric computes; a dict gives several values, each under its own name."""
        computed = self.metric.compute()
        if not isinstance(computed, Mapping):
            return {self.name: self._number(computed)}
        return {f"{self.name}_{key}": self._number(value) for key, value in computed.items()}

    def _number(self, value: Any) -> float:
        if isinstance(value, Mean):
            return float(value.total / value.count)
        if isinstance(value, (int, float, np.number)) or (isinstance(value, Tensor) and value.numel() == 1):
            return float(value)
        raise TaskError(
            f"the metric {self.name!r} must compute a number, or a dict of numbers",
            got=f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__,
            remedy="reduce it, for example with average='macro'",
        )


class DeclaredMeter(Meter):
    """A torchmetrics metric, merged by the reductions that it declares for its states."""

    def __init__(self, name: str, metric: Any, arguments: Arguments | None, device: torch.device) -> None:
        super().__init__(name, metric.to(device) if hasattr(metric, "to") else metric, arguments, device)
        for part in self._parts():
            # States are merged here: torchmetrics would reduce over torch's process group a second time.
            part._to_sync = part.sync_on_compute = False

    def usual_arguments(self, outputs: Any, batch: Any) -> Any:
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            return outputs, batch[1]
        raise TaskError(
            f"the metric {self.name!r} needs predictions and targets, which are outputs and batch[1] of (x, y) batches",
            got=f"a batch of type {type(batch).__name__}",
            remedy="pass a function that selects them: "
            f'metrics={{"{self.name}": (metric, lambda outputs, batch: (outputs, ...))}}',
        )

    @property
    def obstacle(self) -> str:
        for part in self._parts():
            if any(base.__module__ == _OF_LAST_BATCHES for base in type(part).__mro__):
                return f"{type(part).__name__} looks at the last batches alone, of which every replica has its own"
            for state, reduction in part._reductions.items():
                # Lists can be concatenated; a single value without a reduction cannot be merged.
                if reduction is None and not isinstance(part._defaults[state], list):
                    return f"{type(part).__name__} has no rule for its state {state!r} (dist_reduce_fx=None)"
        return ""

    def caution(self, given: Any) -> str:
        kind, scores = type(self.metric).__name__, next(iter(given), None) if isinstance(given, tuple) else None
        guesses = kind.startswith(("Binary", "Multilabel")) or kind.endswith(("AUROC", "AveragePrecision", "ROC"))
        if not guesses or not isinstance(scores, Tensor) or not scores.is_floating_point():
            return ""
        if bool(((scores >= 0) & (scores <= 1)).all()):
            return ""
        return (
            f"the metric {self.name!r} gets values outside of 0 to 1: {kind} decides for every batch separately "
            "whether they "
            "are logits, so another split may change it; give it probabilities, with predict= or in a pair"
        )

    def pack(self) -> Any:
        return [
            {name: _on(torch.device("cpu"), getattr(part, name)) for name in part._reductions}
            | {"_update_count": getattr(part, "_update_count", 0)}
            for part in self._parts()
        ]

    def join(self, packed: Sequence[tuple[Any, int]]) -> None:
        seen = [(states, count) for states, count in packed if count] or packed[:1]
        weights = torch.tensor([count for _, count in seen], dtype=torch.float64)
        for index, part in enumerate(self._parts()):
            states = [state[index] for state, _ in seen]
            for name, reduction in part._reductions.items():
                joined = _joined(reduction, [state[name] for state in states], weights)
                setattr(part, name, _on(self.device, joined))
            part._computed = None
            part._update_count = max(1, sum(state["_update_count"] for state in states))

    def _parts(self) -> list[Any]:
        """Return the metric and the metrics inside of it, as in torchmetrics wrappers."""
        inside = self.metric.modules() if hasattr(self.metric, "modules") else [self.metric]
        return [part for part in inside if hasattr(part, "_reductions")]


class OwnMeter(Meter):
    """A user-defined metric object: `update(outputs, batch)`, `compute()`, and `merge(other)` for several replicas."""

    def usual_arguments(self, outputs: Any, batch: Any) -> Any:
        return outputs, batch

    @property
    def obstacle(self) -> str:
        return "" if hasattr(self.metric, "merge") else f"{type(self.metric).__name__} has no merge(other)"

    def pack(self) -> Any:
        moved = _moved(self.metric, torch.device("cpu"))
        state = _plain_state(moved)
        return Opaque.of(moved) if state is None else state

    def join(self, packed: Sequence[tuple[Any, int]]) -> None:
        seen = [state for state, count in packed if count] or [packed[0][0]]
        first, *others = (_moved(self._with(state), self.device) for state in seen)
        for other in others:
            first.merge(other)
        self.metric = first

    def _with(self, state: Any) -> Any:
        """Return a metric object of the same class with another replica's state."""
        if isinstance(state, Opaque):
            return state.open()
        metric = object.__new__(type(self.metric))
        vars(metric).update(state)
        return metric


def parted(task: Task, world: World) -> tuple[dict[str, Function], list[Meter]]:
    """Return the task's metrics that are functions, and new meters for those that are objects."""
    functions = {name: metric for name, metric in task.metrics.items() if is_function(metric)}
    objects = {name: metric for name, metric in task.metrics.items() if name not in functions}
    meters = [meter for name, metric in objects.items() for meter in _meters(name, metric, world.device)]
    _require_joinable(meters, world.size)
    return functions, meters


def compute(meters: Sequence[Meter], world: World) -> dict[str, float]:
    """Merge the meters of all replicas and return their values; a collective with the same result on each."""
    if meters and world.size > 1:
        gathered = world.gather_objects([(meter.pack(), meter.num_samples) for meter in meters])
        for index, meter in enumerate(meters):
            meter.join([packed[index] for packed in gathered])
    return {name: value for meter in meters for name, value in meter.values().items()}


def check_metrics(task: Task, num_replicas: int) -> None:
    """Raise for metric objects that several replicas could not merge, before any process is started."""
    if num_replicas > 1:
        cpu = torch.device("cpu")
        objects = [(name, metric) for name, metric in task.metrics.items() if not is_function(metric)]
        _require_joinable([meter for name, metric in objects for meter in _meters(name, metric, cpu)], num_replicas)


def try_meters(meters: Sequence[Meter], outputs: Any, batch: Any) -> list[str]:
    """Update every meter with a few samples: errors in `update` are raised, those in `compute` become notices."""
    notices = []
    for meter in meters:
        meter.update(outputs, batch, 1)
        if caution := meter.caution(meter.given(outputs, batch)):
            notices.append(caution)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                meter.values()
        except TaskError:
            raise
        except Exception as error:
            notices.append(
                f"the metric {meter.name!r} could not be computed from a few samples ({type(error).__name__}: {error})"
            )
    return notices


def _meters(name: str, given: Any, device: torch.device) -> Iterator[Meter]:
    """Yield new meters for one entry of `Task.metrics`; a collection gives one for each of its metrics."""
    metric, arguments = given if isinstance(given, tuple) else (given, None)
    # The task's object is not modified: every evaluation, also in another thread, starts from a copy.
    metric = metric() if _is_factory(metric) else copy.deepcopy(metric)
    if hasattr(metric, "reset"):
        metric.reset()
    if type(metric).__name__ == "MetricCollection":
        for key, inner in metric.items():
            yield DeclaredMeter(f"{name}_{key}", inner, arguments, device)
        return
    if not _is_object(metric):
        raise TaskError(
            f"the metric {name!r} must be a function of (outputs, batch), or return an object with update and compute",
            got=f"{'a pair whose object is of type ' if arguments else ''}{type(metric).__name__}",
            remedy="return such an object from it, or accept two arguments",
        )
    kind = DeclaredMeter if hasattr(metric, "_reductions") else OwnMeter
    yield kind(name, metric, arguments, device)


def _is_object(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "update") and hasattr(value, "compute")


def is_function(value: Any) -> bool:
    """Return whether an entry of `Task.metrics` is a plain function, which gives one number under its own name."""
    return not isinstance(value, tuple) and not _is_object(value) and not _is_factory(value)


def _is_factory(value: Any) -> bool:
    """Return whether a value creates a metric: a class, or a callable with () but not with (outputs, batch)."""
    inner = value.func if isinstance(value, functools.partial) else value
    if isinstance(inner, type) or _is_object(value):
        return isinstance(inner, type)
    signature = inspect.signature(value)
    return _binds(signature) and not _binds(signature, None, None)


def _binds(signature: inspect.Signature, *values: Any) -> bool:
    try:
        signature.bind(*values)
    except TypeError:
        return False
    return True


def _joined(reduction: Any, values: Sequence[Any], weights: Tensor) -> Any:
    """Merge one state of several replicas: concatenate lists, or apply the declared reduction over a new first dim."""
    if any(isinstance(value, list) for value in values):
        rows = [row for value in values for row in (value if isinstance(value, list) else [value])]
        return rows if reduction is None or _name(reduction) == "cat" else reduction(rows)
    if _name(reduction) == "cat":
        return torch.cat([torch.atleast_1d(value) for value in values])
    stacked = torch.stack(list(values))
    if _name(reduction) == "mean":
        # Replicas may have seen different numbers of samples.
        shares = (weights / weights.sum()).view(-1, *[1] * (stacked.dim() - 1))
        return (stacked * shares).sum(0).to(stacked.dtype)
    return reduction(stacked)


def _name(reduction: Any) -> str:
    return getattr(reduction, "__name__", "").removeprefix("dim_zero_")


def _moved(metric: Any, device: torch.device) -> Any:
    """Return a copy of an object with its tensors moved to a device."""
    moved = copy.copy(metric)
    for name, value in vars(metric).items():
        setattr(moved, name, _on(device, value))
    return moved


def _plain_state(metric: Any) -> dict[str, Any] | None:
    """Return an object's attributes if they are its whole state and all plain data; else None.

    >>> _plain_state(MetricSums.__new__(MetricSums)), _plain_state([1])
    ({}, None)
    """
    make, args, state, *items = (*metric.__reduce_ex__(4), None, None, None)[:5]
    is_simple = make is copyreg.__newobj__ and args == (type(metric),) and not any(items)  # type: ignore[attr-defined]
    state = {} if state is None else state
    if not is_simple or hasattr(metric, "__setstate__") or not isinstance(state, dict):
        return None
    return state if is_plain(state) else None


def _on(device: torch.device, data: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, data)


def _require_joinable(meters: Sequence[Meter], num_replicas: int) -> None:
    for meter in meters:
        if num_replicas > 1 and meter.obstacle:
            raise TaskError(
                f"a metric must be combinable over {num_replicas} replicas",
                got=f"{meter.name!r}: {meter.obstacle}",
                remedy="give it a merge(other), declare how its states are reduced, omit it, or use one replica",
            )
