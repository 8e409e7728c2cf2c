"""ARCHITECTURE.md and docs/decisions: short, complete, and consistent with the source and the table of layers."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from .test_layers import EVERYTHING, MAY_IMPORT, PACKAGE, PACKAGES

ROOT = PACKAGE.parents[1]
MAP = ROOT / "ARCHITECTURE.md"
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
PAGES = [MAP, ROOT / "docs" / "decisions" / "index.md", *DECISIONS]
SECTIONS = ["Context", "Decision", "Evidence"]
MAX_LINES = 200
MAX_WIDTH = 120
FILE = re.compile(r"`([\w./-]+\.(?:py|md|js))(?:::([\w.]+))?`")
"""A path in backticks, with the name of a function, class or method in that file if `::` follows."""
ROW = re.compile(r"^\| `([\w/]+)\.py` \| .+ \| ([\w, ]+) \|$", re.MULTILINE)
"""A row of the table of packages: the entry point without its extension, the purpose, and the allowed imports."""


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def found(path: str) -> Path | None:
    """Return the file that a page names, relative to the repository, the package or the documentation."""
    return next((base / path for base in (ROOT, PACKAGE, ROOT / "docs") if (base / path).is_file()), None)


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Return the functions, classes and methods of a file, methods as `Class.method`."""
    body = ast.parse(read(path)).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in body if isinstance(node, kinds)]
    classes = [node for node in top if isinstance(node, ast.ClassDef)]
    methods = [f"{one.name}.{node.name}" for one in classes for node in one.body if isinstance(node, kinds)]
    return frozenset([*(node.name for node in top), *methods])


def imports_in_map() -> dict[str, set[str]]:
    """Return the allowed imports by package as ARCHITECTURE.md lists them."""
    special = {
        "everything": EVERYTHING,
        "nothing": set[str](),
        "everything but cli, keras, dashboard, testing": MAY_IMPORT["api"],
    }
    rows = [(entry.partition("/")[0], cell) for entry, cell in ROW.findall(read(MAP))]
    assert len(rows) == len(dict(rows)), "a package has two rows"
    return {package: special.get(cell, set(cell.split(", "))) for package, cell in rows}


def test_map_is_short() -> None:
    assert len(read(MAP).splitlines()) <= MAX_LINES


def test_lines_fit_the_width() -> None:
    assert not [(page.name, line) for page in PAGES for line in read(page).splitlines() if len(line) > MAX_WIDTH]


def test_table_lists_every_package() -> None:
    assert set(imports_in_map()) == set(PACKAGES)
    assert not [path.name for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]


def test_allowed_imports_are_those_of_the_layers() -> None:
    assert imports_in_map() == {name: allowed for name, allowed in MAY_IMPORT.items() if name != "(root)"}


def test_diagram_has_every_package_above_its_imports() -> None:
    rows = re.findall(r"^ │ (.*) │$", read(MAP), re.MULTILINE)
    height = {name: -number for number, row in enumerate(rows) for name in re.findall(r"\w+", row) if name in PACKAGES}
    assert set(height) == set(PACKAGES)
    limited = {name: allowed for name, allowed in MAY_IMPORT.items() if allowed != EVERYTHING and name != "(root)"}
    assert not [(name, one) for name, allowed in limited.items() for one in allowed if height[name] <= height[one]]


def test_named_files_and_functions_exist() -> None:
    for page in PAGES:
        for path, name in FILE.findall(read(page)):
            file = found(path)
            assert file is not None, f"{page.name} names {path}, which does not exist"
            assert not name or name in names_in(file), f"{page.name} names {path}::{name}, which does not exist"


def test_glossary_is_alphabetical() -> None:
    terms = re.findall(r"^\| ([^|]+) \|", read(MAP).partition("## Glossary")[2], re.MULTILINE)[1:]
    assert len(terms) > 10
    assert terms == sorted(terms)


def test_decisions_have_a_title_and_three_sections() -> None:
    for page in DECISIONS:
        title, *parts = re.split(r"^## (.+)$", read(page), flags=re.MULTILINE)
        assert title.startswith(f"# {page.stem[:3]}. "), page.name
        assert parts[::2] == SECTIONS, page.name
        assert all(part.strip() for part in parts[1::2]), page.name


def test_decisions_are_numbered_and_listed_in_the_index_and_the_navigation() -> None:
    names = [page.name for page in DECISIONS]
    assert [int(name[:3]) for name in names] == list(range(1, len(names) + 1))
    assert re.findall(r"\]\((\d{3}-[\w-]+\.md)\)", read(ROOT / "docs" / "decisions" / "index.md")) == names
    assert re.findall(r"decisions/(\d{3}-[\w-]+\.md)$", read(ROOT / "mkdocs.yml"), re.MULTILINE) == names
