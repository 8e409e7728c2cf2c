"""The Kubernetes resolver: pods of a Kubeflow PyTorchJob or TrainJob, or of a JobSet."""

from __future__ import annotations

from ...core import SettingsError
from .resolver import Environ, ResolvedCluster, Resolver, named, number, port_of

NUM_HOSTS = "MANYHANDS_HOSTS"
"""Environment variable with the number of pods of a JobSet, which the manifest sets: Kubernetes gives only an index."""


class Kubernetes(Resolver):
    """Resolver that reads PET_* of Kubeflow's operators, or the index of an indexed job; every pod counts as a host."""

    name = "Kubernetes"

    def is_present(self, environ: Environ) -> bool:
        return "PET_NNODES" in environ or ("JOB_COMPLETION_INDEX" in environ and NUM_HOSTS in environ)

    def read(self, environ: Environ) -> ResolvedCluster:
        is_kubeflow = "PET_NNODES" in environ
        address = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR", "")
        if not address:
            raise SettingsError(
                "neither PET_MASTER_ADDR nor MASTER_ADDR is set, so the pods have no rendezvous address",
                remedy="give the job a Master replica" if is_kubeflow else "set MASTER_ADDR to the first pod",
            )
        _require_one_master(environ)
        num_hosts = _num_pods(environ) if is_kubeflow else number(environ, NUM_HOSTS)
        return ResolvedCluster(
            source=self.name,
            hosts=named(num_hosts, {0: address}, _num_ranks(environ)),
            here=number(environ, "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK"),
            address=address,
            port=port_of(environ, port_of(environ), "PET_MASTER_PORT"),
            generation=number(environ, "JOBSET_RESTART_ATTEMPT", default=0),
            variables=tuple(n for n in ("PET_NNODES", "PET_NODE_RANK", "JOB_COMPLETION_INDEX") if n in environ),
        )


def _num_pods(environ: Environ) -> int:
    """Return the number of pods; raise SettingsError for the range of an elastic job, such as "1:4"."""
    text = environ["PET_NNODES"]
    if not text.isdecimal():
        raise SettingsError(
            "PET_NNODES must be a fixed number of pods", got=repr(text), remedy="remove elasticPolicy from the job"
        )
    return int(text)


def _num_ranks(environ: Environ) -> int | None:
    text = environ.get("PET_NPROC_PER_NODE", "")
    return int(text) if text.isdecimal() else None


def _require_one_master(environ: Environ) -> None:
    mine, theirs = environ.get("MASTER_ADDR"), environ.get("PET_MASTER_ADDR")
    if mine and theirs and mine != theirs:
        raise SettingsError(
            "a cluster must have one master",
            got=f"MASTER_ADDR={mine} and PET_MASTER_ADDR={theirs}",
            remedy="remove MASTER_ADDR from the pod template",
        )
