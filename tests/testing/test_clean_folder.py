"""The check that test runs leave no files in the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pytest_run_that_leaves_a_file_fails_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from tests.clean_folder import CleanFolder\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(CleanFolder(Path.cwd()))\n"
    )
    (tmp_path / "test_writing.py").write_text(
        "from pathlib import Path\n"
        "def test_writing(): Path('servers.csv').touch()\n"
        "def test_in_a_cache(): Path('.pytest_cache').mkdir(exist_ok=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-k"]
    runs = [
        subprocess.run([*command, name], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        for name in ("cache", "writing", "writing")
    ]
    assert [done.returncode for done in runs] == [0, 1, 0], "a file from before is no failure"
    assert f"files that tests left in {tmp_path}" in runs[1].stdout
    assert "\nservers.csv\n" in runs[1].stdout
