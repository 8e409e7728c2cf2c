"""mh.map and mh.tune on the hosts of a real Ray cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh

from ..launcher.test_ray import nodes  # noqa: F401 - the cluster of two nodes
from . import networks


def test_map_and_tune_run_on_both_ray_hosts(nodes: Any, tmp_path: Path) -> None:  # noqa: F811
    found = mh.map(lambda n: (n * n, os.getpid()), range(6), on="ray", per_device=1)
    assert [square for square, _ in found] == [n * n for n in range(6)]
    assert len({process for _, process in found}) == 2
    space = {"lr": [0.01, 0.02, 0.03]}
    study = mh.tune(
        networks.task,
        space,
        on="ray",
        folder=tmp_path,
        options=[
            mh.options.Algorithm(search="grid"),
            mh.options.Execution(per_device=1),
            mh.options.Display(progress=False),
        ],
    )
    assert [trial.state for trial in study.trials] == ["finished"] * 3
    assert mh.evaluate(study.run())["loss"] == pytest.approx(study.best.value, rel=1e-6)
