"""Rounds (steps of all stacked networks), run eagerly, compiled or as CUDA graphs, in chunks if memory is short."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..capture import CapturedGraphs, CaptureError, Phase, has_convolutions, rehearsing
from ..core import OutOfMemory, StrategySpec
from ..data import Resident
from .compiling import CannotCompile, Compiled
from .convolutions import ALL, GROUPED, THIN
from .program import Program
from .shared_feed import Block, most_rounds
from .stack import Stack

NUM_PLAIN = 2
"""Number of eager rounds before the warm-up for capture, because libraries initialize themselves in the first one."""
WORTH_SECONDS = 240.0
"""Minimum seconds of remaining training for which compilation is tried; it takes about a minute."""
BETTER = 0.97
"""Keep compiled rounds only if they take at most this fraction of the time of rounds that are not compiled."""
Way = tuple[int, int | None]
"""A way to compute rounds: which convolutions are unfolded, and how many members are computed at a time."""


@dataclass
class _CapturedRound:
    """A round (a step of all members) as a CUDA graph, with the tensors that it reads and writes."""

    ids: Tensor
    factors: Tensor
    losses: Tensor
    round: Tensor
    captured: CapturedGraphs


class Rounds:
    """Run rounds (steps of all members of a stack) in the fastest way on this device.

    Args:
        program: The step of stacked networks.
        data: The training data.
        spec: The strategy, whose `capture` and `deterministic` are used.
        notice: Called with messages for the user.
    """

    def __init__(self, program: Program, data: Resident, spec: StrategySpec, notice: Callable[[str], None]) -> None:
        capture, deterministic = spec.capture, spec.deterministic
        self._program, self._data, self._notice = program, data, notice
        self._captures = program.device.type == "cuda" and capture != "off"
        self._made: dict[Hashable, _CapturedRound] = {}
        self._seen: dict[Hashable, int] = {}
        self._pool = self._new_pool()
        self._is_capturing = self._is_plain = False
        self._compiles = capture == "compile"
        self._may_compile = self._captures and capture == "auto" and not deterministic
        self._plain_seconds = 0.0
        self._has_convolutions, self._is_settled = has_convolutions(program.model), deterministic
        self._compiled = Compiled(program)
        self._largest = 0
        self.losses = torch.empty(0, 0, dtype=torch.float64)
        """Losses of the last rounds that were run, by round and member."""
        self.chunk: int | None = None
        """Number of members that are computed at a time; None for all members."""

    def forget(self) -> None:
        """Release CUDA graphs and their memory, after the stack's tensors were replaced."""
        self._made.clear()
        self._seen.clear()
        self._pool = self._new_pool()

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self._program.device.type == "cuda" else None

    def close(self) -> None:
        """Release CUDA graphs, compiled steps and the compiler's processes."""
        self.forget()
        self._compiled.close()

    def forget_all(self) -> None:
        """Release CUDA graphs and compiled steps, after settings that are constants in them have changed."""
        self.forget()
        self._compiled.forget()

    def take(self, stack: Stack, block: Block, factors: Tensor, left: int = 0) -> Tensor:
        """Run all rounds of a block; return the losses by round and member.

        If a round fails, the attribute `losses` has those of the rounds before it.

        Args:
            stack: The tensors of the members, changed in place.
            block: The sample ids of the rounds.
            factors: Factors of the learning rates, by round and member.
            left: Number of rounds until the end of training, to decide whether compilation is worthwhile.
        """
        self.losses = torch.empty(0, len(stack), dtype=torch.float64)
        if self._has_convolutions and not self._is_settled:
            self._choose(stack, block, factors)
        key = (block.ids.shape[1:], block.shared)
        losses = torch.empty(block.ids.shape[:2], dtype=torch.float64, device=block.ids.device)
        start = 0
        while start < block.num_rounds and not self._is_captured(key):
            losses[start] = self._round(stack, block, start, factors, key)
            start += 1
            self.losses = losses[:start]
        if start < block.num_rounds:
            made = self._made.get(key) or self._capture_graph(stack, block, key)
            if made is not None:
                rest = block.num_rounds - start
                made.ids[:rest].copy_(block.ids[start:])
                made.factors[:rest].copy_(factors[start:])
                made.round.zero_()
                self._replay(made, rest, left)
                losses[start:] = made.losses[:rest]
                self.losses, start = losses, block.num_rounds
        for number in range(start, block.num_rounds):
            losses[number] = self._round(stack, block, number, factors, key)
            self.losses = losses[: number + 1]
        return losses

    def take_plainly(self, stack: Stack, block: Block, factors: Tensor) -> Tensor:
        """Run all rounds of a block eagerly, for a stack that is used only once; return losses by round and member."""
        self._is_plain = True
        try:
            rounds = range(block.num_rounds)
            return torch.stack([self._whole(stack, block.ids[n], factors[n], block.shared) for n in rounds]).double()
        finally:
            self._is_plain = False

    # -- one round ------------------------------------------------------------------------------------------------

    def _is_captured(self, key: Hashable) -> bool:
        """Return whether the next round can be run as a CUDA graph, after eager rounds of the same shape."""
        return self._captures and self._seen.get(key, 0) > NUM_PLAIN

    def _round(self, stack: Stack, block: Block, number: int, factors: Tensor, key: Hashable) -> Tensor:
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        ids, factor = block.ids[number], factors[number]
        if not self._captures or seen != NUM_PLAIN + 1:
            return self._whole(stack, ids, factor, block.shared)
        try:
            with rehearsing():
                return self._whole(stack, ids, factor, block.shared)
        except CaptureError as error:
            # Forward or backward synchronizes with the GPU. The update has not run yet, so the stack is unchanged.
            self._give_up(error)
            return self._whole(stack, ids, factor, block.shared)

    def _whole(self, stack: Stack, ids: Tensor, factor: Tensor, shared: bool) -> Tensor:
        """Run one step of all members, in chunks if they do not fit into memory together; return their losses."""
        losses, start = [], 0
        while start < len(stack):
            stop = min(len(stack), start + (self.chunk or len(stack)))
            part = stack if stop - start == len(stack) else stack.part(start, stop)
            try:
                with self._program.trying_kernels():
                    losses.append(self._step(part, ids[start:stop], factor[start:stop], shared))
            except torch.OutOfMemoryError as error:
                if self._is_capturing:
                    raise
                self._halve(stop - start, error)
                continue
            start = stop
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def _step(self, stack: Stack, ids: Tensor, factor: Tensor, shared: bool) -> Tensor:
        batch, factors = self._data.fetch(ids[0] if shared else ids), self._program.factors(stack, factor)
        # A smaller last batch of an epoch is too rare to be worth a minute of compilation.
        self._largest = max(self._largest, ids.shape[1])
        if self._compiles and not self._is_plain and ids.shape[1] == self._largest:
            try:
                return self._compiled.step(stack, batch, ids, factors, shared=shared)
            except CannotCompile as error:
                self._compiles = False
                self._notice(f"steps are not compiled: {error}")
        return self._program.step(stack, batch, ids, factors, shared=shared)

    def _halve(self, size: int, error: torch.OutOfMemoryError) -> None:
        if size == 1:
            raise OutOfMemory(f"not even one member fits into memory: {error}") from error
        self.chunk = (size + 1) // 2
        self.forget()
        error.__traceback__ = None  # frees the tensors to which the step's frames refer
        gc.collect()
        if self._program.device.type == "cuda":
            torch.cuda.empty_cache()
        self._notice(f"{size} members do not fit into memory together: {self.chunk} are computed at a time")

    # -- choice of kernels ----------------------------------------------------------------------------------------

    def _choose(self, stack: Stack, block: Block, factors: Tensor) -> None:
        """Choose the fastest way to compute convolutions, by measurement.

        They can be grouped, some or all can be unfolded, and on a CPU members can be computed one by one.
        """
        self._is_settled = True
        one_by_one = [(GROUPED, 1)] if self._program.device.type == "cpu" else []
        ways: list[Way] = [(GROUPED, None), (THIN, None), (ALL, None), *one_by_one]
        seconds: dict[Way, float] = {}
        for way in ways:
            try:
                taken = self._timed(way, stack, block, factors)
            except RuntimeError:
                if way[0] == GROUPED:
                    raise
                continue  # an operation does not support the output of an unfolded convolution
            # If members did not fit into memory together, they were computed in smaller chunks.
            seconds[self._program.unfolds, self.chunk] = taken
        self._set(min(seconds, key=lambda way: seconds[way]))

    def _set(self, way: Way) -> None:
        self._program.unfolds, self.chunk = way

    def _timed(self, way: Way, stack: Stack, block: Block, factors: Tensor) -> float:
        """Return the seconds of the fastest of some eager rounds in this way, on a copy of the stack."""
        self._set(way)
        copy = Stack({key: tensor.clone() for key, tensor in stack.tensors.items()})
        first = Block(block.ids[:1], block.shared)
        times = []
        for _ in range(NUM_PLAIN + 1):
            began = time.perf_counter()
            self.take_plainly(copy, first, factors[:1])
            if self._program.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def _replay(self, made: _CapturedRound, count: int, left: int) -> None:
        """Replay a captured round `count` times; if many rounds are left, try whether compiled rounds are faster."""
        if not self._may_compile:
            for _ in range(count):
                made.captured.replay()
            return
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            made.captured.replay()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / count
        if not self._compiles and seconds * left > WORTH_SECONDS:
            self._compiles, self._plain_seconds = True, seconds
            self.forget()
        elif self._compiles:
            self._may_compile = False
            if seconds > BETTER * self._plain_seconds:
                self._compiles = False
                self.forget()

    # -- CUDA graphs ----------------------------------------------------------------------------------------------

    def _capture_graph(self, stack: Stack, block: Block, key: Hashable) -> _CapturedRound | None:
        ids = torch.zeros_like(block.ids[:1]).repeat(most_rounds(block.ids[0].numel()), 1, 1)
        factors = torch.ones(ids.shape[:2], dtype=torch.float64, device=ids.device)
        losses = torch.zeros_like(factors)
        number = torch.zeros(1, dtype=torch.int64, device=ids.device)

        def run() -> None:
            mine = ids.index_select(0, number)[0]
            loss = self._whole(stack, mine, factors.index_select(0, number)[0], block.shared)
            losses.index_copy_(0, number, loss.double().unsqueeze(0))
            number.add_(1)

        self._is_capturing = True
        try:
            captured = CapturedGraphs([Phase(run)], self._pool)
        except CaptureError as error:
            self._give_up(error)
            return None
        finally:
            self._is_capturing = False
        self._made[key] = _CapturedRound(ids, factors, losses, number, captured)
        return self._made[key]

    def _give_up(self, error: CaptureError) -> None:
        self._captures = False
        self.forget()
        self._notice(f"steps are not captured: {error}")
