"""The MPI resolver: processes of mpirun or mpiexec, which set Open MPI's or PMI's variables."""

from __future__ import annotations

from ...core import SettingsError
from .resolver import Environ, ResolvedCluster, Resolver, Standing, named, number, port_of

LOOPBACK = "127.0.0.1"


class Mpi(Resolver):
    """Resolver that reads the rank of a process in the job and on its host; MPI sets no address of the first rank."""

    name = "MPI"

    def is_present(self, environ: Environ) -> bool:
        return "OMPI_COMM_WORLD_RANK" in environ or ("PMI_RANK" in environ and "PMI_SIZE" in environ)

    def read(self, environ: Environ) -> ResolvedCluster:
        standing = Standing(
            rank=number(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
            size=number(environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
            local_rank=number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", default=0),
            local_size=number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", default=1),
        )
        is_one_host = standing.size == standing.local_size
        address = environ.get("MASTER_ADDR") or (LOOPBACK if is_one_host else "")
        if not address:
            raise SettingsError(
                "ranks on several hosts need MASTER_ADDR for the rendezvous, which MPI does not set",
                remedy="write mpirun -x MASTER_ADDR=FIRST_HOST (mpiexec -genv MASTER_ADDR FIRST_HOST)",
            )
        num_hosts = 1 if is_one_host else -(-standing.size // standing.local_size)
        alike = standing.local_size if num_hosts * standing.local_size == standing.size else None
        return ResolvedCluster(
            source=self.name,
            hosts=named(num_hosts, {0: address}, alike),
            here=min(standing.rank // standing.local_size, num_hosts - 1),
            address=address,
            port=port_of(environ),
            standing=standing if standing.size > 1 else None,
            variables=tuple(n for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MASTER_ADDR") if n in environ),
        )
