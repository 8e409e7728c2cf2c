"""Training with parameter servers: servers hold and update parameters, workers compute gradients of assigned samples.

The modules of servers and workers need ZeroMQ and msgspec, and are imported when a job starts.
"""

from .loop import check_served, has_own_optimizer, tables_in, train_served
from .roles import ProcessRole, find_role, run_member

__all__ = [
    "check_served",
    "has_own_optimizer",
    "tables_in",
    "train_served",
    "ProcessRole",
    "find_role",
    "run_member",
]
