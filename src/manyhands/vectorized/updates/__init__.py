"""Optimizer updates of stacked networks, each with its own hyperparameters; a file per optimizer."""

from .registry import KNOWN, update_for
from .update import Numbers, Slots, Update, along

__all__ = ["Update", "Numbers", "Slots", "update_for", "along", "KNOWN"]
