"""Task: a network, its loss, its optimizer and its data, as one immutable object; and functions that create tasks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .errors import SettingsError, TaskError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

T = TypeVar("T")

_ARGUMENTS = {
    "model": (),
    "optimizer": ("model",),
    "loss": ("model", "batch"),
    "step": ("hand", "batch"),
    "schedule": ("step", "total"),
}
"""Names of the arguments with which manyhands calls the functions of a task."""


@dataclass(frozen=True, eq=False)
class Mean:
    """A mean stored as its total and its count, so that the parts of several replicas are added before the division."""

    total: Tensor
    count: Tensor


def mean(total: Tensor, count: Tensor | int) -> Mean:
    """Return a loss or metric that is a mean over tokens, boxes or pixels instead of samples.

    Totals and counts are summed over replicas and micro-batches before the division, so the result is the same
    however the batch is split.

    Args:
        total: Sum of the values, a tensor with one element.
        count: Number of values in the sum.

    >>> import torch
    >>> mean(torch.tensor(6.0), 3)
    Mean(total=tensor(6.), count=tensor(3., dtype=torch.float64))
    """
    import torch

    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        shape = tuple(getattr(total, "shape", ())) or type(total).__name__
        raise TaskError("the total of mh.mean must be a scalar tensor", got=shape, remedy="sum it: losses.sum()")
    if isinstance(count, torch.Tensor):
        counted = count.to(total.device).detach().double()
    else:
        # Created on the device: a copy from the host would synchronize.
        counted = torch.full((), float(count), dtype=torch.float64, device=total.device)
    if counted.numel() != 1:
        raise TaskError(
            "the count of mh.mean must be a single number", got=tuple(counted.shape), remedy="sum it: count.sum()"
        )
    return Mean(total.reshape(()), counted.reshape(()))


@dataclass(frozen=True)
class TorchScheduler:
    """A learning-rate scheduler of PyTorch or of transformers, as the `schedule` of a Task.

    Args:
        make: Function of the optimizer that returns the scheduler.
        every: When the scheduler is stepped: after every "epoch", or after every "step" of the optimizer.
        metric: Name of the value by which `torch.optim.lr_scheduler.ReduceLROnPlateau` decides after an epoch: "loss"
            (the mean training loss), "valid_loss", or "valid_" and a metric's name.

    >>> TorchScheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)).every
    'epoch'
    """

    make: Callable[[Any], Any]
    every: str = "epoch"
    metric: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.make) or hasattr(self.make, "optimizer"):
            raise TaskError(
                "the first argument of TorchScheduler must be a function of the optimizer that returns a scheduler",
                got=type(self.make).__name__,
                remedy="write for example mh.TorchScheduler(lambda optimizer: StepLR(optimizer, 10))",
            )
        if self.every not in ("epoch", "step"):
            raise TaskError(
                'every of TorchScheduler must be "epoch" or "step"', got=repr(self.every), remedy="choose one of them"
            )
        if self.metric is not None and self.every != "epoch":
            raise TaskError(
                "a scheduler that follows a metric is stepped after epochs, at which metrics are measured",
                got=f"metric={self.metric!r} with every={self.every!r}",
                remedy="omit every",
            )


Loss = Callable[[Any, Any], "Tensor | Mean"]
Optimizers = Mapping[str, "Optimizer"] | Sequence["Optimizer"]
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True, kw_only=True, repr=False)
class Task:
    """Definition of a training task: factories and plain functions, without a base class to inherit from.

    `loss(model, batch)` returns the mean over the batch's samples, or `mh.mean(total, count)`. Instead of it,
    `step(hand, batch)` may implement a custom step with `hand.minimize(...)`.

    - `model`: creates the network, on the CPU; it is called once in every process;
    - `optimizer`: creates the optimizer of a model. A list or a dict of optimizers over disjoint parameters is stepped
      together (such as Muon for matrices and AdamW for the rest); with `step` the keys of a dict name them for
      `hand.minimize`. Parameters that no optimizer holds stay fixed;
    - `data`: arrays or tensors (alone, in a tuple or a dict), a dataset, an iterable, a DataLoader, a Hugging Face
      dataset, `mh.data.files(...)`, `mh.data.bucketed(...)`, or a function that creates one;
    - `loss`, `step`: the loss function, or the custom step that replaces it;
    - `valid`: validation data, of the same kinds as `data`, on which the network is evaluated after every epoch;
    - `batch_size`: global batch size, the same on any number of devices; omit it if `data` is a DataLoader or
      `mh.data.bucketed(...)`, which have their own;
    - `collate`: function that makes a batch of a list of samples; by default tensors are stacked, and fields of
      different lengths are padded;
    - `shuffle`: whether every epoch has a different order;
    - `drop_last`: whether an epoch omits a last batch that is smaller than `batch_size`;
    - `workers`: number of processes per replica that read the data in the background; None lets manyhands choose;
    - `predict`: `predict(model, *inputs)`, whose parameter names are the Predictor's inputs; by default the model on
      the batch's first element;
    - `metrics`: by name, evaluated on `valid`: a function `metric(outputs, batch)` of the outputs of `predict`, a mean
      over samples or `mh.mean`; a torchmetrics object, which gets (outputs, batch[1]); a custom object with
      `update(outputs, batch)`, `compute()` and, for several replicas, `merge(other)`; a function without arguments that
      creates such an object; or a pair (object, function of (outputs, batch)), whose function returns the arguments of
      `update`, a tuple or a dict of names;
    - `clip`: maximum norm of the gradient of all parameters of an optimizer; None does not clip;
    - `schedule`: `schedule(step, total)` multiplies the optimizer's own learning rate; or an `mh.TorchScheduler`;
    - `not_finite`: what happens if a gradient is not finite: "stop" the run, or "skip" the step and continue;
    - `max_skipped`: number of consecutive skipped steps after which the run is rolled back to its last good state; if
      the same steps fail again, the run ends;
    - `ema`: decay of an exponential moving average of the weights, such as 0.999 for about 1000 steps: validation,
      `run.model()` and exports use the average, training continues with the weights themselves;
    - `weights`: initial weights instead of those that `model` creates: the path of a file of weights, of a Hugging Face
      folder, of an exported model or of a run, or `mh.storage.weights(...)`; each device reads only its own shards;
    - `seed`: seed of the initial weights, the order of the data and random numbers.

    >>> import torch
    >>> task = Task(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=(torch.zeros(8, 4), torch.zeros(8, 1)),
    ...     batch_size=4,
    ... )
    >>> task.batch_size
    4
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], Optimizer | Optimizers]
    data: Any
    loss: Loss | None = None
    step: Callable[[Any, Any], Mapping[str, Any] | None] | None = None
    valid: Any = None
    batch_size: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool = True
    drop_last: bool = False
    workers: int | None = None
    predict: Callable[..., Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    schedule: Callable[[int, int], float] | TorchScheduler | None = None
    not_finite: str = "stop"
    max_skipped: int = 20
    ema: float | None = None
    weights: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            given = "both" if self.loss is not None else "neither"
            raise TaskError(
                "a Task must have either a loss or a step",
                got=given,
                remedy="pass loss=fn(model, batch) or step=fn(hand, batch)",
            )
        if _is_a(self.model, "torch.nn", "Module"):
            raise TaskError(
                "model must be a function that builds a new network each time",
                got=type(self.model).__name__,
                remedy=f"write model=lambda: {type(self.model).__name__}(...)",
            )
        if isinstance(self.optimizer, type) and any(base.__name__ == "Optimizer" for base in self.optimizer.__mro__):
            name = self.optimizer.__name__
            raise TaskError(
                "optimizer must be a function of the model",
                got=f"the class {name}",
                remedy=f"write optimizer=lambda model: torch.optim.{name}(model.parameters())",
            )
        if _is_a(self.loss, "torch.nn", "Module") or getattr(self.loss, "__module__", "") == "torch.nn.functional":
            name = getattr(self.loss, "__name__", f"{type(self.loss).__name__}()")
            raise TaskError(
                "loss must be a function of the model and a batch",
                got=f"{name}, which takes outputs and labels",
                remedy=f"write loss=lambda model, batch: {name}(model(batch[0]), batch[1])",
            )
        if not isinstance(self.metrics, Mapping):
            raise TaskError(
                "metrics must be functions by name",
                got=type(self.metrics).__name__,
                remedy='write metrics={"accuracy": fn(outputs, batch)}',
            )
        for name, metric in self.metrics.items():
            _require_metric(name, metric)
            if not _takes(metric, ()):  # a function without arguments creates the metric
                _require_arguments(f"metrics[{name!r}]", metric, ("outputs", "batch"))
        for name, arguments in _ARGUMENTS.items():
            _require_arguments(name, getattr(self, name), arguments)
        if inspect.isclass(self.schedule) or hasattr(self.schedule, "optimizer"):
            name = getattr(self.schedule, "__name__", type(self.schedule).__name__)
            raise TaskError(
                "schedule must be a function of (step, total) that returns a factor for the learning rate, or an "
                "mh.TorchScheduler",
                got=f"{'the class' if inspect.isclass(self.schedule) else 'a'} {name}",
                remedy=f"write schedule=mh.TorchScheduler(lambda optimizer: {name}(optimizer, ...))",
            )
        for name in ("model", "optimizer", "loss", "step", "collate", "predict", "schedule"):
            value = getattr(self, name)
            if value is not None and not callable(value) and not isinstance(value, TorchScheduler):
                raise TaskError(
                    f"{name} must be a function",
                    got=type(value).__name__,
                    remedy=f"wrap it: {name}=lambda ...: ...",
                )
        if self.batch_size is not None and (not isinstance(self.batch_size, int) or self.batch_size < 1):
            raise TaskError(
                "batch_size must be a whole number of at least 1",
                got=repr(self.batch_size),
                remedy="pass for example batch_size=32",
            )
        if self.clip is not None and not is_above_zero(self.clip):
            raise TaskError(
                "clip must be a positive norm, or None", got=repr(self.clip), remedy="pass for example clip=1.0"
            )
        if self.not_finite not in ("stop", "skip"):
            raise TaskError(
                'not_finite must be "stop" or "skip"', got=repr(self.not_finite), remedy="choose one of them"
            )
        if not isinstance(self.max_skipped, int) or self.max_skipped < 1:
            raise TaskError(
                "max_skipped must be a whole number of at least 1",
                got=repr(self.max_skipped),
                remedy="pass for example max_skipped=20",
            )
        if self.ema is not None and not (isinstance(self.ema, float) and 0 < self.ema < 1):
            raise TaskError(
                "ema must be a decay between 0 and 1, or None", got=repr(self.ema), remedy="pass for example ema=0.999"
            )
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 0):
            raise TaskError(
                "workers must be a whole number of at least 0", got=repr(self.workers), remedy="pass workers=0 or more"
            )

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in ("model", "loss", "step", "optimizer")}
        parts = [f"{name}={getattr(v, '__name__', type(v).__name__)}" for name, v in shown.items() if v is not None]
        data = f"data={type(self.data).__name__}, batch_size={self.batch_size}, seed={self.seed}"
        return f"Task({', '.join(parts)}, {data})"

    def make_optimizer(self, model: nn.Module) -> Any:
        """Create the optimizer of a network; join several into one, except a dict of them in a task with `step`."""
        from .optimizers import make_optimizers

        return make_optimizers(self.optimizer, model, keyed=self.step is not None)

    def replace(self, **changes: Any) -> Task:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def as_task(task: Task | Callable[..., Task], params: Mapping[str, Any] | None = None) -> Task:
    """Return a Task itself, or the Task that a function creates with `params` and the defaults of its signature."""
    task, bound = split_params(task)
    params = {**bound, **(params or {})}
    if isinstance(task, Task):
        if params:
            raise SettingsError(
                "parameters need a function that returns a Task",
                got=", ".join(params),
                remedy="write def task(lr: float = 1e-3) -> mh.Task: ...",
            )
        return task
    if not callable(task) or _is_a(task, "torch.nn", "Module"):
        raise TaskError(
            "a task must be an mh.Task or a function that returns one",
            got=type(task).__name__,
            remedy="pass one of these",
        )
    made = task(**typed(task, params))
    if not isinstance(made, Task):
        raise TaskError(
            "the task function must return an mh.Task",
            got=type(made).__name__,
            remedy="end it with return mh.Task(...)",
        )
    return made


def split_params(task: T) -> tuple[T, dict[str, Any]]:
    """Return the function of a `functools.partial`, and the parameters that it fixes by name.

    >>> def task(lr: float = 1e-3) -> Task: ...
    >>> split_params(functools.partial(task, lr=0.1)) == (task, {"lr": 0.1})
    True
    """
    if not isinstance(task, functools.partial):
        return task, {}
    return cast(T, task.func), {**inspect.signature(task.func).bind_partial(*task.args).arguments, **task.keywords}


def task_name(task: Task | Callable[..., Task]) -> str:
    """Return a name for runs of a task: its function's name, or the file's if the function is called "task"."""
    task = split_params(task)[0]
    name = getattr(task, "__name__", "task")
    if name != "task" and name.isidentifier():
        return name
    module = getattr(task, "__module__", "__main__").rsplit(".", 1)[-1]
    if module == "__main__":
        module = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "task").stem
    return module if module.isidentifier() and not isinstance(task, Task) else "task"


def typed(task: Callable[..., Task], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a task function, with strings converted to the types of its signature.

    >>> def task(lr: float = 1e-3, width: int = 8) -> Task: ...
    >>> typed(task, {"lr": "3e-4", "width": "16"})
    {'lr': 0.0003, 'width': 16}

    Names that a `**` parameter accepts are passed on, as strings if it has no type.
    """
    parameters = inspect.signature(task).parameters
    own = {name: item for name, item in parameters.items() if item.kind not in _VARIADIC}
    for name, parameter in own.items():
        if parameter.default is inspect.Parameter.empty and name not in params:
            raise SettingsError(
                "every parameter of a task function must have a default",
                got=f"{name} without a default",
                remedy=f"write {name}=...",
            )
    passed_on = next((name for name, item in parameters.items() if item.kind is inspect.Parameter.VAR_KEYWORD), None)
    hints = typing.get_type_hints(task) if not inspect.isclass(task) else {}
    result = {}
    for name, value in params.items():
        if name not in own and passed_on is None:
            known = ", ".join(own) or "no parameters"
            remedy = f"correct the name, or write def {task.__name__}({name}=...): and use it there"
            raise SettingsError(f"a parameter of the task must be one of {known}", got=repr(name), remedy=remedy)
        parameter = own[name] if name in own else parameters[passed_on or name]
        usual = str if parameter.default is inspect.Parameter.empty else type(parameter.default)
        kind = hints.get(parameter.name, usual)
        result[name] = convert(name, value, kind)
    return result


def is_above_zero(value: object) -> bool:
    """Return whether a value is a number above 0; texts, truth values and NaN are not.

    >>> is_above_zero(0.5), is_above_zero("3"), is_above_zero(True)
    (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0


def convert(name: str, value: Any, kind: Any) -> Any:
    """Convert a string to the type `kind`; return any other value unchanged. `name` is for errors."""
    if not isinstance(value, str):
        return value
    if typing.get_origin(kind) is tuple:
        each = typing.get_args(kind)[0]
        try:
            return tuple(each(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            raise SettingsError(
                f"{name} must be values of type {each.__name__}, separated by commas",
                got=repr(value),
                remedy="correct the value",
            ) from None
    options = [arg for arg in typing.get_args(kind) if arg is not type(None)] or [kind]
    if value.lower() in ("none", "null") and type(None) in typing.get_args(kind):
        return None
    for option in options:
        try:
            if option is bool:
                return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]
            if option in (int, float, str, Path):
                return option(value)
        except (ValueError, KeyError):
            continue
    if kind is Any or str in options:
        return value
    shown = getattr(kind, "__name__", str(kind))
    raise SettingsError(
        f"{name} must be of type {shown}", got=repr(value), remedy=f"pass a value of this type: {name}=VALUE"
    )


def _require_arguments(name: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Raise TaskError if a plain function cannot be called with `arguments`; accept callables of other types."""
    if inspect.isfunction(function) and not _takes(function, arguments):
        raise TaskError(
            f"{name} must accept the arguments ({', '.join(arguments)})",
            got=f"{function.__name__}{inspect.signature(function)}",
            remedy="change its signature"
            + (", or write mh.TorchScheduler(function) for a scheduler of torch" if name == "schedule" else ""),
        )


def _takes(function: Any, arguments: tuple[str, ...]) -> bool:
    """Return whether a plain function can be called with these arguments."""
    try:
        return inspect.isfunction(function) and inspect.signature(function).bind(*arguments) is not None
    except TypeError:
        return False


def _require_metric(name: str, metric: Any) -> None:
    measure = metric
    if isinstance(metric, tuple):
        measure = metric[0] if len(metric) == 2 and callable(metric[1]) else None
    if not (callable(measure) or hasattr(measure, "compute")):
        raise TaskError(
            f"the metric {name!r} must be a function, an object with update and compute, or a pair (object, function)",
            got="a tuple" if isinstance(metric, tuple) else type(metric).__name__,
            remedy="pass fn(outputs, batch), or for example torchmetrics.classification.BinaryAUROC()",
        )


def _is_a(value: object, package: str, name: str) -> bool:
    """Return whether a value is an instance of the class `name` of a package, without importing the package."""
    return any(base.__name__ == name and base.__module__.startswith(package) for base in type(value).__mro__)
