"""Who works together and where: devices, worlds, and the engines that start ranks."""

from .devices import Device, devices, num_cores, resolve, this_host
from .engine import Engine, Job, OnEvent, OnOutput
from .health import Finding, doctor
from .launched import join_launched, launched, meet
from .leases import leased
from .line import DirectLine, Line
from .local import LocalEngine
from .resolvers import Cluster, Host, HostsFile, Place, Resolver, understood
from .torch_world import TorchWorld
from .world import DEFAULT_TIMEOUT, NullWorld, Pending, Seat, World, current_world, enter_world, innermost

__all__ = [
    "Device",
    "devices",
    "resolve",
    "this_host",
    "num_cores",
    "leased",
    "doctor",
    "Finding",
    "World",
    "innermost",
    "NullWorld",
    "TorchWorld",
    "Pending",
    "Seat",
    "Line",
    "DirectLine",
    "current_world",
    "enter_world",
    "Engine",
    "Job",
    "OnEvent",
    "OnOutput",
    "LocalEngine",
    "launched",
    "join_launched",
    "meet",
    "understood",
    "Cluster",
    "Host",
    "Place",
    "Resolver",
    "HostsFile",
    "DEFAULT_TIMEOUT",
]
