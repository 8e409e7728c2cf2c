"""Network: the costs of a network, piece by piece in the order of execution, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """The cost of one forward or backward of a piece, for the number of samples of the trace."""

    flops: float = 0.0
    """FLOPs of matrix products, convolutions and attention, without those that a causal mask skips."""
    attention: float = 0.0
    """The part of `flops` in fused attention kernels."""
    fill: float = 0.0
    """FLOPs of products for one element of their inner dimension: how many are lost while kernels fill and drain."""
    moved: float = 0.0
    """Bytes that operations read and write, as far as they grow with the samples."""
    product_moved: float = 0.0
    """The part of `moved` of products, which move bytes while they compute."""
    product_fixed: float = 0.0
    """The part of `fixed` of products."""
    fused: float | None = None
    """What `moved` is without products if neighbouring operations run as one kernel, as torch.compile makes them;
    None if it is not known."""
    unsharded: float = 0.0
    """The part of `moved` that every device moves in full under tensor parallelism: sums, norms and dropout of rows."""
    fixed: float = 0.0
    """Bytes of parameters and gradients that are read and written, independent of the number of samples."""
    operations: int = 0
    products: int = 0
    """The number of `operations` that are products."""
    kernels: int | None = None
    """What `operations` is if neighbouring ones run as one kernel."""
    peak: float = 0.0
    """Peak bytes while it runs, beyond those allocated before."""

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            flops=self.flops + other.flops,
            attention=self.attention + other.attention,
            fill=self.fill + other.fill,
            moved=self.moved + other.moved,
            product_moved=self.product_moved + other.product_moved,
            product_fixed=self.product_fixed + other.product_fixed,
            fused=self.alone(fused=True) + other.alone(fused=True),
            products=self.products + other.products,
            kernels=self.launches(fused=True) + other.launches(fused=True),
            unsharded=self.unsharded + other.unsharded,
            fixed=self.fixed + other.fixed,
            operations=self.operations + other.operations,
            peak=max(self.peak, other.peak),
        )

    def alone(self, *, fused: bool) -> float:
        """Return the bytes of operations that are not products, as far as they grow with the samples."""
        moved = self.moved - self.product_moved
        return moved if self.fused is None or not fused else min(moved, self.fused)

    def launches(self, *, fused: bool) -> int:
        """Return the number of operations that the host launches."""
        return self.operations if self.kernels is None or not fused else self.kernels


@dataclass(frozen=True, kw_only=True)
class NetworkPart:
    """A part of a network that runs as one: a block, a layer, or the code around them."""

    name: str
    forward: PassCost = PassCost()
    backward: PassCost = PassCost()
    params: int = 0
    param_bytes: int = 0
    """Bytes of all parameters, trainable or not, each counted where it is first used."""
    frozen_bytes: int = 0
    """The part of `param_bytes` that is not trained: without gradients and optimizer state."""
    largest: int = 0
    """Bytes of the largest parameter, which occupies a single server unless it is sharded."""
    table_bytes: int = 0
    """Bytes of embedding tables, of which parameter servers send and receive single rows."""
    touched: float = 0.0
    """Bytes of the table rows that the samples of the trace use."""
    kept: float = 0.0
    """Bytes that backward needs, for the samples of the trace."""
    copies: int = 0
    """Bytes of parameters in another precision that backward needs, independent of the number of samples."""
    output: float = 0.0
    """Bytes that are passed to the next piece."""
    products: int = 0
    """Number of inputs multiplied by parameters: pairs can be split across devices, with one all-reduce per pair."""
    is_repeated: bool = False
    """Whether there are others of its kind, so that `recompute="blocks"` recomputes it."""

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients of its parameters."""
        return self.param_bytes - self.frozen_bytes

    def served(self, samples: float) -> float:
        """Return the bytes that a worker pulls from, and pushes to, servers for `samples` times the traced samples."""
        return self.gradient_bytes - self.table_bytes + min(self.table_bytes, self.touched * samples)

    def share(self, tensor: int, *, sequence: bool = False) -> float:
        """Return the fraction of its activations on each device when its products are split over `tensor` devices.

        With `sequence`, norms and sums of rows are split as well, by tokens.
        """
        if tensor == 1 or not self.products:
            return 1.0
        if sequence:
            return 1 / tensor
        whole = self.forward.unsharded / self.forward.moved if self.forward.moved else 0.0
        return whole + (1 - whole) / tensor


@dataclass(frozen=True, kw_only=True)
class Network:
    """All pieces of a network, for one micro-batch of `rows` samples in one precision.

    >>> Network(rows=2, pieces=(NetworkPart(name="a", params=3, forward=PassCost(flops=8)),)).flops_per_sample
    4.0
    """

    rows: int
    pieces: tuple[NetworkPart, ...]
    precision: str = "fp32"
    state_bytes: int = 0
    """Bytes of the optimizer state."""
    input_bytes: float = 0.0
    """Bytes of a batch of `rows` samples."""
    buffer_bytes: int = 0
    """Bytes of the network's buffers."""
    is_measured: bool = False
    """Whether its costs are the time of whole steps on some hardware, because it could not be traced."""

    @property
    def params(self) -> int:
        """Return the number of parameter elements, trainable or not."""
        return sum(piece.params for piece in self.pieces)

    @property
    def param_bytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(piece.param_bytes for piece in self.pieces)

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all gradients."""
        return sum(piece.gradient_bytes for piece in self.pieces)

    @property
    def flops_per_sample(self) -> float:
        """Return the FLOPs of forward and backward of one sample."""
        return sum(piece.forward.flops + piece.backward.flops for piece in self.pieces) / self.rows

    @property
    def kept_per_sample(self) -> float:
        """Return the bytes that one sample's forward keeps for its backward."""
        return sum(piece.kept for piece in self.pieces) / self.rows

    @property
    def largest(self) -> int:
        """Return the bytes of the largest single parameter."""
        return max((piece.largest for piece in self.pieces), default=0)

    def named(self) -> Iterator[tuple[str, NetworkPart]]:
        """Return the pieces with their names, in order."""
        return ((piece.name, piece) for piece in self.pieces)

    def of_worker(self) -> Network:
        """Return the network as a worker of parameter servers holds it: without tables and optimizer state."""
        pieces = [
            replace(
                piece,
                param_bytes=piece.param_bytes - piece.table_bytes,
                backward=replace(piece.backward, fixed=piece.backward.fixed - piece.table_bytes),
            )
            for piece in self.pieces
        ]
        return replace(self, pieces=tuple(pieces), state_bytes=0)

    def grouped(self, most: int) -> Network:
        """Return the network with neighbouring pieces merged, the smallest first, until there are at most `most`."""
        pieces = list(self.pieces)
        while len(pieces) > most:
            sizes = [a.forward.flops + b.forward.flops for a, b in pairwise(pieces)]
            first = sizes.index(min(sizes))
            pieces[first : first + 2] = [_joined(pieces[first], pieces[first + 1])]
        return replace(self, pieces=tuple(pieces))


def _joined(a: NetworkPart, b: NetworkPart) -> NetworkPart:
    return NetworkPart(
        name=f"{a.name}..{b.name}",
        forward=a.forward + b.forward,
        backward=a.backward + b.backward,
        params=a.params + b.params,
        param_bytes=a.param_bytes + b.param_bytes,
        frozen_bytes=a.frozen_bytes + b.frozen_bytes,
        largest=max(a.largest, b.largest),
        table_bytes=a.table_bytes + b.table_bytes,
        touched=a.touched + b.touched,
        kept=a.kept + b.kept,
        copies=a.copies + b.copies,
        output=b.output,
        products=a.products + b.products,
        is_repeated=a.is_repeated and b.is_repeated,
    )
