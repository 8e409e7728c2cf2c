"""The public functions: few parameters, and options that are declared once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest

import manyhands as mh
from manyhands.cli.ensemble import GROUPS as ENSEMBLE
from manyhands.cli.fit import GROUPS as FIT
from manyhands.cli.serve import SERVER, SHARED, Backends
from manyhands.cli.tune import GROUPS as TUNE
from manyhands.core import SettingsError, options_of

MAX_PARAMETERS = 10


def public_functions() -> Iterator[Any]:
    """Yield every public function, and every public method of the exported classes that are not frozen dataclasses."""
    for exported in mh.__all__:
        value = getattr(mh, exported)
        if inspect.isfunction(value):
            yield pytest.param(value, id=exported)
        elif inspect.isclass(value) and not is_dataclass(value):
            for name, method in inspect.getmembers(value, inspect.isfunction):
                if name == "__init__" or not name.startswith("_"):
                    yield pytest.param(method, id=f"{exported}.{name}")


@pytest.mark.parametrize("function", [*public_functions()])
def test_public_functions_and_methods_have_at_most_ten_parameters(function: Any) -> None:
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    assert len(parameters) <= MAX_PARAMETERS


def test_settings_that_a_strategy_does_not_take_are_combined_by_a_product() -> None:
    servers = mh.ParameterServer(2, 4) * mh.Single(recompute="blocks")
    assert servers == mh.StrategySpec(servers=2, replicas=4, recompute="blocks")
    pipelines = mh.Pipeline(4) * mh.Mirrored(2, sync="bf16")
    assert pipelines == mh.StrategySpec(stages=4, microbatches=8, replicas=2, sync="bf16")


def test_options_of_serving_have_unique_names_and_helps() -> None:
    fields = [field for kind in (*SHARED, *SERVER, Backends) for field in options_of(kind)]
    names = [field.name for field in fields]
    assert len(names) == len(set(names))
    assert all(field.metadata["help"].endswith(".") for field in fields)


@pytest.mark.parametrize("wrong", [{"listen": {"http": 0}}, {"batching": 5}, {"rollout": "latest:2"}, {"log": 5}])
def test_options_of_another_class_are_refused_with_the_right_one(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"Pass mh\.serving\.\w+\(\.\.\.\)"):
        mh.serve("models", on="cpu", **wrong)


@pytest.mark.parametrize("kinds", [FIT, TUNE, ENSEMBLE], ids=["fit", "tune", "ensemble"])
def test_commands_declare_every_option_once_with_a_help(kinds: tuple[type, ...]) -> None:
    fields = [field for kind in kinds for field in options_of(kind)]
    names = [field.name for field in fields]
    assert len(names) == len(set(names))
    assert all(field.metadata["help"].endswith(".") for field in fields)


def test_argument_that_moved_into_a_class_is_refused_with_that_class() -> None:
    call: Any = mh.fit
    with pytest.raises(TypeError, match=r"pass options=mh\.options\.Checkpoints\(save_every=10\)"):
        call(None, save_every=10)
    call = mh.tune
    with pytest.raises(TypeError, match=r"pass options=mh\.options\.Algorithm\(search='random'\)"):
        call(None, {}, search="random")
    with pytest.raises(TypeError, match=r"mh\.tune has no argument 'epoch'; known are task, space, trials"):
        call(None, {}, epoch=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (mh.options.Budget(seconds=3), r"objects of Checkpoints, Logging.* but got Budget\(.*Pass for example"),
        ({"keep": 3}, r"Pass options=mh\.options\.Checkpoints\(keep=3\)"),
        (mh.options.Checkpoints, r"Pass an object: mh\.options\.Checkpoints\(\.\.\.\)"),
        ([mh.options.Checkpoints(keep=1), mh.options.Checkpoints(keep=2)], "Checkpoints twice"),
    ],
)
def test_options_that_fit_does_not_have_are_refused(options: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        mh.fit(mh.Task, options=options)  # type: ignore[arg-type]
