"""Who works together and where: devices, worlds, and the engines that start ranks."""

from .authentication import ObjectGather, RankKey
from .devices import Device, devices, num_cores, place_of, resolve, this_host
from .engine import AfterLoss, Engine, Job, OnEvent, OnOutput
from .engines import engine_for
from .health import Finding, doctor
from .joining import TLS_VARIABLE, TOKEN_VARIABLE, Join, Team, tls_here, write_token
from .judgement import Judgement, Loss
from .launched import TRAINERS, described, join_launched, launched, meet, whole_host
from .leases import leased
from .line import DirectLine, Line
from .links import Link, Reach, reach
from .local import LocalEngine
from .messages import Opaque, is_plain, message
from .network import resolve_host
from .pretended import PretendedWorld
from .resolvers import CHIEF, EVALUATOR, SERVER, WORKER, Cluster, Host, HostsFile, Resolver, Standing, understood
from .service import Make, Service
from .summons import regroup
from .survey import Facts, Survey, survey
from .torch_world import TorchWorld
from .world import (
    DEFAULT_TIMEOUT,
    NullWorld,
    Pending,
    Seat,
    World,
    caller_lines,
    current_world,
    enter_world,
    groups_along,
    innermost,
)

__all__ = [
    "Device",
    "devices",
    "resolve",
    "place_of",
    "this_host",
    "num_cores",
    "leased",
    "doctor",
    "Finding",
    "World",
    "caller_lines",
    "innermost",
    "NullWorld",
    "TorchWorld",
    "PretendedWorld",
    "Pending",
    "Seat",
    "Line",
    "DirectLine",
    "current_world",
    "enter_world",
    "groups_along",
    "Engine",
    "AfterLoss",
    "Job",
    "OnEvent",
    "OnOutput",
    "LocalEngine",
    "Service",
    "Make",
    "engine_for",
    "described",
    "launched",
    "join_launched",
    "meet",
    "whole_host",
    "Join",
    "TOKEN_VARIABLE",
    "TLS_VARIABLE",
    "tls_here",
    "Team",
    "write_token",
    "understood",
    "Cluster",
    "Host",
    "CHIEF",
    "WORKER",
    "SERVER",
    "TRAINERS",
    "EVALUATOR",
    "resolve_host",
    "ObjectGather",
    "RankKey",
    "Opaque",
    "is_plain",
    "message",
    "Standing",
    "Resolver",
    "HostsFile",
    "reach",
    "Reach",
    "Link",
    "survey",
    "Survey",
    "Facts",
    "regroup",
    "Judgement",
    "Loss",
    "DEFAULT_TIMEOUT",
]
