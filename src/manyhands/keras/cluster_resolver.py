"""Cluster resolvers under TensorFlow's names, based on manyhands' own cluster detection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ..core import DeviceError, SettingsError
from ..launcher import ResolvedCluster, described


class ClusterResolver:
    """Resolver that describes the cluster of this process, as its environment defines it."""

    source = "TF_CONFIG, a scheduler or torchrun"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._cluster: ResolvedCluster | None = described()

    @property
    def task_type(self) -> str | None:
        """This process's role: chief, worker, ps or evaluator; None outside of a cluster."""
        return None if self._cluster is None else self._cluster.host.role

    @property
    def task_id(self) -> int | None:
        """Index of this process among the processes with its role; None outside of a cluster."""
        if self._cluster is None:
            return None
        alike = [index for index, host in enumerate(self._cluster.hosts) if host.role == self.task_type]
        return alike.index(self._cluster.here)

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of the cluster's processes by role; an empty ClusterSpec outside of a cluster."""
        jobs: dict[str, list[str]] = {}
        for host in () if self._cluster is None else self._cluster.hosts:
            jobs.setdefault(host.role, []).append(f"{host.name}:{host.port}" if host.port else host.name)
        return ClusterSpec(jobs)

    def num_accelerators(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        """Return the number of this host's GPUs as `{"GPU": number}`; an empty dict if it has none."""
        import torch

        return {"GPU": torch.cuda.device_count()} if torch.cuda.is_available() else {}

    def master(self, *args: Any, **kwargs: Any) -> str:
        """Return the address and port at which the ranks rendezvous; an empty string outside of a cluster."""
        return "" if self._cluster is None else f"{self._cluster.address}:{self._cluster.port}"


class ClusterSpec:
    """The addresses of a cluster's processes by role, such as "chief", "worker" or "ps".

    >>> cluster = ClusterSpec({"worker": ["a:1", "b:1"]})
    >>> cluster, cluster.num_tasks("worker")
    (ClusterSpec({'worker': ['a:1', 'b:1']}), 2)
    """

    def __init__(self, jobs: Mapping[str, list[str]]) -> None:
        self._jobs = {name: list(addresses) for name, addresses in jobs.items()}

    def __repr__(self) -> str:
        return f"ClusterSpec({self._jobs})"

    @property
    def jobs(self) -> list[str]:
        """The roles that processes of the cluster have, sorted."""
        return sorted(self._jobs)

    def as_dict(self) -> dict[str, list[str]]:
        """Return a dict of the addresses by role."""
        return dict(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of processes with the role `job_name`."""
        return len(self._jobs[job_name])

    def job_tasks(self, job_name: str) -> list[str]:
        """Return the addresses of the processes with the role `job_name`."""
        return list(self._jobs[job_name])


class TFConfigClusterResolver(ClusterResolver):
    """Resolver for TF_CONFIG; if that is not set, for any other cluster environment that is detected."""


class SlurmClusterResolver(ClusterResolver):
    """Resolver for SLURM's environment."""


class KubernetesClusterResolver(ClusterResolver):
    """Resolver for the environment that Kubeflow or a headless service sets in a pod."""


class SimpleClusterResolver(ClusterResolver):
    """Resolver that returns the cluster that the caller gives.

    The ranks still rendezvous by their environment, such as TF_CONFIG; a cluster described there must be the same.
    """

    def __init__(self, cluster_spec: ClusterSpec | Mapping[str, list[str]], **kwargs: Any) -> None:
        super().__init__()
        given = cluster_spec.as_dict() if isinstance(cluster_spec, ClusterSpec) else dict(cluster_spec)
        if self._cluster is not None and self.cluster_spec().as_dict() != given:
            raise SettingsError(
                f"cluster_spec must be the cluster that {self._cluster.source} describes",
                got=f"{given} instead of {self.cluster_spec().as_dict()}",
                remedy="omit the resolver, or correct one of the two",
            )
        self._given = given

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self._given) if hasattr(self, "_given") else super().cluster_spec()


class GCEClusterResolver(ClusterResolver):
    """Not supported: manyhands does not query cloud APIs for the members of an instance group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise SettingsError(
            "a resolver must read the environment, because manyhands does not query cloud APIs",
            got="GCEClusterResolver",
            remedy="run manyhands launch script.py --hosts N --join FIRST:PORT on each machine, or set TF_CONFIG",
        )


class TPUClusterResolver(ClusterResolver):
    """Not supported: manyhands has no TPU devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _no_tpu("TPUClusterResolver")


def TPUStrategy(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise DeviceError: TPUs are not supported."""
    _no_tpu("TPUStrategy")


def _no_tpu(what: str) -> NoReturn:
    raise DeviceError(
        "TPUs are not supported",
        got=what,
        remedy="use MirroredStrategy or MultiWorkerMirroredStrategy on GPUs or CPUs, or Keras with JAX for TPUs",
    )
