"""Environment variables as schedulers and launchers set them, and the cluster that each describes."""

from __future__ import annotations

import json
from typing import Any

TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/none_y/attempt_0/1/error.json",
}
SHELLS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOBID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "5",
    "SLURM_NPROCS": "5",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NODELIST": "gpu[07-08],big1",
    "SLURM_JOB_NODELIST": "gpu[07-08],big1",
    "SLURM_STEP_NODELIST": "gpu[07-08],big1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_SRUN_COMM_HOST": "10.0.0.7",
    "SLURM_CPUS_ON_NODE": "16",
    "SLURMD_NODENAME": "big1",
    "SLURM_CLUSTER_NAME": "alps",
}
SLURM_HOSTS = {
    **SLURM,
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "4",
}
SLURM_BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
PYTORCHJOB = {
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "digits-master-0",
    "PET_MASTER_ADDR": "digits-master-0",
    "WORLD_SIZE": "3",
    "RANK": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "2",
    "PET_NNODES": "3",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "MANYHANDS_HOSTS": "2",
    "MASTER_ADDR": "digits-workers-0-0.digits",
    "MASTER_PORT": "7777",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
    "OMPI_MCA_orte_ess_num_procs": "4",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1955594241",
    "MASTER_ADDR": "alpha",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}


def tf_config(cluster: Any, role: str = "worker", index: Any = 0) -> dict[str, str]:
    """The variable as a TensorFlow operator writes it."""
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"})
    }


TF_WORKERS = tf_config(
    {
        "chief": ["tf-chief-0.default.svc:2222"],
        "worker": ["tf-worker-0.default.svc:2222", "tf-worker-1.default.svc:2222"],
        "ps": ["tf-ps-0.default.svc:2222"],
        "evaluator": ["tf-evaluator-0.default.svc:2222"],
    },
    "worker",
    1,
)

SAMPLES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "torchrun": (
        TORCHRUN,
        {"source": "torchrun", "ranks": (3, 4, 1, 2), "hosts": ["node-a", "?"], "here": 1, "at": "node-a:29400",
         "generation": 2},
    ),
    "a shell per rank": (
        SHELLS,
        {"source": "torchrun", "ranks": (1, 2, 0, 1), "hosts": ["10.0.0.1", "?"], "here": 1, "at": "10.0.0.1:29500"},
    ),
    "srun": (
        SLURM,
        {"source": "SLURM", "ranks": (4, 5, 0, 1), "hosts": ["gpu07", "gpu08", "big1"], "here": 2, "at": "gpu07:19242"},
    ),
    "srun, a task per host of four GPUs": (
        SLURM_HOSTS,
        {"source": "SLURM", "ranks": None, "hosts": ["n1", "n2"], "here": 1, "at": "n1:19242", "size": 8},
    ),
    "sbatch without srun": (
        SLURM_BATCH,
        {"source": "SLURM", "ranks": None, "hosts": ["n1"], "here": 0, "at": "n1:15077", "warns": "srun before"},
    ),
    "PyTorchJob": (
        PYTORCHJOB,
        {"source": "Kubernetes", "ranks": None, "hosts": ["digits-master-0", "?", "?"], "here": 2,
         "at": "digits-master-0:23456"},
    ),
    "JobSet": (
        JOBSET,
        {"source": "Kubernetes", "ranks": None, "hosts": ["digits-workers-0-0.digits", "?"], "here": 1,
         "at": "digits-workers-0-0.digits:7777"},
    ),
    "mpirun": (
        OPEN_MPI,
        {"source": "MPI", "ranks": (3, 4, 1, 2), "hosts": ["alpha", "?"], "here": 1, "at": "alpha:29500"},
    ),
    "mpiexec on one host": (
        HYDRA,
        {"source": "MPI", "ranks": (1, 2, 1, 2), "hosts": ["127.0.0.1"], "here": 0, "at": "127.0.0.1:29500"},
    ),
    "TF_CONFIG": (
        TF_WORKERS,
        {"source": "TF_CONFIG", "ranks": None, "here": 2, "at": "tf-chief-0.default.svc:2222",
         "hosts": ["tf-chief-0.default.svc:2222", "tf-worker-0.default.svc:2222", "tf-worker-1.default.svc:2222",
                   "tf-ps-0.default.svc:2222", "tf-evaluator-0.default.svc:2222"]},
    ),
}  # fmt: skip
