"""Ways to execute one and the same step: tried one after another while training goes on, measured, the fastest kept.

All of them compute the same up to rounding; what differs is where numbers lie in memory, how many threads compute, and
whether the step is compiled. bf16 that was asked for on a CPU gives way to fp32 where it is slower. Nothing is tried in
a run that is too short to win back what the trial costs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from statistics import median
from typing import Any

import torch

from ..graph import has_convolutions, lay_out, stop_compilers
from .hand import Hand

Loss = Callable[[Any, Any], Any]

AS_WRITTEN, CHANNELS_LAST, ONE_THREAD, FULL_WIDTH, COMPILED = (
    "as written",
    "channels last",
    "one thread",
    "fp32",
    "compiled",
)
WINDOWS = {"cuda": (14, 44), "cpu": (2, 10)}
"""The steps between which a way is measured, counted from its first, by kind of device."""
BETTER = {"cuda": 0.98, "cpu": 0.95}
"""How much of the best time so far a new way may take at most, to be kept."""
WORTH_SECONDS = {"cuda": 5.0, "cpu": 30.0}
"""The time that a run must have before it for a trial of another way."""
MAX_WINDOWS = 3
COMPILE_GAIN, COMPILE_MARGIN = 0.25, 1.5
"""The share of a step that compiling usually saves, and how many times its cost it must be worth."""


class Ways:
    """Decides how a task's step is executed. `loss` is what to call for it."""

    def __init__(self, hand: Hand, loss: Loss, total: int | None) -> None:
        self._hand, self._task_loss, self._total = hand, loss, total
        self._kind = hand.device.type if hand.device.type in WINDOWS else "cpu"
        self._num_threads = torch.get_num_threads()
        self.loss = loss
        self.seconds: dict[str, float] = {}
        """Seconds of a step, by way."""
        self._way = self._best = AS_WRITTEN
        self._count = self._num_windows = 0
        self._is_steady = True
        """Whether all batches of the window had the usual shape and, on a GPU, ran from a recording."""
        self._marks: list[torch.cuda.Event] = []
        self._steps: list[float] = []
        """Seconds on the host of each step of the window."""
        self._compiled = False
        self._usual: Hashable = None
        """The shape of the first batch. Only that is compiled: a last, smaller one would be compiled all over."""
        # What is chosen by time may differ by a rounding from run to run; and a run that lost ranks has lost time too.
        is_first = hand.world.seat.generation == 0
        self._is_settled = hand.spec.capture != "auto" or hand.spec.deterministic or not is_first
        if hand.spec.capture == "compile":
            self._enter(COMPILED)

    def loss_for(self, shape: Hashable) -> Loss:
        """What to call for a batch of this shape."""
        if self._usual is None:
            self._usual = shape
        return self.loss if shape == self._usual else self._task_loss

    def compiles(self, shape: Hashable) -> bool:
        """Whether the loss for this shape is a compiled one."""
        return self.loss_for(shape) is not self._task_loss

    def tick(self, shape: Hashable, replayed: bool, seconds: float) -> bool:
        """A step was taken, from a recording or not; True if the steps to come are executed in another way."""
        if self._is_settled:
            return False
        self._count += 1
        first, last = WINDOWS[self._kind]
        if first < self._count <= last:
            self._is_steady = self._is_steady and shape == self._usual and (replayed or self._kind != "cuda")
            self._steps.append(seconds)
        if self._kind == "cuda" and self._count in (first, last):
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        return self._count > last and self._decide()

    def settle(self) -> None:
        """Tries nothing more."""
        self._is_settled = True

    def close(self) -> None:
        """Ends what a way left behind in the process."""
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        if self._compiled:
            stop_compilers()

    # -- measuring ------------------------------------------------------------------------------------------------

    def _measured(self) -> float:
        """Seconds of a step in this way, on the slowest replica; infinite where it was not steady."""
        seconds = median(self._steps)
        if self._kind == "cuda":
            start, end = self._marks
            end.synchronize()
            seconds = start.elapsed_time(end) / 1000 / len(self._steps)
        return float(max(self._hand.world.gather_objects(seconds if self._is_steady else math.inf)))

    def _start_window(self) -> None:
        self._count, self._is_steady = 0, True
        self._marks, self._steps = [], []

    def _decide(self) -> bool:
        """Keeps or leaves the way that was measured, and tries the next one that may pay."""
        taken, before = self._measured(), self._way
        if math.isinf(taken) and self._num_windows < MAX_WINDOWS:
            # An epoch ended within: look once more.
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
        following = next((way for way in self._candidates() if way not in self.seconds), None)
        if following is None:
            self._end()
        else:
            self._enter(following)
        self._start_window()
        return self._way != before

    def _candidates(self) -> list[str]:
        """Ways besides the one as written that may be faster here, in the order of their cost."""
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
        """Says what was chosen, where there was a choice."""
        self.settle()
        self._way = self._best
        if len(self.seconds) > 1:
            told = ", ".join(f"{way} {1000 * s:.3g} ms" for way, s in self.seconds.items() if math.isfinite(s))
            self._hand.notice(f"a step is executed {self._best} from here on ({told})")

    # -- entering and leaving a way -------------------------------------------------------------------------------

    def _enter(self, way: str) -> None:
        self._way = way
        if way == COMPILED:
            self._compile()
        else:
            self._set(way, True)

    def _leave(self, way: str) -> None:
        if way == COMPILED:
            self.loss = self._task_loss
        else:
            self._set(way, False)
        self._way = self._best

    def _set(self, way: str, is_on: bool) -> None:
        replica = self._hand.replica
        if way == CHANNELS_LAST:
            lay_out(replica.model, replica.optimizers.values(), channels_last=is_on)
            replica.lay_out_anew()
        elif way == ONE_THREAD:
            torch.set_num_threads(1 if is_on else self._num_threads)
        elif way == FULL_WIDTH:
            replica.is_narrow = not is_on

    def _compile(self) -> None:
        self._compiled = True
        plain = self._task_loss
        _give_names(plain, self._hand.model)
        self.loss = torch.compile(lambda model, batch: plain(model, batch), dynamic=False)

    def gave_up_compiling(self, error: Exception) -> bool:
        """Whether this is a compiler's failure, forward or backward; if so the step goes on as written."""
        home = type(error).__module__
        if not self._compiled or not home.startswith(("torch._dynamo", "torch._inductor", "torch.fx")):
            return False
        self._hand.notice(f"the step could not be compiled: {_first_line(error)}")
        self.loss, self._way = self._task_loss, self._best
        self.settle()
        return True


def _give_names(loss: Loss, model: torch.nn.Module) -> None:
    """Lets the compiler find what a program's own functions refer to.

    It looks for that in the module they say they are from. Functions of the program itself come to a rank as copies,
    with names of their own, while the rank's main module has none of them.
    """
    functions = [loss, *(type(module).forward for module in model.modules())]
    theirs = vars(sys.modules["__main__"])
    for function in functions:
        names = getattr(function, "__globals__", theirs)
        if names is not theirs and names.get("__name__") == "__main__":
            theirs.update({name: value for name, value in names.items() if name not in theirs})


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
