"""`manyhands manifest kubernetes --serve`, and the Dockerfile that such a manifest runs."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from manyhands.cli.serve import SERVER, SHARED
from manyhands.core.settings import variable
from manyhands.serving import Listen

from .conftest import Invoke

ROOT = Path(__file__).parents[2]
VARIABLES = {variable(field.name) for kind in (*SHARED, *SERVER) for field in dataclasses.fields(kind)}


@pytest.fixture
def parts(invoke: Invoke) -> dict[tuple[str, str], Any]:
    result = invoke(
        "manifest", "kubernetes", "--serve", "--name", "digits", "--image", "reg/serve:1", "--claim", "models",
        "--hosts", 2, "--max-hosts", 6, "--queue-rows", 32, "--gpus", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return {(part["kind"], part["metadata"]["name"]): part for part in yaml.safe_load_all(result.stdout)}


def test_pod_has_health_probes_and_enough_grace_period(parts: dict[tuple[str, str], Any]) -> None:
    pod = parts["Deployment", "digits"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    defaults = Listen()
    assert ports == {"grpc": defaults.grpc, "http": defaults.http}
    for probe, path in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        assert container[probe]["httpGet"] == {"path": f"/v2/health/{path}", "port": "http"}
    leaving = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > leaving + defaults.drain
    assert {entry["name"] for entry in container["env"]} <= VARIABLES
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}


def test_pod_runs_with_restricted_permissions(parts: dict[tuple[str, str], Any]) -> None:
    pod = parts["Deployment", "digits"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "models"
    secrets = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "valueFrom" in entry}
    assert secrets == {
        "MANYHANDS_TOKEN": {"name": "digits", "key": "token"},
        "MANYHANDS_MANAGE_TOKEN": {"name": "digits", "key": "manage-token"},
    }
    assert not any("token" in word.lower() for word in container["args"])
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False


def test_instructions_put_no_token_into_arguments(invoke: Invoke) -> None:
    """Other users of a machine can read the arguments of its processes, but not their files."""
    result = invoke("manifest", "kubernetes", "--serve", "--claim", "models")
    head = [line for line in result.stdout.splitlines() if line.startswith("#")]
    assert "--from-file=token=<(openssl" in "".join(head)
    assert "--from-literal" not in "".join(head)


def test_autoscaler_uses_queue_rows_and_headless_service_exposes_pods(parts: dict[tuple[str, str], Any]) -> None:
    scaling = parts["HorizontalPodAutoscaler", "digits"]["spec"]
    assert (scaling["minReplicas"], scaling["maxReplicas"]) == (2, 6)
    metric = scaling["metrics"][0]["pods"]
    assert (metric["metric"]["name"], metric["target"]["averageValue"]) == ("manyhands_queue_rows", "32")
    assert "manyhands_queue_rows" in (ROOT / "src/manyhands/serving/exposition.py").read_text()
    (endpoint,) = parts["PodMonitor", "digits"]["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert parts["Service", "digits-pods"]["spec"]["clusterIP"] == "None"
    assert [port["port"] for port in parts["Service", "digits-pods"]["spec"]["ports"]] == [8500, 8501]
    assert [port["port"] for port in parts["Service", "digits"]["spec"]["ports"]] == [8500, 8501]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("slurm", "--serve", "--claim", "models"), "--serve must be used with kubernetes"),
        (("kubernetes", "--serve", "--claim", "models", "--", "ls"), "without a command"),
        (("kubernetes", "--serve"), "Pass --claim NAME, for example --claim models"),
        (
            ("kubernetes", "--serve", "--claim", "models", "--hosts", "4", "--max-hosts", "2"),
            "--max-hosts must be at least 4",
        ),
        (("kubernetes", "--serve", "--claim", "models", "--queue-rows", "0"), "--queue-rows must be at least 1"),
    ],
)
def test_invalid_serving_manifest_arguments_are_rejected(invoke: Invoke, words: tuple[str, ...], error: str) -> None:
    result = invoke("manifest", *words)
    assert result.exit_code != 0
    assert error in " ".join(result.output.split())


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def test_docker_image_runs_serve_as_non_root_user() -> None:
    found = instructions()
    last_stage = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    stage = found[last_stage:]
    values = dict(stage)
    assert int(values["USER"]) > 0
    assert (values["ENTRYPOINT"], json.loads(values["CMD"])[:2]) == ('["manyhands"]', ["serve", "/models"])
    assert values["STOPSIGNAL"] == "SIGTERM"
    assert set(values["EXPOSE"].split()) == {"8500", "8501"}
    set_here = {name for name, _, _ in (part.partition("=") for part in shlex.split(values["ENV"]))}
    assert {name for name in set_here if name.startswith("MANYHANDS_")} <= VARIABLES
    assert not any("TOKEN" in rest for _, rest in found)
    # What runs as root comes before the user does.
    order = [word for word, _ in stage]
    assert order.index("USER") > max(number for number, word in enumerate(order) if word == "RUN")


def test_docker_image_copies_existing_files_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for name in rest.split()[:-1]:
                assert (ROOT / name).exists()
                assert f"!{name}" in ignored
    assert any(word == "RUN" and ".[serve]" in rest for word, rest in instructions())
