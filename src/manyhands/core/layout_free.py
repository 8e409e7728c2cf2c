"""Layout-free randomness: random numbers that do not depend on how a batch is split over devices.

Every number is a function of (seed, step, call, sample, element). A counter-based hash takes the place of torch's
generators while a network and its loss are computed. The numbers drawn for a sample depend on its id and not on where
it is computed, so the result is the same on any number of replicas, with gradient accumulation, when a run is resumed
on other devices, and when activation checkpointing computes a forward again in backward.

**Which dim of a draw holds the samples** is learned before training, by computing with two numbers of rows (`learn`).
For a draw that was not observed then, the dim is guessed from its size and the number of rows that the network gets:
the first dim if it has that size; in three or more dims the second (time first, then batch); the first dim if its size
is a multiple (rows and heads, or rows and positions, in one dim); else any dim of exactly that size. The number of rows
depends on the split, so the guess may be wrong, and `guess` reports it. If no dim holds samples, and for parameters,
the numbers are the same on every replica and in every micro-batch. The draws for a padding row (a replica without
samples computes one, with weight 0) do not matter. An element is identified by its coordinates in its sample, so
padding a batch to another length does not change the numbers of the other positions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .randomness import mix
from .sample_dims import SampleDims, Sizes
from .sample_hash import ElementCodes, sample_keys, scramble

if TYPE_CHECKING:
    from numpy.typing import NDArray

Shape = Sequence[int]

NUM_WATCHED = 6
"""Number of `drawing` contexts that are checked for draws that bypass the hash: forward and backward of some steps."""
NUM_LOOKS = 4
"""Number of trials in which `learn` observes draws; more than one, because branches may be taken at random."""
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Random bits of a uniform number in each dtype: as many as keep it below 1."""


_paused: list[bool] = []


@contextmanager
def as_written() -> Iterator[None]:
    """Disable `LayoutFree` within the context, so that a trace contains a network's random operations unchanged."""
    _paused.append(True)
    try:
        yield
    finally:
        _paused.pop()


class GeneratorWatch:
    """Check in the first few `drawing` contexts whether an operation drew from torch's own generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_scopes = 0
        """Number of `drawing` contexts checked so far."""
        self.strayed = False
        """Whether an operation drew from torch's own generators."""

    def restart(self) -> None:
        """Check the next `drawing` contexts again, because those so far belonged to a trial in evaluation mode."""
        self.num_scopes = 0

    def offset(self) -> int:
        """Return the offset of the GPU's generator, which every draw increases; 0 without a GPU or without a check."""
        if self._device.type != "cuda" or self.num_scopes >= NUM_WATCHED or torch.cuda.is_current_stream_capturing():
            return 0
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        return int(torch.cuda.default_generators[index].get_offset())

    def check(self, call: int, offset: int) -> None:
        """Set `strayed` at the end of a `drawing` context if torch's generators were used in it.

        Args:
            call: The number of the next call, with which `LayoutFree` has seeded the CPU generator.
            offset: The result of `offset` at the start of the context.
        """
        if self.num_scopes < NUM_WATCHED:
            untouched = torch.Generator().manual_seed(call).get_state()
            self.strayed |= self.offset() != offset
            self.strayed |= not torch.equal(torch.default_generator.get_state(), untouched)
            self.num_scopes += 1


class LayoutFree(TorchFunctionMode):
    """Torch function mode that computes the random numbers of one replica by hash instead of torch's generators.

    `load` sets the samples of a step, `select` those of the current micro-batch. Within `drawing()`, torch's random
    operations are computed by hash, and Python's and numpy's generators are seeded for the step.

    >>> draws = LayoutFree(torch.device("cpu"))
    >>> draws.load(0, 7, np.arange(4))
    >>> with draws.drawing():
    ...     whole = torch.rand(4, 3)
    >>> draws.load(0, 7, np.arange(2, 4))
    >>> with draws.drawing():
    ...     half = torch.rand(2, 3)
    >>> torch.equal(whole[2:], half)
    True
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        from .random_operations import replacements

        self._device = device
        self._replacements = replacements()
        self._buffers: dict[int, Tensor] = {}
        self._is_drawing = False
        self._only_first = False
        self.num_draws = 0
        """Number of random operations computed by hash."""
        self.watch = GeneratorWatch(device)
        self.guess = ""
        """Description of the first draw whose sample dim was guessed from its size; empty if there is none."""
        self._dims = SampleDims()
        self._trace: dict[int, Sizes] | None = None
        self._shared = 0
        self._codes = ElementCodes()
        self.load(0, 0, np.empty(0, dtype=np.int64))

    @property
    def strayed(self) -> bool:
        """Whether an operation was seen that still draws from torch's own generators."""
        return self.watch.strayed

    # -- which samples --------------------------------------------------------------------------------------------

    def load(self, seed: int, step: int, ids: NDArray[np.int64]) -> None:
        """Set the samples of a step by their ids, and select all of them.

        A captured step (CUDA graphs) contains everything but this call. The keys of as many samples as before are
        written to the same device memory.
        """
        self._seed = mix(seed, step)
        self._host = torch.from_numpy(sample_keys(self._seed, ids))
        self._keys = self._host if self._device.type == "cpu" else self._on_device()
        self._num_passes = 0
        self.select(0, len(ids))

    def begin(self) -> None:
        """Start another pass over the step's micro-batches, which draws different numbers."""
        self._num_passes += 1

    def select(self, start: int, size: int) -> None:
        """Select the samples of the current micro-batch, and count calls from the start, as for the whole batch.

        So a sample draws the same numbers as without micro-batches. A size of 0 means a padding row.
        """
        self._rows = max(1, size)
        # A padding row has no sample; it gets the key of draws that belong to no sample.
        self._part = slice(start, start + size) if size else slice(-1, None)
        self._call = self._num_passes << 32
        self._is_new = True
        if self._is_drawing:
            self._settle()

    @contextmanager
    def given(self, keys: Tensor, num_passes: int) -> Iterator[None]:
        """Draw within the context with given keys, such as those of `stacked_keys` for a vectorized ensemble.

        The last key is for draws that belong to no sample; `num_passes` is the number of calls of `begin`.
        """
        before = self._keys
        self._keys, self._num_passes = keys, num_passes
        self.select(0, len(keys) - 1)
        try:
            with self.drawing():
                yield
        finally:
            self._keys = before

    def _settle(self) -> None:
        """Seed torch's CPU generator with the current call's number, and at a new selection Python's and numpy's."""
        torch.default_generator.manual_seed(self._call)
        if self._is_new:
            self._shared = mix(self._seed, self._call)
            random.seed(self._shared)
            np.random.seed(self._shared & 0xFFFFFFFF)
            self._is_new = False

    def drew_on_host(self) -> str:
        """Return the first of "random" and "numpy.random" that was used since it was seeded for the step, or ""."""
        if random.getstate() != random.Random(self._shared).getstate():
            return "random"
        fresh = np.random.RandomState(self._shared & 0xFFFFFFFF)
        return "" if str(np.random.get_state()) == str(fresh.get_state()) else "numpy.random"

    def _on_device(self) -> Tensor:
        count = len(self._host)
        if count not in self._buffers:
            self._buffers[count] = torch.empty(count, dtype=torch.int64, device=self._device)
        return self._buffers[count].copy_(self._host, non_blocking=True)

    def learn(
        self, compute: Callable[[int], Any], few: int, more: int, any_rank: Callable[[bool], bool] = bool
    ) -> None:
        """Find the dim of every draw that holds the samples, by steps with `few` and with `more` rows.

        Args:
            compute: Performs a step with the given number of rows.
            few: The smaller number of rows.
            more: The larger number of rows.
            any_rank: Returns whether its argument is true on any rank. `compute` may contain collectives, so all ranks
                must call it equally often, although a pipeline stage without dropout, for example, draws nothing.
        """
        counts = self.num_draws, self.watch.num_scopes
        dims = SampleDims()
        try:
            for look in range(NUM_LOOKS):
                first, second = (self._traced(compute, rows, look) for rows in (few, more))
                dims.add(few, first, more, second)
                if not any_rank(bool(first)):
                    break
        finally:
            self._trace = None
            self.num_draws, self.watch.num_scopes = counts
        self._dims = dims

    def _traced(self, compute: Callable[[int], Any], rows: int, look: int) -> dict[int, Sizes]:
        """Return the shapes of the draws in a step with `rows` rows, by call number; `look` is the trial's number."""
        self.load(0, look, np.arange(rows))
        self.begin()
        self.select(0, rows)
        trace: dict[int, Sizes] = {}
        self._trace = trace
        with self.drawing():
            compute(rows)
        return trace

    # -- scopes ---------------------------------------------------------------------------------------------------

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Compute every random operation within the context by hash; restore the CPU generator's state afterwards.

        Within the context, torch's CPU generator is seeded with the number of the next call. Code that saves and
        restores the generator's state, as activation checkpointing does before it recomputes a forward, therefore gets
        the same numbers again.
        """
        if self._is_drawing:
            yield
            return
        generator = torch.default_generator
        state, offset = generator.get_state(), self.watch.offset()
        self._settle()
        self._is_drawing = True
        try:
            with self:
                yield
        finally:
            self._is_drawing = False
            self._call = generator.initial_seed()
            self.watch.check(self._call, offset)
            generator.set_state(state)

    @contextmanager
    def samples_first(self) -> Iterator[None]:
        """Assume within the context that the first dim holds the samples of draws that `learn` did not observe."""
        before, self._only_first = self._only_first, True
        try:
            yield
        finally:
            self._only_first = before

    def cover(self, model: nn.Module) -> list[RemovableHandle]:
        """Register hooks that make a network draw by hash whenever it is called; returns their handles."""
        open_scopes: list[AbstractContextManager[None]] = []

        def enter(*_: Any) -> None:
            open_scopes.append(self.drawing())
            open_scopes[-1].__enter__()

        def leave(*_: Any) -> None:
            open_scopes.pop().__exit__(None, None, None)

        return [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = None if _paused else self._replacements.get(func)
        # A generator passed by the user is used as it is.
        if replacement is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return replacement(self, *args, **kwargs)

    # -- numbers --------------------------------------------------------------------------------------------------

    def words(self, shape: Shape, device: torch.device, owner: Tensor | None = None, *, shared: bool = False) -> Tensor:
        """Return 32 random bits for every element, as int32; the upper bits have better quality.

        Args:
            shape: Shape of the result.
            device: Device of the result.
            owner: The tensor for which the numbers are drawn. For a parameter they do not depend on the sample.
            shared: Whether the numbers must be the same on all replicas, independent of the sample.
        """
        generator = torch.default_generator
        call = generator.initial_seed()
        generator.manual_seed(call + 1)
        self.num_draws += 1
        dim = None if shared or isinstance(owner, nn.Parameter) else self._dim_of(call, tuple(shape))
        part = slice(-1, None) if dim is None else self._part
        keys = (self._keys if device == self._keys.device else self._host.to(device))[part]
        rows = len(keys)
        inner = list(shape)
        if dim is not None:
            inner[dim] //= rows
        drawn = scramble(self._codes.of(tuple(inner), device), keys * (mix(call) | 1))
        if not dim:
            return drawn.view(list(shape))
        return drawn.view(rows, *inner).movedim(0, dim).reshape(list(shape))

    def _dim_of(self, call: int, shape: Sizes) -> int | None:
        """Return the dim of a draw that holds the samples, learned or guessed from the sizes; None if none does."""
        if self._trace is not None:
            self._trace[call] = shape
        seen = self._dims.find(call, shape, self._rows)
        if seen is not None or not shape:
            return None if seen is None else seen.dim
        dim = batch_dim(shape[:1] if self._only_first else shape, self._rows)
        if self._trace is None and not self.guess:
            what = "the whole batch" if dim is None else f"samples in dim {dim}"
            self.guess = f"random numbers of shape {shape} are taken for those of {what}"
        return dim

    def keep(self, shape: Shape, p: float, device: torch.device, owner: Tensor | None = None) -> Tensor:
        """Return a mask that is True with probability `p`; `owner` as in `words`."""
        threshold = round((1.0 - p) * 2**32) - 2**31
        return self.words(shape, device, owner) >= min(threshold, 2**31 - 1)

    def kept(self, shape: Shape, dropped: Tensor, device: torch.device, owner: Tensor | None = None) -> Tensor:
        """Return a mask that is False with probability `dropped`, for example one for each network of an ensemble."""
        threshold = ((1.0 - (1.0 - dropped)) * 2**32).round() - 2**31
        return self.words(shape, device, owner) >= threshold.clamp(max=2**31 - 1).to(torch.int32)

    def uniform(
        self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, owner: Tensor | None = None
    ) -> Tensor:
        """Return uniform numbers in [0, 1)."""
        bits = _BITS[dtype]
        if dtype is not torch.float64:
            top = self.words(shape, device, owner).bitwise_right_shift_(32 - bits)
            return top.to(torch.float32).mul_(2.0**-bits).add_(0.5).to(dtype)
        top, low = (self.words(shape, device, owner).to(torch.int64) for _ in range(2))
        return ((top << 21) + (low >> 11 & (1 << 21) - 1)).to(dtype).mul_(2.0**-53).add_(0.5)

    def normal(
        self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, owner: Tensor | None = None
    ) -> Tensor:
        """Return standard normal numbers (Box-Muller)."""
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        radius = self.exponential(shape, device, wide, owner).mul_(2.0).sqrt_()
        angle = self.uniform(shape, device, wide, owner).mul_(2 * torch.pi)
        return radius.mul_(angle.cos_()).to(dtype)

    def exponential(
        self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, owner: Tensor | None = None
    ) -> Tensor:
        """Return exponential numbers of rate 1, never 0, so that their logarithm is finite."""
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        drawn = self.uniform(shape, device, wide, owner).neg_().log1p_().neg_()
        return drawn.clamp(min=max(2.0 ** -(_BITS[wide] + 1), torch.finfo(dtype).tiny)).to(dtype)

    def integers(self, shape: Shape, low: int, high: int, device: torch.device, owner: Tensor | None = None) -> Tensor:
        """Return integers in [low, high), as int64."""
        count = high - low
        words = self.words(shape, device, owner).to(torch.int64).add_(2**31)
        if count <= 2**31:
            return words.mul_(count).bitwise_right_shift_(32).add_(low)
        more = self.words(shape, device, owner).to(torch.int64).add_(2**31)
        return words.bitwise_left_shift_(31).bitwise_xor_(more).remainder_(count).add_(low)


def batch_dim(shape: Shape, rows: int) -> int | None:
    """Return the dim of a draw that seems to hold `rows` samples, judged by the sizes; None if no dim does.

    >>> batch_dim((4, 3), 4), batch_dim((9, 4, 3), 4), batch_dim((8, 3), 4), batch_dim((5, 4), 4), batch_dim((5,), 4)
    (0, 1, 0, 1, None)
    """
    if not shape:
        return None
    if shape[0] == rows:
        return 0
    if len(shape) > 2 and shape[1] == rows:
        return 1
    if shape[0] and shape[0] % rows == 0:
        return 0
    return next((dim for dim, size in enumerate(shape) if size == rows), None)
