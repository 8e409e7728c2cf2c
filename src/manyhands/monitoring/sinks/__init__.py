"""Sinks: destinations of a run's events in addition to its event log, such as files and experiment trackers."""

from .dispatcher import DROPPED, SinkDispatcher
from .registry import SINKS, LogTo, make_sinks
from .sink import About, NumberSink, Sink, default_params

__all__ = ["Sink", "NumberSink", "About", "SinkDispatcher", "DROPPED", "SINKS", "LogTo", "make_sinks", "default_params"]
