"""Strategy: what tf.distribute calls one, on manyhands' replicas: a process per device, each with the whole model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import keras
import torch
from keras import tree
from torch import Tensor

from ..cluster import NullWorld
from ..core import StrategyError, StrategySpec
from ..training import Hand
from .following import variables_of
from .inputs import DistributedInput, InputContext, OwnInput, distributed, share_randomness
from .measures import Measures
from .share import Share, known_share
from .statistics import scaled
from .step import Step, Sums, Update, apart, current_step, taking


class ReduceOp(Enum):
    """How values of replicas become one."""

    SUM = "SUM"
    MEAN = "MEAN"


class Strategy:
    """A replica's view of all replicas. `hand` is what it stands on: rank, size, device, collectives."""

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
        """How it is split, as far as Keras lets it be."""
        _require_mirrored(self.spec)
        self._num_alone = 0
        self._metrics: list[ReferenceType[Any]] = []
        """Metrics that were made in a scope, in their order, which is the same on all replicas."""
        share_randomness(hand)

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas over which gradients are summed."""
        return self.hand.size

    @property
    def is_active(self) -> bool:
        """Whether there is something to join: several replicas, several micro-batches, another precision."""
        changes = self.spec.accumulate > 1 or self.spec.precision != "fp32"
        return not self._num_alone and (self.hand.size > 1 or changes)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Models that are made or compiled inside are trained by this strategy; first weights are equal on all."""
        share_randomness(self.hand)
        _scopes.append(self)
        try:
            with keras.RematScope() if self.spec.recompute else contextlib.nullcontext():
                yield self
        finally:
            _scopes.pop()

    # -- loops of one's own ---------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls a function on this replica's part; optimizers inside get gradients that are summed over replicas.

        As in tf.distribute, a loss inside is the replica's part of the whole: Keras' own losses are, and
        `compute_average_loss` makes one of values per sample. Metrics that were made in the scope count the rows of
        all replicas.
        """
        step = Step(self, self._share_of([*args, *(kwargs or {}).values()]).rows[0], Sums(), is_plain_sum=True)
        metrics = [metric for known in self._metrics if (metric := known()) is not None]
        measures = Measures(metrics, self.hand)
        with taking(step):
            result = fn(*args, **(kwargs or {}))
        measures.take({}, step.rows)
        measures.joined({})
        return result

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """The sum or mean of what the replicas hold; with an axis over that axis of all of them too."""
        op = ReduceOp(reduce_op if isinstance(reduce_op, ReduceOp) else str(reduce_op).rpartition(".")[2].upper())
        return tree.map_structure(lambda leaf: self._reduced(op, torch.as_tensor(leaf), axis), value)

    def _reduced(self, op: ReduceOp, value: Tensor, axis: int | None) -> Tensor:
        own, count = (value, 1.0) if axis is None else (value.sum(axis), float(value.shape[axis]))
        if self._is_borrowed:
            own, count = torch.zeros_like(own), 0.0
        total = self.hand.sum(own)
        return total if op is ReduceOp.SUM else total / self.hand.sum(count)

    def gather(self, value: Any, axis: int = 0) -> Tensor:
        """The values of all replicas, one after another along an axis; in a step gradients flow back to them."""
        rows = torch.as_tensor(value).movedim(axis, 0).contiguous()
        if self._is_borrowed:
            rows = rows[:0]
        step = current_step()
        # Replicas' gradients are weighed when an optimizer gets them, by whose rows they are; here others' come in.
        weight = 1.0 if step is None else step.weight
        gathered = self.hand.gather(scaled(rows, 1.0 / weight if weight else 0.0))
        return scaled(gathered, weight).movedim(0, axis)

    @property
    def _is_borrowed(self) -> bool:
        """Whether what this process holds is of no replica: a server's, or of a row that a step has borrowed."""
        step = current_step()
        return self.worker is None if step is None else step.is_borrowed

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """What the replicas of this process hold: one."""
        return (value,)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """This replica's rows of every global batch of a dataset: a DataLoader, a PyDataset, arrays, a tf.data one."""
        return distributed(self, dataset)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> DistributedInput:
        """Input that every replica makes for itself; the function is told which one it is for."""
        from keras.src.trainers import data_adapters

        # Who takes no rows has a look at the first one's.
        context = InputContext(self.num_replicas_in_sync, self.worker or 0, self.num_replicas_in_sync)
        return OwnInput(data_adapters.get_data_adapter(dataset_fn(context)), self)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """A value of each replica's own."""
        return value_fn(ReplicaContext(self))

    def barrier(self) -> None:
        """Returns when every replica has come here."""
        self.hand.barrier()

    # -- what training needs --------------------------------------------------------------------------------------

    update: Update | None = None
    """How an optimizer is applied in `fit`; None where every replica applies the sums."""

    failure: Exception | None = None
    """What a callback has raised here, until all replicas know of it."""

    @property
    def worker(self) -> int | None:
        """Which of those that take rows this is; None where it takes none."""
        return self.hand.rank

    def share(self, total: int, micros: int = 1) -> Share:
        """This replica's rows of a global batch."""
        return Share.of(total, rank=self.hand.rank, size=self.hand.size, micros=micros)

    def take_metric(self, metric: Any) -> None:
        """Counts over the replicas in `run`, too."""
        self._metrics = [*(known for known in self._metrics if known() is not None), ref(metric)]

    def share_memory(self, model: Any) -> None:
        """Gives every replica what the optimizer remembers, where not all of them apply it."""

    def _share_of(self, args: Sequence[Any]) -> Share:
        """The share that these arrays were handed out as; of others, what each replica has of them."""
        share = known_share(args)
        if share is not None:
            return share
        arrays = [leaf for leaf in tree.flatten(args) if getattr(leaf, "shape", ())]
        if not arrays:
            return self.share(self.num_replicas_in_sync)
        own = 0 if self.worker is None else int(arrays[0].shape[0])
        counts = self.hand.replicas.all_gather(torch.tensor([own], device=self.hand.device))
        return Share.among(counts.flatten().tolist(), self.hand.rank)

    def once(self, name: str, act: Callable[[], Any]) -> Any:
        """Lets the first replica do something; the others go on when it is done, so that they can read what it wrote.

        The first one waits for nobody: a script may let it alone come here.
        """
        number = _num_done[name] = _num_done.get(name, 0) + 1
        if not self.hand.is_first:
            return self.hand.world.wait_for(f"{name} {number}")
        try:
            return act()
        finally:
            self.hand.world.mark(f"{name} {number}")

    def mirror(self, model: Any) -> None:
        """Gives every replica the first one's weights and optimizer state."""
        for variable in variables_of(model):
            self.hand.replicas.broadcast(variable._value.data)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What runs inside is this replica's own affair."""
        self._num_alone += 1
        try:
            with apart():
                yield
        finally:
            self._num_alone -= 1


_OURS = ("replicas", "accumulate", "precision", "recompute", "capture")


def _require_mirrored(spec: StrategySpec) -> None:
    plain = StrategySpec(**{name: getattr(spec, name) for name in _OURS})
    if spec != plain or spec.precision == "fp64":
        raise StrategyError(
            "a Keras model is mirrored: replicas, accumulate, precision fp32 or bf16, and recompute are what there is",
            got=str(spec),
            remedy='write --strategy mirrored, and keras.config.set_dtype_policy("float64") for fp64',
        )


_num_done: dict[str, int] = {}
"""How often each thing was done that one replica does for all."""


class ReplicaContext:
    """What code inside `strategy.run` may ask."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = strategy.hand.rank if strategy.worker is None else strategy.worker
        self.num_replicas_in_sync = strategy.num_replicas_in_sync

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """The sum or mean over the replicas, on all of them."""
        return self.strategy.reduce(reduce_op, value)

    def all_gather(self, value: Any, axis: int = 0) -> Tensor:
        """The values of all replicas, on all of them."""
        return self.strategy.gather(value, axis)


_scopes: list[Strategy] = []
_strategies: WeakKeyDictionary[Any, Strategy] = WeakKeyDictionary()
"""By model the strategy in whose scope it was made."""


def remember(model: Any) -> None:
    """A model that is made or compiled in a scope is its strategy's."""
    if _scopes:
        _strategies[model] = _scopes[-1]


def remember_metric(metric: Any) -> None:
    """A metric that is made in a scope counts what all replicas see."""
    if _scopes:
        _scopes[-1].take_metric(metric)


def home_of(model: Any) -> Strategy | None:
    """The strategy in whose scope a model was made, whether it is at work or not."""
    return _strategies.get(model)


def strategy_of(model: Any) -> Strategy | None:
    """The strategy that joins what this model computes; None where it computes alone."""
    strategy = home_of(model)
    return strategy if strategy is not None and strategy.is_active else None


def get_strategy() -> Strategy:
    """The strategy of the step that is computed, else of the innermost scope; one replica where there is none.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    step = current_step()
    if step is not None:
        return step.strategy
    return _scopes[-1] if _scopes else Strategy(Hand(NullWorld(), StrategySpec()))


def has_strategy() -> bool:
    """Whether this is inside a scope, or a step."""
    return bool(_scopes) or current_step() is not None


def in_cross_replica_context() -> bool:
    """Whether this is not inside `strategy.run`, nor a step of `fit`."""
    return current_step() is None


def get_replica_context() -> ReplicaContext | None:
    """This replica, inside `strategy.run`; None outside."""
    step = current_step()
    return None if step is None else ReplicaContext(step.strategy)


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Tensor:
    """This replica's part of the mean over the global batch, in a loop or a step of one's own.

    >>> compute_average_loss(torch.tensor([1.0, 3.0]), global_batch_size=4)
    tensor(1.)
    """
    losses = torch.as_tensor(per_example_loss)
    if sample_weight is not None:
        losses = losses * torch.as_tensor(sample_weight, device=losses.device)
    step = current_step()
    known = step.rows.total if step is not None else len(losses)
    share = 0.0 if step is not None and step.rows.is_ghost else 1.0
    part = losses.sum() * share / (global_batch_size or known)
    return part if step is None else step.part(part)


def scale_regularization_loss(regularization_loss: Any) -> Tensor:
    """This replica's part of a loss that is the same on all of them."""
    step, loss = current_step(), torch.as_tensor(regularization_loss)
    # In a step of fit gradients are weighed by rows, which are one whole.
    return loss if step is None or not step.is_plain_sum else loss / step.strategy.num_replicas_in_sync
