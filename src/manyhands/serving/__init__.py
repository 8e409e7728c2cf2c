"""Serving: versions swapped under load, requests batched over replicas on every device, protocols that clients know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core import SettingsError
from .batcher import BatchSettings
from .client import Client
from .limits import Limits
from .metrics import BOUNDS, Histogram
from .security import ServingTls

if TYPE_CHECKING:
    from .listener_thread import ListenSettings
    from .rollout_guard import RolloutGuard
    from .routing import PlacedServer, Router, RouteSettings, ScaledRouter, Scaling
    from .server import Server, ServeSettings

__all__ = [
    "Server",
    "ServeSettings",
    "ListenSettings",
    "Router",
    "RouteSettings",
    "ScaledRouter",
    "Scaling",
    "PlacedServer",
    "ServingTls",
    "BatchSettings",
    "Limits",
    "RolloutGuard",
    "Client",
    "Histogram",
    "BOUNDS",
]
_HOME = {
    "Server": "server",
    "ServeSettings": "server",
    "ListenSettings": "listener_thread",
    "Router": "routing",
    "RouteSettings": "routing",
    "ScaledRouter": "routing",
    "Scaling": "routing",
    "PlacedServer": "routing",
    "RolloutGuard": "rollout_guard",
}


def __getattr__(name: str) -> Any:
    """Import server classes on first use, because a client does not need a server's packages."""
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise SettingsError(
            "serving needs additional packages",
            got=f"no {error.name}",
            remedy="install them with pip install 'manyhands[serve]'",
        ) from None
