"""The documentation: its pages build with all links, its programs run, and its commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

import manyhands as mh
from manyhands.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == kind]


BEGINNING = blocks(ROOT / "docs" / "index.md", "python")[0]
"""Where `task`, `images` and `labels` of all pages come from."""


RUNNER = """
import os, pathlib, sys
for page in sorted(pathlib.Path().glob("*/page.py")):
    os.chdir(page.parent.resolve())
    print(page.parent, flush=True)
    exec(compile(pathlib.Path("page.py").read_text(), str(page), "exec"), {"__name__": "__main__"})
    os.chdir("..")
"""


def test_python_programs_of_every_page_run(tmp_path: Path) -> None:
    """All pages in one process, which imports torch once; every page in a folder and with names of its own."""
    pages = [page for page in PAGES if blocks(page, "python")]
    for page in pages:
        programs = blocks(page, "python")
        begins = programs[0] == BEGINNING
        (tmp_path / page.stem).mkdir()
        (tmp_path / page.stem / "page.py").write_text("\n\n".join(programs if begins else [BEGINNING, *programs]))
    command = [sys.executable, "-c", RUNNER]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
    assert {page.stem for page in pages} <= set(done.stdout.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_on_pages_exist_in_the_package(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for fragment in blocks(page, "py"):
        compile(fragment, str(page), "exec")
    for chain in set(re.findall(r"\bmh((?:\.[A-Za-z_]\w*)+)", text)):
        found: object = mh
        for name in chain[1:].split("."):
            assert hasattr(found, name), f"mh{chain}"
            found = getattr(found, name)
            if not isinstance(found, type(mh)):
                break


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_exist(page: Path) -> None:
    lines = [line for text in blocks(page, "sh") for line in text.replace("\\\n", " ").splitlines()]
    for line in (part for whole in lines for part in re.split(r"&&|\||;", whole)):
        words = shlex.split(line, comments=True)
        if "manyhands" in words:
            check(words[words.index("manyhands") + 1 :], line)


@pytest.mark.parametrize("page", ["security", "faults"])
def test_tests_named_on_a_page_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 10
    for file, name in named:
        tests = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *def {name}\(", tests, re.MULTILINE), f"{file}::{name}"


def check(words: list[str], line: str) -> None:
    command: Any = get_command(app)
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    if "--" in words:
        words = words[: words.index("--")]
    assert not [word for word in words if word.startswith("--") and word.split("=")[0] not in known], line


def test_documentation_site_builds_without_broken_links(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "Quick start" in index
    assert not re.search(r'(?:src|href)="https?://(?!squidfunk)', index), "no external hosts"


def test_every_example_is_linked_from_a_page() -> None:
    links = {link for page in PAGES for link in re.findall(r"\]\(\.\./(examples/[^)]+)\)", page.read_text("utf-8"))}
    programs = {path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")}
    helpers = {"examples/demo_pictures.py"}
    assert {path.relative_to(ROOT).as_posix() for path in programs} - helpers == links


def test_reference_has_every_public_name_once() -> None:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^::: manyhands\.([\w.]+)$", "\n".join(page.read_text() for page in pages), re.MULTILINE)
    assert len(named) == len(set(named))
    packages = {name for name in mh.__all__ if isinstance(getattr(mh, name), ModuleType)}
    assert {name for name in mh.__all__ if name not in packages} <= {name.rpartition(".")[2] for name in named}
    assert packages <= {name.partition(".")[0] for name in named}
