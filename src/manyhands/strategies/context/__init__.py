"""Context parallelism: sequences that are split over several ranks, each with the whole network."""

from .replica import ContextReplica, splitting_context
from .trial import find

__all__ = ["ContextReplica", "find", "splitting_context"]
