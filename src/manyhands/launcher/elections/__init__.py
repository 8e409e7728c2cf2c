"""Elections of the host that coordinates a job of several hosts."""

from .election import Election, ElectionUnreachable, Leader
from .registry import election_at

__all__ = ["Election", "ElectionUnreachable", "Leader", "election_at"]
