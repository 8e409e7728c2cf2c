"""Where a run's events go besides its own log: files and the tools that people watch runs with."""

from .outlets import Outlets
from .registry import SINKS, LogTo, make_sinks
from .sink import About, NumberSink, Sink

__all__ = ["Sink", "NumberSink", "About", "Outlets", "SINKS", "LogTo", "make_sinks"]
