"""`manyhands plan`: table, JSON, files, and errors that name command-line options."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Invoke


def test_plan_prints_a_table_and_writes_files(invoke: Invoke, tmp_path: Path) -> None:
    cluster = "2 hosts x 8 H100, 100Gb/s, $2/h"
    result = invoke("plan", "small_task.py", "width=32", "--cluster", cluster, "--save", "p.toml", "--html", "p.html")
    assert result.exit_code == 0, result.output
    for word in ("pick:", "(control)", "saturates", "per 1M samples"):
        assert word in result.output
    assert "strategy = " in (tmp_path / "p.toml").read_text()
    assert "<svg" in (tmp_path / "p.html").read_text()
    again = invoke("fit", "small_task.py", "--strategy", "p.toml", "--on", "cpu", "--steps", "1")
    assert again.exit_code == 2
    assert "for which it was made, of" in again.output


def test_noise_scale_adds_the_time_to_a_target_and_clusters_are_side_by_side(invoke: Invoke, tmp_path: Path) -> None:
    both = ("--cluster", "8 H100, $3/h", "--cluster", "8 A100, $2/h")
    result = invoke("plan", "small_task.py", *both, "--noise", "500", "--html", "both.html")
    assert result.exit_code == 0, result.output
    for word in ("side by side", "energy", "±30%", "gradient noise scale 500 samples", "reach with the task's batch"):
        assert word in result.output
    assert "side by side" in (tmp_path / "both.html").read_text()
    wrong = invoke("plan", "small_task.py", "--cluster", "8 H100", "--noise", "-1")
    assert wrong.exit_code == 2
    assert "gradient noise scale must be a number" in wrong.output


def test_json_output_compares_two_clusters(invoke: Invoke) -> None:
    result = invoke("plan", "small_task.py", "--cluster", "8 H100", "--cluster", "8 K80", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [plan["cluster"] for plan in found["plans"]] == ["8 H100 over NVLink 4", "8 K80 over PCIe 3"]
    assert "times as fast as" in found["why"]


def test_cluster_without_network_speed_is_rejected(invoke: Invoke) -> None:
    result = invoke("plan", "small_task.py", "--cluster", "2 hosts x 8 H100")
    assert result.exit_code == 2
    assert "the speed of its network" in result.output


def test_unwritable_save_path_is_rejected_before_planning(invoke: Invoke) -> None:
    result = invoke("plan", "nowhere.py", "--cluster", "8 H100", "--save", "missing/plan.toml")
    assert result.exit_code == 2
    assert "--save must be a file in a folder that can be written, but got missing/plan.toml" in result.output


def test_plan_on_local_devices_measures_the_control_strategy(invoke: Invoke) -> None:
    result = invoke("plan", "small_task.py", "--on", "cpu*2", "--tries", "1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    control = next(row for row in found["options"] if row["strategy"] == found["control"])
    assert control["measured"] > 0
    assert "making the task" not in result.stdout
