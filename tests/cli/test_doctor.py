"""`manyhands doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands import diagnostics
from manyhands.diagnostics import CHECKS

from .conftest import Invoke


def test_doctor_runs_all_checks_and_leaves_no_files(invoke: Invoke, tmp_path: Path) -> None:
    """The real thing, with two real ranks; nothing may stay behind where it wrote."""
    before = set(tmp_path.iterdir())
    result = invoke("doctor", "--json", "--folder", tmp_path / "runs")
    found = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert len(found) == len(CHECKS) + 1
    assert set(tmp_path.iterdir()) == before
    assert not [finding for finding in found.values() if "could not be checked" in finding["found"]]
    assert result.exit_code == (1 if any(finding["verdict"] == "broken" for finding in found.values()) else 0)
    for name in ("Python", "torch", "loopback", "all-reduce", "run folder"):
        assert found[name]["verdict"] != "broken", found[name]
    assert "µs between two processes" in found["all-reduce"]["found"]


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("slow", 0), ("broken", 1)])
def test_slow_or_broken_finding_is_printed_with_reason_and_remedy(
    verdict: str, code: int, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [diagnostics.Finding("swap", "all of it", verdict, "steps wait for the disk", "buy memory")]
    monkeypatch.setattr(diagnostics, "doctor", lambda folder: found)
    result = invoke("doctor")
    assert result.exit_code == code
    assert "swap" in result.stdout
    assert ("remedy: buy memory" in result.stdout) == (verdict != "ok")
    assert ("steps wait for the disk" in result.stdout) == (verdict != "ok")
