"""The costs of a network as numbers (FLOPs, bytes, memory), by piece, in the order of execution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """The cost of one forward or one backward of a piece (a block or layer), for the traced number of samples."""

    flops: float = 0.0
    """FLOPs of matrix products, convolutions and attention, without those that a causal mask skips."""
    attention: float = 0.0
    """The part of `flops` in fused attention kernels."""
    tf32: float = 0.0
    """The part of `flops` in fp32 products that PyTorch's settings allow tensor cores to compute in TF32."""
    winograd: float = 0.0
    """The part of `flops` in convolutions for which Winograd's algorithm needs fewer multiplications."""
    relaid: float = 0.0
    """Bytes that are moved if tensor cores compute convolutions that are not in `channels_last` layout.

    They are proportional to the number of samples.
    """
    fill: float = 0.0
    """FLOPs of matrix products divided by their inner dimensions, for the time in which kernels fill and drain."""
    depth: float = 0.0
    """Sum of the inner dimensions of matrix products, for the last, partial wave of tiles of each."""
    depth_scaled: float = 0.0
    """The part of `depth` that is proportional to the number of samples: that of gradients of parameters."""
    moved: float = 0.0
    """Bytes that operations read and write and that are proportional to the number of samples."""
    product_moved: float = 0.0
    """The part of `moved` that belongs to matrix products, which move bytes while they compute."""
    product_fixed: float = 0.0
    """The part of `fixed` that belongs to matrix products."""
    fused: float | None = None
    """Bytes that operations other than products move if neighbouring ones are fused, as by torch.compile.

    They are proportional to the number of samples; None if they are unknown.
    """
    unsharded: float = 0.0
    """The part of `moved` that every device moves in full under tensor parallelism: sums, norms and dropout of rows."""
    fixed: float = 0.0
    """Bytes of parameters and gradients that are read and written, independent of the number of samples."""
    operations: int = 0
    """Number of operations that the host launches."""
    products: int = 0
    """The number of `operations` that are matrix products."""
    kernels: int | None = None
    """Number of kernels that the host launches if neighbouring operations are fused; None if it is unknown."""
    peak: float = 0.0
    """Peak bytes allocated while it runs, in addition to those allocated before."""

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            flops=self.flops + other.flops,
            attention=self.attention + other.attention,
            tf32=self.tf32 + other.tf32,
            winograd=self.winograd + other.winograd,
            relaid=self.relaid + other.relaid,
            fill=self.fill + other.fill,
            depth=self.depth + other.depth,
            depth_scaled=self.depth_scaled + other.depth_scaled,
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
        """Return the bytes, proportional to the samples, that operations other than matrix products move.

        If `fused`, neighbouring operations run as one kernel, as after torch.compile.
        """
        moved = self.moved - self.product_moved
        return moved if self.fused is None or not fused else min(moved, self.fused)

    def launches(self, *, fused: bool) -> int:
        """Return the number of kernels that the host launches; if `fused`, neighbouring operations are one kernel."""
        return self.operations if self.kernels is None or not fused else self.kernels


@dataclass(frozen=True, kw_only=True)
class NetworkPart:
    """The costs of a piece of a network: a block, a layer, or the code outside of them."""

    name: str
    forward: PassCost = PassCost()
    backward: PassCost = PassCost()
    params: int = 0
    param_bytes: int = 0
    """Bytes of all parameters, trainable or not; a shared one counts only in the first piece that uses it."""
    frozen_bytes: int = 0
    """The part of `param_bytes` that is not trained, so that it has no gradients and no optimizer state."""
    largest: int = 0
    """Bytes of the largest parameter, which occupies a single server unless it is sharded."""
    table_bytes: int = 0
    """Bytes of embedding tables of which parameter servers send and receive only the used rows."""
    touched: float = 0.0
    """Bytes of the embedding rows that the traced samples use."""
    kept: float = 0.0
    """Bytes of activations that forward keeps for backward, for the traced number of samples."""
    copies: int = 0
    """Bytes of autocast's copies of parameters that backward needs, independent of the number of samples."""
    output: float = 0.0
    """Bytes that the piece passes to the next one, for the traced number of samples."""
    products: int = 0
    """Number of activations that are multiplied by parameters; tensor parallelism splits pairs of such products."""
    is_split: bool = False
    """Whether tensor parallelism splits the piece although it has no products: a loss of the last layer's classes."""
    is_repeated: bool = False
    """Whether the piece is one of several equal blocks, which `recompute="blocks"` recomputes in backward."""

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients of the piece's trainable parameters."""
        return self.param_bytes - self.frozen_bytes

    def served(self, samples: float) -> float:
        """Return the bytes that a worker pulls from parameter servers in a step, and pushes to them.

        `samples` is the number of samples relative to the traced number. Of embedding tables only used rows are sent.
        """
        return self.gradient_bytes - self.table_bytes + min(self.table_bytes, self.touched * samples)

    def share(self, tensor: int, *, sequence: bool = False) -> float:
        """Return the fraction of the piece's activations on each of `tensor` devices under tensor parallelism.

        With `sequence`, norms and sums of rows are sharded too, along the sequence (the tokens).
        """
        if tensor == 1 or not (self.products or self.is_split):
            return 1.0
        if sequence or self.is_split:
            return 1 / tensor
        whole = self.forward.unsharded / self.forward.moved if self.forward.moved else 0.0
        return whole + (1 - whole) / tensor


@dataclass(frozen=True, kw_only=True)
class Network:
    """The costs of all pieces of a network, for one micro-batch of `rows` samples in one precision.

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
    """Whether the costs were derived from the measured time of steps, because the network could not be traced."""

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
        """Return the bytes of activations that forward keeps for backward, per sample."""
        return sum(piece.kept for piece in self.pieces) / self.rows

    @property
    def largest(self) -> int:
        """Return the bytes of the largest single parameter."""
        return max((piece.largest for piece in self.pieces), default=0)

    def named(self) -> Iterator[tuple[str, NetworkPart]]:
        """Return each piece's name and the piece, in the order of execution."""
        return ((piece.name, piece) for piece in self.pieces)

    def of_worker(self) -> Network:
        """Return the costs for a worker of parameter servers, which has no embedding tables and no optimizer state."""
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
        """Return the network with at most `most` pieces: neighbours with the fewest FLOPs are merged first."""
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
        is_split=a.is_split and b.is_split,
        is_repeated=a.is_repeated and b.is_repeated,
    )
