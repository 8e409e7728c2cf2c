"""`manyhands manifest`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from manyhands.launcher.resolvers.registry import understood

from .conftest import Invoke

COMMAND = ("--", "manyhands", "fit", "train.py", 'note=it\'s: #1 "quoted"', "--epochs", "3")
WORDS = list(COMMAND[1:])


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    return dict(found)


def test_kubernetes_manifest_is_a_pytorchjob(invoke: Invoke) -> None:
    result = invoke("manifest", "kubernetes", "--hosts", 3, "--image", "reg/x:1", "--claim", "runs", *COMMAND)
    assert result.exit_code == 0, result.output
    job = yaml.safe_load(result.stdout)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (job["kind"], replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == ("PyTorchJob", 1, 2)
    pod = container(replicas["Worker"]["template"])
    assert pod == container(replicas["Master"]["template"])
    assert pod["command"] == WORDS
    assert pod["name"] == "pytorch"  # the operator looks for it by this name
    assert pod["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert {"name": "MANYHANDS_FOLDER", "value": "/runs"} in pod["env"]


@pytest.mark.parametrize(
    ("scheduler", "find"),
    [
        ("kubernetes", lambda job: job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]),
        ("jobset", lambda job: job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]),
    ],
)
def test_restarted_pod_resumes_the_run_of_the_job(
    invoke: Invoke, scheduler: str, find: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = ("fit", "small_task.py", "--epochs")
    printed = invoke("manifest", scheduler, "--name", "digits", "--hosts", 1, "--claim", "runs", "--", *fit, 1).stdout
    job = yaml.safe_load(printed)
    assert job["spec"].get("runPolicy", {}).get("backoffLimit") or job["spec"]["failurePolicy"]["maxRestarts"]
    environ = {item["name"]: item["value"] for item in container(find(job))["env"] if "value" in item}
    # The volume, which is mounted at /runs in a pod.
    for name, value in {**environ, "MANYHANDS_FOLDER": "runs", "MANYHANDS_ON": "cpu"}.items():
        if name in ("MANYHANDS_FOLDER", "MANYHANDS_ON", "MANYHANDS_NAME", "MANYHANDS_RESUME"):
            monkeypatch.setenv(name, value)
    assert "resumed" not in invoke(*fit, 1).stderr
    again = invoke(*fit, 2)
    assert "resumed at step 4" in again.stderr, again.output
    assert [path.name for path in Path("runs").iterdir()] == ["digits"]


def test_pods_with_several_gpus_are_started_by_torchrun(invoke: Invoke) -> None:
    job = yaml.safe_load(invoke("manifest", "kubernetes", "--hosts", 1, "--gpus", 8, *COMMAND).stdout)
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert job["spec"]["nprocPerNode"] == "8"
    assert container(job["spec"]["pytorchReplicaSpecs"]["Master"]["template"])["command"] == [
        "torchrun", "--no-python", *WORDS,
    ]  # fmt: skip


def test_jobset_environment_is_resolved_as_a_cluster(invoke: Invoke) -> None:
    result = invoke("manifest", "jobset", "--name", "digits", "--hosts", 2, "--gpus", 0, *COMMAND)
    job = yaml.safe_load(result.stdout)
    (part,) = job["spec"]["replicatedJobs"]
    inner = part["template"]["spec"]
    assert (inner["completions"], inner["parallelism"]) == (2, 2)
    pod = container(inner["template"])
    assert "resources" not in pod
    environ = {item["name"]: item["value"] for item in pod["env"] if "value" in item}
    cluster = understood({**environ, "JOB_COMPLETION_INDEX": "1"})
    assert cluster is not None
    assert (cluster.num_hosts, cluster.here, cluster.address) == (2, 1, "digits-workers-0-0.digits")


def test_slurm_manifest_is_a_runnable_sbatch_script(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("manifest", "slurm", "--hosts", 4, "--gpus", 8, *COMMAND)
    script = tmp_path / "job.sh"
    script.write_text(result.stdout)
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in result.stdout
    commands = {"srun": 'for word in "$@"; do echo "$word"; done\necho "$MANYHANDS_TOKEN"', "openssl": "echo drawn"}
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, str(script)], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["--kill-on-bad-exit=1", *WORDS, "drawn"], done.stderr
    given = {"PATH": str(tmp_path), "MANYHANDS_TOKEN": "given"}
    done = subprocess.run([bash, str(script)], env=given, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "given"


def test_slurm_job_without_a_token_is_not_started(invoke: Invoke, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(invoke("manifest", "slurm", *COMMAND).stdout)
    (tmp_path / "srun").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "srun").chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, str(script)], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode != 0, done.stdout) == (True, "")


@pytest.mark.parametrize(
    ("scheduler", "find"),
    [
        ("kubernetes", lambda job: job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]),
        ("jobset", lambda job: job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]),
    ],
)
def test_training_pods_have_restricted_permissions_and_a_token_from_a_secret(
    invoke: Invoke, scheduler: str, find: Callable[[Any], Any]
) -> None:
    template = find(yaml.safe_load(invoke("manifest", scheduler, "--name", "digits", *COMMAND).stdout))
    pod = container(template)
    assert template["spec"]["automountServiceAccountToken"] is False
    assert template["spec"]["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    secret = {"secretKeyRef": {"name": "digits", "key": "token", "optional": True}}
    assert {"name": "MANYHANDS_TOKEN", "valueFrom": secret} in pod["env"]
    assert "TOKEN" not in " ".join(pod["command"])


@pytest.mark.parametrize(("scheduler", "gpus"), [("kubernetes", 1), ("kubernetes", 2), ("jobset", 2)])
def test_kubernetes_expands_no_variable_in_the_words_of_the_command(invoke: Invoke, scheduler: str, gpus: int) -> None:
    word = "note=$(MANYHANDS_TOKEN) costs $$5"
    result = invoke("manifest", scheduler, "--gpus", gpus, "--", "manyhands", "fit", word)
    (line,) = {line for line in result.stdout.splitlines() if "command:" in line}
    # "$$" is the escape for "$" in a container's command.
    given = yaml.safe_load(line)["command"][-1]
    assert "$(" not in given.replace("$$", "")
    assert given.replace("$$", "$") == word


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nomad", *COMMAND), "the scheduler must be one of kubernetes, jobset, slurm"),
        (("slurm",), "no command was given for the job"),
        (("slurm", "--hosts", "0", *COMMAND), "--hosts must be at least 1"),
        (("jobset", "--name", "My_Job", *COMMAND), "--name must consist of lowercase letters"),
        (("jobset", "--name", "a\nkind", *COMMAND), "--name must consist of lowercase letters"),
        (("jobset", "--name", "on", *COMMAND), "--name must not be a word that YAML reads"),
        (("kubernetes", "--claim", "null", *COMMAND), "--claim must not be a word that YAML reads"),
        (("slurm", "--time", "soon; rm", *COMMAND), "--time must be written as"),
    ],
)
def test_invalid_manifest_arguments_exit_with_code_2(invoke: Invoke, words: tuple[str, ...], said: str) -> None:
    result = invoke("manifest", *words)
    assert result.exit_code == 2
    assert said in result.stderr
