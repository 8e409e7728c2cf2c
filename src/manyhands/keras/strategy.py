"""Strategy: what tf.distribute calls one, on manyhands' replicas: a process per device, each with the whole model."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref
from zlib import crc32

import keras
import torch
from keras import tree
from keras.src.backend.torch import core as keras_torch
from torch import Tensor

from ..core import SettingsError, StrategyError, StrategySpec
from ..distributed import NullWorld, caller_lines
from ..training import SCRIPT_END, Hand
from .batch_share import KerasShare, known_share
from .inputs import (
    DistributedInput,
    InputContext,
    OwnInput,
    brought_by_all,
    come_to_meeting,
    distributed,
    next_meeting,
    share_randomness,
)
from .metrics_sync import Measures
from .model_changes import variables_of
from .statistics import scaled
from .step import GradientSums, MicroBatchStep, Update, apart, current_step, taking


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
        self._compared: WeakSet[Any] = WeakSet()
        """Optimizers whose variables were found to be equal on all replicas."""
        self._metrics: list[Any] = []
        """Metrics that were made in a scope, in their order, which is the same on all replicas."""
        share_randomness(hand, "make a strategy")
        if hand.size > 1:
            _made[:] = [self]

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas over which gradients are summed."""
        return self.hand.size

    @property
    def is_active(self) -> bool:
        """Whether there is something to join: several replicas, several micro-batches, another precision."""
        changes = self.spec.accumulate > 1 or self.spec.precision != "fp32"
        return not self.is_alone and (self.hand.size > 1 or changes)

    @property
    def is_alone(self) -> bool:
        """Whether this replica does something by itself, as callbacks do on the first one."""
        return self._num_alone > 0 and self.hand.size > 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Models that are made or compiled inside are trained by this strategy; first weights are equal on all."""
        if not self.is_alone:
            share_randomness(self.hand, "enter strategy.scope()")
            self._let_go_of_metrics()
        _scopes.append(self)
        try:
            with self.at_home(), keras.RematScope() if self.spec.recompute else contextlib.nullcontext():
                yield self
        finally:
            _scopes.pop()

    @contextlib.contextmanager
    def at_home(self) -> Iterator[None]:
        """Lets Keras compute on this strategy's device: a program may have another one for another device."""
        before, keras_torch.DEFAULT_DEVICE = keras_torch.DEFAULT_DEVICE, str(self.hand.device)
        try:
            yield
        finally:
            keras_torch.DEFAULT_DEVICE = before

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
        if any(type(leaf).__name__ == "SymbolicTensor" for leaf in tree.flatten([*args, *(kwargs or {}).values()])):
            raise SettingsError(
                "Keras on PyTorch computes with values, and nothing is traced",
                got="strategy.run inside of a tf.function",
                remedy="leave @tf.function away, and tf.GradientTape too: loss.backward() has the gradients",
            )
        self._require_together("strategy.run")
        if self.spec.accumulate > 1:
            raise StrategyError(
                "strategy.run takes a step of all its rows: a loop of one's own accumulates by itself",
                got=f"accumulate={self.spec.accumulate}",
                remedy="leave it out; add up the gradients of parts of the rows, as examples/keras/own_loop.py does",
            )
        step = MicroBatchStep(
            self, self._share_of([*args, *(kwargs or {}).values()]).rows[0], GradientSums(), is_plain_sum=True
        )
        measures = Measures(self._metrics, self.hand)
        with self.at_home(), self.narrow(), taking(step):
            result = fn(*args, **(kwargs or {}))
        measures.take({}, step.rows)
        measures.joined({})
        return result

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """The sum or mean of what the replicas hold; with an axis over that axis of all of them too."""
        self._require_together("strategy.reduce")
        op = ReduceOp(reduce_op if isinstance(reduce_op, ReduceOp) else str(reduce_op).rpartition(".")[2].upper())
        return tree.map_structure(lambda leaf: self._reduced(op, torch.as_tensor(leaf), axis), value)

    def _reduced(self, op: ReduceOp, value: Tensor, axis: int | None) -> Tensor:
        own, count = (value, 1.0) if axis is None else (value.sum(axis), float(value.shape[axis]))
        if self._is_borrowed:
            own, count = torch.zeros_like(own), 0.0
        total = self.hand.sum(own)
        return (total if op is ReduceOp.SUM else total / self.hand.sum(count)).to(value.device)

    def gather(self, value: Any, axis: int = 0) -> Tensor:
        """The values of all replicas, one after another along an axis; in a step gradients flow back to them."""
        self._require_together("strategy.gather")
        rows = torch.as_tensor(value).movedim(axis, 0).contiguous()
        if self._is_borrowed:
            rows = rows[:0]
        step = current_step()
        # Replicas' gradients are weighed when an optimizer gets them, by whose rows they are; here others' come in.
        weight = 1.0 if step is None else step.weight
        gathered = self.hand.gather(scaled(rows, 1.0 / weight if weight else 0.0))
        return scaled(gathered, weight).movedim(0, axis).to(rows.device)

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
        self._require_together("strategy.barrier")
        come_to_meeting(self.hand)
        self.hand.barrier()

    def _require_together(self, what: str) -> None:
        if self.is_alone:
            raise StrategyError(
                f"all replicas take part in {what}",
                got="a callback, which runs on the first replica alone",
                remedy="call the model there, or model.evaluate on all rows; or do it between two calls of fit",
            )

    # -- what training needs --------------------------------------------------------------------------------------

    def narrow(self) -> contextlib.AbstractContextManager[Any]:
        """The precision that was asked for: `--strategy mirrored,precision=bf16`."""
        if self.spec.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.hand.device.type, dtype=torch.bfloat16)

    def require_all(self, doing: str) -> None:
        """Refuses what only some replicas do, where each would wait for the others for ever."""
        self._require_together(doing)
        if self.hand.size > 1:
            brought_by_all(self.hand, doing)

    def require_equal(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Refuses weights that differ between replicas before their first step: sums would keep them apart."""
        if optimizer in self._compared or self.hand.size == 1:
            return
        self._compared.add(optimizer)
        every = self.hand.world.gather_objects([_digest(variable) for variable in variables])
        for variable, digests in zip(variables, zip(*every, strict=True), strict=True):
            if len(set(digests)) > 1:
                raise StrategyError(
                    "weights must be the same on all replicas before they learn together",
                    got=f"{getattr(variable, 'path', 'a parameter')} that differs",
                    remedy="make the model in `with strategy.scope():`, or load its weights on every replica",
                )

    update: Update | None = None
    """How an optimizer is applied in `fit`; None where every replica applies the sums."""

    failure: Exception | None = None
    """What a callback has raised here, until all replicas know of it."""

    @property
    def worker(self) -> int | None:
        """Which of those that take rows this is; None where it takes none."""
        return self.hand.rank

    def share(self, total: int, micros: int = 1) -> KerasShare:
        """This replica's rows of a global batch."""
        return KerasShare.of(total, rank=self.hand.rank, size=self.hand.size, micros=micros)

    def take_metric(self, metric: Any) -> None:
        """Counts over the replicas in `run`, too."""
        if not self.is_alone:
            self._metrics.append(metric)

    def _let_go_of_metrics(self) -> None:
        """Forgets those that nobody else holds.

        At one moment on all replicas: left to each one's collector, one would sum others than the next in `run`.
        """
        held, self._metrics = [ref(metric) for metric in self._metrics], []
        if held:
            gc.collect()
            alive = zip(*self.hand.world.gather_objects([known() is not None for known in held]), strict=True)
            self._metrics = [known() for known, flags in zip(held, alive, strict=True) if all(flags)]

    def share_memory(self, model: Any) -> None:
        """Gives every replica what the optimizer remembers, where not all of them apply it."""

    def _share_of(self, args: Sequence[Any]) -> KerasShare:
        """The share that these arrays were handed out as; of others, what each replica has of them."""
        share = known_share(args)
        if share is not None:
            return share
        arrays = [leaf for leaf in tree.flatten(args) if getattr(leaf, "shape", ())]
        if not arrays:
            return self.share(self.num_replicas_in_sync)
        own = 0 if self.worker is None else int(arrays[0].shape[0])
        counts = self.hand.replicas.all_gather(torch.tensor([own], device=self.hand.device))
        return KerasShare.among(counts.flatten().tolist(), self.hand.rank)

    def once(self, name: str, act: Callable[[], Any]) -> Any:
        """Lets the first replica do something; the others go on when it is done, so that they can read what it wrote.

        The first one waits for nobody: a script may let it alone come here. What it does at one place of a script is
        what the others wait for at the same place, unless it comes to where all meet next, or to the end, without it.
        """
        place = f"{name} on the first replica at {', '.join(caller_lines())}"
        number = _num_done[place] = _num_done.get(place, 0) + 1
        if not self.hand.is_first:
            return self.hand.world.wait_for(f"{place} ({number})", next_meeting(), SCRIPT_END)
        try:
            return act()
        finally:
            self.hand.world.mark(f"{place} ({number})")

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
"""How often each thing was done that one replica does for all, by its place in the script."""


def _digest(variable: Any) -> int:
    """Tells the beginnings of two variables apart."""
    value = getattr(variable, "value", variable).detach().reshape(-1)[:4096]
    return crc32(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())


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
_made: list[Strategy] = []
"""The strategy of several replicas that was made last."""
_strategies: WeakKeyDictionary[Any, Strategy] = WeakKeyDictionary()
"""By model, and by optimizer, the strategy in whose scope it was made."""


def remember(owner: Any) -> None:
    """A model that is made or compiled in a scope is its strategy's, and so is an optimizer."""
    if not _scopes:
        return
    _strategies[owner] = _scopes[-1]
    device = _scopes[-1].hand.device
    # One that was made before the strategy is where Keras was then.
    for variable in getattr(getattr(owner, "optimizer", None), "variables", ()):
        if variable._value is not None and variable._value.device != device:
            variable._value.data = variable._value.data.to(device)


def require_step(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses an update outside of a step, which every replica would take from its own rows alone."""
    ids = {id(variable) for variable in variables}
    for owner, strategy in list(_strategies.items()):
        if strategy.hand.size == 1 or strategy.is_alone:
            continue
        if owner is optimizer or any(id(variable) in ids for variable in owner.variables):
            raise StrategyError(
                "gradients are summed over the replicas in a step",
                got="an optimizer that is applied outside of strategy.run",
                remedy="put what computes and applies them into a function, and call strategy.run(function, args)",
            )


def warn_of_no_scope(model: Any) -> None:
    """Says that replicas learn apart, where a model was made outside of the strategy that there is."""
    strategy = _made[0] if _made else None
    if strategy is None or home_of(model) is not None or strategy.is_alone:
        return
    if strategy.hand.is_first:
        warnings.warn(
            f"{model.name} was made outside of strategy.scope(), so each of the {strategy.hand.size} replicas trains "
            "its own copy on all rows; make and compile it in `with strategy.scope():`",
            stacklevel=4,
        )


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
