"""Where a run's events go besides its own log: files and the tools that people watch runs with."""

from .dispatcher import DROPPED, SinkDispatcher
from .registry import SINKS, LogTo, make_sinks
from .sink import About, NumberSink, Sink

__all__ = ["Sink", "NumberSink", "About", "SinkDispatcher", "DROPPED", "SINKS", "LogTo", "make_sinks"]
