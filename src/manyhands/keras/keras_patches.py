"""Patches of Keras: a few of its functions are wrapped once, when this package is imported, to use the strategy.

For models without a strategy the wrapped functions behave as before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from keras import Model, models, saving
from keras.callbacks import TensorBoard
from keras.layers import BatchNormalization
from keras.metrics import Mean, Metric
from keras.src.backend.torch import random as keras_random
from keras.src.backend.torch.trainer import TorchTrainer
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.saving import saving_api
from keras.src.trainers.trainer import Trainer
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core import SettingsError, StrategyError, mix
from . import losses, metrics_sync, statistics, trainer
from .step import current_step, sum_gradients
from .strategy import home_of, remember, remember_metric, require_step, strategy_of

_ONCE = (
    *((Model, name) for name in ("export", "summary")),
    # `Model.save` also ends in save_model; patch it under all its names.
    *((place, "save_model") for place in (saving_api, saving, models)),
    *((place, "save_weights") for place in (saving_api, saving)),
)


def install() -> None:
    """Install the wrappers in Keras' classes and modules; do nothing if they are installed."""
    if getattr(TorchTrainer, "knows_manyhands", False):
        return
    TorchTrainer.knows_manyhands = True
    for owner, name, wrap in (
        (TorchTrainer, "__init__", _remembering),
        (Trainer, "compile", _remembering),
        (BatchNormalization, "_moments", statistics.over_replicas),
        (keras_loss, "reduce_weighted_values", losses.over_replicas),
        (keras_random, "torch_seed_generator", _own_seed),
        (BaseOptimizer, "__init__", _remembering),
        (BaseOptimizer, "apply", _summing),
        (LossScaleOptimizer, "apply", _summing),
        (LossScaleOptimizer, "scale_loss", losses.weighing),
        (Mean, "update_state", metrics_sync.by_rows),
        (Metric, "__init__", _remembering_metric),
        (TensorBoard, "__init__", _requiring_tensorflow),
        *((owner, name, _by_the_first) for owner, name in _ONCE),
    ):
        setattr(owner, name, wrap(getattr(owner, name)))
    for name, over in (
        ("fit", trainer.fit),
        ("evaluate", trainer.evaluate),
        ("predict", trainer.predict),
        ("train_on_batch", trainer.on_batch),
        ("test_on_batch", trainer.on_batch),
        ("predict_on_batch", trainer.on_batch),
    ):
        setattr(TorchTrainer, name, _at_home(over(getattr(TorchTrainer, name), strategy_of)))
    register_optimizer_step_pre_hook(_sum_for_torch)
    register_optimizer_step_post_hook(lambda *_: None if current_step() is None else torch.clear_autocast_cache())
    for kind in ("train", "test", "predict"):
        name = f"make_{kind}_function"
        setattr(TorchTrainer, name, trainer.make_function(getattr(TorchTrainer, name), strategy_of, kind))


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that its model or optimizer is assigned to the strategy in whose scope the method is called."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        remember(self)
        return result

    return wrapped


def _at_home(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a model so that Keras computes on the device of the model's strategy."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        home = home_of(self)
        with contextlib.nullcontext() if home is None else home.at_home():
            return original(self, *args, **kwargs)

    return wrapped


def _remembering_metric(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a metric's constructor so that the strategy of the current scope sums the metric over the replicas."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        remember_metric(self)

    return init


def _summing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's update so that it gets the gradients summed over all replicas."""

    @functools.wraps(original)
    def summing(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        step = current_step()
        given = None if trainable_variables is None else list(trainable_variables)
        variables = (self._trainable_variables or []) if given is None else given
        if step is None:
            require_step(self, variables)
        if step is None or step.is_applying:
            return original(self, grads, given)
        if step.is_plain_sum:
            step.strategy.joint.require_equal(self, variables)
        added = step.add_gradients(self, list(grads))
        if added is None:
            return None
        apply = losses.kept(step, original, added, variables) if isinstance(self, LossScaleOptimizer) else original
        with step.applying():
            if step.update is not None:
                return step.update(self, apply, added, variables)
            return apply(self, sum_gradients(step.hand, added, variables), given)

    return summing


def _sum_for_torch(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Sum the gradients over the replicas before a PyTorch optimizer's update within a step."""
    step = current_step()
    if step is None:
        return
    has_closure = len(args) > 1 or kwargs.get("closure") is not None
    values = [value for group in optimizer.param_groups for value in group["params"]]
    if step.is_plain_sum:
        step.strategy.joint.require_equal(optimizer, values)
    added = None if has_closure else step.add_gradients(optimizer, [value.grad for value in values])
    if added is None:
        raise StrategyError(
            "a PyTorch optimizer needs the gradients of the whole batch before it is called",
            got="a closure" if has_closure else f"accumulate={step.strategy.spec.accumulate}",
            remedy="call optimizer.step() after loss.backward()" if has_closure else "use one of Keras' optimizers",
        )
    for value, total in zip(values, sum_gradients(step.hand, added, values), strict=True):
        value.grad = total


def _own_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Keras' seed generator so that within a step each replica's layers draw different numbers."""

    @functools.wraps(original)
    def torch_seed_generator(seed: Any) -> Any:
        generator, step = original(seed), current_step()
        if step is not None and generator is not None and step.hand.rank:
            generator.manual_seed(mix(generator.initial_seed(), step.hand.rank))
        return generator

    return torch_seed_generator


def _by_the_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that writes files or prints, so that only the first replica calls it."""

    @functools.wraps(original)
    def once(model: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(model)
        act = functools.partial(original, model, *args, **kwargs)
        # Replicas cannot be matched by path: scripts for TensorFlow use another one on each worker, for unused copies.
        return act() if strategy is None else strategy.joint.once(original.__name__, act)

    return once


def _requiring_tensorflow(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the constructor of Keras' TensorBoard callback to raise SettingsError if TensorFlow is missing.

    Without the wrapper, the error would be raised during `fit`.
    """

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if find_spec("tensorflow") is None:
            raise SettingsError(
                "keras.callbacks.TensorBoard needs TensorFlow, which is not installed",
                remedy="use mhk.TensorBoard(log_dir), which writes the same curves without it",
            )
        original(self, *args, **kwargs)

    return init
