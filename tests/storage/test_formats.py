"""File formats: samples of every released format are read, and files in a newer format are refused with a remedy."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import ManyhandsError, read_events
from manyhands.storage import CheckpointStore
from manyhands.tuning.journal import Journal, read_journal
from manyhands.tuning.space import Choice
from manyhands.tuning.trial import FINISHED

SAMPLES = sorted((Path(__file__).parent / "samples").glob("format-*"))
UPGRADE = "must have format 1 or older, but got 2, which a newer version of manyhands has written. Upgrade manyhands"


def checkpoint(folder: Path) -> Any:
    return CheckpointStore(folder / "checkpoints").load()


def model(folder: Path) -> Any:
    return mh.load(folder / "model")(torch.ones(3, 1))


def events(folder: Path) -> Any:
    return list(read_events(folder / "events.jsonl"))


def journal(folder: Path) -> Any:
    return read_journal(folder)


@pytest.fixture(params=SAMPLES, ids=lambda path: path.name)
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(request.param, tmp_path / "sample"))


def test_checkpoint_of_every_released_format_is_read(sample: Path) -> None:
    found = checkpoint(sample)
    assert found.step == 2
    assert {name: tuple(tensor.shape) for name, tensor in found.model.items()} == {"weight": (1, 1), "bias": (1,)}


def test_model_of_every_released_format_is_read(sample: Path) -> None:
    assert model(sample).shape == (3, 1)


def test_event_log_of_every_released_format_is_read(sample: Path) -> None:
    kinds = [entry["kind"] for entry in events(sample)]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("steps") == 2


def test_journal_of_every_released_format_is_read_and_continued(sample: Path) -> None:
    record, trials = journal(sample)
    assert record["search"] == "random"
    assert [trial.state for trial in trials] == [FINISHED, FINISHED]
    Journal(sample, {"lr": Choice((0.001, 0.01))}).close()
    assert journal(sample)[0] == record


def with_newer_manifest(folder: Path, marker: bool) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    text = json.dumps({**manifest, "format": 2})
    (folder / "manifest.json").write_text(text)
    if marker:
        old = (folder / "COMMITTED").read_text()
        (folder / "COMMITTED").write_text(hashlib.sha256(text.encode()).hexdigest() + old[64:])


def with_newer_lines(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (lambda folder: with_newer_manifest(folder / "checkpoints" / "step-000000002", marker=True), checkpoint),
        (lambda folder: with_newer_manifest(folder / "model" / "1", marker=False), model),
        (lambda folder: with_newer_lines(folder / "events.jsonl", '"v": 1', '"v": 2'), events),
        (lambda folder: with_newer_lines(folder / "journal.log", '"format":1', '"format":2'), journal),
    ],
    ids=["checkpoint", "model", "events", "journal"],
)
def test_newer_format_is_refused_with_the_remedy(
    change: Callable[[Path], None], read: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(SAMPLES[-1], tmp_path / "sample"))
    change(folder)
    with pytest.raises(ManyhandsError, match=UPGRADE):
        read(folder)
