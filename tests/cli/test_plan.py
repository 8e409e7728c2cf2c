"""`manyhands plan`: a table, JSON, files, and errors in the command line's own words."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Invoke


def test_a_table_and_files(invoke: Invoke, tmp_path: Path) -> None:
    cluster = "2 hosts x 8 H100, 100Gb/s, $2/h"
    result = invoke("plan", "small_task.py", "width=32", "--cluster", cluster, "--save", "p.toml", "--html", "p.html")
    assert result.exit_code == 0, result.output
    for word in ("pick:", "(control)", "saturates", "per 1M samples"):
        assert word in result.output
    assert "strategy = " in (tmp_path / "p.toml").read_text()
    assert "<svg" in (tmp_path / "p.html").read_text()
    again = invoke("fit", "small_task.py", "--strategy", "p.toml", "--on", "cpu", "--steps", "1")
    assert again.exit_code == 2
    assert "was made for a network of" in again.output


def test_json_and_comparison(invoke: Invoke) -> None:
    result = invoke("plan", "small_task.py", "--cluster", "8 H100", "--cluster", "8 K80", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [plan["cluster"] for plan in found["plans"]] == ["8 H100 over NVLink 4", "8 K80 over PCIe 3"]
    assert "times as fast as" in found["why"]


def test_a_cluster_that_makes_no_sense(invoke: Invoke) -> None:
    result = invoke("plan", "small_task.py", "--cluster", "2 hosts x 8 H100")
    assert result.exit_code == 2
    assert "a network with a speed" in result.output


def test_a_result_that_has_no_place_is_refused_before_the_work(invoke: Invoke) -> None:
    result = invoke("plan", "nowhere.py", "--cluster", "8 H100", "--save", "missing/plan.toml")
    assert result.exit_code == 2
    assert "--save is a file in a folder that can be written, but got missing/plan.toml" in result.output


def test_here(invoke: Invoke) -> None:
    result = invoke("plan", "small_task.py", "--on", "cpu*2", "--tries", "1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    control = next(row for row in found["options"] if row["strategy"] == found["control"])
    assert control["measured"] > 0
    assert "making the task" not in result.stdout
