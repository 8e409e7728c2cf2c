"""`FILE.py[:name]`: the file that is loaded, and the task that is found in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from manyhands.cli.target import BrokenFile, load_module, load_task, parse_params
from manyhands.core import SettingsError, Task, as_task

TASK = "mh.Task(model=lambda: None, loss=lambda m, b: 0, optimizer=lambda m: None, data=[1])"


def write(name: str, text: str) -> str:
    Path(name).write_text(f"import manyhands as mh\n{text}\n")
    return name


def test_function_named_task_is_used_by_default() -> None:
    assert as_task(load_task("small_task.py"), {"width": "3"}).batch_size == 16  # type: ignore[arg-type]


def test_name_after_colon_selects_the_task() -> None:
    file = write("two.py", f"def small() -> mh.Task: return {TASK}\nbig = {TASK}\n")
    assert isinstance(load_task(f"{file}:big"), Task)


@pytest.mark.parametrize("said", ["mh.Task", "'mh.Task'", "'Task'"])
def test_single_task_is_used_regardless_of_its_name(said: str) -> None:
    file = write("one.py", f"def digits() -> {said}: return {TASK}\ndef loss(): ...\n")
    assert load_task(file).__name__ == "digits"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (f"a = {TASK}\nb = {TASK}", "", "must have one task, but got several. Name one: some.py:a, some.py:b"),
        ("x = 1", "", "must have one task, but got none. Write def task"),
        (f"a = {TASK}", ":b", "must have a task of that name, but got 'b'. Name one: some.py:a"),
    ],
)
def test_missing_or_ambiguous_task_error_lists_candidates(text: str, name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_task(write("some.py", text) + name)


def test_loaded_file_is_importable_as_a_module() -> None:
    module = load_module(Path("small_task.py"))
    assert module.__name__ == "small_task"
    assert sys.modules["small_task"] is module
    assert sys.path[0] == str(Path.cwd())


@pytest.mark.parametrize("name", ["random.py", "my-task.py", "torch.py"])
def test_file_named_like_an_imported_module_does_not_replace_it(name: str) -> None:
    before = sys.modules["random"], sys.modules["torch"]
    assert load_module(Path(write(name, "x = 1"))).x == 1
    assert (sys.modules["random"], sys.modules["torch"]) == before


def test_traceback_of_a_broken_file_shows_only_its_own_lines() -> None:
    file = write("broken.py", "def inner():\n    return undefined_name\ninner()")
    with pytest.raises(BrokenFile, match="NameError") as caught:
        load_task(file)
    first, *frames = [line for line in caught.value.traceback.splitlines() if line.startswith("  File")]
    assert "broken.py" in first
    assert all("broken.py" in frame for frame in frames)


def test_syntax_error_shows_the_line() -> None:
    with pytest.raises(BrokenFile, match=r"SyntaxError(.|\n)*def f\(:"):
        load_task(write("slip.py", "def f(:"))


@pytest.mark.parametrize("name", ["none.py", ".", "beside.txt"])
def test_non_python_target_is_rejected_with_files_to_choose_from(name: str) -> None:
    with pytest.raises(SettingsError, match=r"the first argument must be a Python file.*beside.py, own_loop.py"):
        load_task(name)


def test_misspelled_file_name_error_suggests_the_closest_file() -> None:
    with pytest.raises(SettingsError, match=r"own_lop.py, which does not exist\. Here are own_loop.py, "):
        load_task("own_lop.py")


def test_command_line_parameters_override_config_file_parameters() -> None:
    params = parse_params(["lr=3e-4", "note=a=b"], {"lr": 0.1, "width": 8, "norm": True, "sizes": [1, 2]})
    assert params == {"lr": "3e-4", "note": "a=b", "width": "8", "norm": "True", "sizes": [1, 2]}


def test_parameter_without_a_value_is_rejected() -> None:
    with pytest.raises(SettingsError, match=r"key=value, but got '0\.1'"):
        parse_params(["0.1"])
