"""Layout-free randomness: numbers as a function of (seed, step, call, sample, element), the same on any split.

A counter-based hash takes the place of the generators while a network and its loss are computed. What a sample draws
depends on which sample it is and not on where it is computed, so the answer is the same on any number of replicas,
under accumulation, when a run is resumed on other devices, and when a block's forward is computed again in backward.

**Which dim holds the samples** is learned before work starts, by computing with two numbers of rows (`learn`). What was
not seen then is taken by its size, given the rows that the network sees: the first dim if it has as many entries; in
three or more dims the second (time first, then batch); the first dim if it is a multiple (rows and heads, or rows and
places, in one dim); else any dim with exactly so many. A split changes that number, so this may err, and `guess` tells
of it. Where no dim holds samples, and for parameters, the numbers are the same on every replica and in every
micro-batch. A replica that borrowed a row draws whatever it likes, because that row weighs nothing. An element is known
by its coordinates beside the sample, so padding a batch to another length does not change what the other places draw.
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

if TYPE_CHECKING:
    from numpy.typing import NDArray

Shape = Sequence[int]

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LAST = 0x846CA68B - 2**32
KEPT_PLACES, KEPT_SHAPES = 1 << 14, 64
NUM_WATCHED = 6
"""Scopes that are looked at for draws that were not caught: forward and backward of the first steps."""
NUM_LOOKS = 4
"""Times that draws are looked at beforehand: branches may be taken at random."""
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a uniform number: as many as stay below 1 in its dtype."""


_paused: list[bool] = []


@contextmanager
def as_written() -> Iterator[None]:
    """Where a network is followed and not computed, so that its random operations must be seen as they are."""
    _paused.append(True)
    try:
        yield
    finally:
        _paused.pop()


class LayoutFree(TorchFunctionMode):
    """Takes the place of torch's generators for what one replica draws.

    `load` says which samples a step has, `select` which of them come now; inside `with drawing():` torch's random
    operations answer by hash, and Python's and numpy's generators are those of the step.

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
        """Random operations that were answered."""
        self.strayed = False
        """Whether an operation was seen that draws from torch's own generators in spite of this."""
        self.guess = ""
        """The first draw of which only the size told what it is for, in words; empty while there is none."""
        self._dims = SampleDims()
        self._trace: dict[int, Sizes] | None = None
        self._num_watched = 0
        self._shared = 0
        self._known_places: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self.load(0, 0, np.empty(0, dtype=np.int64))

    # -- which samples --------------------------------------------------------------------------------------------

    def load(self, seed: int, step: int, ids: NDArray[np.int64]) -> None:
        """The samples of a step, all of them at first; the only part that a captured step leaves outside.

        The keys stay at one place on the device as long as their number does.
        """
        self._seed = mix(seed, step)
        self._host = torch.from_numpy(_keys(self._seed, ids))
        self._keys = self._host if self._device.type == "cpu" else self._on_device()
        self._num_passes = 0
        self.select(0, len(ids))

    def begin(self) -> None:
        """Another pass over the step's micro-batches; it draws other numbers than those before."""
        self._num_passes += 1

    def select(self, start: int, size: int) -> None:
        """The samples that come now; calls are counted anew, so a micro-batch draws what the whole would."""
        self._rows = max(1, size)
        # A borrowed row has no sample; it gets the key of what belongs to none.
        self._part = slice(start, start + size) if size else slice(-1, None)
        self._call = self._num_passes << 32
        self._is_new = True
        if self._is_drawing:
            self._settle()

    @contextmanager
    def given(self, keys: Tensor, num_passes: int) -> Iterator[None]:
        """Draws inside with keys that were made elsewhere, as `stacked_keys` does: a network in a stack has its own.

        The last key is for what belongs to no sample; `num_passes` says how often `begin` would have been called.
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
        """Sets the generators of the CPU to what comes now."""
        torch.default_generator.manual_seed(self._call)
        if self._is_new:
            self._shared = mix(self._seed, self._call)
            random.seed(self._shared)
            np.random.seed(self._shared & 0xFFFFFFFF)
            self._is_new = False

    def drew_on_host(self) -> str:
        """Which of Python's and numpy's generators gave numbers since they were set; "" if none did."""
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
        """Find out which dim of every draw holds the samples; `compute` does with so many rows what a step does.

        `compute` may contain collectives, so all ranks must call it equally often although a rank may see no draw, as
        a pipeline stage without dropout: `any_rank` returns whether its argument is true on any of them.
        """
        counts = self.num_draws, self._num_watched
        dims = SampleDims()
        try:
            for look in range(NUM_LOOKS):
                first, second = (self._traced(compute, rows, look) for rows in (few, more))
                dims.add(few, first, more, second)
                if not any_rank(bool(first)):
                    break
        finally:
            self._trace = None
            self.num_draws, self._num_watched = counts
        self._dims = dims

    def _traced(self, compute: Callable[[int], Any], rows: int, look: int) -> dict[int, Sizes]:
        """The shapes that are drawn with so many rows, by the number of the call."""
        self.load(0, look, np.arange(rows))
        self.begin()
        self.select(0, rows)
        trace: dict[int, Sizes] = {}
        self._trace = trace
        with self.drawing():
            compute(rows)
        return trace

    # -- where it holds -------------------------------------------------------------------------------------------

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Answers every random operation inside; the CPU's own generator is given back as it was.

        Inside, the seed of that generator is the number of the next call. Whoever keeps and restores it, as
        checkpointing does before it computes a forward again, gets the same numbers again.
        """
        if self._is_drawing:
            yield
            return
        generator = torch.default_generator
        state, offset = generator.get_state(), self._device_offset()
        self._settle()
        self._is_drawing = True
        try:
            with self:
                yield
        finally:
            self._is_drawing = False
            self._call = generator.initial_seed()
            self._watch(offset)
            generator.set_state(state)

    def watch_anew(self) -> None:
        """Look at the next few draws as at the first ones, which were those of a trial in evaluation mode."""
        self._num_watched = 0

    def _watch(self, offset: int) -> None:
        """The first few times, looks whether something drew from torch's own generators all the same."""
        if self._num_watched < NUM_WATCHED:
            untouched = torch.Generator().manual_seed(self._call).get_state()
            self.strayed |= self._device_offset() != offset
            self.strayed |= not torch.equal(torch.default_generator.get_state(), untouched)
            self._num_watched += 1

    def _device_offset(self) -> int:
        """How far the device's generator has come."""
        if self._device.type != "cuda" or self._num_watched >= NUM_WATCHED or torch.cuda.is_current_stream_capturing():
            return 0
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        return int(torch.cuda.default_generators[index].get_offset())

    @contextmanager
    def samples_first(self) -> Iterator[None]:
        """Where samples are in the first dim for certain."""
        before, self._only_first = self._only_first, True
        try:
            yield
        finally:
            self._only_first = before

    def cover(self, model: nn.Module) -> list[RemovableHandle]:
        """Lets a network draw so whenever it is called; the handles take that off again."""
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
        # A generator of a person's own keeps its numbers.
        if replacement is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return replacement(self, *args, **kwargs)

    # -- numbers --------------------------------------------------------------------------------------------------

    def words(self, shape: Shape, device: torch.device, owner: Tensor | None = None, *, shared: bool = False) -> Tensor:
        """32 random bits for every element, as int32; the upper ones are the better ones.

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
        drawn = _scramble(self._places(tuple(inner), device), keys * (mix(call) | 1))
        if not dim:
            return drawn.view(list(shape))
        return drawn.view(rows, *inner).movedim(0, dim).reshape(list(shape))

    def _dim_of(self, call: int, shape: Sizes) -> int | None:
        """The dim that holds the samples of a draw, as it was seen; else by its size."""
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

    def _places(self, inner: tuple[int, ...], device: torch.device) -> Tensor:
        """A code for every element of a sample; those of small shapes are kept, which makes small draws cheaper."""
        found = self._known_places.get((inner, device))
        if found is None:
            found = _places(inner, device)
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if found.numel() <= KEPT_PLACES and len(self._known_places) < KEPT_SHAPES and not capturing:
                self._known_places[inner, device] = found
        return found

    def keep(self, shape: Shape, p: float, device: torch.device, owner: Tensor | None = None) -> Tensor:
        """True with probability p."""
        threshold = round((1.0 - p) * 2**32) - 2**31
        return self.words(shape, device, owner) >= min(threshold, 2**31 - 1)

    def kept(self, shape: Shape, dropped: Tensor, device: torch.device, owner: Tensor | None = None) -> Tensor:
        """What `keep` says for a probability that is a tensor, as each member of a stack has its own."""
        threshold = ((1.0 - (1.0 - dropped)) * 2**32).round() - 2**31
        return self.words(shape, device, owner) >= threshold.clamp(max=2**31 - 1).to(torch.int32)

    def uniform(
        self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, owner: Tensor | None = None
    ) -> Tensor:
        """Numbers in [0, 1)."""
        bits = _BITS[dtype]
        if dtype is not torch.float64:
            top = self.words(shape, device, owner).bitwise_right_shift_(32 - bits)
            return top.to(torch.float32).mul_(2.0**-bits).add_(0.5).to(dtype)
        top, low = (self.words(shape, device, owner).to(torch.int64) for _ in range(2))
        return ((top << 21) + (low >> 11 & (1 << 21) - 1)).to(dtype).mul_(2.0**-53).add_(0.5)

    def normal(
        self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, owner: Tensor | None = None
    ) -> Tensor:
        """Standard normal numbers, by Box and Muller."""
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        radius = self.exponential(shape, device, wide, owner).mul_(2.0).sqrt_()
        angle = self.uniform(shape, device, wide, owner).mul_(2 * torch.pi)
        return radius.mul_(angle.cos_()).to(dtype)

    def exponential(
        self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, owner: Tensor | None = None
    ) -> Tensor:
        """Exponential numbers of rate 1, never 0, so that their logarithm is finite."""
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        drawn = self.uniform(shape, device, wide, owner).neg_().log1p_().neg_()
        return drawn.clamp(min=max(2.0 ** -(_BITS[wide] + 1), torch.finfo(dtype).tiny)).to(dtype)

    def integers(self, shape: Shape, low: int, high: int, device: torch.device, owner: Tensor | None = None) -> Tensor:
        """Whole numbers from low up to and without high, as int64."""
        count = high - low
        words = self.words(shape, device, owner).to(torch.int64).add_(2**31)
        if count <= 2**31:
            return words.mul_(count).bitwise_right_shift_(32).add_(low)
        more = self.words(shape, device, owner).to(torch.int64).add_(2**31)
        return words.bitwise_left_shift_(31).bitwise_xor_(more).remainder_(count).add_(low)


def batch_dim(shape: Shape, rows: int) -> int | None:
    """The dim along which a drawn tensor seems to hold the samples, by its size; None where there is none.

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


def _keys(seed: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """A well-mixed 64-bit key for every sample, and behind them one for what belongs to no sample (splitmix64)."""
    keys = np.append(ids, -1).astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed)
    keys = (keys ^ keys >> np.uint64(30)) * np.uint64(_FIRST)
    keys = (keys ^ keys >> np.uint64(27)) * np.uint64(_SECOND)
    return (keys ^ keys >> np.uint64(31)).view(np.int64)


def stacked_keys(seeds: Tensor, steps: Tensor, ids: Tensor) -> Tensor:
    """The keys that `load(seeds[i], steps[i], ids[i])` makes, for many networks at once and on their device.

    >>> draws = LayoutFree(torch.device("cpu"))
    >>> draws.load(5, 7, np.arange(3))
    >>> keys = stacked_keys(torch.tensor([5]), torch.tensor([7]), torch.arange(3)[None])
    >>> torch.equal(keys[0], draws._keys)
    True
    """
    value = torch.full_like(seeds, _signed(_GOLDEN, 64))
    for part in (seeds, steps):
        value = (value ^ part) * _signed(_FIRST, 64)
        value = (value ^ _shifted(value, 31)) * _signed(_SECOND, 64)
        value = value ^ _shifted(value, 29)
    samples = torch.cat([ids, torch.full_like(ids[:, :1], -1)], 1)
    keys = samples * _signed(_GOLDEN, 64) + _shifted(value, 1).unsqueeze(1)
    keys = (keys ^ _shifted(keys, 30)) * _signed(_FIRST, 64)
    keys = (keys ^ _shifted(keys, 27)) * _signed(_SECOND, 64)
    return keys ^ _shifted(keys, 31)


def _shifted(values: Tensor, count: int) -> Tensor:
    """Shifted to the right, with zeros coming in as for numbers without a sign."""
    return (values >> count) & (1 << 64 - count) - 1


def _places(inner: Shape, device: torch.device) -> Tensor:
    """A code for every element of a sample, made from its coordinates, in one row."""
    codes = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for dim, size in enumerate(inner):
        if size != 1:
            coordinate = torch.arange(size, dtype=torch.int32, device=device).mul_(_signed(mix(dim) | 1))
            codes = (codes.view(-1, 1) + coordinate).view(1, -1)
    return codes


def _scramble(places: Tensor, keys: Tensor) -> Tensor:
    """The hash of every (key, place), as rows of int32: a 32-bit finaliser that two halves of the key enter."""
    keys = keys.bitwise_xor(keys >> 32)
    # Not a view of halves, for which torch 2.11 has no rule in stacked networks.
    first, second = (half.to(torch.int32).unsqueeze(-1) for half in (keys, keys >> 32))
    x = places ^ first
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += second
    x *= _LAST
    return x


def _signed(value: int, bits: int = 32) -> int:
    """The lower bits as a signed number, as torch's int32 or int64 has it."""
    half = 1 << bits - 1
    return (value + half) % (2 * half) - half
