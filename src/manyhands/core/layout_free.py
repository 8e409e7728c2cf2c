"""Layout-free randomness: numbers as a function of (seed, step, call, sample, element), the same on any split.

A counter-based hash takes the place of the generators while a network and its loss are computed. What a sample draws
depends on which sample it is and not on where it is computed, so the answer is the same on any number of replicas,
under accumulation, when a run is resumed on other devices, and when a block's forward is computed again in backward.

**Which dim holds the samples** is learned before work starts, by computing with two numbers of rows (`learn`). A draw
that was not seen then is judged by its size, given the rows that the network sees: the first dim if it has as many
entries; in three or more dims the second (time first, then batch); the first dim if it is a multiple (rows and heads,
or rows and positions, in one dim); else any dim of exactly that size. A split changes that number, so this may err, and
`guess` reports it. If no dim holds samples, and for parameters, the numbers are the same on every replica and in every
micro-batch. The draws of a replica with a borrowed row do not matter, because that row has weight 0. An element is
identified by its coordinates beside the sample, so padding a batch to another length does not change other positions.
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
"""Number of scopes checked for draws that bypass this mode: forward and backward of the first steps."""
NUM_LOOKS = 4
"""Number of traces that learn the sample dims: branches may be taken at random."""
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a uniform number: as many as stay below 1 in its dtype."""


_paused: list[bool] = []


@contextmanager
def as_written() -> Iterator[None]:
    """Disable the mode while a network is traced, so that its random operations appear unchanged."""
    _paused.append(True)
    try:
        yield
    finally:
        _paused.pop()


class GeneratorWatch:
    """Checks in the first few scopes whether an operation drew from torch's own generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_scopes = 0
        """Number of scopes checked so far."""
        self.strayed = False
        """Whether an operation drew from torch's own generators."""

    def restart(self) -> None:
        """Check the next scopes as the first ones were checked; those belonged to a trial run in evaluation mode."""
        self.num_scopes = 0

    def offset(self) -> int:
        """Return the offset of the device's generator."""
        if self._device.type != "cuda" or self.num_scopes >= NUM_WATCHED or torch.cuda.is_current_stream_capturing():
            return 0
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        return int(torch.cuda.default_generators[index].get_offset())

    def check(self, call: int, offset: int) -> None:
        """Compare the generators with the call number and the device's offset that they should have at the end."""
        if self.num_scopes < NUM_WATCHED:
            untouched = torch.Generator().manual_seed(call).get_state()
            self.strayed |= self.offset() != offset
            self.strayed |= not torch.equal(torch.default_generator.get_state(), untouched)
            self.num_scopes += 1


class LayoutFree(TorchFunctionMode):
    """Torch function mode that replaces torch's generators for the draws of one replica.

    `load` sets the samples of a step, `select` those of the current micro-batch; inside `with drawing():` torch's
    random operations are computed by hash, and Python's and numpy's generators are seeded for the step.

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
        """Set the samples of a step and select all of them; the only part outside of a captured step.

        The keys keep their device memory while their number stays the same.
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
        """Select the current samples and restart the call count, so that a micro-batch draws what the batch would."""
        self._rows = max(1, size)
        # A borrowed row has no sample; it gets the key of draws that belong to no sample.
        self._part = slice(start, start + size) if size else slice(-1, None)
        self._call = self._num_passes << 32
        self._is_new = True
        if self._is_drawing:
            self._settle()

    @contextmanager
    def given(self, keys: Tensor, num_passes: int) -> Iterator[None]:
        """Draw inside with keys made elsewhere, such as by `stacked_keys` for each network of a vectorized ensemble.

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
        """Seed the CPU generators for the current call."""
        torch.default_generator.manual_seed(self._call)
        if self._is_new:
            self._shared = mix(self._seed, self._call)
            random.seed(self._shared)
            np.random.seed(self._shared & 0xFFFFFFFF)
            self._is_new = False

    def drew_on_host(self) -> str:
        """Return which of Python's and numpy's generators was used since it was seeded; "" if none was."""
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
        """Find the sample dimension of every draw; `compute` performs a step with the given number of rows.

        `compute` may contain collectives, so all ranks must call it equally often although a rank may see no draw, as
        a pipeline stage without dropout: `any_rank` returns whether its argument is true on any of them.
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
        """Return the shapes drawn with this number of rows, by call number."""
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
        """Compute every random operation inside by hash; afterwards the CPU generator has its previous state.

        Inside, the seed of that generator is the number of the next call. Code that saves and restores it, as
        activation checkpointing does before it recomputes a forward pass, gets the same numbers again.
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
        """Assume inside that samples are in the first dim."""
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

        `owner` is the tensor they are drawn for: those for a parameter do not depend on the sample, nor do `shared`.
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
        """Return the dim that holds the samples of a draw, as learned or else judged by its size."""
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
        """Return a mask that is True with probability p."""
        threshold = round((1.0 - p) * 2**32) - 2**31
        return self.words(shape, device, owner) >= min(threshold, 2**31 - 1)

    def kept(self, shape: Shape, dropped: Tensor, device: torch.device, owner: Tensor | None = None) -> Tensor:
        """Return the mask of `keep` for a probability given as a tensor, such as one per member of an ensemble."""
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
    """Return the dim along which a drawn tensor seems to hold the samples, judged by its size, or None.

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
