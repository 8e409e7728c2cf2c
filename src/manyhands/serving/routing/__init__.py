"""Several servers behind one address."""

from .router import Router, RouteSettings
from .scaled import PlacedServer, ScaledRouter, Scaling

__all__ = ["Router", "RouteSettings", "ScaledRouter", "Scaling", "PlacedServer"]
