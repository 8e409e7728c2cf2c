"""How the threads of a server share a core: answering requests goes before large or untrusted work."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

SLICE_NANOSECONDS = 100_000
"""The time slice that a thread asks for which must answer quickly; the kernel accepts no shorter one."""
_SET_ATTR = {"x86_64": 314, "aarch64": 274}
"""The number of the system call sched_setattr, which Python does not offer."""
_ATTR = struct.Struct("<IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period."""


def shorten_slice() -> bool:
    """Ask the kernel for short time slices of this thread, and return whether it agreed.

    A thread that wakes with a shorter slice preempts one with a longer slice at once. Otherwise it waits until the
    other thread has used its slice, which takes up to two ticks of the kernel's clock (8 ms). The thread does not get
    more time than others. Linux 6.12 and later support it; threads and processes that it starts inherit it.
    """
    return _set_slice(SLICE_NANOSECONDS)


def restore_slice() -> None:
    """Give this thread time slices of the usual length again.

    It keeps its niceness: a thread of less priority that holds the interpreter would hold up those that wait for it.
    """
    _set_slice(0)


def step_aside(nice: int) -> None:
    """Give this process less priority than the processes of its server that answer requests.

    Where the kernel groups processes by their session (sched_autogroup), niceness counts inside a session only, so the
    process gets a session of its own and the session gets the niceness.
    """
    restore_slice()
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    with contextlib.suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(nice))


@contextlib.contextmanager
def pausing(seconds: float) -> Iterator[None]:
    """Let the main thread of this process sleep for a moment at regular intervals, also inside of C functions.

    A process that computes without a pause keeps its core until the next tick of the kernel's clock (4 ms at 250 Hz)
    if the threads that wait for the core have just used more than their share. The pause ends that wait. A timer's
    signal calls `usleep` of the C library, which takes the signal's number as microseconds, because a handler in Python
    would run after the C function.

    The handler stays installed, because a signal that arrives after the last pause would end the process otherwise. So
    this is for processes that use SIGALRM for nothing else.

    Args:
        seconds: Time between two pauses. Each takes about 70 microseconds.
    """
    library = ctypes.CDLL(None)
    library.signal(signal.SIGALRM, ctypes.cast(library.usleep, ctypes.c_void_p))
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _set_slice(nanoseconds: int) -> bool:
    number = _SET_ATTR.get(platform.machine())
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTR.pack(_ATTR.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
    return int(ctypes.CDLL(None).syscall(number, 0, attributes, 0)) == 0
