"""Objectives: the metrics that a study minimizes or maximizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core import SettingsError, Task
from ..training import Patience, check_patience


@dataclass(frozen=True)
class Objective:
    """A metric that a study optimizes, and whether it is minimized or maximized.

    >>> Objective.parse("valid_loss"), Objective.parse("valid_score:max")
    (Objective(name='valid_loss', mode='min'), Objective(name='valid_score', mode='max'))
    """

    name: str
    mode: str

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Return the objective that a text NAME, NAME:min or NAME:max describes.

        The suffix is required if the name does not imply whether the metric is minimized.
        """
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
        """Return a value of the metric as a cost to minimize: negated if the metric is maximized."""
        return value if self.mode == "min" else -value

    def of(self, metrics: Mapping[str, float]) -> float:
        """Return the value of this objective in a trial's metrics; raise SettingsError if it is missing."""
        if self.name not in metrics:
            raise never_reported(self.name, list(metrics))
        return float(metrics[self.name])


def as_objectives(objective: str | Sequence[str]) -> tuple[Objective, ...]:
    """Return the objectives that a text or a list of texts describes; raise SettingsError if it is invalid."""
    texts = [objective] if isinstance(objective, str) else list(objective)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise SettingsError(
            "an objective must be a name, or a list of names",
            got=repr(objective),
            remedy='pass for example "valid_loss"',
        )
    made = tuple(Objective.parse(text) for text in texts)
    if len({one.name for one in made}) < len(made):
        raise SettingsError("every objective must be named once", got=", ".join(texts), remedy="omit the duplicates")
    return made


def check_objectives(objectives: Sequence[Objective], task: Task) -> None:
    """Raise SettingsError if an objective is not a metric or loss that the task measures."""
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
    """Return the error for an objective `name` that is not among the metrics `known` that a trial measured."""
    shown = ", ".join(known) or "nothing"
    return SettingsError(
        f"the objective must be among the values that a trial reports ({shown})",
        got=repr(name),
        remedy="choose one of them",
    )
