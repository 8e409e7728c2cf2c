"""Two short runs of the chaos runner: random faults, drawn from a seed, after which every invariant holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.root


@pytest.mark.parametrize(("seed", "systems"), [(1, "training"), (2, "serving")])
def test_short_chaos_run_breaks_no_invariant(seed: int, systems: str) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--quick", "--seed", str(seed), "--only", systems]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout.splitlines()[-1])["checks"]
    assert checks.pop("faults")["value"] == 2
    checks.pop("lowest_tries")
    assert {name: check["value"] for name, check in checks.items()} == dict.fromkeys(checks, 0.0)
    assert {"unrecovered", "wrong_samples", "lost_requests", "silent_faults", "left_behind"} < set(checks)
