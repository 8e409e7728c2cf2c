"""Monitoring of a run: progress in the terminal, sinks for its events, phases of a step, and stragglers."""

from .notebook import NotebookOutput, html_progress, in_notebook
from .progress import View, make_view, sparkline
from .sinks import DROPPED, About, LogTo, Sink, SinkDispatcher, default_params, make_sinks
from .spans import IDLE, PHASES, PhaseTimes, Span, Spans, by_phase
from .stragglers import Stopwatch, Stragglers
from .usage import HostUsage

__all__ = [
    "View",
    "make_view",
    "sparkline",
    "NotebookOutput",
    "html_progress",
    "in_notebook",
    "Sink",
    "About",
    "SinkDispatcher",
    "DROPPED",
    "LogTo",
    "make_sinks",
    "default_params",
    "HostUsage",
    "Span",
    "Spans",
    "PhaseTimes",
    "PHASES",
    "IDLE",
    "by_phase",
    "Stragglers",
    "Stopwatch",
]
