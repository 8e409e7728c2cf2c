"""Fakes and contract kits that we ship: a world of threads with scripted faults, contracts, a look for leaks."""

from .contracts import Runner, WorldContract
from .leaks import Footprint, no_leaks
from .policies import PolicyContract
from .threads import Faults, InjectedFault, ThreadWorld, run_threads

__all__ = [
    "ThreadWorld",
    "run_threads",
    "Faults",
    "InjectedFault",
    "WorldContract",
    "PolicyContract",
    "Runner",
    "Footprint",
    "no_leaks",
]
