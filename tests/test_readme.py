"""The README's own program runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_program_works_as_written(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "first.py").write_text(program)
    done = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    metrics, answer = done.stdout.strip().splitlines()
    assert "valid_accuracy" in metrics
    assert answer.startswith("tensor([")
    assert (tmp_path / "models" / "digits" / "1" / "program.json").exists()
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("first-")
