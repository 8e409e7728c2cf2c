"""Fakes and contract kits that we ship: threads with scripted faults, hosts, contracts, a look for leaks."""

from .contracts import Runner, WorldContract
from .hosts import Host, Hosts
from .leaks import Footprint, no_leaks
from .policies import PolicyContract
from .ports import held_ports
from .services import ServiceContract
from .threads import Faults, InjectedFault, ThreadWorld, run_threads

__all__ = [
    "ThreadWorld",
    "run_threads",
    "Faults",
    "InjectedFault",
    "WorldContract",
    "PolicyContract",
    "ServiceContract",
    "Runner",
    "Host",
    "Hosts",
    "Footprint",
    "no_leaks",
    "held_ports",
]
