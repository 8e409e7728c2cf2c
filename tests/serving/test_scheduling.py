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


def test_parsing_gives_up_its_core_inside_of_a_c_function() -> None:
    """A text that takes 100 ms of one call in C would keep the core until the kernel's next tick otherwise."""
    program = """
import resource, time
from manyhands.serving.parsing import PAUSE_SECONDS, Parser

def hash_for_long(size):
    import hashlib
    began = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.process_time()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - began[0], time.process_time() - began[1]

(switches, seconds), refusal = Parser(None).parse(hash_for_long, 200_000)
time.sleep(0.01)
print(switches * PAUSE_SECONDS / seconds, refusal)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    share, refusal = done.stdout.split()
    assert float(share) > 0.3
    assert refusal == "None"
