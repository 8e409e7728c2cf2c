"""Predict the peak memory of a rank by simulating what forward and backward of a step allocate and free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core import StrategySpec
from ..costs import Network, NetworkPart

USABLE_SHARE = 0.92
"""Fraction of a device's memory that a step may use; context, fragmentation and libraries need the rest."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of memory of one rank at its peak, by use; `working` is temporary memory of operations and the inputs."""

    parameters: float
    gradients: float
    state: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """Bytes of memory for all uses together."""
        return self.parameters + self.gradients + self.state + self.activations + self.working


def footprint(
    network: Network, pieces: Sequence[NetworkPart], spec: StrategySpec, rows: float, in_flight: float = 1
) -> Footprint:
    """Return the peak memory of a rank.

    Args:
        network: The whole network.
        pieces: The pieces of the network on this rank.
        spec: The strategy.
        rows: Number of rows of a micro-batch.
        in_flight: Number of micro-batches whose activations the rank holds at a time.
    """
    shards, replicas = spec.shards or 1, (spec.replicas or 1) * spec.context
    samples = rows / network.rows / spec.context
    own = sum(piece.param_bytes for piece in pieces) / spec.tensor
    whole = own / max(1, network.param_bytes / spec.tensor)
    trained = sum(piece.gradient_bytes for piece in pieces) / spec.tensor
    state = network.state_bytes * trained / max(1, network.gradient_bytes) / shards
    parameters = own / shards + network.buffer_bytes * whole
    # Replicas hold each gradient and its communication buffer.
    gradients = trained / shards * (2 if replicas > 1 else 1)
    stay = spec.accumulate * spec.microbatches > 1 or replicas > 1 or shards > 1 or in_flight > 1
    kept = [_kept(piece, spec, samples) for piece in pieces]
    gathered = _gathered(pieces, spec)
    before = (in_flight - 1) * sum(kept)
    best = _peak(pieces, spec, samples, kept, 0.0 if stay else trained)
    activations, working, grown = best
    return Footprint(
        parameters=parameters + gathered,
        gradients=gradients if stay else grown,
        state=state,
        activations=before + activations,
        # The rows of all micro-batches of a step are in memory.
        working=working + network.input_bytes * samples * spec.accumulate * spec.microbatches,
    )


def is_sequence(spec: StrategySpec) -> bool:
    """Return whether tensor parallelism also shards norms and sums of rows, along the sequence (the tokens)."""
    return spec.tensor > 1 and ":sequence" in spec.layout


def _kept(piece: NetworkPart, spec: StrategySpec, samples: float) -> float:
    if spec.recompute and piece.is_repeated:
        # A recomputed block keeps only its input, which is as large as its output; "selective" also keeps products.
        share = 0.5 if spec.recompute == "selective" else 0.0
        is_split = is_sequence(spec)
        kept = share * piece.kept * piece.share(spec.tensor, sequence=is_split)
        return (piece.output / (spec.tensor if is_split else 1) + kept) * samples
    return piece.kept * samples * piece.share(spec.tensor, sequence=is_sequence(spec)) + piece.copies / spec.tensor


def _peak(
    pieces: Sequence[NetworkPart], spec: StrategySpec, samples: float, kept: Sequence[float], gradients: float
) -> tuple[float, float, float]:
    """Return the bytes of activations, working memory and gradients at the moment when their sum is largest.

    Args:
        pieces: The pieces on the rank, in order of execution.
        spec: The strategy.
        samples: Number of samples, relative to the traced number.
        kept: Bytes of activations that each piece keeps for backward.
        gradients: Bytes of gradients that are allocated during backward; 0 if they are allocated all the time.
    """
    held, best = 0.0, (0.0, 0.0, 0.0)
    for piece, size in zip(pieces, kept, strict=True):
        working = max(0.0, piece.forward.peak * samples * piece.share(spec.tensor, sequence=is_sequence(spec)) - size)
        held += size
        best = max(best, (held, working, 0.0), key=sum)
    grown = 0.0
    total = sum(piece.gradient_bytes for piece in pieces) or 1
    for piece, size in zip(reversed(pieces), reversed(kept), strict=True):
        again = 0.0
        if spec.recompute and piece.is_repeated:
            again = piece.kept * samples * piece.share(spec.tensor, sequence=is_sequence(spec))
        # Backward of a piece also holds the gradient of its output, which is as large as the output.
        working = (
            piece.backward.peak * piece.share(spec.tensor, sequence=is_sequence(spec)) + piece.output
        ) * samples + again
        if spec.accumulate * spec.microbatches > 1:
            working += piece.largest / spec.tensor  # autograd allocates a gradient before it is accumulated
        grown += gradients * piece.gradient_bytes / total
        best = max(best, (held, working, grown), key=sum)
        held -= size
    return max(best, (0.0, 0.0, grown), key=sum)


def _gathered(pieces: Sequence[NetworkPart], spec: StrategySpec) -> float:
    """Return the bytes of gathered parameters of a sharded network: those of two blocks.

    With sharding="gradients" all parameters are gathered, because they stay whole until backward.
    """
    if (spec.shards or 1) == 1:
        return 0.0
    sizes = sorted((piece.param_bytes / spec.tensor for piece in pieces), reverse=True)
    return sum(sizes) if spec.sharding == "gradients" else sum(sizes[:2])
