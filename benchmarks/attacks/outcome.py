"""What came of one attack."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """The result of one attack.

    Attributes:
        name: Which attack it was.
        succeeded: Whether the attacker reached the goal (memory read, code executed, service denied).
        reason: The reason the target gave for its refusal; empty if it gave none.
        detail: What was observed, for the report.
    """

    name: str
    succeeded: bool
    reason: str = ""
    detail: dict[str, float | str] = field(default_factory=dict)

    @property
    def is_refused_with_reason(self) -> bool:
        """Whether the target refused the attack and said why."""
        return not self.succeeded and bool(self.reason)
