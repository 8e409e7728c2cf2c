"""Command `manyhands manifest`: print a job file for SLURM or Kubernetes that runs a command on several hosts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..core import SettingsError, option, resolve_options
from .generated_options import with_options
from .manifest_serving import Served, serving
from .options import add_command

PORT = 29500
MAX_RESTARTS = 10
"""Number of times that a scheduler restarts a job whose pods fail or are evicted."""
YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Names that YAML parses as booleans or null instead of strings."""


@dataclass(frozen=True, kw_only=True)
class ManifestRequest:
    """The command of a job, and the resources that the job requests.

    Attributes:
        command: The words of the command; every host runs it.
        name: Name of the job.
        hosts: Number of hosts.
        gpus: GPUs per host; 0 for the CPU.
        image: Container image (Kubernetes).
        claim: Volume claim for the runs (Kubernetes); empty for none.
        time: Time limit (SLURM), as HH:MM:SS.
    """

    command: tuple[str, ...]
    name: str
    hosts: int
    gpus: int
    image: str
    claim: str
    time: str

    @property
    def ranks(self) -> int:
        """Number of ranks per host: one per GPU, or one for the CPU."""
        return max(1, self.gpus)


@dataclass(frozen=True, kw_only=True)
class PodScaling:
    """Scaling: the number of pods of a deployment (--serve)."""

    max_hosts: int = option(10, "Maximum number of pods when the queue grows; 10 by default.", in_files=False)
    queue_rows: int = option(
        64, "Rows that wait in a pod before another pod is started; 64 by default.", in_files=False
    )


Scheduler = Annotated[
    str, typer.Argument(metavar="SCHEDULER", help="kubernetes (PyTorchJob), jobset or slurm.", show_default=False)
]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="COMMAND", help="Command to run on every host, after --.", show_default=False),
]
Hosts = Annotated[int, typer.Option(help="Number of hosts.")]
Gpus = Annotated[int, typer.Option(help="GPUs per host; 0 for the CPU.")]
Name = Annotated[str, typer.Option(help="Name of the job.")]
Image = Annotated[str, typer.Option(help="Container image with manyhands (Kubernetes).")]
Claim = Annotated[str, typer.Option(help="Volume claim for the runs, mounted at /runs on all hosts (Kubernetes).")]
Time = Annotated[str, typer.Option(help="Time limit of the job (SLURM).")]
Serve = Annotated[
    bool,
    typer.Option("--serve", help="Print a deployment that serves the models in --claim instead of a job (Kubernetes)."),
]

EXAMPLES = (
    "manyhands manifest slurm --hosts 4 --gpus 8 -- manyhands fit train.py --epochs 3 > job.sh",
    "manyhands manifest kubernetes --hosts 2 --gpus 1 --image registry/train:1 -- manyhands fit train.py",
    "manyhands manifest kubernetes --serve --image registry/serve:1 --claim models --gpus 0",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, manifest, EXAMPLES)


@with_options(PodScaling)
def manifest(
    scheduler: Scheduler,
    command: Command = None,
    hosts: Hosts = 2,
    gpus: Gpus = 1,
    name: Name = "train",
    image: Image = "IMAGE",
    claim: Claim = "",
    time: Time = "24:00:00",
    serve: Serve = False,
    *,
    given: dict[str, Any],
) -> None:
    """Print a manifest that runs a command on many hosts: sbatch for SLURM, a PyTorchJob or a JobSet for Kubernetes.

    Every host runs the same command, and manyhands finds the other hosts from the variables that the scheduler sets.
    With --serve the manifest is a deployment that serves a volume of models, with probes, graceful shutdown, and
    scaling by the length of the queue.
    """
    if scheduler not in MANIFESTS:
        raise SettingsError(
            f"the scheduler must be one of {', '.join(MANIFESTS)}", got=repr(scheduler), remedy="choose one of them"
        )
    if serve:
        scaling = resolve_options((PodScaling,), given).of(PodScaling)
        _check_server(scheduler, command, hosts, scaling, gpus)
        if not claim:
            raise SettingsError(
                "--serve needs a volume claim with the models", remedy="pass --claim NAME, for example --claim models"
            )
        _check_names(name, claim)
        served = Served(
            name="serve" if name == "train" else name, image=image, claim=claim, pods=hosts, max_pods=scaling.max_hosts,
            gpus=gpus, queue_rows=scaling.queue_rows,
        )  # fmt: skip
        typer.echo(serving(served), nl=False)
        return
    wanted = ManifestRequest(
        command=tuple(command or ()), name=name, hosts=hosts, gpus=gpus, image=image, claim=claim, time=time
    )
    _check(wanted)
    typer.echo(MANIFESTS[scheduler](wanted), nl=False)


def slurm(wanted: ManifestRequest) -> str:
    """Return a script for sbatch, in which srun starts one task per device."""
    gpus = f"#SBATCH --gpus-per-node={wanted.gpus}\n" if wanted.gpus else ""
    return (
        "#!/bin/bash\n"
        f"#SBATCH --job-name={wanted.name}\n"
        f"#SBATCH --nodes={wanted.hosts}\n"
        f"#SBATCH --ntasks-per-node={wanted.ranks}\n"
        f"{gpus}"
        f"#SBATCH --time={wanted.time}\n"
        "#SBATCH --output=%x-%j.log\n"
        "#SBATCH --requeue\n"
        "\n"
        "# A task per device; manyhands reads hosts and ranks from SLURM's variables.\n"
        "set -euo pipefail\n"
        "# The ranks authenticate each other; the token is in no file and no argument.\n"
        "MANYHANDS_TOKEN=${MANYHANDS_TOKEN:-$(openssl rand -hex 32)}\n"
        "export MANYHANDS_TOKEN\n"
        f"srun --kill-on-bad-exit=1 {shlex.join(wanted.command)}\n"
    )


def pytorchjob(wanted: ManifestRequest) -> str:
    """Return a PyTorchJob of Kubeflow: a master and workers with the same pod template."""
    template = _indented(_pod(wanted, _launched(wanted)), 10)
    replicas = [("Master", 1), ("Worker", wanted.hosts - 1)]
    parts = "".join(
        f"    {role}:\n      replicas: {count}\n      restartPolicy: OnFailure\n      template:\n{template}"
        for role, count in replicas
        if count
    )
    return (
        f"{_secret(wanted)}"
        "apiVersion: kubeflow.org/v1\n"
        "kind: PyTorchJob\n"
        "metadata:\n"
        f"  name: {wanted.name}\n"
        "spec:\n"
        "  runPolicy:\n"
        f"    backoffLimit: {MAX_RESTARTS}\n"
        f'  nprocPerNode: "{wanted.ranks}"\n'
        "  pytorchReplicaSpecs:\n"
        f"{parts}"
    )


def jobset(wanted: ManifestRequest) -> str:
    """Return a Kubernetes JobSet with one indexed job, whose pods reach each other by name."""
    first = f"{wanted.name}-workers-0-0.{wanted.name}"
    command = _launched(
        wanted,
        f"--nnodes={wanted.hosts}", f"--nproc-per-node={wanted.ranks}", "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={first}", f"--master-port={PORT}",
    )  # fmt: skip
    environ = {"MANYHANDS_HOSTS": str(wanted.hosts), "MASTER_ADDR": first, "MASTER_PORT": str(PORT)}
    return (
        f"{_secret(wanted)}"
        "apiVersion: jobset.x-k8s.io/v1alpha2\n"
        "kind: JobSet\n"
        "metadata:\n"
        f"  name: {wanted.name}\n"
        "spec:\n"
        "  failurePolicy:\n"
        f"    maxRestarts: {MAX_RESTARTS}\n"
        "  replicatedJobs:\n"
        "  - name: workers\n"
        "    replicas: 1\n"
        "    template:\n"
        "      spec:\n"
        f"        parallelism: {wanted.hosts}\n"
        f"        completions: {wanted.hosts}\n"
        "        backoffLimit: 0\n"
        "        template:\n"
        f"{_indented(_pod(wanted, command, environ, restart='Never'), 12 - 2)}"
    )


MANIFESTS: dict[str, Callable[[ManifestRequest], str]] = {"kubernetes": pytorchjob, "jobset": jobset, "slurm": slurm}


def _launched(wanted: ManifestRequest, *options: str) -> tuple[str, ...]:
    """Return the command of a pod: the requested one, or torchrun, which starts that one once per device of a pod."""
    # Kubernetes replaces $(NAME) in a command by the variable, and $$ by $.
    command = tuple(word.replace("$", "$$") for word in wanted.command)
    return command if wanted.ranks == 1 else ("torchrun", *options, "--no-python", *command)


def _secret(wanted: ManifestRequest) -> str:
    """Return comments for the head of a manifest: how to create the secret, and a note if there is no volume."""
    note = (
        ""
        if wanted.claim
        else "# Without --claim a restarted job starts from the beginning, because checkpoints end with its pods.\n"
    )
    return (
        f"{note}"
        "# With this secret the ranks authenticate each other:\n"
        f"# kubectl create secret generic {wanted.name} --from-file=token=<(openssl rand -hex 32)\n"
    )


def _pod(
    wanted: ManifestRequest, command: tuple[str, ...], environ: dict[str, str] | None = None, restart: str = ""
) -> list[str]:
    """Return the lines of a pod template; strings are written as JSON, which is valid YAML."""
    # With a volume, a restarted job resumes the run that has the name of the job.
    kept = {"MANYHANDS_FOLDER": "/runs", "MANYHANDS_NAME": wanted.name, "MANYHANDS_RESUME": "auto"}
    variables = {**(environ or {}), **(kept if wanted.claim else {})}
    lines = ["spec:"]
    if restart:
        lines.append(f"  restartPolicy: {restart}")
    lines += [
        "  automountServiceAccountToken: false",
        "  securityContext:",
        "    seccompProfile: {type: RuntimeDefault}",
        "  containers:",
        "  - name: pytorch",
        f"    image: {json.dumps(wanted.image)}",
        f"    command: {json.dumps(list(command))}",
        "    securityContext:",
        "      allowPrivilegeEscalation: false",
        '      capabilities: {drop: ["ALL"]}',
        "    env:",
        "    - name: MANYHANDS_TOKEN",
        f"      valueFrom: {{secretKeyRef: {{name: {wanted.name}, key: token, optional: true}}}}",
    ]
    for key, value in variables.items():
        lines += [f"    - name: {key}", f"      value: {json.dumps(value)}"]
    if wanted.gpus:
        lines += ["    resources:", "      limits:", f"        nvidia.com/gpu: {wanted.gpus}"]
    # Ranks of one pod and the workers that read data share memory, of which a pod has 64 MB by default.
    lines += ["    volumeMounts:", "    - name: memory", "      mountPath: /dev/shm"]
    lines += ["    - name: runs", "      mountPath: /runs"] if wanted.claim else []
    lines += ["  volumes:", "  - name: memory", "    emptyDir:", "      medium: Memory"]
    if wanted.claim:
        lines += ["  - name: runs", "    persistentVolumeClaim:", f"      claimName: {wanted.claim}"]
    return lines


def _indented(lines: list[str], spaces: int) -> str:
    return "".join(f"{' ' * spaces}{line}\n" for line in lines)


def _check(wanted: ManifestRequest) -> None:
    """Raise SettingsError for an invalid request, so that no part of it can change the meaning of the job file."""
    if not wanted.command:
        raise SettingsError(
            "no command was given for the job", remedy="write it after --, for example -- manyhands fit train.py"
        )
    for what, value, least in (("--hosts", wanted.hosts, 1), ("--gpus", wanted.gpus, 0)):
        if value < least:
            raise SettingsError(f"{what} must be at least {least}", got=value, remedy="pass a larger number")
    _check_names(wanted.name, wanted.claim or "a")
    if not re.fullmatch(r"[0-9:-]+", wanted.time):
        raise SettingsError(
            "--time must be written as HH:MM:SS", got=repr(wanted.time), remedy="write for example --time 24:00:00"
        )


def _check_names(name: str, claim: str) -> None:
    for what, text in (("--name", name), ("--claim", claim)):
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", text):
            raise SettingsError(
                f"{what} must consist of lowercase letters, digits and -, at most 40 characters",
                got=repr(text),
                remedy="choose another name",
            )
        if text in YAML_WORDS:
            raise SettingsError(
                f"{what} must not be a word that YAML reads as a boolean or null",
                got=repr(text),
                remedy="choose another name",
            )


def _check_server(scheduler: str, command: list[str] | None, hosts: int, scaling: PodScaling, gpus: int) -> None:
    if scheduler != "kubernetes" or command:
        got = scheduler if scheduler != "kubernetes" else " ".join(command or [])
        raise SettingsError(
            "--serve must be used with kubernetes and without a command",
            got=repr(got),
            remedy="run manyhands manifest kubernetes --serve --image IMAGE --claim models",
        )
    for what, value, least in (("--hosts", hosts, 1), ("--max-hosts", scaling.max_hosts, hosts), ("--gpus", gpus, 0)):
        if value < least:
            raise SettingsError(f"{what} must be at least {least}", got=value, remedy="pass a larger number")
    if scaling.queue_rows < 1:
        raise SettingsError("--queue-rows must be at least 1", got=scaling.queue_rows, remedy="pass a larger number")
