"""Advice about a profile: each with its evidence, a remedy, and the expected gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .profile import Profile


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A problem of a profiled task, with its evidence, a remedy and the expected benefit."""

    name: str
    evidence: str
    remedy: str
    gain: float = 1.0
    """Maximum expected speedup; 1 if the advice is not about speed."""
    saves: str = ""
    """Other expected benefits as text, such as less memory."""

    @property
    def expected(self) -> str:
        """Return the expected benefit as text."""
        speed = f"up to {self.gain:.2f} times the speed" if self.gain > 1 else ""
        return ", ".join(filter(None, (speed, self.saves)))

    def __str__(self) -> str:
        """Return the advice as one sentence.

        >>> print(Advice(name="starved input", evidence="half of a step waits", remedy="pass workers=2", gain=2))
        starved input: half of a step waits; pass workers=2 (up to 2.00 times the speed)
        """
        expected = f" ({self.expected})" if self.expected else ""
        return f"{self.name}: {self.evidence}; {self.remedy}{expected}"


Rule = Callable[["Profile"], Advice | None]


def advise(profile: Profile) -> list[Advice]:
    """Return the advice of all rules for a profile, ordered by expected gain."""
    from .rules import RULES

    found = [rule(profile) for rule in RULES]
    return sorted((one for one in found if one is not None), key=lambda one: -one.gain)
