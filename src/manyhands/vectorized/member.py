"""Progress of one member (network) of a vectorized ensemble: step, cursor, losses and status."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core import Task
from ..data import Cursor

TRAINING, DONE, STOPPED, FAILED = "training", "done", "stopped", "failed"
MAX_SKIPPED = 20
"""Number of consecutive steps with a non-finite loss after which a member fails, even with not_finite="skip"."""


@dataclass
class VectorizedMember:
    """The progress of one member of a vectorized ensemble; its tensors are in the stack."""

    task: Task
    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    status: str = TRAINING
    """"training", "done", "stopped" or "failed"."""
    reason: str = ""
    """Why the member failed; empty if it did not."""
    loss: float = math.nan
    """The loss of the last step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last measurements: the mean training loss since the previous ones, and validation loss and metrics."""
    total: float = 0.0
    """The sum of the finite losses since the last measurement."""
    count: int = 0
    """The number of finite losses since the last measurement."""
    num_skipped: int = 0
    """The number of consecutive steps with a non-finite loss."""

    @property
    def is_training(self) -> bool:
        """Whether the member still takes steps."""
        return self.status == TRAINING

    def record_losses(self, losses: Sequence[float], *, skips: bool) -> None:
        """Record the losses of consecutive steps.

        A non-finite loss fails the member; if `skips` (not_finite="skip"), only MAX_SKIPPED of them in a row do. Losses
        after the one that fails the member are ignored.
        """
        total = sum(losses)
        if math.isfinite(total):
            self.step, self.loss, self.num_skipped = self.step + len(losses), losses[-1], 0
            self.total, self.count = self.total + total, self.count + len(losses)
            return
        for loss in losses if self.is_training else ():
            self._record_loss(loss, skips)
            if not self.is_training:
                return

    def _record_loss(self, loss: float, skips: bool) -> None:
        self.step += 1
        self.loss = loss
        if math.isfinite(loss):
            self.total, self.count, self.num_skipped = self.total + loss, self.count + 1, 0
            return
        self.num_skipped += 1
        if not skips or self.num_skipped >= MAX_SKIPPED:
            self.status = FAILED
            self.reason = f"its loss became {loss} at step {self.step}; lower the learning rate, or set clip=1.0"

    def loop_state(self) -> dict[str, Any]:
        """Return the state of the training loop in the form in which `fit` stores it in a checkpoint."""
        validated = {name: value for name, value in self.metrics.items() if name.startswith("valid_")}
        return {"metrics": validated, "measured": {}, "sums": {"loss": [self.total, self.count]}}

    def resume_from(self, loop: Mapping[str, Any]) -> None:
        """Restore metrics and loss sums from a loop state of `loop_state` or of a checkpoint of `fit`."""
        self.metrics = dict(loop.get("metrics", {}))
        self.total, self.count = loop.get("sums", {}).get("loss", (0.0, 0))

    def take_mean(self) -> dict[str, float]:
        """Return the mean loss since the last measurement as {"loss": …}, empty without losses; start a new mean."""
        mean = {"loss": self.total / self.count} if self.count else {}
        self.total, self.count = 0.0, 0
        return mean
