"""Starting and supervising ranks: engines, the coordinator, joining hosts, resolvers and leases."""

from .engine import AfterLoss, Engine, RunningJob, engine_for
from .existing_cluster import TRAINERS, described, join_launched, launched, meet, whole_host
from .joining.hosts import JoinedHosts
from .joining.join import Join
from .joining.tls import TLS_VARIABLE, tls_here
from .joining.token import TOKEN_VARIABLE, write_token
from .leases import Holder, holders, leased
from .local import LocalEngine
from .rendezvous import regroup
from .resolvers.resolver import CHIEF, EVALUATOR, SERVER, WORKER, Host, ResolvedCluster
from .restart_policy import RankFailure, RestartPolicy
from .service import Make, Service
from .zygote import life_descriptor

__all__ = [
    "AfterLoss",
    "CHIEF",
    "ResolvedCluster",
    "EVALUATOR",
    "Engine",
    "Holder",
    "Host",
    "RunningJob",
    "Join",
    "RestartPolicy",
    "LocalEngine",
    "RankFailure",
    "Make",
    "SERVER",
    "Service",
    "TLS_VARIABLE",
    "TOKEN_VARIABLE",
    "TRAINERS",
    "JoinedHosts",
    "WORKER",
    "described",
    "engine_for",
    "holders",
    "join_launched",
    "launched",
    "leased",
    "life_descriptor",
    "meet",
    "regroup",
    "tls_here",
    "whole_host",
    "write_token",
]
