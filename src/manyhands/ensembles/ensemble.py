"""Ensemble: several trained networks as one model, computed in one program, with their predictions combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core import DataError, Predictor, Signature, TensorSpec
from ..storage import export
from .combination import NUMBERS, Combination, MeanCombination, Vote, as_probabilities, form_of, require_combination
from .comparison import MemberComparison, compared
from .member import Member, named, renamed, require_alike
from .stacked_members import StackedMembers
from .uncertainty import Calibration, calibration, mutual_information, spread

SPREAD, MUTUAL = "spread", "mutual_information"
Batches = Sequence[tuple[dict[str, Tensor], Tensor | None]]
"""Batches of data: the inputs by name, and their labels or None."""


class CombinationRule:
    """How the predictions of an ensemble's members are combined.

    Args:
        combinations: The combination of each output, by the name of the output.
        uncertainty: Whether the results also have outputs with the members' disagreement.
    """

    def __init__(self, combinations: Mapping[str, Combination], uncertainty: bool) -> None:
        self.combinations, self.uncertainty = dict(combinations), uncertainty

    @classmethod
    def of(cls, name: str, answers: Mapping[str, Tensor], labels: Tensor | None, uncertainty: bool) -> CombinationRule:
        """Create the rule with the combination `name`, and fit its weights if it has any.

        Args:
            name: Name of a combination, such as "mean".
            answers: The members' predictions on validation data by output; the first dimension is the member.
            labels: The labels of these data, for the first output; None if there are none.
            uncertainty: Whether the results also have outputs with the members' disagreement.

        Raises:
            DataError: The combination is fitted to labels, but there are none.
        """
        kind = require_combination(name)
        made: dict[str, Combination] = {}
        for place, (output, values) in enumerate(answers.items()):
            form = form_of(values, labels if place == 0 else None)
            # Only the first output has labels to learn from; integers, such as classes, have no mean.
            chosen = kind if place == 0 or not kind.needs_data else MeanCombination
            made[output] = (chosen if values.is_floating_point() else Vote)(len(values), form)
            if made[output].needs_data:
                if labels is None:
                    raise DataError(
                        f"combine={name!r} is fitted to validation data with labels, but there are none",
                        remedy="pass valid= to the task, or options=mh.options.Combining(data=...), or use "
                        "combine='mean'",
                    )
                made[output].fit(values, labels)
        return cls(made, uncertainty)

    def combined(self, answers: Mapping[str, Tensor], who: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Return the combined predictions by output, one for every row.

        Args:
            answers: The members' predictions by output; the first dimension is the member.
            who: Numbers of the members whose predictions these are, in this order; None for all members.
        """
        found = {
            name: rule(answers[name]) if who is None else rule.of_some(answers[name], who)
            for name, rule in self.combinations.items()
        }
        if self.uncertainty:
            first = next(iter(self.combinations))
            form = self.combinations[first].form
            found[SPREAD] = spread(answers[first], form)
            if form != NUMBERS:
                found[MUTUAL] = mutual_information(answers[first], form)
        return found

    def signature(self, member: Signature) -> Signature:
        """Return the signature of an ensemble whose members have the signature `member`."""
        outputs = dict(member.outputs)
        if self.uncertainty:
            first = next(iter(self.combinations))
            dtype = outputs[first].dtype
            outputs[SPREAD] = TensorSpec(dtype, (None,))
            if self.combinations[first].form != NUMBERS:
                outputs[MUTUAL] = TensorSpec(dtype, (None,))
        return Signature(member.inputs, outputs)


class Ensemble(Predictor):
    """Ensemble in one program: a Predictor that is served and exported like any model.

    `ensemble(inputs)` returns combined predictions, in the form of the members' outputs. `ensemble.uncertainty(inputs)`
    returns how far the members disagree, and `ensemble.calibration()` how well confidence matches accuracy.
    `mh.remote_ensemble(ensemble)` runs each member in its own process.

    Args:
        members: The members, with the same inputs and outputs.
        combine: Name of the combination: "mean", "vote", "weighted" or "stacked".
        batches: Validation data, to which a combination with weights is fitted.
        uncertainty: Whether predictions also have outputs with the members' disagreement.
        devices: Devices over which the members are distributed; by default they stay on the CPU.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        combine: str = "mean",
        batches: Batches = (),
        uncertainty: bool = False,
        devices: Sequence[torch.device] = (),
    ) -> None:
        members = [renamed(member, members[0].signature) for member in members]
        require_alike([member.name for member in members], [member.signature for member in members])
        self.members, self.combine, self._batches = members, combine, batches
        self._program = self._together()
        self._names = list(members[0].signature.inputs)
        if devices:
            self._program.place(devices)
        answers, labels = self._on(batches or [(members[0].example, None)])
        self.rule = CombinationRule.of(combine, answers, labels, uncertainty)
        self.signature = self.rule.signature(members[0].signature)
        self.is_stacked = bool(members[0].example) and self._program.settle(self._ordered(members[0].example))
        """Whether all members are computed as one stacked program (vmap), because that was measured to be faster."""

    def __repr__(self) -> str:
        names = ", ".join(member.name for member in self.members)
        return f"Ensemble of {len(self.members)} ({names}), combined by {self.combine}"

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return self.rule.combined(self._program.answer(*self._ordered(inputs)))

    def each(self, inputs: Any) -> dict[str, Tensor]:
        """Return the predictions of every member by output; the first dimension is the member, the second the row."""
        return self._program.answer(*self._ordered(self.checked(inputs)))

    def uncertainty(self, inputs: Any) -> dict[str, Tensor]:
        """Return the members' disagreement for every row of `inputs`.

        "spread" is the standard deviation of their predictions; for classes there is also "mutual_information".
        """
        answers = self.each(inputs)
        measures = CombinationRule(self.rule.combinations, True).combined(answers)
        return {name: measures[name] for name in (SPREAD, MUTUAL) if name in measures}

    def calibration(self, batches: Batches | None = None) -> tuple[Calibration, list[Calibration]]:
        """Return the calibration of the ensemble and of each member, on `batches` or else on the validation data.

        Raises:
            DataError: The data have no class labels.
        """
        answers, labels = self._on(self._batches if batches is None else batches)
        first = next(iter(self.rule.combinations))
        form = self.rule.combinations[first].form
        if labels is None or form == NUMBERS:
            raise DataError(
                "calibration needs class labels, but the validation data have none",
                remedy="pass valid= with class labels to the task, or options=mh.options.Combining(data=...)",
            )
        together = as_probabilities(self.rule.combinations[first](answers[first]), form)
        return calibration(together, labels), [calibration(as_probabilities(a, form), labels) for a in answers[first]]

    def comparison(self, batches: Batches | None = None) -> MemberComparison | None:
        """Return how the ensemble compares with its best member on the validation data, and what would help.

        None if the data has no labels, or too few rows to tell.
        """
        batches = self._batches if batches is None else batches
        if not batches:
            return None
        answers, labels = self._on(batches)
        first = next(iter(self.rule.combinations))
        if labels is None or not answers[first].is_floating_point():
            return None
        names = [member.name for member in self.members]
        return compared(answers[first], labels, self.rule.combinations[first], names)

    def export(self, path: str | Path) -> Path:
        """Export all members and their combination as one model, the next version in the folder `path`.

        Return the folder of the version.

        Raises:
            DataError: There is no example of the inputs, because the members are exported models.
        """
        example = self.members[0].example
        if not example:
            raise DataError(
                "exporting an ensemble needs an example of its inputs, which exported members do not have",
                remedy="create the ensemble from runs",
            )
        extra = {"members": [member.name for member in self.members], "combine": self.combine}
        network = _EnsembleModule(self._together(), self.rule)  # on the CPU, because a server may have other devices
        return export(network, _called, example, Path(path), free=self.members[0].free, extra=extra)

    def _together(self) -> StackedMembers:
        """Return a module on the CPU that computes all members."""
        return StackedMembers([m.model for m in self.members], [m.predict for m in self.members], named).eval()

    def _ordered(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        return [inputs[name] for name in self._names]

    @torch.no_grad()
    def _on(self, batches: Batches) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the predictions of all members for the rows of `batches`, and the labels or None."""
        parts = [self._program.answer(*self._ordered(inputs)) for inputs, _ in batches if inputs]
        if not parts:
            raise DataError(
                "an ensemble needs validation data, or members that have an example of their inputs; exported models "
                "have none",
                remedy="pass options=mh.options.Combining(data=...), for exported models data=(inputs, labels)",
            )
        labels = [label for _, label in batches]
        joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        return joined, None if any(one is None for one in labels) else torch.cat(labels)  # type: ignore[arg-type]


class _EnsembleModule(nn.Module):
    """All members of an ensemble and their combination as one module, to be exported."""

    def __init__(self, program: StackedMembers, rule: CombinationRule) -> None:
        super().__init__()
        self.program, self.rules, self._rule = program, nn.ModuleDict(rule.combinations), rule

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        return self._rule.combined(self.program(*inputs))


def _called(model: nn.Module, *inputs: Tensor) -> Any:
    return model(*inputs)
