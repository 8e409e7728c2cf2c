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


def test_the_function_named_task_is_taken() -> None:
    assert as_task(load_task("small_task.py"), {"width": "3"}).batch_size == 16  # type: ignore[arg-type]


def test_a_name_after_a_colon_is_taken() -> None:
    file = write("two.py", f"def small() -> mh.Task: return {TASK}\nbig = {TASK}\n")
    assert isinstance(load_task(f"{file}:big"), Task)


@pytest.mark.parametrize("said", ["mh.Task", "'mh.Task'", "'Task'"])
def test_the_only_task_is_taken_whatever_its_name(said: str) -> None:
    file = write("one.py", f"def digits() -> {said}: return {TASK}\ndef loss(): ...\n")
    assert load_task(file).__name__ == "digits"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (f"a = {TASK}\nb = {TASK}", "", "must have one task, but got several; name one: some.py:a, some.py:b"),
        ("x = 1", "", "must have one task, but got none; write def task"),
        (f"a = {TASK}", ":b", "must have a task of that name, but got 'b'; name one: some.py:a"),
    ],
)
def test_the_candidates_are_named(text: str, name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_task(write("some.py", text) + name)


def test_a_file_is_a_module_that_others_beside_it_can_import() -> None:
    module = load_module(Path("small_task.py"))
    assert module.__name__ == "small_task"
    assert sys.modules["small_task"] is module
    assert sys.path[0] == str(Path.cwd())


@pytest.mark.parametrize("name", ["random.py", "my-task.py", "torch.py"])
def test_a_file_s_name_does_not_stand_in_the_way_of_a_module(name: str) -> None:
    before = sys.modules["random"], sys.modules["torch"]
    assert load_module(Path(write(name, "x = 1"))).x == 1
    assert (sys.modules["random"], sys.modules["torch"]) == before


def test_a_file_with_an_error_shows_its_own_lines_only() -> None:
    file = write("broken.py", "def inner():\n    return undefined_name\ninner()")
    with pytest.raises(BrokenFile, match="NameError") as caught:
        load_task(file)
    first, *frames = [line for line in caught.value.traceback.splitlines() if line.startswith("  File")]
    assert "broken.py" in first
    assert all("broken.py" in frame for frame in frames)


def test_a_file_that_does_not_compile_shows_the_line() -> None:
    with pytest.raises(BrokenFile, match=r"SyntaxError(.|\n)*def f\(:"):
        load_task(write("slip.py", "def f(:"))


@pytest.mark.parametrize("name", ["none.py", ".", "beside.txt"])
def test_what_is_not_a_python_file_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=r"the first argument is a Python file.*beside.py, own_loop.py"):
        load_task(name)


def test_a_slip_in_a_name_names_the_file_that_was_meant() -> None:
    with pytest.raises(SettingsError, match=r"own_lop.py, which does not exist; here are own_loop.py, "):
        load_task("own_lop.py")


def test_words_win_over_the_file_s_parameters() -> None:
    params = parse_params(["lr=3e-4", "note=a=b"], {"lr": 0.1, "width": 8, "norm": True, "sizes": [1, 2]})
    assert params == {"lr": "3e-4", "note": "a=b", "width": "8", "norm": "True", "sizes": [1, 2]}


def test_a_word_without_a_value_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"key=value, but got '0\.1'"):
        parse_params(["0.1"])
