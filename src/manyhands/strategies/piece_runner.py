"""Runs one rank's pieces of a partitioned network, and sends and receives activations and gradients.

All ranks follow the same order of pieces. A result is sent as soon as its piece is done; the rank that needs it posts
the receive without waiting, so there is no deadlock. Backward follows the reverse order, and gradients are sent in the
opposite direction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..distributed import Pending, World
from ..graph import Crossing, DrawCounter, GraphPiece, Segment, Works

MAX_CROSSINGS = 1 << 16
"""Number of tags per micro-batch, more than any network has crossings."""


@dataclass
class Flow:
    """One micro-batch in flight through a network."""

    number: int
    inputs: Sequence[Tensor]
    start: int = 0
    """The index of the network's first random draw."""
    held: dict[str, Tensor] = field(default_factory=dict)
    """Results that pieces of this rank need, detached from the graph that computed them."""
    made: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Outputs of each piece of this rank, with their autograd graph."""
    coming: dict[tuple[int, bool], tuple[Tensor, Pending]] = field(default_factory=dict)
    """Pending receives, by crossing and direction."""
    going: list[tuple[Tensor, Pending]] = field(default_factory=list)
    """Pending sends; the tensors are kept until they are sent."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers that this micro-batch updates, by name, starting from the values before the step."""

    def settle(self) -> None:
        """Wait until all sends are complete."""
        for _, pending in self.going:
            pending.wait()
        self.going.clear()


class Relay:
    """Run the pieces of one rank for calls of one shape."""

    def __init__(
        self,
        works: Works,
        pieces: Sequence[GraphPiece],
        crossings: Sequence[Crossing],
        world: World,
        segments: Mapping[int, Sequence[Segment]],
        tensor_of: Callable[[str], Tensor],
        clock: DrawCounter,
        plain: Callable[[Tensor], Tensor],
        own_buffers: Collection[str] = (),
        in_turn: Collection[str] = (),
    ) -> None:
        self.works, self.pieces = works, pieces
        self._world, self._segments, self._tensor_of, self._clock = world, segments, tensor_of, clock
        self._plain = plain
        self._own_buffers = {
            node: name for node, name in works.traced.buffers.items() if name in own_buffers or name in in_turn
        }
        self._in_turn = {node: name for node, name in self._own_buffers.items() if name in in_turn}
        self.given = {piece.index: [c for c in crossings if c.source is piece] for piece in pieces}
        """The results that each piece sends to other ranks."""
        self._taken = {piece.index: [c for c in crossings if c.first is piece] for piece in pieces}
        """The crossings whose gradients are complete after each piece's backward."""

    @property
    def end(self) -> GraphPiece:
        """The piece that holds the network's output."""
        return self.pieces[-1]

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, flow: Flow, piece: GraphPiece) -> list[Tensor]:
        """Compute a piece if it is this rank's, else start receiving its results; return its last segment's outputs."""
        if piece.rank != self._world.rank:
            for crossing in self.given[piece.index]:
                if crossing.to == self._world.rank:
                    self._receive(flow, crossing, back=False)
            return []
        for name in piece.takes:
            self._take(flow, name)
        env = self._environment(flow)
        self._clock.start = flow.start
        result: list[Tensor] = []
        for segment in self._segments[piece.index]:
            segment.run(env, self._clock)
            result = [env[name] for name in segment.gives]
        with torch.no_grad():
            for node, name in self._in_turn.items():
                if name in flow.buffers:
                    self._tensor_of(node).copy_(flow.buffers[name])
        self._give(flow, piece, env)
        return result

    def _environment(self, flow: Flow) -> dict[str, Any]:
        given = dict(zip(self.works.traced.inputs, flow.inputs, strict=True))
        return _Environment(flow.held, given, lambda node: self._own(flow, node))

    def _own(self, flow: Flow, node: str) -> Tensor:
        """Return one of the network's tensors; for a buffer that forward updates, a copy that backward can read."""
        name = self._own_buffers.get(node)
        if name is None or not torch.is_grad_enabled():
            return self._tensor_of(node)
        if name not in flow.buffers:
            flow.buffers[name] = self._tensor_of(node).clone()
        return flow.buffers[name]

    def _take(self, flow: Flow, name: str) -> None:
        """Wait until a result of another piece has arrived."""
        if name in flow.held:
            return
        crossing = next(c for c in self._arriving(name))
        tensor, pending = flow.coming.pop((crossing.number, False))
        pending.wait()
        flow.held[name] = tensor.requires_grad_(self._has_gradient(name))

    def _arriving(self, name: str) -> list[Crossing]:
        return [c for cs in self.given.values() for c in cs if c.name == name and c.to == self._world.rank]

    def _give(self, flow: Flow, piece: GraphPiece, env: Mapping[str, Any]) -> None:
        made = {name: self._plain(env[name]) for name in piece.gives}
        if torch.is_grad_enabled():
            flow.made[piece.index] = made
        for crossing in self.given[piece.index]:
            self._send(flow, crossing, made[crossing.name].detach(), back=False)
        for name, tensor in made.items():
            flow.held[name] = tensor.detach().requires_grad_(self._has_gradient(name))

    def _has_gradient(self, name: str) -> bool:
        return torch.is_grad_enabled() and self.works.facts.values[name].requires_grad

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, flow: Flow, piece: GraphPiece) -> None:
        """Run a piece's backward if it is this rank's, else start receiving gradients of its inputs."""
        if piece.rank != self._world.rank:
            for crossing in self._taken[piece.index]:
                if crossing.source.rank == self._world.rank and self._has_gradient(crossing.name):
                    self._receive(flow, crossing, back=True)
            return
        made, gradients = self.gathered(flow, piece)
        if made:
            torch.autograd.backward(made, gradients)
        self.hand_back(flow, piece)

    def gathered(self, flow: Flow, piece: GraphPiece) -> tuple[list[Tensor], list[Tensor]]:
        """Return a piece's outputs, and the gradients that were received for them."""
        made, gradients = [], []
        for name, tensor in flow.made.pop(piece.index, {}).items():
            parts = [
                self._await(flow, c) for c in self.given[piece.index] if c.name == name and self._has_gradient(name)
            ]
            own = flow.held.pop(name, None)
            if own is not None and own.grad is not None:
                parts.append(own.grad)
            if parts and tensor.requires_grad:
                made.append(tensor)
                gradients.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        return made, gradients

    def hand_back(self, flow: Flow, piece: GraphPiece) -> None:
        """Send the gradients that are complete after this piece back to the ranks of their sources."""
        for crossing in self._taken[piece.index]:
            if self._has_gradient(crossing.name) and crossing.source.rank != self._world.rank:
                leaf = flow.held.pop(crossing.name)
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                self._send(flow, crossing, gradient, back=True)

    def _await(self, flow: Flow, crossing: Crossing) -> Tensor:
        tensor, pending = flow.coming.pop((crossing.number, True))
        pending.wait()
        return tensor

    # -- between ranks ---------------------------------------------------------------------------------------------

    def _tag(self, flow: Flow, crossing: Crossing, back: bool) -> int:
        return 2 * (flow.number * MAX_CROSSINGS + crossing.number) + back

    def _send(self, flow: Flow, crossing: Crossing, tensor: Tensor, *, back: bool) -> None:
        # Contiguous in the unsplit network's order of dimensions, because the tensor may be a view.
        tensor = tensor.permute(self.works.facts.values[crossing.name].order).contiguous()
        to = crossing.source.rank if back else crossing.to
        flow.going.append((tensor, self._world.start_send(tensor, to, self._tag(flow, crossing, back))))

    def _receive(self, flow: Flow, crossing: Crossing, *, back: bool) -> None:
        value = self.works.facts.values[crossing.name]
        shape = [value.shape[dim] for dim in value.order]
        into = torch.empty(shape, dtype=value.dtype, device=self._world.device)
        source = crossing.to if back else crossing.source.rank
        pending = self._world.start_receive(into, source, self._tag(flow, crossing, back))
        back_in_order = sorted(range(len(shape)), key=value.order.__getitem__)
        flow.coming[crossing.number, back] = (into.permute(back_in_order), pending)


class _Environment(dict[str, Any]):
    """The values that a piece reads by name: results, inputs, and the network's own tensors."""

    def __init__(self, held: Mapping[str, Tensor], inputs: Mapping[str, Tensor], own: Callable[[str], Tensor]) -> None:
        super().__init__(held)
        self.update(inputs)
        self._own = own

    def __missing__(self, name: str) -> Tensor:
        return self._own(name)
