"""The target of a command, `FILE.py[:name]`: loads the file as a module and finds the task in it."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core import ManyhandsError, SettingsError, Task, as_task
from .failures import short_traceback

TaskLike = Task | Callable[..., Task]
DEFAULT_NAME = "task"


class BrokenFile(SettingsError):
    """Raised if a user's file raises an exception while it is imported; the text contains the user's traceback."""

    def __init__(self, path: Path, error: BaseException) -> None:
        super().__init__(
            f"{path} must be importable without an error",
            got=f"{type(error).__name__}: {error}",
            remedy="correct the line shown below",
        )
        self.traceback = short_traceback(error)

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.traceback}"


def load_task(target: str) -> TaskLike:
    """Import the file of a target `FILE.py[:name]` and return its task or task function.

    Without a name, it is the object called `task`, or else the only task in the file. Functions and classes of the file
    are pickled by value, so that worker processes need not import it.
    """
    path, name = split_target(target)
    module = load_module(path)
    return _named(module, path, name) if name else _found(module, path)


def split_target(target: str) -> tuple[Path, str]:
    """Split a target `FILE.py[:name]` into the file and the name, which is empty if the target has none.

    >>> split_target("digits.py:big")
    (PosixPath('digits.py'), 'big')
    """
    path, colon, name = target.rpartition(":")
    return (Path(path), name) if colon and path and name.isidentifier() else (Path(target), "")


def parse_params(words: Sequence[str], written: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a task's parameters: those written in the configuration file, overridden by `key=value` words.

    >>> parse_params(["lr=3e-4"], {"lr": 0.1, "width": 8})
    {'lr': '3e-4', 'width': '8'}
    """
    params = {key: _as_text(value) for key, value in (written or {}).items()}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise SettingsError(
                "a parameter of the task must be written key=value", got=repr(word), remedy="write for example lr=3e-4"
            )
        params[key] = value
    return params


def with_params(task: TaskLike, words: Sequence[str], written: Mapping[str, Any] | None = None) -> TaskLike:
    """Return the task function with its parameters bound; without parameters, return `task` unchanged.

    A Task has no parameters, so `as_task` raises if some are given for one.
    """
    params = parse_params(words, written)
    if not params:
        return task
    return as_task(task, params) if isinstance(task, Task) else functools.partial(task, **params)


def _as_text(value: Any) -> Any:
    """Return numbers and booleans as strings, so that the task function's signature decides their type."""
    return str(value) if isinstance(value, (bool, int, float)) else value


def require_file(path: Path) -> None:
    """Raise SettingsError unless the path is a Python file; the error names Python files in the same folder."""
    if path.is_file() and path.suffix == ".py":
        return
    folder = path if path.is_dir() else path.parent
    there = sorted(item.name for item in folder.glob("*.py")) if folder.is_dir() else []
    there.sort(key=lambda name: difflib.SequenceMatcher(None, path.name, name).ratio() < 0.6)  # similar names first
    remedy = f"here are {', '.join(there[:8])}" if there else "give the path to a .py file"
    what = f"{path}, which " + ("does not exist" if not path.exists() else "is not one")
    raise SettingsError("the first argument must be a Python file", got=what, remedy=remedy)


def load_module(path: Path) -> ModuleType:
    """Import a Python file as a module, and put its folder first in sys.path; raise BrokenFile if it raises."""
    import cloudpickle

    require_file(path)
    path = path.resolve()
    sys.path[:] = [str(path.parent), *(entry for entry in sys.path if entry != str(path.parent))]
    name = _module_name(path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    cloudpickle.register_pickle_by_value(module)
    try:
        spec.loader.exec_module(module)
    except ManyhandsError:
        raise
    except (Exception, SystemExit) as error:
        raise BrokenFile(path, error) from error
    return module


def _module_name(stem: str) -> str:
    """Return a module name for a file; with a prefix if the file's own name would hide another module."""
    if stem.isidentifier() and stem not in sys.modules and stem not in sys.stdlib_module_names:
        return stem
    return "file_" + re.sub(r"\W", "_", stem)


def _named(module: ModuleType, path: Path, name: str) -> TaskLike:
    if not hasattr(module, name):
        raise _not_there(module, path, repr(name))
    return typing.cast(TaskLike, getattr(module, name))


def _found(module: ModuleType, path: Path) -> TaskLike:
    if hasattr(module, DEFAULT_NAME):
        return typing.cast(TaskLike, getattr(module, DEFAULT_NAME))
    names = _candidates(module)
    if len(names) != 1:
        raise _not_there(module, path, "several" if names else "none")
    return typing.cast(TaskLike, getattr(module, names[0]))


def _not_there(module: ModuleType, path: Path, got: str) -> SettingsError:
    names = _candidates(module) or [DEFAULT_NAME] * hasattr(module, DEFAULT_NAME)
    remedy = (
        f"name one: {', '.join(f'{path}:{name}' for name in names)}" if names else "write def task() -> mh.Task: ..."
    )
    rule = f"{path} must have a task of that name" if got.startswith("'") else f"{path} must have one task"
    return SettingsError(rule, got=got, remedy=remedy)


def _candidates(module: ModuleType) -> list[str]:
    """Return the names of a module's tasks, and of its functions that are annotated to return a Task."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Task)
        or (callable(value) and getattr(value, "__module__", "") == module.__name__ and _returns_task(value))
    ]


def _returns_task(function: Callable[..., Any]) -> bool:
    annotation = getattr(function, "__annotations__", {}).get("return")
    return annotation is Task or (isinstance(annotation, str) and annotation.split(".")[-1] == Task.__name__)
