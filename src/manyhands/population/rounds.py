"""Rounds: steps of a whole stack, taken plainly or from a recording, in parts where memory is short."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import OutOfMemory
from ..data import Resident
from ..graph import CannotRecord, Phase, Recording, rehearsing
from .course import Block, most_rounds
from .program import Program
from .stack import Stack

NUM_PLAIN = 2
"""Plain rounds before the rehearsal: libraries set themselves up in the first."""


@dataclass
class _Made:
    """A recorded round, and the tensors that it reads and writes."""

    ids: Tensor
    factors: Tensor
    losses: Tensor
    round: Tensor
    recording: Recording


class Rounds:
    """Takes rounds of a stack, in the fastest way that this device has."""

    def __init__(self, program: Program, data: Resident, capture: str, notice: Callable[[str], None]) -> None:
        self._program, self._data, self._notice = program, data, notice
        self._records = program.device.type == "cuda" and capture != "off"
        self._made: dict[Hashable, _Made] = {}
        self._seen: dict[Hashable, int] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._records else None
        self._is_recording = False
        self.chunk: int | None = None
        """Members that are computed at a time; None for all of them."""

    def forget(self) -> None:
        """Lets recordings go, because tensors lie elsewhere now or a number that is built in has changed."""
        self._made.clear()
        self._seen.clear()

    def take(self, stack: Stack, block: Block, factors: Tensor) -> Tensor:
        """Takes all rounds of a block; returns their losses by round and member."""
        key = (block.ids.shape[1:], block.shared)
        losses = torch.empty(block.ids.shape[:2], dtype=torch.float64, device=block.ids.device)
        start = 0
        while start < block.num_rounds and not self._is_recorded(key):
            losses[start] = self._round(stack, block, start, factors, key)
            start += 1
        if start < block.num_rounds:
            made = self._made.get(key) or self._record(stack, block, key)
            if made is not None:
                rest = block.num_rounds - start
                made.ids[:rest].copy_(block.ids[start:])
                made.factors[:rest].copy_(factors[start:])
                made.round.zero_()
                for _ in range(rest):
                    made.recording.replay()
                losses[start:] = made.losses[:rest]
                start = block.num_rounds
        for number in range(start, block.num_rounds):
            losses[number] = self._round(stack, block, number, factors, key)
        return losses

    def take_plainly(self, stack: Stack, block: Block, factors: Tensor) -> Tensor:
        """The same, always as it is written."""
        rounds = range(block.num_rounds)
        return torch.stack([self._whole(stack, block.ids[n], factors[n], block.shared) for n in rounds]).double()

    # -- one round ------------------------------------------------------------------------------------------------

    def _is_recorded(self, key: Hashable) -> bool:
        """Whether the next round may come from a recording."""
        return self._records and self._seen.get(key, 0) > NUM_PLAIN

    def _round(self, stack: Stack, block: Block, number: int, factors: Tensor, key: Hashable) -> Tensor:
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        ids, factor = block.ids[number], factors[number]
        if not self._records or seen != NUM_PLAIN + 1:
            return self._whole(stack, ids, factor, block.shared)
        before = {name: tensor.clone() for name, tensor in stack.tensors.items()}
        try:
            with rehearsing():
                return self._whole(stack, ids, factor, block.shared)
        except CannotRecord as error:
            self._give_up(error)
            for name, tensor in stack.tensors.items():
                tensor.copy_(before[name])
            return self._whole(stack, ids, factor, block.shared)

    def _whole(self, stack: Stack, ids: Tensor, factor: Tensor, shared: bool) -> Tensor:
        """A step of all members, some at a time where they do not fit into memory together."""
        losses, start = [], 0
        while start < len(stack):
            stop = min(len(stack), start + (self.chunk or len(stack)))
            part = stack if stop - start == len(stack) else stack.part(start, stop)
            try:
                losses.append(self._program.step(part, self._data, ids[start:stop], factor[start:stop], shared=shared))
            except torch.OutOfMemoryError as error:
                if self._is_recording:
                    raise
                self._halve(stop - start, error)
                continue
            start = stop
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def _halve(self, size: int, error: torch.OutOfMemoryError) -> None:
        if size == 1:
            raise OutOfMemory(f"not even one member fits into memory: {error}") from error
        self.chunk = (size + 1) // 2
        self.forget()
        error.__traceback__ = None  # what the step held goes with its frames
        gc.collect()
        if self._program.device.type == "cuda":
            torch.cuda.empty_cache()
        self._notice(f"{size} members do not fit into memory together: {self.chunk} are computed at a time")

    # -- recordings -----------------------------------------------------------------------------------------------

    def _record(self, stack: Stack, block: Block, key: Hashable) -> _Made | None:
        ids = torch.zeros_like(block.ids[:1]).repeat(most_rounds(block.ids[0].numel()), 1, 1)
        factors = torch.ones(ids.shape[:2], dtype=torch.float64, device=ids.device)
        losses = torch.zeros_like(factors)
        number = torch.zeros(1, dtype=torch.int64, device=ids.device)

        def run() -> None:
            mine = ids.index_select(0, number)[0]
            loss = self._whole(stack, mine, factors.index_select(0, number)[0], block.shared)
            losses.index_copy_(0, number, loss.double().unsqueeze(0))
            number.add_(1)

        self._is_recording = True
        try:
            recording = Recording([Phase(run)], self._pool)
        except CannotRecord as error:
            self._give_up(error)
            return None
        finally:
            self._is_recording = False
        self._made[key] = _Made(ids, factors, losses, number, recording)
        return self._made[key]

    def _give_up(self, error: CannotRecord) -> None:
        self._records = False
        self.forget()
        self._notice(f"steps are not recorded: {error}")
