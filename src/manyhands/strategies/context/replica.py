"""ContextReplica: a replica whose sequences are split over several ranks, each with the whole network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...core import StrategySpec
from ...distributed import World
from ..mirrored import MirroredReplica
from ..recompute import recompute
from .exchange import ContextRanks
from .scope import SequenceSplit
from .split_tensor import all_whole
from .trial import find


class ContextReplica(MirroredReplica):
    """One rank's part of the sequences, with a whole network.

    Every rank's gradients are those of its tokens, so that the sum over all ranks, which the replicas compute anyway,
    is the gradient of the whole.
    """

    def __init__(
        self,
        spec: StrategySpec,
        world: World,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        sequences: SequenceSplit,
        notes: Sequence[str],
    ) -> None:
        super().__init__(spec, world, model, optimizers)
        self._sequences = sequences
        self._num_samples: int | None = None
        self.notes += notes

    @property
    def reports_loss(self) -> bool:
        return self._sequences.ranks.world.is_first

    @property
    def is_capturable(self) -> bool:
        return False

    @property
    def is_local(self) -> bool:
        return False

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope(), self._sequences.scope():
            yield

    def loss(self, function: Callable[[Any, Any], Any], data: Any) -> Any:
        try:
            value = super().loss(function, self._sequences.inputs(data))
        finally:
            # Metrics and other outputs are computed on whole sequences.
            self._num_samples, self._sequences.num_samples = self._sequences.num_samples, None
        return value

    def plain(self, value: Any) -> Any:
        return all_whole(value)

    def backward(self, objective: Tensor, key: str, *, last: bool) -> None:
        with self._sequences.scope(), self._sequences.in_backward(self._num_samples):
            # Every rank's copy of the loss is a share of the whole.
            super().backward(objective / self._sequences.ranks.size, key, last=last)


def splitting_context(
    spec: StrategySpec,
    world: World,
    model: nn.Module,
    make_optimizers: Callable[[nn.Module], Mapping[str, Optimizer]],
    probe: Callable[..., Any] | None,
) -> ContextReplica:
    """Build a replica whose sequences are split, after a trial of the network on a few samples."""
    notes = [] if probe is None else find(model, spec, probe, world.device).notes
    sequences = SequenceSplit(ContextRanks(world.along(spec.axes, "context")), spec.sequence_dim)
    recompute(model, spec.recompute, own_randomness=not spec.deterministic, scope=sequences.scope)
    return ContextReplica(spec, world, model, make_optimizers(model), sequences, notes)
