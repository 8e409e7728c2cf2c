"""Advice: sentences about a profile, each with its evidence, a cure, and what the cure should gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .profile import Profile


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What is wrong, how that is known, and what would mend it."""

    name: str
    evidence: str
    cure: str
    gain: float = 1.0
    """How many times as fast it should then be, at the most; 1 where it is not about speed."""
    saves: str = ""
    """What else it should bring."""

    @property
    def expected(self) -> str:
        """What the cure should bring, in words."""
        speed = f"up to {self.gain:.2f} times the speed" if self.gain > 1 else ""
        return ", ".join(filter(None, (speed, self.saves)))

    def __str__(self) -> str:
        """One sentence.

        >>> print(Advice(name="starved input", evidence="half of a step waits for data", cure="pass workers=2", gain=2))
        starved input: half of a step waits for data; pass workers=2 (up to 2.00 times the speed)
        """
        expected = f" ({self.expected})" if self.expected else ""
        return f"{self.name}: {self.evidence}; {self.cure}{expected}"


Rule = Callable[["Profile"], Advice | None]


def advise(profile: Profile) -> list[Advice]:
    """What every rule says of a profile, what promises most first."""
    from .rules import RULES

    found = [rule(profile) for rule in RULES]
    return sorted((one for one in found if one is not None), key=lambda one: -one.gain)
