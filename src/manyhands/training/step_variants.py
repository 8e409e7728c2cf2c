"""Variants of executing the same step: tried one after another during training, timed, and the fastest kept.

All variants compute the same up to rounding; they differ in memory layout, number of threads, and whether the step is
compiled. bf16 requested on a CPU is replaced by fp32 where it is slower. Runs too short to amortize a trial try none.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from ..capture import has_convolutions, lay_out, stop_compilers
from ..core import format_duration
from .hand import Hand
from .step import Loss

AS_WRITTEN, CHANNELS_LAST, ONE_THREAD, FULL_WIDTH, COMPILED = (
    "as written",
    "channels last",
    "one thread",
    "fp32",
    "compiled",
)
WINDOWS = {"cuda": (14, 44), "cpu": (2, 10)}
"""By device type: the steps between which a variant is timed, counted from its first."""
BETTER = {"cuda": 0.98, "cpu": 0.95}
"""By device type: the share of the best time so far below which a new variant is kept."""
WORTH_SECONDS = {"cuda": 5.0, "cpu": 30.0}
"""By device type: the remaining seconds that a run must have for a trial of another variant."""
MAX_WINDOWS = 3
COMPILE_GAIN, COMPILE_MARGIN = 0.25, 1.5
"""The share of a step that compiling usually saves, and the factor by which the gain must exceed its cost."""


@dataclass(frozen=True)
class _Step:
    """A step of the window in which a variant is timed."""

    seconds: float
    """The host's time for the step."""
    is_usual: bool
    """Whether its batch has the usual shape, and other variants may execute it."""
    replayed: bool


class StepVariants:
    """Decides how a task's step is executed; `loss` is the function to call for it."""

    def __init__(self, hand: Hand, loss: Loss, total: int | None) -> None:
        self._hand, self._task_loss, self._total = hand, loss, total
        self._kind = hand.device.type if hand.device.type in WINDOWS else "cpu"
        self._num_threads = torch.get_num_threads()
        self.loss = loss
        self.seconds: dict[str, float] = {}
        """Seconds per step, by variant."""
        self._variant = self._best = AS_WRITTEN
        self._count = self._num_windows = 0
        self._marks: list[torch.cuda.Event] = []
        """On a GPU: the ends of the steps, from the one before the window on."""
        self._steps: list[_Step] = []
        self._compiled = False
        self._usual: Hashable = None
        """The shape of the first batch. Only this is compiled: a smaller last batch would be compiled separately."""
        # Timing-based choices may change rounding from run to run; a run that has lost ranks skips trials. Split
        # sequences cannot be compiled.
        is_first = hand.world.rank_info.generation == 0
        self._is_settled = (
            hand.spec.capture != "auto" or hand.spec.deterministic or not is_first or hand.spec.context > 1
        )
        if hand.spec.capture == "compile":
            self._enter(COMPILED)

    def loss_for(self, shape: Hashable) -> Loss:
        """Return the loss function to call for a batch of this shape."""
        if self._usual is None:
            self._usual = shape
        return self.loss if shape == self._usual else self._task_loss

    def compiles(self, shape: Hashable) -> bool:
        """Return whether the loss for this shape is compiled."""
        return self.loss_for(shape) is not self._task_loss

    @property
    def is_plain(self) -> bool:
        """Whether all further steps compute the task's loss as it is written, and no other variant is tried."""
        return self._is_settled and self.loss is self._task_loss

    def tick(self, shape: Hashable, replayed: bool, seconds: float, *, counts: bool = True) -> bool:
        """Account for a step, replayed or not; return True if the following steps use another variant.

        A step that does not count must stay as it is, for instance because Python code in it changes its values.
        """
        if self._is_settled:
            return False
        self._count += 1
        first, last = WINDOWS[self._kind]
        if first < self._count <= last:
            self._steps.append(_Step(seconds, is_usual=counts and shape == self._usual, replayed=replayed))
        if self._kind == "cuda" and first <= self._count <= last:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        return self._count > last and self._decide()

    def settle(self) -> None:
        """Try no further variants."""
        self._is_settled = True

    def close(self) -> None:
        """Restore the number of threads and stop compiler processes."""
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        if self._compiled:
            stop_compilers()

    # -- measuring ------------------------------------------------------------------------------------------------

    def _measured(self) -> float:
        """Return the seconds per step of the current variant on the slowest replica.

        Steps of another shape, and steps that are replayed where most are not, do not count: ends of epochs may fall
        into the window. Infinite if less than half of the steps count.
        """
        seconds = [step.seconds for step in self._steps]
        if self._kind == "cuda":
            self._marks[-1].synchronize()
            seconds = [start.elapsed_time(end) / 1000 for start, end in pairwise(self._marks)]
        usual = [(s, step.replayed) for s, step in zip(seconds, self._steps, strict=True) if step.is_usual]
        most = 2 * sum(replayed for _, replayed in usual) > len(usual)
        counted = [s for s, replayed in usual if replayed == most]
        is_steady = 2 * len(counted) >= len(self._steps)
        return float(max(self._hand.world.gather_objects(median(counted) if is_steady else math.inf)))

    def _start_window(self) -> None:
        self._count = 0
        self._marks, self._steps = [], []

    def _decide(self) -> bool:
        """Keep or leave the variant that was timed, and enter the next one that may pay off."""
        taken, before = self._measured(), self._variant
        if math.isinf(taken) and self._num_windows < MAX_WINDOWS:
            # Batches of other shapes came within the window: measure once more.
            self._num_windows += 1
            self._start_window()
            return False
        self._num_windows = 0
        self.seconds[before] = taken
        if math.isinf(taken) and before == AS_WRITTEN:
            self.settle()
            return False
        if taken <= BETTER[self._kind] * self.seconds[self._best]:
            self._best = before
        elif before != self._best:
            self._leave(before)
        following = next((variant for variant in self._candidates() if variant not in self.seconds), None)
        if following is None:
            self._end()
        else:
            self._enter(following)
        self._start_window()
        return self._variant != before

    def _candidates(self) -> list[str]:
        """Return the variants that may be faster here, cheapest to try first."""
        hand, taken = self._hand, self.seconds[self._best]
        left = math.inf if self._total is None else self._total - hand.num_steps
        found = []
        if left * taken > WORTH_SECONDS[self._kind]:
            if has_convolutions(hand.model):
                found.append(CHANNELS_LAST)
            if self._kind == "cpu" and hand.world.size == 1 and self._num_threads > 1:
                found.append(ONE_THREAD)
            if self._kind == "cpu" and hand.spec.precision == "bf16":
                found.append(FULL_WIDTH)
        if self._total is not None and left * taken * COMPILE_GAIN > COMPILE_MARGIN * self._compile_seconds():
            found.append(COMPILED)
        return found

    def _compile_seconds(self) -> float:
        num_layers = sum(not list(module.children()) for module in self._hand.model.modules())
        return 8.0 + 0.2 * num_layers

    def _end(self) -> None:
        """Report the chosen variant, where several were timed."""
        self.settle()
        self._variant = self._best
        if len(self.seconds) > 1:
            timings = ", ".join(
                f"{variant} {format_duration(s)}" for variant, s in self.seconds.items() if math.isfinite(s)
            )
            self._hand.notice(f"steps are executed {self._best} from now on ({timings})")

    # -- entering and leaving a variant ---------------------------------------------------------------------------

    def _enter(self, variant: str) -> None:
        self._variant = variant
        if variant == COMPILED:
            self._compile()
        else:
            self._set(variant, True)

    def _leave(self, variant: str) -> None:
        if variant == COMPILED:
            self.loss = self._task_loss
        else:
            self._set(variant, False)
        self._variant = self._best

    def _set(self, variant: str, is_on: bool) -> None:
        replica = self._hand.replica
        if variant == CHANNELS_LAST:
            lay_out(replica.model, replica.optimizers.values(), channels_last=is_on)
            replica.rebuild_layout()
        elif variant == ONE_THREAD:
            torch.set_num_threads(1 if is_on else self._num_threads)
        elif variant == FULL_WIDTH:
            replica.is_narrow = not is_on

    def _compile(self) -> None:
        self._compiled = True
        plain = self._task_loss
        _give_names(plain, self._hand.model)
        self.loss = torch.compile(lambda model, batch: plain(model, batch), dynamic=False)

    def gave_up_compiling(self, error: Exception) -> bool:
        """Return whether an error is a compiler failure in forward or backward; if so, fall back to the plain step."""
        home = type(error).__module__
        if not self._compiled or not home.startswith(("torch._dynamo", "torch._inductor", "torch.fx")):
            return False
        self._hand.notice(f"the step could not be compiled: {_first_line(error)}")
        self.loss, self._variant = self._task_loss, self._best
        self.settle()
        return True


def _give_names(loss: Loss, model: torch.nn.Module) -> None:
    """Let the compiler resolve the globals of functions that were defined in the user's main module.

    The compiler looks them up in the module a function names. Functions of the user's `__main__` arrive in a rank as
    copies with their own globals, while the rank's own main module lacks those names.
    """
    functions = [loss, *(type(module).forward for module in model.modules())]
    main_globals = vars(sys.modules["__main__"])
    for function in functions:
        names = getattr(function, "__globals__", main_globals)
        if names is not main_globals and names.get("__name__") == "__main__":
            main_globals.update({name: value for name, value in names.items() if name not in main_globals})


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
