"""Test utilities for users: ranks as threads with scripted faults, simulated hosts, contract tests, leak detection."""

from .contracts import Runner, WorldContract
from .hosts import NamespaceHost, NamespaceHosts
from .leaks import ResourceSnapshot, no_leaks
from .policies import PolicyContract
from .services import ServiceContract, held_ports
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
    "NamespaceHost",
    "NamespaceHosts",
    "ResourceSnapshot",
    "no_leaks",
    "held_ports",
]
