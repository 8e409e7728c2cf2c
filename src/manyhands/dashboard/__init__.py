"""The dashboard: a local web page with runs, studies, plans and servers, read from event logs and servers' metrics."""

from .server import Dashboard

__all__ = ["Dashboard"]
