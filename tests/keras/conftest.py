"""Two replicas, started once for all comparisons of a test file, by an engine that has imported Keras."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import manyhands as mh
from manyhands.api.runtime import runtime
from manyhands.launcher import LocalEngine

from .behaviours import BEHAVIOURS
from .loops import LOOPS
from .scenarios import SCENARIOS


def run_all(hand: Any, folder: Path, names: Collection[str]) -> dict[str, Any]:
    """What a replica has to tell, by name."""
    told = {}
    # Every step is reported, so that each kind of optimizer is asked for its step count.
    with mock.patch("manyhands.training.hand.REPORT_STEP_SECONDS", 0.0):
        for name, act in {**SCENARIOS, **BEHAVIOURS, **LOOPS}.items():
            if name in names:
                (folder / name).mkdir(exist_ok=True, parents=True)
                told[name] = act(folder / name)
    return told


def told_by(engine: LocalEngine, on: str, folder: Path, names: Collection[str]) -> list[dict[str, Any]]:
    """What each of the replicas on some devices has to tell."""
    with mock.patch.object(runtime, "engine", engine):
        run = functools.partial(run_all, folder=folder, names=list(names))
        return mh.launch(run, "mirrored", on=on, progress=False, timeout=60)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def engine() -> Iterator[LocalEngine]:
    """Forks processes that have imported Keras, which takes seconds; the product's own have not."""
    forking = LocalEngine(
        preload=["manyhands.api.fit", "manyhands.serving.replica_process", "manyhands.keras", "sklearn.datasets"]
    )
    # Or Keras would look for a GPU, and no child of a process that has could use one.
    with mock.patch.dict(os.environ, KERAS_TORCH_DEVICE="cpu"):
        forking.warm_up()
    yield forking
    forking.close()


@pytest.fixture(autouse=True)
def _all_are_forked_with_keras(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "engine", engine)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they write, each scenario and behaviour in a folder of its own."""
    return tmp_path_factory.mktemp("keras")


@pytest.fixture(scope="module")
def every(folder: Path, engine: LocalEngine, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What both replicas tell, by name, of a file's `ACTS`."""
    two = told_by(engine, "cpu*2", folder, request.module.ACTS)
    return {name: [told[name] for told in two] for name in two[0]}
