"""Patience: ends a run when something that is measured has not got better for a while."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import SettingsError, Task
from .metrics import is_function

_LOW = {"loss", "error", "err", "mae", "mse", "rmse", "perplexity", "wer", "cer", "nll", "fid"}
_HIGH = {"accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "map", "iou", "dice", "bleu", "rouge", "r2"}


@dataclass(frozen=True)
class Patience:
    """Ends a run when a value has not got better in so many epochs one after another.

    `name` is "loss" (the mean training loss of an epoch), "valid_loss" or "valid_" and a metric's name. `mode` says
    what is better, "min" or "max"; "auto" knows it of losses and of the usual metrics. A value is better when it
    beats the best so far by more than `min_delta`. `run.model(best=True)` is the network of that best epoch.

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
                "Patience watches a name", got=repr(self.name), remedy='write mh.Patience("valid_loss")'
            )
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise SettingsError(
                "Patience waits a whole number of epochs, at least 1",
                got=repr(self.epochs),
                remedy=f"write mh.Patience({self.name!r}, 5)",
            )
        if self.mode not in ("auto", "min", "max"):
            raise SettingsError(
                "the mode of Patience is auto, min or max", got=repr(self.mode), remedy='write mode="min"'
            )
        if not self.min_delta >= 0:
            raise SettingsError("min_delta is at least 0", got=self.min_delta, remedy="leave it out, or write 0.001")
        if self.mode == "auto":
            object.__setattr__(self, "mode", _usual_mode(self.name))

    @classmethod
    def parse(cls, text: str) -> Patience:
        """Patience from a text, NAME:EPOCHS and after another colon the mode.

        >>> Patience.parse("valid_score:3:max")
        Patience(name='valid_score', epochs=3, mode='max', min_delta=0.0)
        """
        name, _, rest = text.strip().partition(":")
        epochs, _, mode = rest.partition(":")
        if not name or not epochs.isdecimal():
            raise SettingsError(
                "patience is written NAME:EPOCHS or NAME:EPOCHS:MODE", got=repr(text), remedy="write valid_loss:5"
            )
        return cls(name, int(epochs), mode or "auto")

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value counts as progress; one that is not a number never does."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


class PatienceState:
    """What a run's patience has seen: its state is saved with every checkpoint."""

    def __init__(self, stop: Sequence[Patience]) -> None:
        self._stop = tuple(stop)
        self._best: list[float | None] = [None] * len(self._stop)
        self._waited = [0] * len(self._stop)
        self._step = 0

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of an epoch, once: a finished run that is resumed is measured again."""
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
        """Why the run should end; empty while it should go on."""
        for patience, best, waited in zip(self._stop, self._best, self._waited, strict=True):
            if waited >= patience.epochs:
                reached = "was never a number" if best is None else f"has not got better than {best:.6g}"
                return f"{patience.name} {reached} in {waited} epochs"
        return ""

    def score(self, values: Mapping[str, float]) -> float | None:
        """What a checkpoint is the best by, the lower the better; None where it was not measured.

        It is the first value that is watched. Without patience it is the validation's loss, or else the training's.
        """
        if self._stop:
            value = values.get(self._stop[0].name)
            return value if value is None or self._stop[0].mode == "min" else -value
        losses = [value for name, value in values.items() if not name.startswith("valid_")]
        return values.get("valid_loss", next(iter(losses), None))

    def state(self) -> list[dict[str, Any]]:
        """JSON-ready data, by the name that is watched."""
        return [
            {"name": patience.name, "best": best, "waited": waited, "step": self._step}
            for patience, best, waited in zip(self._stop, self._best, self._waited, strict=True)
        ]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from a saved state; a name that was not watched before begins anew."""
        known = {saved["name"]: saved for saved in state}
        for index, patience in enumerate(self._stop):
            if patience.name in known:
                self._step = known[patience.name]["step"]
                self._best[index], self._waited[index] = known[patience.name]["best"], known[patience.name]["waited"]


def as_patience(stop: Patience | Sequence[Patience] | None) -> tuple[Patience, ...]:
    """One, several or none, as a tuple."""
    several = stop if isinstance(stop, (list, tuple)) else () if stop is None else (stop,)
    for one in several:
        if not isinstance(one, Patience):
            raise SettingsError(
                "stop is an mh.Patience or a list of them",
                got=type(one).__name__,
                remedy='pass stop=mh.Patience("valid_loss", 5)',
            )
    return tuple(several)


def check_patience(stop: Sequence[Patience], task: Task, losses: Sequence[str] | None = None) -> None:
    """Refuses names that are never measured. `losses` are the names of a step's own, which its optimizers tell."""
    known = ["loss"] if task.loss is not None else [*(losses or ())]
    if task.valid is not None:
        known += [f"valid_{name}" for name in (*(["loss"] if task.loss is not None else []), *task.metrics)]
    # An object may compute several values, whose names it alone knows.
    several = tuple(f"valid_{name}_" for name, metric in task.metrics.items() if not is_function(metric))
    for patience in stop:
        name = patience.name
        is_untold = task.loss is None and losses is None and not name.startswith("valid_")
        is_several = task.valid is not None and name.startswith(several)
        if name not in known and not is_several and not is_untold:
            raise _never_measured(
                name, known, "" if task.valid is not None else "; valid_ names need a Task with valid="
            )


def _value(patience: Patience, values: Mapping[str, float]) -> float:
    if patience.name not in values and not patience.name.startswith("valid_"):
        # Known since the start (`check_patience`): every step of this epoch was left out.
        return math.nan
    if patience.name not in values:
        raise _never_measured(patience.name, list(values))
    return values[patience.name]


def _never_measured(name: str, known: Sequence[str], more: str = "") -> SettingsError:
    close = difflib.get_close_matches(name, known, n=3)
    return SettingsError(
        f"Patience watches what is measured: {', '.join(known) or 'nothing yet'}{more}",
        got=repr(name),
        remedy=f"did you mean {' or '.join(close)}?" if close else "name one of these",
    )


def _usual_mode(name: str) -> str:
    words = set(name.lower().replace("-", "_").split("_"))
    if bool(words & _LOW) != bool(words & _HIGH):
        return "min" if words & _LOW else "max"
    raise SettingsError(
        "whether more is better must be known", got=repr(name), remedy=f'write mh.Patience({name!r}, mode="max")'
    )
