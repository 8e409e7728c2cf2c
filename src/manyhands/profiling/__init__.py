"""Profiles of a task's steps: time by phase, module and operation, memory by kind, and advice."""

from .advice import Advice
from .memory import MemoryProfile
from .operations import ModuleTime, OperationStats, OperationTable
from .other_load import load_notes
from .probe import Larger, Largest, RankProfile, ReadingLine, probe
from .profile import Profile, of_run

__all__ = [
    "Profile",
    "RankProfile",
    "of_run",
    "probe",
    "Advice",
    "OperationStats",
    "OperationTable",
    "ModuleTime",
    "MemoryProfile",
    "Largest",
    "Larger",
    "ReadingLine",
    "load_notes",
]
