"""`manyhands explain`: the table and the partition, as text, JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Invoke

TARGET = "small_task.py"


def test_sharded_strategy_is_explained_as_a_table(invoke: Invoke) -> None:
    result = invoke("explain", TARGET, "--strategy", "sharded", "--on", "cpu*2")
    assert result.exit_code == 0
    assert "a device holds" in result.stdout
    told = json.loads(invoke("explain", TARGET, "--strategy", "sharded", "--on", "cpu*2", "--json").stdout)
    assert told["spec"] == {"shards": 2}
    assert told["parameters"] < told["whole"]
    assert "a single device, so nothing is split" in invoke("explain", TARGET, "--strategy", "sharded").stdout


def test_placed_strategy_is_drawn_as_svg(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "partition.svg"
    result = invoke("explain", TARGET, "--strategy", "placed", "--on", "cpu*2", "--draw", str(path))
    assert result.exit_code == 0
    assert "pieces on 2 devices" in result.stdout
    assert path.read_text().startswith("<svg")
    refused = invoke("explain", TARGET, "--strategy", "mirrored", "--on", "cpu*2", "--draw", str(path))
    assert refused.exit_code == 2
    assert "--draw needs a strategy that partitions the network" in refused.stderr
