"""Cluster resolvers: describe the cluster from torchrun, SLURM, Kubernetes, MPI, a TF_CONFIG or a hosts file."""

from .hosts_file import HostsFile, is_hosts_file
from .registry import CHOICE, RESOLVERS, understood
from .resolver import CHIEF, EVALUATOR, SERVER, WORKER, Host, ResolvedCluster, Resolver, Standing, expand

__all__ = [
    "understood",
    "ResolvedCluster",
    "Host",
    "Standing",
    "Resolver",
    "HostsFile",
    "is_hosts_file",
    "RESOLVERS",
    "CHOICE",
    "CHIEF",
    "WORKER",
    "SERVER",
    "EVALUATOR",
    "expand",
]
