"""What profiling costs a run: the same steps with `profile=True` and without, alternately.

Times are the processor's, of one thread, so that what else the machine does counts for neither.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

from .report import SAME, interleaved

ROWS, STEPS = 64, 170
FIRST = 20
"""The step after which the clock begins."""
ROUNDS = 45


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def task() -> mh.Task:
    """A step of about a millisecond, so that every overhead shows."""
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        data=(torch.randn(ROWS * STEPS, 256), torch.randint(10, (ROWS * STEPS,))),
        batch_size=ROWS,
    )


def times(quick: bool) -> dict[str, list[float]]:
    """Seconds of a step, by round, off, off once more, and on."""
    work = task()
    contenders = {"off": False, f"off{SAME}": False, "on": True}
    return interleaved({name: partial(_seconds, work, on) for name, on in contenders.items()}, 6 if quick else ROUNDS)


def _seconds(work: mh.Task, profile: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        clock = _Clock()
        mh.fit(
            work,
            mh.Single(),
            on="cpu",
            folder=folder,
            callbacks=[clock],
            options=[mh.options.Display(progress=False), mh.options.Logging(profile=profile)],
        )
        return clock.seconds / (STEPS - FIRST)


class _Clock(mh.Callback):
    """The processor's time from one of the first steps to the last."""

    def __init__(self) -> None:
        self._began = self.seconds = 0.0

    def on_step(self, hand: mh.Hand) -> None:
        """Begins and ends."""
        if hand.num_steps == FIRST:
            self._began = time.process_time()
        elif hand.num_steps == STEPS:
            self.seconds = time.process_time() - self._began
