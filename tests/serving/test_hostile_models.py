"""Models that an attacker puts into the folder of a server: the others are served, and each reason is reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from benchmarks.attacks.files import CONTENTS, KINDS, attack_models, plant

from manyhands.serving import Server
from manyhands.serving.folder import MOST_REFUSED, complete_versions, models_in

from .conftest import Start, publish


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


def test_hostile_models_appear_while_others_are_served(tmp_path: Path, adder: Path, start: Start) -> None:
    root = tmp_path / "models"
    publish(adder, root / "adder", 1)
    server = start(root, log=tmp_path / "log")
    answers, reason_of = probes(server)
    assert answers()
    outcomes = attack_models(root, answers, reason_of)
    assert len(outcomes) == len(CONTENTS) + len(KINDS)
    assert [outcome for outcome in outcomes if not outcome.is_refused_with_reason] == []
    # What comes afterwards is found: the look at the folder goes on, and a version at its root hides no model.
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


def test_a_server_starts_beside_hostile_models(tmp_path: Path, adder: Path, start: Start) -> None:
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
    assert "JSON must be nested at most 64 deep, but got deeper" in reason_of("deep")
    assert "manifest.json must be a regular file, but got a FIFO" in reason_of("fifo")


def test_a_refused_version_leaves_the_one_before_in_place(tmp_path: Path, adder: Path) -> None:
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


def test_half_a_manifest_is_a_copy_that_is_not_complete_yet(tmp_path: Path, adder: Path) -> None:
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


def test_a_folder_full_of_refused_versions_is_looked_at_in_part(tmp_path: Path) -> None:
    for number in range(1, 2 * MOST_REFUSED):
        plant(tmp_path / "m" / str(number) / "manifest.json", "folder")
    assert len(complete_versions(tmp_path / "m").refused) == MOST_REFUSED


def test_a_folder_of_versions_is_one_model_unless_there_are_others(tmp_path: Path, adder: Path) -> None:
    publish(adder, tmp_path / "adder", 1)
    assert models_in(tmp_path / "adder") == {"adder": tmp_path / "adder"}
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "manifest.json").write_text("{}")
    assert set(models_in(tmp_path)) == {"7", "adder"}
