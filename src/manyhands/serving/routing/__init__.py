"""Several servers behind one address."""

from .router import Router, RouteSettings

__all__ = ["Router", "RouteSettings"]
