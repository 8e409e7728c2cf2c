"""Convert a compiled Keras model to a Task, for parameter servers, plans, studies and ensembles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch
from keras.layers import BatchNormalization
from torch import Tensor, nn

from ..core import Task, TaskError


def as_task(
    model: Callable[[], Any],
    data: Any,
    batch_size: int | None = None,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **more: Any,
) -> Task:
    """Return a task that trains the compiled Keras model created by a function.

    Args:
        model: Function that creates a built and compiled model; every process calls it.
        data: Batches of (x, y) or (x, y, sample_weight), of any kind that a Task takes.
        batch_size: Rows of a global batch, as in a Task.
        optimizer: Function that creates a PyTorch optimizer for the model. By default PyTorch's optimizer with the name
            and settings of the model's: SGD, Adam, AdamW or RMSprop. Epsilon has PyTorch's meaning.
        **more: Other fields of a Task, such as `valid`, `metrics` and `seed`.

    >>> def make():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile(optimizer="sgd", loss="mse")
    ...     return model
    >>> as_task(make, (torch.ones(8, 4), torch.ones(8, 1)), batch_size=4).batch_size
    4
    """

    def made() -> Any:
        built = model()
        _require_trainable(built)
        return built

    return Task(
        **{
            "model": made,
            "loss": _loss,
            "optimizer": optimizer or _torch_optimizer,
            "data": data,
            "batch_size": batch_size,
            "predict": _predict,
            **more,
        }
    )


def _loss(model: Any, batch: Any) -> Tensor:
    x, y, weights = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    with _where(x):
        value = model.compute_loss(x=x, y=y, y_pred=model(x, training=model.training), sample_weight=weights)
    return torch.as_tensor(value)


def _predict(model: Any, input: Any) -> Any:
    with _where(input):
        return model(input, training=False)


def _where(input: Any) -> AbstractContextManager[Any]:
    """Return a context in which Keras computes on a batch's device; by default it moves tensors to the first GPU."""
    device = next(leaf.device for leaf in keras.tree.flatten(input) if isinstance(leaf, Tensor))
    return keras.device(str(device))  # type: ignore[no-any-return]


def _require_trainable(model: Any) -> None:
    if not model.built or not model.compiled:
        raise TaskError(
            "the model function must return a built and compiled model",
            got=f"a model that is not {'built' if model.compiled else 'compiled'}",
            remedy="start the model with keras.Input(shape), and call model.compile(...)",
        )
    found = [layer.name for layer in model._flatten_layers() if isinstance(layer, BatchNormalization)]
    if found:
        raise TaskError(
            "batch statistics of Keras layers can only be synchronized by the strategies of manyhands.keras",
            got=", ".join(found),
            remedy="use mhk.MirroredStrategy and model.fit, or another layer, such as GroupNormalization",
        )


def _torch_optimizer(model: Any) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer with the name and settings of the model's; raise TaskError if there is none."""
    given = model.optimizer
    config = given.get_config()
    weights = [variable.value for variable in model.trainable_variables]
    kind, rate = type(given).__name__, config.get("learning_rate")
    clips = [name for name in ("clipnorm", "clipvalue", "global_clipnorm", "use_ema") if config.get(name)]
    if isinstance(rate, dict) or clips or config.get("gradient_accumulation_steps"):
        raise _refused(
            ", ".join(clips) or "a schedule or accumulated gradients", "set clip, ema or schedule of the task"
        )
    decay = config.get("weight_decay") or 0.0
    if kind == "SGD" and not decay:
        return torch.optim.SGD(weights, lr=rate, momentum=config["momentum"], nesterov=config["nesterov"])
    if kind == "RMSprop" and not decay and not config["momentum"]:
        return torch.optim.RMSprop(
            weights, lr=rate, alpha=config["rho"], eps=config["epsilon"], centered=config["centered"]
        )
    if kind == "AdamW" or (kind == "Adam" and not decay):
        adam = torch.optim.AdamW if kind == "AdamW" else torch.optim.Adam
        betas = (config["beta_1"], config["beta_2"])
        return adam(weights, lr=rate, betas=betas, eps=config["epsilon"], amsgrad=config["amsgrad"], weight_decay=decay)
    raise _refused(f"{kind} with these settings", "pass optimizer=lambda model: torch.optim...")


def _refused(got: str, remedy: str) -> TaskError:
    return TaskError("the model's optimizer must also exist in PyTorch", got=got, remedy=remedy)
