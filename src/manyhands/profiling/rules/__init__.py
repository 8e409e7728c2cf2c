"""The rules for advice: each examines a profile and returns a text, or none."""

from ..advice import Rule
from .exchange import exposed_communication, hot_parameter, slow_rank
from .feeding import slow_copy, starved_input, tiny_batch
from .holding import tight_memory
from .upkeep import costly_checkpoints, costly_update, frequent_validation, idle_between, many_threads

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
