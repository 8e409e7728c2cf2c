"""The rules for advice: each examines a profile and returns an Advice, or None."""

from ..advice import Rule
from .communication import exposed_communication, hot_parameter, slow_rank
from .input import slow_copy, starved_input, tiny_batch
from .memory import tight_memory
from .overhead import costly_checkpoints, costly_update, frequent_validation, idle_between, many_threads

RULES: tuple[Rule, ...] = (
    starved_input,
    slow_copy,
    tiny_batch,
    slow_rank,
    hot_parameter,
    exposed_communication,
    tight_memory,
    many_threads,
    frequent_validation,
    costly_checkpoints,
    costly_update,
    idle_between,
)

__all__ = ["RULES"]
