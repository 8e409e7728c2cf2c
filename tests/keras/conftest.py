"""Two replicas, started once for all that is compared or observed of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import manyhands as mh
from manyhands.training import Hand

from .behaviours import BEHAVIOURS
from .scenarios import SCENARIOS


def run_all(hand: Any, folder: Path) -> dict[str, Any]:
    """What a replica has to tell, by name."""
    told = {}
    # Every step is told, so that each kind of optimizer is asked for its steps.
    with mock.patch.dict(Hand.tell_step.__globals__, TELL_SECONDS=0.0):
        for name, act in {**SCENARIOS, **BEHAVIOURS}.items():
            (folder / name).mkdir(exist_ok=True, parents=True)
            told[name] = act(folder / name)
    return told


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they write, each scenario and behaviour in a folder of its own."""
    return tmp_path_factory.mktemp("keras")


@pytest.fixture(scope="package")
def every(folder: Path, engine: Any) -> dict[str, list[dict[str, Any]]]:
    """What both replicas tell, by name."""
    two = mh.launch(functools.partial(run_all, folder=folder), "mirrored", on="cpu*2", progress=False, timeout=60)
    return {name: [told[name] for told in two] for name in two[0]}
