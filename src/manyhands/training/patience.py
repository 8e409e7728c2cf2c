"""Patience: early stopping when a measured value has not improved for some epochs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import SettingsError, Task, counted
from .metrics import is_function

_LOW = {"loss", "error", "err", "mae", "mse", "rmse", "perplexity", "wer", "cer", "nll", "fid"}
_HIGH = {"accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "map", "iou", "dice", "bleu", "rouge", "r2"}


@dataclass(frozen=True)
class Patience:
    """Ends a run when a value has not improved for `epochs` consecutive epochs.

    `name` is "loss" (the mean training loss of an epoch), "valid_loss", or "valid_" and a metric's name. `mode` is
    "min" or "max"; "auto" infers it for losses and common metrics. A value improves if it beats the best so far by more
    than `min_delta`. `run.model(best=True)` returns the network of the best epoch.

    >>> Patience("valid_loss", 5)
    Patience(name='valid_loss', epochs=5, mode='min', min_delta=0.0)
    """

    name: str
    epochs: int = 5
    mode: str = "auto"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise SettingsError(
                "the first argument of Patience must be a name",
                got=repr(self.name),
                remedy='write for example mh.Patience("valid_loss")',
            )
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise SettingsError(
                "epochs of Patience must be a whole number of at least 1",
                got=repr(self.epochs),
                remedy=f"write for example mh.Patience({self.name!r}, 5)",
            )
        if self.mode not in ("auto", "min", "max"):
            raise SettingsError(
                "mode of Patience must be auto, min or max", got=repr(self.mode), remedy='write for example mode="min"'
            )
        if isinstance(self.min_delta, str) or not self.min_delta >= 0:
            raise SettingsError(
                "min_delta must be at least 0", got=repr(self.min_delta), remedy="omit it, or write for example 0.001"
            )
        if self.mode == "auto":
            object.__setattr__(self, "mode", _usual_mode(self.name))

    @classmethod
    def parse(cls, text: str) -> Patience:
        """Parse `NAME:EPOCHS` or `NAME:EPOCHS:MODE`.

        >>> Patience.parse("valid_score:3:max")
        Patience(name='valid_score', epochs=3, mode='max', min_delta=0.0)
        """
        name, _, rest = text.strip().partition(":")
        epochs, _, mode = rest.partition(":")
        if not name or not epochs.isdecimal():
            raise SettingsError(
                "patience must be written NAME:EPOCHS or NAME:EPOCHS:MODE",
                got=repr(text),
                remedy="write for example valid_loss:5",
            )
        return cls(name, int(epochs), mode or "auto")

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether a value improves on the best so far; NaN never does."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


class PatienceState:
    """The best values and waiting times of a run's patience, saved with every checkpoint."""

    def __init__(self, stop: Sequence[Patience]) -> None:
        self._stop = tuple(stop)
        self._best: list[float | None] = [None] * len(self._stop)
        self._waited = [0] * len(self._stop)
        self._step = 0

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """Update with the values of an epoch; ignore a step seen before, as resuming a finished run evaluates again."""
        if step <= self._step:
            return
        self._step = step
        for index, patience in enumerate(self._stop):
            value = _value(patience, values)
            if patience.is_better(value, self._best[index]):
                self._best[index], self._waited[index] = value, 0
            else:
                self._waited[index] += 1

    @property
    def reason(self) -> str:
        """Why the run should end; empty while it should continue."""
        for patience, best, waited in zip(self._stop, self._best, self._waited, strict=True):
            if waited >= patience.epochs:
                reached = "was never a number" if best is None else f"has not got better than {best:.6g}"
                return f"{patience.name} {reached} in {counted(waited, 'epoch')}"
        return ""

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return the score by which the best checkpoint is chosen, lower is better; None where it was not measured.

        It is the first watched value; without patience, the validation loss, or else the training loss.
        """
        if self._stop:
            value = values.get(self._stop[0].name)
            return value if value is None or self._stop[0].mode == "min" else -value
        losses = [value for name, value in values.items() if not name.startswith("valid_")]
        return values.get("valid_loss", next(iter(losses), None))

    def state(self) -> list[dict[str, Any]]:
        """Return JSON-ready data, one entry per watched name."""
        return [
            {"name": patience.name, "best": best, "waited": waited, "step": self._step}
            for patience, best, waited in zip(self._stop, self._best, self._waited, strict=True)
        ]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore a saved state; a name that was not watched before starts from zero."""
        known = {saved["name"]: saved for saved in state}
        for index, patience in enumerate(self._stop):
            if patience.name in known:
                self._step = known[patience.name]["step"]
                self._best[index], self._waited[index] = known[patience.name]["best"], known[patience.name]["waited"]


def check_patience(stop: Sequence[Patience], task: Task, losses: Sequence[str] | None = None) -> None:
    """Raise for names that are never measured. `losses` are the names of a custom step's losses (its optimizers')."""
    for patience in stop:
        check_measured(patience.name, task, "Patience", losses)


def check_measured(name: str, task: Task, what: str, losses: Sequence[str] | None = None) -> None:
    """Raise if a value that `what` follows is never measured at the end of an epoch."""
    known = ["loss"] if task.loss is not None else [*(losses or ())]
    if task.valid is not None:
        known += [f"valid_{name}" for name in (*(["loss"] if task.loss is not None else []), *task.metrics)]
    # A metric object may compute several values, whose names are not known here.
    several = tuple(f"valid_{name}_" for name, metric in task.metrics.items() if not is_function(metric))
    is_unknown = task.loss is None and losses is None and not name.startswith("valid_")
    is_several = task.valid is not None and name.startswith(several)
    if name not in known and not is_several and not is_unknown:
        more = "" if task.valid is not None else "; valid_ names need a Task with valid="
        raise _never_measured(name, known, more, what)


def _value(patience: Patience, values: Mapping[str, float]) -> float:
    if patience.name not in values and not patience.name.startswith("valid_"):
        # `check_patience` has accepted the name, so every step of this epoch was skipped.
        return math.nan
    if patience.name not in values:
        raise _never_measured(patience.name, list(values))
    return values[patience.name]


def _never_measured(name: str, known: Sequence[str], more: str = "", what: str = "Patience") -> SettingsError:
    close = difflib.get_close_matches(name, known, n=3)
    return SettingsError(
        f"{what} needs the name of a measured value: {', '.join(known) or 'nothing yet'}{more}",
        got=repr(name),
        remedy=f"did you mean {' or '.join(close)}?" if close else "choose one of them",
    )


def _usual_mode(name: str) -> str:
    words = set(name.lower().replace("-", "_").split("_"))
    if bool(words & _LOW) != bool(words & _HIGH):
        return "min" if words & _LOW else "max"
    raise SettingsError(
        "the direction of a metric must be known", got=repr(name), remedy=f'write mh.Patience({name!r}, mode="max")'
    )
