"""The layers: which package may import which. An import that the table does not list fails here."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "manyhands"

EVERYTHING = {"*"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "options": {"core"},
    "distributed": {"core"},
    "launcher": {"core", "distributed"},
    "diagnostics": {"core", "distributed", "launcher"},
    "storage": {"core"},
    "monitoring": {"core", "distributed"},
    "data": {"core"},
    "sync": {"core", "distributed"},
    "graph": {"core", "distributed"},
    "capture": {"distributed"},
    "costs": {"core", "distributed", "graph"},
    "strategies": {"core", "distributed", "sync", "graph", "capture", "costs"},
    "training": {"core", "distributed", "monitoring", "launcher", "graph", "capture", "strategies", "data", "storage"},
    "parameter_server": {"core", "distributed", "monitoring", "launcher", "capture", "strategies", "data", "training"},
    "vectorized": {"core", "distributed", "storage", "training", "data", "capture"},
    "profiling": {"core", "distributed", "monitoring", "capture", "training", "costs"},
    "planning": {"core", "costs"},
    "tuning": {"core", "options", "distributed", "monitoring", "launcher", "storage", "training", "vectorized"},
    "ensembles": {"core", "distributed", "launcher", "storage", "training", "vectorized"},
    "serving": {"core", "distributed", "launcher", "storage", "capture"},
    "keras": {"core", "distributed", "launcher", "storage", "strategies", "training", "data"},
    "dashboard": {"core"},
    "testing": {"core", "distributed", "launcher", "sync", "strategies", "data", "storage"},
    "cli": EVERYTHING,
}
MAY_IMPORT["api"] = set(MAY_IMPORT) - {"cli", "keras", "dashboard", "testing"}
MAY_IMPORT["(root)"] = {"api", *MAY_IMPORT["api"], "cli"}
PACKAGES = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")


def imports(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Return every import of manyhands in a file: its line, and the path inside the package."""
    here = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            tail = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = here[: len(here) - (node.level - 1)]
                yield node.lineno, (*base, *tail) or tuple(alias.name for alias in node.names[:1])
            elif tail and tail[0] == PACKAGE.name:
                yield node.lineno, tail[1:] or tuple(alias.name for alias in node.names[:1])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = tuple(alias.name.split("."))
                if parts[0] == PACKAGE.name:
                    yield node.lineno, parts[1:]


def package_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "(root)"


@pytest.mark.parametrize("package", [*PACKAGES, "(root)"])
def test_packages_import_only_what_the_table_allows(package: str) -> None:
    assert package in MAY_IMPORT, f"the package {package!r} is not in the table"
    files = PACKAGE.glob("*.py") if package == "(root)" else (PACKAGE / package).rglob("*.py")
    allowed = MAY_IMPORT[package]
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {'.'.join(target)}"
        for path in files
        for line, target in imports(path)
        if allowed != EVERYTHING and target and target[0] not in (package, "__version__", *allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_are_imported_through_their_init() -> None:
    # The public interface of `api` is a file for each function, so that `import manyhands` loads only what is used.
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports a submodule of {target[0]}: {'.'.join(target)}"
        for path in PACKAGE.rglob("*.py")
        for line, target in imports(path)
        if len(target) > 1 and target[0] in PACKAGES and target[0] not in (package_of(path), "api")
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_have_no_import_cycle() -> None:
    edges = {
        name: {t[0] for path in (PACKAGE / name).rglob("*.py") for _, t in imports(path) if t and t[0] in PACKAGES}
        - {name}
        for name in PACKAGES
    }

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = edges[todo.pop()] - seen
            seen |= new
            todo.extend(new)
        return seen

    assert not [package for package in PACKAGES if package in reach(package)]


def test_api_functions_share_only_public_names_and_have_no_import_cycle() -> None:
    edges: dict[str, set[str]] = {}
    for path in (PACKAGE / "api").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                edges.setdefault(path.stem, set()).add(node.module)
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path.name}:{node.lineno} imports {private} of {node.module}"
    order = list(graphlib.TopologicalSorter(edges).static_order())  # raises CycleError
    assert "runtime" in order


def test_every_file_has_a_docstring() -> None:
    without = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not without


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(PACKAGE)))
    assert not {name: files for name, files in places.items() if len(files) > 1}
