"""Corrupted or hostile checkpoints and weights: the previous one is loaded, and nothing hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.attacks.files import CONTENTS, KINDS, attack_checkpoints, plant

from manyhands.core import CheckpointError
from manyhands.storage import Checkpoint, CheckpointStore
from manyhands.storage.weights import open_weights


def test_corrupted_checkpoint_falls_back_to_the_previous_one(tmp_path: Path) -> None:
    outcomes = attack_checkpoints(tmp_path)
    assert len(outcomes) > 60
    assert [outcome for outcome in outcomes if not outcome.is_refused_with_reason] == []


def test_exhausted_generation_number_is_reported_and_other_steps_are_saved(tmp_path: Path) -> None:
    errors: list[Exception] = []
    (tmp_path / "step-000000003.999999999").mkdir(parents=True)
    with CheckpointStore(tmp_path, on_error=errors.append) as store:
        store.save(Checkpoint(3, {"w": torch.ones(2)}))
        store.save(Checkpoint(4, {"w": torch.ones(2)}))
    assert store.steps() == [4]
    assert "Remove the entry of that name" in str(errors[0])


def test_manifest_with_invalid_score_or_claim_does_not_stop_pruning(tmp_path: Path) -> None:
    errors: list[Exception] = []
    with CheckpointStore(tmp_path, keep=1, on_error=errors.append) as store:
        store.claim()
        store.save(Checkpoint(1, {"w": torch.ones(2)}), score=1.0)
        store.wait()
        manifest = tmp_path / "step-000000001" / "manifest.json"
        for changed in ({"score": "low", "claim": "first"}, {"score": float("nan"), "claim": [7]}):
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changed}))
            assert store.best() is None
        store.save(Checkpoint(2, {"w": torch.ones(2)}), score=0.5)
        store.wait()
        assert (store.steps(), store.best()) == ([2], 2)
    assert errors == []


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"])
def test_corrupted_or_non_regular_weight_files_are_rejected(tmp_path: Path, name: str) -> None:
    for number, content in enumerate(CONTENTS.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError):
            open_weights(folder)
    for kind in ("fifo", "socket", "link_to_device", "link_loop", "folder"):
        plant(tmp_path / kind / name, kind)
        with pytest.raises(CheckpointError):
            open_weights(tmp_path / kind)
    assert "link" in KINDS


def test_symlinks_of_a_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to("../blob")
    found = open_weights(tmp_path / "folder")
    assert found.shapes == {"w": (2,)}
    assert torch.equal(found.load()[0]["w"], torch.ones(2))
