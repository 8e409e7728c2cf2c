"""Optimizer updates for many networks at once, each with its own hyperparameters."""

from .registry import KNOWN, update_for
from .update import Numbers, Slots, Update, along

__all__ = ["Update", "Numbers", "Slots", "update_for", "along", "KNOWN"]
