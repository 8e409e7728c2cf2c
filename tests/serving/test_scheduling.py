"""Priorities of a server's processes."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os
from manyhands.serving.scheduling import shorten_slice, step_aside
shorten_slice()
step_aside(7)
print(os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0) == os.getpid(), open("/proc/self/autogroup").read().split()[-1])
"""


def test_low_priority_process_runs_in_its_own_session_with_higher_nice_value() -> None:
    """Where the kernel groups processes by session, niceness inside of one says nothing to the others."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    nice, has_session, session_nice = done.stdout.split()
    assert (int(nice), has_session) == (7, "True")
    with open("/proc/sys/kernel/sched_autogroup_enabled") as file:
        assert int(session_nice) == 7 or file.read().strip() == "0"


def test_json_parser_process_runs_in_its_own_session() -> None:
    program = "from manyhands.serving.parsing import Parser; import os; Parser(None); print(os.getsid(0), os.getpid())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    session, process = map(int, done.stdout.split())
    assert session == process != os.getsid(0)
