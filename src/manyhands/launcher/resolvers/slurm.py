"""The SLURM resolver: the tasks of a step that srun started."""

from __future__ import annotations

import re

from ...core import SettingsError
from .resolver import Environ, Host, ResolvedCluster, Resolver, Standing, expand, number, port_of

_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
FIRST_PORT, NUM_PORTS = 15000, 15000
"""The range of rendezvous ports, below the ephemeral ones; the job id selects one, so that jobs on a host differ."""


class Slurm(Resolver):
    """Resolver that reads the node list, the tasks per node, and the number of this task."""

    name = "SLURM"

    def is_present(self, environ: Environ) -> bool:
        return "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ

    def read(self, environ: Environ) -> ResolvedCluster:
        names = _names(environ)
        if "SLURM_STEP_ID" not in environ and "SLURM_STEPID" not in environ:
            return self._batch_script(environ, names)
        num_tasks = number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
        counts = _tasks_per_node(environ, len(names), num_tasks)
        here = number(environ, "SLURM_NODEID", default=0)
        standing = Standing(
            rank=number(environ, "SLURM_PROCID"),
            size=num_tasks,
            local_rank=number(environ, "SLURM_LOCALID", default=0),
            local_size=counts[min(here, len(counts) - 1)],
        )
        num_gpus = _num_gpus(environ)
        # A task that is alone on its host starts one rank per device itself, if there are several devices.
        is_host = num_tasks == 1 or (num_gpus > 1 and set(counts) == {1})
        return ResolvedCluster(
            source=self.name,
            hosts=tuple(
                Host(name, (num_gpus or None) if is_host else count) for name, count in zip(names, counts, strict=True)
            ),
            here=here,
            address=environ.get("MASTER_ADDR") or names[0],
            port=_port(environ),
            standing=None if is_host else standing,
            generation=number(environ, "SLURM_RESTART_COUNT", default=0),
            variables=tuple(n for n in ("SLURM_PROCID", *_LISTS, *_TASKS) if n in environ),
        )

    def _batch_script(self, environ: Environ, names: list[str]) -> ResolvedCluster:
        """Return a cluster of one host: the script that sbatch runs is one process on the first host."""
        warning = (
            f"the job has {len(names)} hosts ({', '.join(names)}), but srun did not start this process: it is alone on "
            f"{names[0]}; write srun before the command"
        )
        return ResolvedCluster(
            source=self.name,
            hosts=(Host(names[0]),),
            here=0,
            address=names[0],
            port=_port(environ),
            variables=("SLURM_JOB_ID",),
            warnings=(warning,) if len(names) > 1 else (),
        )


def _names(environ: Environ) -> list[str]:
    for name in _LISTS:
        if environ.get(name):
            return expand(environ[name])
    raise SettingsError("SLURM_JOB_NODELIST must be set", remedy="start the command with srun")


def _tasks_per_node(environ: Environ, num_hosts: int, num_tasks: int) -> list[int]:
    """Return the number of tasks of every host, which SLURM writes as "2(x3),1" for 2, 2, 2, 1."""
    text = next((environ[name] for name in _TASKS if environ.get(name)), "")
    counts: list[int] = []
    for piece in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if match is None:
            raise SettingsError(
                "tasks per node must be written like 2(x3),1",
                got=repr(text),
                remedy="check the options of the SLURM job",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if not counts and num_tasks % num_hosts == 0:
        counts = [num_tasks // num_hosts] * num_hosts
    if len(counts) != num_hosts:
        raise SettingsError(
            f"SLURM must set the number of tasks of each of the {num_hosts} hosts",
            got=repr(text) if text else f"{num_tasks} tasks",
            remedy="pass --ntasks-per-node",
        )
    return counts


def _num_gpus(environ: Environ) -> int:
    text = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else 0


def _port(environ: Environ) -> int:
    return port_of(environ, FIRST_PORT + number(environ, "SLURM_JOB_ID") % NUM_PORTS)
