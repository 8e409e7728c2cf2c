"""The torchrun resolver, also for ranks that are started by hand with the same variables."""

from __future__ import annotations

from ...core import SettingsError
from .kubernetes import Kubernetes
from .resolver import Environ, ResolvedCluster, Resolver, Standing, named, number, port_of


class Torchrun(Resolver):
    """Resolver that reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and torchrun's other variables if set."""

    name = "torchrun"

    def is_present(self, environ: Environ) -> bool:
        has_rank = "RANK" in environ and "WORLD_SIZE" in environ
        # Kubeflow sets the same two variables for a pod, which may hold several ranks.
        return has_rank and ("LOCAL_RANK" in environ or not Kubernetes().is_present(environ))

    def read(self, environ: Environ) -> ResolvedCluster:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise SettingsError(
                    "ranks that were launched need RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                    got=f"no {name}",
                    remedy="set it, or unset RANK and WORLD_SIZE",
                )
        standing = Standing(
            rank=number(environ, "RANK"),
            size=number(environ, "WORLD_SIZE"),
            local_rank=number(environ, "LOCAL_RANK", default=0),
            local_size=number(environ, "LOCAL_WORLD_SIZE", default=1),
        )
        # Without torchrun it is unknown which ranks share a host, so each counts as its own host.
        num_hosts = number(environ, "GROUP_WORLD_SIZE", default=max(1, standing.size // max(1, standing.local_size)))
        here = number(environ, "GROUP_RANK", default=min(standing.rank // max(1, standing.local_size), num_hosts - 1))
        alike = standing.local_size if num_hosts * standing.local_size == standing.size else None
        return ResolvedCluster(
            source=self.name,
            hosts=named(num_hosts, {0: environ["MASTER_ADDR"]}, alike),
            here=here,
            address=environ["MASTER_ADDR"],
            port=port_of(environ),
            standing=standing,
            generation=number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
            is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            variables=tuple(n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n in environ),
        )
