"""Network: what a network costs, piece by piece in the order of execution, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """One forward or one backward of a piece, for as many samples as the network was traced with."""

    flops: float = 0.0
    """Of matrix products, convolutions and attention."""
    moved: float = 0.0
    """Bytes that operations read and write and that grow with the samples."""
    uncut: float = 0.0
    """Those of them that every device moves whole where products are cut: sums, norms and dropout of whole rows."""
    fixed: float = 0.0
    """Bytes of parameters and their gradients that are read and written, however many samples there are."""
    operations: int = 0
    peak: float = 0.0
    """Bytes that are there at the most while it runs, beyond what was there before."""

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            flops=self.flops + other.flops,
            moved=self.moved + other.moved,
            uncut=self.uncut + other.uncut,
            fixed=self.fixed + other.fixed,
            operations=self.operations + other.operations,
            peak=max(self.peak, other.peak),
        )


@dataclass(frozen=True, kw_only=True)
class NetworkPart:
    """A part of a network that runs as one: a block, a layer, or the lines around them."""

    name: str
    forward: PassCost = PassCost()
    backward: PassCost = PassCost()
    params: int = 0
    param_bytes: int = 0
    """Trainable ones and others, each counted where it is first used."""
    frozen_bytes: int = 0
    """Those of them that are not trained: they have no gradient, and no state."""
    largest: int = 0
    """Bytes of the largest parameter, which no server can share with another unless it is cut."""
    table_bytes: int = 0
    """Those of tables of which parameter servers send and get single rows."""
    touched: float = 0.0
    """Bytes of the rows that the samples of the trace ask them for."""
    kept: float = 0.0
    """Bytes that backward needs, for the samples of the trace."""
    copies: int = 0
    """Bytes of parameters in another precision that backward needs, however many samples there are."""
    output: float = 0.0
    """Bytes that go on to the next piece."""
    products: int = 0
    """Inputs that are multiplied by parameters: pairs of them can be cut across devices, with one sum for each pair."""
    is_repeated: bool = False
    """Whether there are others of its kind: what `recompute="blocks"` computes again."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of its parameters."""
        return self.param_bytes - self.frozen_bytes

    def served(self, samples: float) -> float:
        """Bytes that a worker pulls from parameter servers, and pushes, for so many times the samples of the trace."""
        return self.gradient_bytes - self.table_bytes + min(self.table_bytes, self.touched * samples)

    def share(self, cut: int) -> float:
        """The part of its activations that each of so many devices holds where its products are cut over them."""
        if cut == 1 or not self.products:
            return 1.0
        whole = self.forward.uncut / self.forward.moved if self.forward.moved else 0.0
        return whole + (1 - whole) / cut


@dataclass(frozen=True, kw_only=True)
class Network:
    """All pieces, for one micro-batch of `rows` samples in one precision.

    >>> Network(rows=2, pieces=(Piece(name="a", params=3, forward=Work(flops=8)),)).flops_per_sample
    4.0
    """

    rows: int
    pieces: tuple[NetworkPart, ...]
    precision: str = "fp32"
    state_bytes: int = 0
    """What the optimizer keeps beside the parameters."""
    input_bytes: float = 0.0
    """Bytes of a batch of `rows` samples."""
    buffer_bytes: int = 0
    """What the network holds besides parameters."""

    @property
    def params(self) -> int:
        """How many numbers are trained or held."""
        return sum(piece.params for piece in self.pieces)

    @property
    def param_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(piece.param_bytes for piece in self.pieces)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(piece.gradient_bytes for piece in self.pieces)

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward of one sample."""
        return sum(piece.forward.flops + piece.backward.flops for piece in self.pieces) / self.rows

    @property
    def kept_per_sample(self) -> float:
        """Bytes that one sample's forward leaves for its backward."""
        return sum(piece.kept for piece in self.pieces) / self.rows

    @property
    def largest(self) -> int:
        """Bytes of the largest single parameter."""
        return max((piece.largest for piece in self.pieces), default=0)

    def named(self) -> Iterator[tuple[str, NetworkPart]]:
        """Pieces by name, in order."""
        return ((piece.name, piece) for piece in self.pieces)

    def of_worker(self) -> Network:
        """What is left of it for a worker of parameter servers, who hold the tables and what the optimizer keeps."""
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
        """The same with neighbours put together until there are at most so many pieces, the smallest first."""
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
