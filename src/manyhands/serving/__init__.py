"""Serving: versions swapped under load, requests batched over replicas on every device, protocols that clients know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core import SettingsError
from .limits import Limits
from .options import Batching, Listen, Replicas, Rollout, ServingLog
from .security import ServingTls

if TYPE_CHECKING:
    from .client import Client
    from .metrics import BOUNDS, Histogram
    from .python_model import InvalidInput, is_python_predictor, signature
    from .routing import PlacedServer, Router, RouteSettings, ScaledRouter, Scaling
    from .server import Server, ServeSettings

__all__ = [
    "Server",
    "ServeSettings",
    "Router",
    "RouteSettings",
    "ScaledRouter",
    "Scaling",
    "PlacedServer",
    "ServingTls",
    "Listen",
    "Batching",
    "Rollout",
    "Replicas",
    "ServingLog",
    "Limits",
    "Client",
    "signature",
    "InvalidInput",
    "is_python_predictor",
    "Histogram",
    "BOUNDS",
]
_HOME = {
    "Client": "client",
    "signature": "python_model",
    "InvalidInput": "python_model",
    "is_python_predictor": "python_model",
    "Histogram": "metrics",
    "BOUNDS": "metrics",
    "Server": "server",
    "ServeSettings": "server",
    "Router": "routing",
    "RouteSettings": "routing",
    "ScaledRouter": "routing",
    "Scaling": "routing",
    "PlacedServer": "routing",
}


def __getattr__(name: str) -> Any:
    """Import classes on first use: a client does not need a server's packages, and the help of commands needs none."""
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
