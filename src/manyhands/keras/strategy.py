"""Base class of the Keras strategies, and the functions of tf.distribute; a replica is a process with one device."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import keras
import torch
from keras import tree
from keras.src.backend.torch import core as keras_torch
from torch import Tensor

from ..core import SettingsError, StrategyError, StrategySpec
from ..distributed import NullWorld
from ..training import Hand
from .batch_share import KerasShare, known_share
from .inputs import (
    DistributedInput,
    InputContext,
    OwnInput,
    distributed,
    mark_call,
    share_randomness,
)
from .joint_calls import JointCalls, ScopeMetrics
from .metrics_sync import Measures
from .statistics import scaled
from .step import GradientSums, MicroBatchStep, Update, current_step, taking


class ReduceOp(Enum):
    """How `Strategy.reduce` combines the values of the replicas."""

    SUM = "SUM"
    MEAN = "MEAN"


class Strategy:
    """Base class of strategies, with the methods of `tf.distribute.Strategy`.

    Every replica is a process with a strategy and the whole model.

    Args:
        hand: The handle of this replica, with rank, size, device and collectives.
        accumulate: Number of micro-batches per step in `fit`.
        precision: "fp32" or "bf16".
        recompute: Set it to recompute activations in backward, as in `mh.Mirrored`.
    """

    def __init__(
        self,
        hand: Hand,
        *,
        accumulate: int | None = None,
        precision: str | None = None,
        recompute: str | None = None,
    ) -> None:
        chosen: dict[str, Any] = {"accumulate": accumulate, "precision": precision, "recompute": recompute}
        self.hand = hand
        self.spec = dataclasses.replace(hand.spec, **{name: value for name, value in chosen.items() if value})
        """The StrategySpec of the replicas: their number, `accumulate`, `precision` and `recompute`."""
        _require_mirrored(self.spec)
        self.joint, self.scope_metrics = JointCalls(hand), ScopeMetrics(hand)
        share_randomness(hand, "make a strategy")
        if hand.size > 1:
            _made[:] = [self]

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are summed."""
        return self.hand.size

    @property
    def is_active(self) -> bool:
        """Whether steps differ from plain Keras: several replicas or micro-batches, or a precision other than fp32.

        False in a callback, which runs on one replica alone.
        """
        changes = self.spec.accumulate > 1 or self.spec.precision != "fp32"
        return not self.joint.is_alone and (self.hand.size > 1 or changes)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Return a context in which to create and compile the models that this strategy trains.

        Initial weights are equal on all replicas.
        """
        if not self.joint.is_alone:
            share_randomness(self.hand, "enter strategy.scope()")
            self.scope_metrics.drop_unused()
        _scopes.append(self)
        try:
            with self.at_home(), keras.RematScope() if self.spec.recompute else contextlib.nullcontext():
                yield self
        finally:
            _scopes.pop()

    @contextlib.contextmanager
    def at_home(self) -> Iterator[None]:
        """Make this strategy's device Keras' default within the context; a program may have several strategies."""
        before, keras_torch.DEFAULT_DEVICE = keras_torch.DEFAULT_DEVICE, str(self.hand.device)
        try:
            yield
        finally:
            keras_torch.DEFAULT_DEVICE = before

    # -- custom training loops ------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call a function on this replica's rows; optimizers in it get gradients summed over the replicas.

        As in tf.distribute, a loss in the function must be this replica's share of the global loss. Keras' own losses
        are, and `compute_average_loss` computes it from losses per sample. Metrics created in the scope count the rows
        of all replicas.

        Args:
            fn: The function, such as one training step.
            args: Its positional arguments, such as a batch of a distributed dataset.
            kwargs: Its keyword arguments.
            options: Accepted and ignored.

        Returns:
            The function's result on this replica.
        """
        if any(type(leaf).__name__ == "SymbolicTensor" for leaf in tree.flatten([*args, *(kwargs or {}).values()])):
            raise SettingsError(
                "Keras on PyTorch runs eagerly, so strategy.run cannot be called in a tf.function",
                remedy="remove @tf.function, and tf.GradientTape too: loss.backward() computes the gradients",
            )
        self.joint.require("strategy.run")
        if self.spec.accumulate > 1:
            raise StrategyError(
                "a custom training loop must accumulate gradients itself: strategy.run processes all its rows at once",
                got=f"accumulate={self.spec.accumulate}",
                remedy="omit it; add up the gradients of parts of the rows, as examples/keras/own_loop.py does",
            )
        step = MicroBatchStep(
            self, self._share_of([*args, *(kwargs or {}).values()]).rows[0], GradientSums(), is_plain_sum=True
        )
        measures = Measures(self.scope_metrics.metrics, self.hand)
        with self.at_home(), self.narrow(), taking(step):
            result = fn(*args, **(kwargs or {}))
        measures.take({}, step.rows)
        measures.joined({})
        return result

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Return the sum or mean of the replicas' values, on all replicas.

        Args:
            reduce_op: "SUM" or "MEAN", or a ReduceOp.
            value: This replica's value: a tensor, a number, or a structure of them.
            axis: Axis of the tensors over which to reduce too; None to reduce only over the replicas.
        """
        self.joint.require("strategy.reduce")
        op = ReduceOp(reduce_op if isinstance(reduce_op, ReduceOp) else str(reduce_op).rpartition(".")[2].upper())
        return tree.map_structure(lambda leaf: self._reduced(op, torch.as_tensor(leaf), axis), value)

    def _reduced(self, op: ReduceOp, value: Tensor, axis: int | None) -> Tensor:
        own, count = (value, 1.0) if axis is None else (value.sum(axis), float(value.shape[axis]))
        if self._is_borrowed:
            own, count = torch.zeros_like(own), 0.0
        total = self.hand.sum(own)
        return (total if op is ReduceOp.SUM else total / self.hand.sum(count)).to(value.device)

    def gather(self, value: Any, axis: int = 0) -> Tensor:
        """Return the values of all replicas concatenated along `axis`, on all replicas.

        In a step, gradients flow back to the replica of each value.
        """
        self.joint.require("strategy.gather")
        rows = torch.as_tensor(value).movedim(axis, 0).contiguous()
        if self._is_borrowed:
            rows = rows[:0]
        step = current_step()
        # The optimizer step weights a replica's gradients by its rows; cancel that weight for other replicas' rows.
        weight = 1.0 if step is None else step.weight
        gathered = self.hand.gather(scaled(rows, 1.0 / weight if weight else 0.0))
        return scaled(gathered, weight).movedim(0, axis).to(rows.device)

    @property
    def _is_borrowed(self) -> bool:
        """Whether this process has no rows: it is a server, or computes a borrowed row in this step."""
        step = current_step()
        return self.worker is None if step is None else step.is_borrowed

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple of the value of this process's only replica."""
        return (value,)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Return this replica's rows of every global batch of a dataset, as a DistributedInput.

        Args:
            dataset: A DataLoader, PyDataset, arrays or tf.data dataset with global batches.
            options: Accepted and ignored.
        """
        return distributed(self, dataset)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> DistributedInput:
        """Return an input whose batches every replica creates itself.

        Args:
            dataset_fn: Called with an InputContext, which names the replica; returns any input that Keras accepts.
            options: Accepted and ignored.
        """
        from keras.src.trainers import data_adapters

        # A process that takes no rows creates the first worker's input.
        context = InputContext(self.num_replicas_in_sync, self.worker or 0, self.num_replicas_in_sync)
        return OwnInput(data_adapters.get_data_adapter(dataset_fn(context)), self)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """Return `value_fn(context)`, where `context` is this replica's ReplicaContext."""
        return value_fn(ReplicaContext(self))

    def barrier(self) -> None:
        """Wait until every replica has called this."""
        self.joint.require("strategy.barrier")
        mark_call(self.hand)
        self.hand.barrier()

    # -- used by training -----------------------------------------------------------------------------------------

    def narrow(self) -> contextlib.AbstractContextManager[Any]:
        """Return an autocast context if the spec's precision is bf16; otherwise a context without effect."""
        if self.spec.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.hand.device.type, dtype=torch.bfloat16)

    update: Update | None = None
    """Function that applies an optimizer in `fit`; None if every replica applies the summed gradients."""

    failure: Exception | None = None
    """Exception raised by a callback on this replica, until all replicas know of it."""

    @property
    def worker(self) -> int | None:
        """Index of this process among those that compute rows; None if it computes none."""
        return self.hand.rank

    def share(self, total: int, micros: int = 1) -> KerasShare:
        """Return this replica's rows of a global batch of `total` rows, split into `micros` micro-batches."""
        return KerasShare.of(total, rank=self.hand.rank, size=self.hand.size, micros=micros)

    def share_memory(self, model: Any) -> None:
        """Copy the optimizer's state to all replicas; without effect here, where every replica applies updates."""

    def _share_of(self, args: Sequence[Any]) -> KerasShare:
        """Return the share of the batch in `args`, the arguments of `run`.

        The share of a distributed dataset's batch is known. For other arrays, gather each replica's number of rows;
        without any array, every replica counts as one row.
        """
        share = known_share(args)
        if share is not None:
            return share
        arrays = [leaf for leaf in tree.flatten(args) if getattr(leaf, "shape", ())]
        if not arrays:
            return self.share(self.num_replicas_in_sync)
        own = 0 if self.worker is None else int(arrays[0].shape[0])
        counts = self.hand.replicas.all_gather(torch.tensor([own], device=self.hand.device))
        return KerasShare.among(counts.flatten().tolist(), self.hand.rank)


_OURS = ("replicas", "accumulate", "precision", "recompute", "capture")


def _require_mirrored(spec: StrategySpec) -> None:
    plain = StrategySpec(**{name: getattr(spec, name) for name in _OURS})
    if spec != plain or spec.precision == "fp64":
        raise StrategyError(
            "a Keras strategy supports replicas, accumulate, precision (fp32 or bf16) and recompute only",
            got=str(spec),
            remedy='write --strategy mirrored, and keras.config.set_dtype_policy("float64") for fp64',
        )


class ReplicaContext:
    """Index and collectives of this replica, for code in `strategy.run`."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = strategy.hand.rank if strategy.worker is None else strategy.worker
        self.num_replicas_in_sync = strategy.num_replicas_in_sync

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Return the "SUM" or "MEAN" of the replicas' values, on all replicas."""
        return self.strategy.reduce(reduce_op, value)

    def all_gather(self, value: Any, axis: int = 0) -> Tensor:
        """Return the values of all replicas concatenated along `axis`, on all replicas."""
        return self.strategy.gather(value, axis)


_scopes: list[Strategy] = []
_made: list[Strategy] = []
"""The most recently created strategy with several replicas."""
_strategies: WeakKeyDictionary[Any, Strategy] = WeakKeyDictionary()
"""The strategy in whose scope each model or optimizer was created or compiled."""


def remember(owner: Any) -> None:
    """Assign a model or optimizer to the strategy of the current scope, if there is one."""
    if not _scopes:
        return
    _strategies[owner] = _scopes[-1]
    device = _scopes[-1].hand.device
    # An optimizer created before the strategy may be on another device.
    for variable in getattr(getattr(owner, "optimizer", None), "variables", ()):
        if variable._value is not None and variable._value.device != device:
            variable._value.data = variable._value.data.to(device)


def require_step(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise StrategyError if the optimizer or the variables belong to a strategy with several replicas.

    The caller is outside of a step, where every replica would update the variables from its own rows alone.
    """
    ids = {id(variable) for variable in variables}
    for owner, strategy in list(_strategies.items()):
        if strategy.hand.size == 1 or strategy.joint.is_alone:
            continue
        if owner is optimizer or any(id(variable) in ids for variable in owner.variables):
            raise StrategyError(
                "an optimizer must be applied in strategy.run, which sums gradients over the replicas",
                got="a call outside of it",
                remedy="put the code that computes and applies them into a function, and call "
                "strategy.run(function, args)",
            )


def warn_of_no_scope(model: Any) -> None:
    """Warn that replicas train separately if a model was created outside of the existing strategy's scope."""
    strategy = _made[0] if _made else None
    if strategy is None or home_of(model) is not None or strategy.joint.is_alone:
        return
    if strategy.hand.is_first:
        warnings.warn(
            f"{model.name} was created outside of strategy.scope(), so each of the {strategy.hand.size} replicas "
            "trains "
            "its own copy on all rows; create and compile it in `with strategy.scope():`",
            stacklevel=4,
        )


def remember_metric(metric: Any) -> None:
    """Register a metric created in a scope to be summed over all replicas."""
    if _scopes and not _scopes[-1].joint.is_alone:
        _scopes[-1].scope_metrics.metrics.append(metric)


def home_of(model: Any) -> Strategy | None:
    """Return the strategy in whose scope a model was created, active or not."""
    return _strategies.get(model)


def strategy_of(model: Any) -> Strategy | None:
    """Return the model's strategy if that is active; None if the model runs as in plain Keras."""
    strategy = home_of(model)
    return strategy if strategy is not None and strategy.is_active else None


def get_strategy() -> Strategy:
    """Return the strategy of the current step, else of the innermost scope, else one with a single replica.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    step = current_step()
    if step is not None:
        return step.strategy
    return _scopes[-1] if _scopes else Strategy(Hand(NullWorld(), StrategySpec()))


def has_strategy() -> bool:
    """Return whether the caller is within the scope of a strategy or a step."""
    return bool(_scopes) or current_step() is not None


def in_cross_replica_context() -> bool:
    """Return whether the caller is outside `strategy.run` and outside a step of `fit`."""
    return current_step() is None


def get_replica_context() -> ReplicaContext | None:
    """Return the replica context inside `strategy.run`; None outside."""
    step = current_step()
    return None if step is None else ReplicaContext(step.strategy)


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Tensor:
    """Return this replica's share of the mean loss over the global batch, for custom training loops and steps.

    Args:
        per_example_loss: The losses of this replica's rows.
        sample_weight: Weights by which to multiply them; None for no weights.
        global_batch_size: Number of rows over all replicas; by default that of the step, outside of a step the number
            of losses.

    >>> compute_average_loss(torch.tensor([1.0, 3.0]), global_batch_size=4)
    tensor(1.)
    """
    losses = torch.as_tensor(per_example_loss)
    if sample_weight is not None:
        losses = losses * torch.as_tensor(sample_weight, device=losses.device)
    step = current_step()
    known = step.rows.total if step is not None else len(losses)
    share = 0.0 if step is not None and step.rows.is_padding else 1.0
    part = losses.sum() * share / (global_batch_size or known)
    return part if step is None else step.part(part)


def scale_regularization_loss(regularization_loss: Any) -> Tensor:
    """Return this replica's share of a loss that is the same on all replicas, such as a penalty of the weights."""
    step, loss = current_step(), torch.as_tensor(regularization_loss)
    # In a step of fit, gradients are weighted by rows, and the weights sum to 1.
    return loss if step is None or not step.is_plain_sum else loss / step.strategy.num_replicas_in_sync
