"""Strategy in the sense of tf.distribute, on manyhands' replicas: a process per device, each with the whole model."""

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
    """How the values of replicas are combined."""

    SUM = "SUM"
    MEAN = "MEAN"


class Strategy:
    """A replica's view of all replicas. `hand` provides rank, size, device and collectives."""

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
        """The strategy's spec, as far as Keras supports it."""
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
        """Whether there is anything to coordinate: several replicas or micro-batches, or another precision."""
        changes = self.spec.accumulate > 1 or self.spec.precision != "fp32"
        return not self.joint.is_alone and (self.hand.size > 1 or changes)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Train models created or compiled inside with this strategy; initial weights are equal on all replicas."""
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
        """Let Keras use this strategy's device inside; a program may have several strategies."""
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
        """Call a function on this replica's rows; optimizers inside get gradients summed over the replicas.

        As in tf.distribute, a loss inside is the replica's share of the whole: Keras' own losses are, and
        `compute_average_loss` computes one from values per sample. Metrics created in the scope count the rows of all
        replicas.
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
        """Return the sum or mean of the replicas' values; with `axis`, also over that axis."""
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
        """Concatenate the values of all replicas along an axis; in a step, gradients flow back to them."""
        self.joint.require("strategy.gather")
        rows = torch.as_tensor(value).movedim(axis, 0).contiguous()
        if self._is_borrowed:
            rows = rows[:0]
        step = current_step()
        # The optimizer step weights a replica's gradients by its rows; cancel that weight for rows of other replicas.
        weight = 1.0 if step is None else step.weight
        gathered = self.hand.gather(scaled(rows, 1.0 / weight if weight else 0.0))
        return scaled(gathered, weight).movedim(0, axis).to(rows.device)

    @property
    def _is_borrowed(self) -> bool:
        """Whether this process has no rows: it is a server, or the step uses a borrowed row."""
        step = current_step()
        return self.worker is None if step is None else step.is_borrowed

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas, of which there is one."""
        return (value,)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Return this replica's rows of every global batch of a DataLoader, PyDataset, arrays or tf.data dataset."""
        return distributed(self, dataset)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> DistributedInput:
        """Return an input that every replica creates itself; the function gets an InputContext."""
        from keras.src.trainers import data_adapters

        # A process that takes no rows creates the first worker's input.
        context = InputContext(self.num_replicas_in_sync, self.worker or 0, self.num_replicas_in_sync)
        return OwnInput(data_adapters.get_data_adapter(dataset_fn(context)), self)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """Return `value_fn(context)` for this replica."""
        return value_fn(ReplicaContext(self))

    def barrier(self) -> None:
        """Wait until every replica has called this."""
        self.joint.require("strategy.barrier")
        mark_call(self.hand)
        self.hand.barrier()

    # -- used by training -----------------------------------------------------------------------------------------

    def narrow(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the spec's precision, such as `--strategy mirrored,precision=bf16`."""
        if self.spec.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.hand.device.type, dtype=torch.bfloat16)

    update: Update | None = None
    """How an optimizer is applied in `fit`; None if every replica applies the summed gradients."""

    failure: Exception | None = None
    """Exception raised by a callback on this replica, until all replicas know of it."""

    @property
    def worker(self) -> int | None:
        """Index among the processes that take rows; None if this one takes none."""
        return self.hand.rank

    def share(self, total: int, micros: int = 1) -> KerasShare:
        """Return this replica's rows of a global batch."""
        return KerasShare.of(total, rank=self.hand.rank, size=self.hand.size, micros=micros)

    def share_memory(self, model: Any) -> None:
        """Give every replica the optimizer's state, if not all of them apply it; nothing to do here."""

    def _share_of(self, args: Sequence[Any]) -> KerasShare:
        """Return the share that these arrays were handed out as; for other arrays, gather each replica's row count."""
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
    """Replica context available to code inside `strategy.run`."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = strategy.hand.rank if strategy.worker is None else strategy.worker
        self.num_replicas_in_sync = strategy.num_replicas_in_sync

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Return the sum or mean over the replicas, on all of them."""
        return self.strategy.reduce(reduce_op, value)

    def all_gather(self, value: Any, axis: int = 0) -> Tensor:
        """Return the values of all replicas, on all of them."""
        return self.strategy.gather(value, axis)


_scopes: list[Strategy] = []
_made: list[Strategy] = []
"""The most recently created strategy with several replicas."""
_strategies: WeakKeyDictionary[Any, Strategy] = WeakKeyDictionary()
"""The strategy in whose scope a model or optimizer was created."""


def remember(owner: Any) -> None:
    """Assign a model or optimizer that is created or compiled in a scope to the scope's strategy."""
    if not _scopes:
        return
    _strategies[owner] = _scopes[-1]
    device = _scopes[-1].hand.device
    # An optimizer created before the strategy may be on another device.
    for variable in getattr(getattr(owner, "optimizer", None), "variables", ()):
        if variable._value is not None and variable._value.device != device:
            variable._value.data = variable._value.data.to(device)


def require_step(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise for an update outside of a step, which every replica would compute from its own rows alone."""
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
    """Return the strategy that coordinates this model's computation; None if it runs alone."""
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
    """Return whether the caller is inside a scope or a step."""
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
    """Return this replica's share of the mean over the global batch, for custom loops and steps.

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
    """Return this replica's share of a loss that is the same on all replicas."""
    step, loss = current_step(), torch.as_tensor(regularization_loss)
    # In a step of fit, gradients are weighted by rows, and the weights sum to 1.
    return loss if step is None or not step.is_plain_sum else loss / step.strategy.num_replicas_in_sync
