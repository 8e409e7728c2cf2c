"""The dashboard: a local page that shows runs, studies, plans and servers; it reads event logs, nothing else."""

from .server import Dashboard

__all__ = ["Dashboard"]
