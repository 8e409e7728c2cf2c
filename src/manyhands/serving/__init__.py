"""Serving: versions swapped under load, requests batched over replicas on every device, protocols that clients know."""

from .batcher import BatchSettings
from .limits import Limits
from .model import Probation
from .server import Server, ServeSettings

__all__ = ["Server", "ServeSettings", "BatchSettings", "Limits", "Probation"]
