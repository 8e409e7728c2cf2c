"""Serving from a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import manyhands as mh

from .conftest import Start, publish


@pytest.mark.gpu
def test_replica_on_a_gpu_returns_predictions(adder: Path, tmp_path: Path, start: Start) -> None:
    publish(adder, tmp_path / "adder", 2)
    server = start(tmp_path, on="cuda:0")
    rows = np.arange(600, dtype=np.float32).reshape(200, 3)
    np.testing.assert_array_equal(mh.serving.Client(server.url)("adder", rows), rows + 2)
