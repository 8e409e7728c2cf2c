"""Hostile models in a server's folder: other models are served, and each reason is reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from benchmarks.attacks import models
from benchmarks.attacks.files import CONTENTS, KINDS, attack_models, plant

from manyhands.serving import Server
from manyhands.serving.folder import MOST_REFUSED, complete_versions, models_in
from manyhands.serving.protocols import open_inference_grpc, tensorflow_grpc
from manyhands.serving.version import without_folders

from .conftest import Start, publish
from .test_grpc import call


def probes(server: Server) -> tuple[Callable[[], bool], Callable[[str], str]]:
    """Whether the honest model answers, and the error that the server reports for a model."""

    def answers() -> bool:
        told = httpx.post(f"{server.url}/v1/models/adder:predict", json={"instances": [[1.0, 2.0, 3.0]]}, timeout=30)
        return told.status_code == 200 and told.json() == {"predictions": [[2.0, 3.0, 4.0]]}

    def reason_of(name: str) -> str:
        versions = [
            version for model in server.state()["models"] if model["name"] == name for version in model["versions"]
        ]
        return "; ".join(version["error"] for version in versions)

    return answers, reason_of


def test_hostile_models_added_at_runtime_do_not_affect_other_models(tmp_path: Path, adder: Path, start: Start) -> None:
    root = tmp_path / "models"
    publish(adder, root / "adder", 1)
    server = start(root, log=tmp_path / "log")
    answers, reason_of = probes(server)
    assert answers()
    outcomes = attack_models(root, answers, reason_of)
    assert len(outcomes) == len(CONTENTS) + len(KINDS)
    assert [outcome for outcome in outcomes if not outcome.is_refused_with_reason] == []
    # Later models are found: the folder is still scanned, and a version at its root hides no model.
    (root / "1").mkdir()
    (root / "1" / "manifest.json").write_text('{"files": {}}')
    publish(adder, root / "adder", 2)
    client = httpx.Client(base_url=server.url)
    with client:
        for _ in range(600):
            told = client.post("/v1/models/adder:predict", json={"instances": [[1.0, 2.0, 3.0]]}).json()
            if told == {"predictions": [[3.0, 4.0, 5.0]]}:
                break
        else:
            pytest.fail(f"the next version did not take over: {told}")
    lines = [json.loads(line) for line in (tmp_path / "log" / "events.jsonl").read_text().splitlines()]
    failed = {line["model"] for line in lines if line["kind"] == "version_failed"}
    assert failed >= {f"hostile-content_{name}" for name in CONTENTS}


def test_server_starts_when_the_folder_contains_hostile_models(tmp_path: Path, adder: Path, start: Start) -> None:
    root = tmp_path / "models"
    publish(adder, root / "adder", 1)
    (root / "deep" / "1").mkdir(parents=True)
    (root / "deep" / "1" / "manifest.json").write_bytes(b"[" * 60_000)
    plant(root / "fifo" / "1" / "manifest.json", "fifo")
    (root / "1").mkdir()
    (root / "1" / "manifest.json").write_text("{}")
    server = start(root)
    answers, reason_of = probes(server)
    assert answers()
    assert server.state()["ready"]
    assert reason_of("adder") == ""
    assert "JSON must be nested at most 64 levels deep, but got a deeper text" in reason_of("deep")
    assert "manifest.json must be a regular file, but got a FIFO" in reason_of("fifo")


def test_rejected_versions_keep_the_previous_version_available(tmp_path: Path, adder: Path) -> None:
    model = tmp_path / "models" / "adder"
    publish(adder, model, 1)
    for number, kind in enumerate(KINDS, 2):
        plant(model / str(number) / "manifest.json", kind)
    shutil.copytree(model / "1", model / "20")
    (model / "20" / "weights.safetensors").unlink()
    plant(model / "20" / "weights.safetensors", "fifo")
    found = complete_versions(model)
    assert list(found.complete) == [1]
    assert set(found.refused) == {20, *range(2, 2 + len(KINDS))}


def test_truncated_manifest_is_treated_as_an_incomplete_copy(tmp_path: Path, adder: Path) -> None:
    model = tmp_path / "models" / "adder"
    publish(adder, model, 1)
    manifest = model / "1" / "manifest.json"
    whole = manifest.read_bytes()
    for length in range(len(whole)):
        manifest.write_bytes(whole[:length])
        found = complete_versions(model)
        assert (found.complete, found.refused) == ({}, {}), whole[:length]
    manifest.write_bytes(whole)
    assert list(complete_versions(model).complete) == [1]


def test_number_of_reported_rejected_versions_is_limited(tmp_path: Path) -> None:
    for number in range(1, 2 * MOST_REFUSED):
        plant(tmp_path / "m" / str(number) / "manifest.json", "folder")
    assert len(complete_versions(tmp_path / "m").refused) == MOST_REFUSED


def test_folder_of_versions_is_one_model_unless_it_contains_other_models(tmp_path: Path, adder: Path) -> None:
    publish(adder, tmp_path / "adder", 1)
    assert models_in(tmp_path / "adder") == {"adder": tmp_path / "adder"}
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "manifest.json").write_text("{}")
    assert set(models_in(tmp_path)) == {"7", "adder"}


def _always_raises(folder: Path) -> Path:
    too_long = models.call("aten.narrow.default", models.ref(1), 0, 0, 4711)
    return models.forge(folder, [too_long, models.call("aten.add.Tensor", models.ref(0), 1)])


FAILING: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "unread": (models.FORGERIES["read_by_reshape_alias"], "reading the export", "aten._reshape_alias.default"),
    "raising": (_always_raises, "warming up", "4711"),
    "misshapen": (models.wrong_shape, "checking outputs", "must be float32[*, 9]"),
}
"""Models that fail at each stage of a load: the stage, and a part of the text that only the log may hold."""


def test_clients_see_the_stage_of_a_failed_load_but_not_its_details(tmp_path: Path, start: Start) -> None:
    for name, (build, _, _) in FAILING.items():
        build(tmp_path / "models" / name)
    (tmp_path / "models" / "refused" / "1").mkdir(parents=True)
    (tmp_path / "models" / "refused" / "1" / "manifest.json").write_text('{"files": 3}')
    server = start(tmp_path / "models", log=tmp_path / "log", poll=60)
    _, detail_of = probes(server)
    shown: dict[str, set[str]] = {}
    index = httpx.post(f"{server.url}/v2/repository/index", json={}).json()
    messages = open_inference_grpc.MESSAGES
    method = "/inference.GRPCInferenceService/RepositoryIndex"
    listed = call(server.grpc, method, messages["RepositoryIndexRequest"](), messages["RepositoryIndexResponse"])
    for name in (*FAILING, "refused"):
        (status,) = httpx.get(f"{server.url}/v1/models/{name}").json()["model_version_status"]
        request = tensorflow_grpc.MESSAGES["GetModelStatusRequest"](model_spec={"name": name})
        answer = tensorflow_grpc.MESSAGES["GetModelStatusResponse"]
        told = call(server.grpc, "/tensorflow.serving.ModelService/GetModelStatus", request, answer)
        shown[name] = {
            status["status"]["error_message"],
            told.model_version_status[0].status.error_message,
            *(one["reason"] for one in index if one["name"] == name),
            *(one.reason for one in listed.models if one.name == name),
        }
    general = "loading failed while {}; the server's log has the details"
    stages = {name: stage for name, (_, stage, _) in FAILING.items()} | {"refused": "reading the export"}
    assert shown == {name: {general.format(stage)} for name, stage in stages.items()}
    lines = [json.loads(line) for line in (tmp_path / "log" / "events.jsonl").read_text().splitlines()]
    logged = {line["model"]: line["reason"] for line in lines if line["kind"] == "version_failed"}
    for name, (_, _, part) in FAILING.items():
        assert part in detail_of(name)
        assert part in logged[name]
    assert "must list the files" in detail_of("refused")


def test_load_failure_details_omit_folders_and_control_characters() -> None:
    text = 'File "/home/author/build 2/net.py": /a/b/c.so\x1b[2J and 3/4 of http://host/a/b\nsecond line'
    assert without_folders(text) == 'File "build 2/net.py": c.so [2J and 3/4 of http://host/a/b'
