"""The package: a wheel is built, installed outside of this folder, and runs the README's first program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import manyhands

ROOT = Path(__file__).parents[1]


def run(*words: str | Path, cwd: Path) -> str:
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=apart, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_installs_in_a_fresh_environment_and_runs_the_first_program(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("manyhands-*.whl")
    assert f"-{manyhands.__version__}-py3-none-any" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(about).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {"manyhands/py.typed", "manyhands/costs/catalogue.toml", "manyhands/profiling/page.js"} <= {*names}
    package = ROOT / "src" / "manyhands"
    page = {f"manyhands/{path.relative_to(package)}" for path in (package / "dashboard" / "static").rglob("*.*")}
    assert page <= {*names}
    assert not [name for name in names if not name.startswith("manyhands")]

    # Its dependencies are the ones that are here; the package itself is the wheel's.
    place = tmp_path / "env"
    venv.create(place, symlinks=True)
    new = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", new, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    found = run(new, "-c", "import manyhands; print(manyhands.__file__)", cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(site)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "first.py").write_text(program)
    metrics, answer = run(new, "first.py", cwd=tmp_path).strip().splitlines()
    assert "valid_accuracy" in metrics
    assert answer.startswith("tensor([")
    assert (tmp_path / "models" / "digits" / "1" / "program.json").exists()
    assert [path.name[:6] for path in (tmp_path / "runs").iterdir()] == ["first-"]
    assert run(place / "bin" / "manyhands", "--version", cwd=tmp_path).strip() == f"manyhands {manyhands.__version__}"
    assert "runs" in run(place / "bin" / "manyhands", "dashboard", "--help", cwd=tmp_path)
