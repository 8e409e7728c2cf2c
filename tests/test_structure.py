"""The size of classes and files: a class has one job, and a file can be read at once."""

from __future__ import annotations

import ast
import functools

from .test_layers import PACKAGE

MAX_METHODS = 25
MAX_LINES = 500
MAX_PARAMETERS = 10
FOREIGN_SIGNATURES = {"keras/trainer.py::fit", "strategies/tensor/heads.py::run"}
"""Functions that take the place of Keras' `Model.fit` and of torch's `MultiheadAttention.forward`."""
REASON = "This file is long because"
"""How the docstring of a longer file begins the sentence that says why it is not split."""
CLASSES = {
    "serving/http_connection.py::Connection",
    "strategies/placed.py::PlacedReplica",
    "strategies/replica.py::Replica",
    "strategies/sharded.py::ShardedReplica",
    "strategies/sharded_pieces.py::HeldInParts",
    "strategies/tensor/glue.py::Glue",
}
"""Classes that are still too large; entries may only disappear."""
FILES = {
    "costs/trace.py",
    "serving/protocols/open_inference_rest.py",
    "strategies/build_replica.py",
    "strategies/tensor/glue.py",
}
"""Files that are still too long without a reason; entries may only disappear."""


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of every file by its path in the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
    }


@functools.cache
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(text)


def classes(name: str, text: str) -> dict[str, int]:
    """Return the number of methods of each class in a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(parsed(text)) if isinstance(node, ast.ClassDef)]
    return {f"{name}::{one.name}": sum(isinstance(node, kinds) for node in one.body) for one in found}


def test_no_class_has_more_than_25_methods() -> None:
    counts = {one: count for name, text in sources().items() for one, count in classes(name, text).items()}
    large = {one for one, count in counts.items() if count > MAX_METHODS}
    assert not large - CLASSES, "split these classes by responsibility"
    assert not CLASSES - large, "remove the entries of classes that are small now"


def test_no_function_has_more_than_10_parameters() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    large = set()
    for name, text in sources().items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, kinds):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if sum(one.arg not in ("self", "cls") for one in given) > MAX_PARAMETERS:
                    large.add(f"{name}::{node.name}")
    assert large == FOREIGN_SIGNATURES


def test_no_file_is_longer_than_500_lines_without_a_reason() -> None:
    long = {
        name
        for name, text in sources().items()
        if len(text.splitlines()) > MAX_LINES and REASON not in (ast.get_docstring(parsed(text)) or "")
    }
    assert not long - FILES, f'split these files, or begin a sentence of the docstring with "{REASON}"'
    assert not FILES - long, "remove the entries of files that are short now"


def test_check_finds_a_class_that_is_too_large() -> None:
    body = "\n".join(f"    def m{number}(self): ..." for number in range(MAX_METHODS + 1))
    assert classes("x.py", f"class Large:\n{body}\n") == {"x.py::Large": MAX_METHODS + 1}
