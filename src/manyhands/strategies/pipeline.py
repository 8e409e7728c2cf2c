"""Pipeline strategy: a network in stages, with the micro-batches of a batch in different stages at the same time.

Stages are consecutive operations of the traced network, balanced by time. A result that a later stage needs is sent
there directly, skipping the stages in between. A schedule defines the order of forwards and backwards of each stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.modules.batchnorm import _BatchNorm

from ..core import ManyhandsError, StrategyError, StrategySpec, set_training
from ..distributed import World, culprit, place_of
from ..graph import Call, GraphPiece, Works, crossings, in_stages
from .device_marks import marks_of
from .first_call import calling, require_partitionable
from .piece_runner import Flow, Relay
from .placed import OutputOnOtherRank, PlacedReplica, autocast_of
from .placement import Partition, Placement, placed_homes
from .placement_rules import able_ranks, balanced, parameters_of
from .schedules import BACKWARD, FORWARD, INPUTS, bubble, even, merged, stages_per_rank, usable

NUM_UNMEASURED = 2
"""Warm-up steps that open connections and allocate memory, and are excluded from the measured bubble."""


def place(
    spec: StrategySpec,
    world: World,
    model: nn.Module,
    probe: Callable[[nn.Module, Callable[[Any], Any]], Any] | None,
    look: Callable[[nn.Module], None] | None,
    layers: Sequence[str] = (),
) -> Placement:
    """Partition a network over the ranks of its group and keep this rank's part; `layers` are not split themselves."""
    require_partitionable(model)
    if probe is None:
        raise StrategyError(
            "a partitioned network needs a loss that calls it",
            remedy="use mh.fit and a task with loss=, or mh.Mirrored() for custom training loops",
        )
    inner = world.along(spec.axes, "stages")
    scope = autocast_of(spec, world.device)
    set_training(model)
    if look is not None:
        look(model)
    found = calling(model, probe, scope())
    kind = Placement if spec.place else StagedPlacement
    placement = kind(model, spec, inner.size, world.device, scope, found, layers=layers)
    try:
        if spec.place:
            placement.settle(placed_homes(placement, _patterns(spec, model, inner), world))
        else:
            placement.settle(lambda works: homes_of_stages(placement, works, world))
    except (ManyhandsError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StrategyError(
            "a partitioned network is traced, and its trace must contain all that it computes",
            got=f"{type(error).__name__}: {error} at {culprit(error)}",
            remedy="use mh.Mirrored() or mh.Sharded(), which call the network as it is written",
        ) from error
    placement.drop(inner.rank)
    return placement


def _patterns(spec: StrategySpec, model: nn.Module, inner: World) -> dict[str, int]:
    """Return the map with ranks in place of devices: the user's, or that of the `on` blocks of the network."""
    devices = inner.gather_objects(inner.rank_info.device)
    return {pattern: place_of(device, devices) for pattern, device in named_devices(spec, model).items()}


def named_devices(spec: StrategySpec, model: nn.Module) -> dict[str, str]:
    """Return the device of every pattern in a spec's map, or of every module built in an `on` block; may be empty."""
    if spec.place == "auto":
        return marks_of(model)
    pairs = [part.rpartition("@") for part in spec.place.split(";") if part]
    return {pattern: device for pattern, _, device in pairs}


@dataclass
class StagedPlacement(Placement):
    """A placement in consecutive stages, assigned to the ranks round-robin if each rank has several."""

    stages: list[int] = field(default_factory=list)
    """The stage of every unit of the first partition."""

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks together."""
        return self.num_ranks * stages_per_rank(self.spec.schedule)

    def notes(self) -> list[str]:
        norms = any(isinstance(layer, _BatchNorm) for layer in self.model.modules())
        found = super().notes()
        if self.spec.microbatches == 1:
            cost = ", each with separate batch statistics" if norms else ""
            found.append(f"with one microbatch the stages take turns; microbatches=8 lets them overlap{cost}")
        elif norms:
            found.append("batch statistics are those of a microbatch: microbatches=1 keeps those of the batch")
        return found

    def _pieces(
        self, works: Works, homes: list[int], wanted: tuple[list[str], list[str]], *, training: bool
    ) -> Partition:
        if not training:
            # Evaluation has no schedule, so a graph that differs from training's is split by where its parameters are.
            return super()._pieces(works, homes, wanted, training=training)
        returned, needed = wanted
        ranks = [stage % self.num_ranks for stage in range(self.num_stages)]
        pieces = in_stages(works, self._stages_of(works), ranks, needed)
        return Partition(works, pieces, list(crossings(pieces)), returned)

    def _end(self, works: Works, homes: list[int], needed: list[str]) -> int:
        """Return the rank of the last stage, which computes the loss in every schedule."""
        return (self.num_stages - 1) % self.num_ranks

    def _stages_of(self, works: Works) -> list[int]:
        """Return the stages of a call's units: as in the first partition for the same graph, else by their inputs."""
        if self.first is None or _shape_of(works) == _shape_of(self.first.works):
            return self.stages
        known: dict[str, set[int]] = {}
        for unit, stage in zip(self.first.works.units, self.stages, strict=True):
            known.setdefault(unit.path, set()).add(stage)
        found: list[int] = []
        for index, unit in enumerate(works.units):
            least = max((found[other] for other in unit.takes), default=0)
            able = able_ranks(works, index, self.holders)
            later = [s for s in range(least, self.num_stages) if able is None or s % self.num_ranks in able]
            if not later:
                raise StrategyError(
                    "a network in stages must call its layers in the order of its first call",
                    got=f"{unit.path or 'the network itself'}, after layers of later stages",
                    remedy="use mh.Placed(), whose pieces may go back and forth",
                )
            same = [stage for stage in later if known.get(unit.path) == {stage}]
            found.append((same or later)[0])
        return found


def _shape_of(works: Works) -> list[tuple[str, ...]]:
    return [tuple(str(node.target) for node in unit.nodes) for unit in works.units]


def homes_of_stages(placement: Placement, works: Works, world: World, *, measures: bool = True) -> list[int]:
    """Return the ranks of balanced stages by the first rank's measurements, the same on all ranks."""
    assert isinstance(placement, StagedPlacement)
    if measures:
        placement.measure(works, world)
    else:
        placement.seconds = [1.0] * len(works.units)
    placement.stages = balanced(works, placement.seconds, placement.num_stages)
    return [stage % placement.num_ranks for stage in placement.stages]


class Micros(Protocol):
    """The micro-batches of a step, as a pipeline requests them."""

    sizes: list[int]
    """Number of samples in each micro-batch; 0 for a padding micro-batch."""

    def loss(self, micro: int) -> Any:
        """Compute the loss of a micro-batch, as far as this rank computes it."""

    def weigh(self, micro: int, loss: Any) -> Tensor:
        """Return the tensor that backward starts from."""

    def scope(self, micro: int) -> AbstractContextManager[None]:
        """Return the context in which a micro-batch's backward runs."""


class PipelineReplica(PlacedReplica):
    """One rank's stages of a network."""

    _now: _Micro | None = None
    """The micro-batch whose loss is being computed."""
    _num_steps = 0
    _seconds = _idle = 0.0

    @property
    def pipeline(self) -> PipelineReplica:
        return self

    @property
    def num_micros(self) -> int:
        """The number of micro-batches per batch, if the batch has enough rows."""
        return self.spec.microbatches

    def sizes(self, rows: int) -> list[int]:
        """Return the rows of each micro-batch: even sizes, of at least two rows if possible."""
        wanted = max(1, min(self.num_micros, rows // 2))
        return even(rows, usable(self.spec.schedule, self.inner.size, wanted)) if rows > 1 else [rows]

    def run(self, num_micros: int, steps: Micros) -> None:
        """Run forward and backward of all micro-batches."""
        start, waited = time.perf_counter(), self.world.waited
        self.refresh()
        self.holding.open()
        under_way: dict[int, _Micro] = {}
        for action in merged(self.spec.schedule, self.inner.size, num_micros):
            micro = under_way.setdefault(action.micro, _Micro(action.micro))
            if action.kind == FORWARD:
                self._ahead(micro, action.stage, steps)
            else:
                with steps.scope(action.micro), self.holding.back():
                    self._back(micro, action.kind, action.stage)
        for micro in under_way.values():
            assert micro.flow is not None
            micro.flow.settle()
            self.buffers.put(micro.flow.buffers)
            self.buffers.add(micro.flow.buffers, steps.sizes[micro.number])
        self._note(time.perf_counter() - start, self.world.waited - waited)

    def _ahead(self, micro: _Micro, stage: int, steps: Micros) -> None:
        """Run or receive a stage's forward; the rank's first call for a micro-batch runs the loss to get its inputs."""
        if micro.relay is not None and not self._is_mine(stage):
            assert micro.flow is not None
            self._through(micro.relay, micro.flow, stage)
            return
        self._now, micro.stage = micro, stage
        try:
            value = steps.loss(micro.number)
        finally:
            self._now = None
        if self._is_mine(stage) and self._is_last(stage):
            micro.objective = steps.weigh(micro.number, value)

    def _train(self, call: Call) -> Any:
        """Run one stage of a micro-batch, or the whole network if no pipeline is running."""
        micro = self._now
        if micro is None:
            return super()._train(call)
        partition, relay = self.relay_for(call)
        if micro.flow is None:
            micro.flow, micro.relay = self._flow_of(call, micro.number), relay
        result = self._through(relay, micro.flow, micro.stage)
        if self._is_last(micro.stage):
            return self.answer_of(partition, micro.flow, result)
        raise OutputOnOtherRank

    def _through(self, relay: Relay, flow: Flow, stage: int) -> list[Tensor]:
        result = relay.forward(flow, relay.pieces[stage])
        return relay.forward(flow, relay.end) if self._is_last(stage) else result

    def _is_mine(self, stage: int) -> bool:
        return stage % self.inner.size == self.inner.rank

    def _is_last(self, stage: int) -> bool:
        return stage == self.inner.size * stages_per_rank(self.spec.schedule) - 1

    # -- backward --------------------------------------------------------------------------------------------------

    def _back(self, micro: _Micro, kind: str, stage: int) -> None:
        relay, flow = micro.relay, micro.flow
        assert relay is not None
        assert flow is not None
        piece = relay.pieces[stage]
        if kind in (BACKWARD, INPUTS) and self._is_last(stage):
            if self._is_mine(stage):
                assert micro.objective is not None
                micro.objective.backward()
                micro.objective = None
            relay.backward(flow, relay.end)
        if kind == BACKWARD or (kind == INPUTS and not self._is_mine(stage)):
            relay.backward(flow, piece)
        elif kind == INPUTS:
            micro.halves[stage] = self._inputs_first(relay, flow, piece)
        elif self._is_mine(stage):
            micro.halves.pop(stage)()

    def _inputs_first(self, relay: Relay, flow: Flow, piece: GraphPiece) -> Callable[[], None]:
        """Compute the input gradients that another rank waits for; return a function for those of the weights."""
        made, gradients = relay.gathered(flow, piece)
        inputs = [flow.held[name] for name in piece.takes if flow.held[name].requires_grad]
        if not inputs or not made:
            relay.hand_back(flow, piece)
            return lambda: torch.autograd.backward(made, gradients) if made else None
        weights = [p for p in self._weights(relay.works, piece) if p.requires_grad]
        # torch detaches the outputs in place, which views do not allow.
        made = [tensor.clone() if tensor._is_view() else tensor for tensor in made]
        _, groups = stage_backward_input(made, gradients, inputs, iter(weights))
        relay.hand_back(flow, piece)

        def weigh() -> None:
            stage_backward_weight(iter(weights), groups)

        return weigh

    def _weights(self, works: Works, piece: GraphPiece) -> list[Any]:
        named = dict(self.model.named_parameters())
        return [self.holding.work(named[name]) for name in parameters_of(works, piece.nodes) if name in named]

    # -- measurements ----------------------------------------------------------------------------------------------

    def _note(self, seconds: float, idle: float) -> None:
        self._num_steps += 1
        if self._num_steps > NUM_UNMEASURED:
            self._seconds += seconds
            self._idle += idle

    def remarks(self) -> list[str]:
        """Report the measured pipeline bubble next to the theoretical one."""
        every = self.inner.gather_objects((self._idle, self._seconds))
        seconds = sum(total for _, total in every)
        if not seconds:
            return []
        seen = sum(idle for idle, _ in every) / seconds
        expected = bubble(self.spec.schedule, self.inner.size, self.spec.microbatches)
        pipeline = f"{self.inner.size} ranks, {self.spec.microbatches} microbatches, {self.spec.schedule}"
        return [
            f"the ranks were idle for {seen:.0%} of a step; the pipeline bubble predicts {expected:.0%} ({pipeline})"
        ]


@dataclass
class _Micro:
    """A micro-batch in flight."""

    number: int
    stage: int = 0
    """The current stage."""
    flow: Flow | None = None
    relay: Relay | None = None
    objective: Tensor | None = None
    halves: dict[int, Callable[[], None]] = field(default_factory=dict)
    """The pending weight half of backwards whose input half is done, by stage."""
