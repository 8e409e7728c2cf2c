"""`manyhands profile`: tables, JSON, files, a run that was sampled, and two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from manyhands.launcher import write_token
from manyhands.testing import held_ports

from .conftest import Invoke


def test_profile_prints_tables_and_writes_files(invoke: Invoke, tmp_path: Path) -> None:
    given = ("--on", "cpu", "--steps", "3", "--html", "p.html", "--trace", "t.json")
    result = invoke("profile", "small_task.py", "width=32", *given)
    assert result.exit_code == 0, result.output
    for word in ("where a step's time goes", "forward", "peak memory"):
        assert word in result.output
    assert "<svg" in (tmp_path / "p.html").read_text()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_json_profile_of_a_finished_run(invoke: Invoke) -> None:
    trained = invoke("fit", "small_task.py", "--on", "cpu", "--epochs", "60", "--name", "first", "--profile", "--quiet")
    assert trained.exit_code == 0, trained.output
    result = invoke("profile", "runs/first", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["task"] == "first"
    assert found["ranks"][0]["phases"]["forward"] > 0


def test_run_without_profile_samples_is_rejected(invoke: Invoke) -> None:
    assert invoke("fit", "small_task.py", "--on", "cpu", "--steps", "1", "--name", "bare", "--quiet").exit_code == 0
    result = invoke("profile", "runs/bare")
    assert result.exit_code == 2
    assert "more than fifty steps" in result.output
    result = invoke("profile", "runs/none")
    assert result.exit_code == 2
    assert "runs/none" in result.output


def test_profile_of_two_hosts_is_reported_on_both(invoke: Invoke, tmp_path: Path) -> None:
    token = tmp_path / "token"
    write_token(token)
    command = ["profile", "small_task.py", "--on", "cpu", "--steps", "2", "--json", "--hosts", "2"]
    with held_ports(1) as (port,):
        command += ["--join", f"127.0.0.1:{port}", "--token-file", str(token)]
        other = subprocess.Popen([sys.executable, "-m", "manyhands", *command], stdout=subprocess.PIPE, text=True)
        try:
            here = invoke(*command)
            there, _ = other.communicate(timeout=120)
        finally:
            other.kill()
            other.wait()
    assert here.exit_code == other.returncode == 0, here.output
    found = json.loads(here.stdout)
    assert found["strategy"] == "replicas=2"
    assert len({rank["host"] for rank in found["ranks"]}) == 2
    assert json.loads(there)["ranks"] == found["ranks"]
