"""Objectives: the metrics that a study minimizes or maximizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core import SettingsError, Task
from ..training import Patience, check_patience


@dataclass(frozen=True)
class Objective:
    """A metric, and whether it is minimized or maximized.

    >>> Objective.parse("valid_loss"), Objective.parse("valid_score:max")
    (Objective(name='valid_loss', mode='min'), Objective(name='valid_score', mode='max'))
    """

    name: str
    mode: str

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse NAME, NAME:min or NAME:max; the suffix is needed if the name does not imply the direction."""
        name, colon, mode = text.partition(":")
        if not name or (colon and mode not in ("min", "max")):
            raise SettingsError(
                "an objective must be written NAME, NAME:min or NAME:max",
                got=repr(text),
                remedy="write for example valid_accuracy:max",
            )
        if not colon:
            try:
                mode = Patience(name).mode
            except SettingsError as error:
                remedy = f"write objective={name + ':min'!r} or {name + ':max'!r}"
                raise SettingsError(error.rule, got=repr(name), remedy=remedy) from None
        return cls(name, mode)

    def cost(self, value: float) -> float:
        """Return the value as a cost to minimize."""
        return value if self.mode == "min" else -value

    def of(self, metrics: Mapping[str, float]) -> float:
        """Return the objective's value from the metrics; raises SettingsError if it is missing."""
        if self.name not in metrics:
            raise never_reported(self.name, list(metrics))
        return float(metrics[self.name])


def as_objectives(objective: str | Sequence[str]) -> tuple[Objective, ...]:
    """Parse one or several objectives."""
    texts = [objective] if isinstance(objective, str) else list(objective)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise SettingsError(
            "an objective must be a name, or a list of names",
            got=repr(objective),
            remedy='pass for example "valid_loss"',
        )
    made = tuple(Objective.parse(text) for text in texts)
    if len({one.name for one in made}) < len(made):
        raise SettingsError("every objective must be named once", got=", ".join(texts), remedy="omit one of them")
    return made


def check_objectives(objectives: Sequence[Objective], task: Task) -> None:
    """Raise SettingsError for names that the task never measures."""
    for one in objectives:
        try:
            check_patience([Patience(one.name, 1, one.mode)], task)
        except SettingsError as error:
            known = error.rule.partition(": ")[2]
            raise SettingsError(
                f"an objective must be something that the task measures: {known}",
                got=repr(one.name),
                remedy=error.remedy,
            ) from None


def never_reported(name: str, known: Sequence[str]) -> SettingsError:
    """Return the error for an objective that a trial did not measure."""
    shown = ", ".join(known) or "nothing"
    return SettingsError(
        f"the objective must be among the values that a trial reports ({shown})",
        got=repr(name),
        remedy="choose one of them",
    )
