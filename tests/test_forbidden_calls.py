"""Calls that can execute data as code appear only in the listed files, each with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "manyhands"
MODULES = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
BUILTINS = {"eval", "exec", "__import__"}
CALLS = {
    ("torch", "load"), ("torch", "jit"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system"), ("os", "popen"),
    ("numpy", "load"), ("np", "load"), ("builtins", "eval"), ("builtins", "exec"), ("builtins", "compile"),
}  # fmt: skip
_TO_OWN_PROCESSES = "a user's function on its way to processes that this program started, over inherited descriptors"
_AFTER_PROOF = "objects of the user's own classes between ranks, after the proof of the sender"
_RAY = "Ray's own transport between its actors, which trusts every process that reaches the Ray cluster"
ALLOWED: dict[str, dict[str, str]] = {
    "cli/launch.py": {"compile": "checks the syntax of the user's own script, and runs nothing"},
    "cli/target.py": {
        "cloudpickle": "marks the user's own file as one to send by value",
        "exec_module": "the file that the user names on the command line",
    },
    "cli/trained.py": {"np.load": "with allow_pickle=False, for arrays that the user names"},
    "distributed/messages.py": {"pickle": _AFTER_PROOF, "cloudpickle": _AFTER_PROOF},
    "launcher/pickles.py": {"pickle": _TO_OWN_PROCESSES, "cloudpickle": _TO_OWN_PROCESSES},
    "launcher/ray_attendant.py": {"cloudpickle": _RAY},
    "launcher/ray_engine.py": {"cloudpickle": _RAY},
    "launcher/ray_host.py": {"cloudpickle": _RAY},
    "launcher/ray_service.py": {"cloudpickle": _RAY},
    "data/worker_memory.py": {"pickle": "batches from reader processes that this process forked"},
    "data/workers.py": {"pickle": "tries whether an error of this process can be sent on"},
    "keras/callbacks.py": {"pickle": _AFTER_PROOF},
    "keras/model_changes.py": {"cloudpickle": _AFTER_PROOF},
    "serving/python_model.py": {"exec_module": "predictor.py of a version, only where the operator trusts Python code"},
    "serving/parsing.py": {"pickle": "PickleBuffer only, which marks bytes as a buffer and reads nothing"},
    "storage/weights.py": {
        "pickle": "the name of an error only",
        "torch.load": "with weights_only=True, for weights that the user names",
    },
    "training/metrics.py": {"cloudpickle": _AFTER_PROOF},
}
"""By file what it may use, and why that executes nothing that an attacker sends."""


def found(text: str) -> set[str]:
    """Return the forbidden things that a module uses."""
    return {name for node in ast.walk(ast.parse(text)) for name in _of(node)}


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
    elif isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        if (node.module or "").partition(".")[0] in MODULES and not node.level:
            yield str(node.module)
        yield from (f"{node.module}.{name}" for name in names if (node.module, name) in CALLS)
    elif isinstance(node, ast.Name) and node.id in BUILTINS:
        # Also where it is only passed on.
        yield node.id
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "compile":
        # As a name of something else it is common.
        yield "compile"
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in CALLS:
        yield f"{node.value.id}.{node.attr}"
    elif isinstance(node, ast.Attribute) and node.attr == "exec_module":
        yield "exec_module"
    elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle") and not _is_false(node.value):
        yield node.arg
    elif isinstance(node, ast.keyword) and node.arg == "weights_only" and _is_false(node.value):
        yield "weights_only=False"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_calls_that_execute_data_are_used_only_in_allowed_files() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        assert sorted(found(path.read_text()) - set(ALLOWED.get(name, {}))) == [], name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import pickle as p", {"pickle"}),
        ("from cloudpickle import loads", {"cloudpickle"}),
        ("def f():\n    import marshal", {"marshal"}),
        ("eval('1')", {"eval"}),
        ("run = exec", {"exec"}),
        ("compile(text, name, 'exec')", {"compile"}),
        ("import re\nre.compile('x')\nmodel.eval()", set()),
        ("torch.load(path)", {"torch.load"}),
        ("from torch import load", {"torch.load"}),
        ("import yaml\nyaml.load(x)", {"yaml.load"}),
        ("subprocess.run('ls', shell=True)", {"shell"}),
        ("subprocess.run(['ls'], shell=False)", set()),
        ("np.load(file, allow_pickle=True)", {"np.load", "allow_pickle"}),
        ("torch.load(file, weights_only=False)", {"torch.load", "weights_only=False"}),
        ("os.system('ls')", {"os.system"}),
        ("spec.loader.exec_module(module)", {"exec_module"}),
    ],
)
def test_every_call_that_executes_data_is_detected(text: str, names: set[str]) -> None:
    assert found(text) == names
