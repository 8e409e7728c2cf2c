"""Tasks: refused arguments, typed parameters, means, predictors, events and seeds."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import (
    DataError,
    EventLog,
    Mean,
    PeerLost,
    Predictor,
    SettingsError,
    Signature,
    TaskError,
    TensorSpec,
    WorkerFailed,
    as_task,
    event,
    mix,
    random_state,
    read_events,
    restore_random_state,
    seed_all,
    typed,
)

GOOD: dict[str, Any] = {
    "model": lambda: nn.Linear(1, 1),
    "loss": lambda model, batch: model(batch).mean(),
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "data": torch.ones(4, 1),
    "batch_size": 2,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": None}, "either a loss or a step, but got neither"),
        ({"step": lambda hand, batch: None}, "either a loss or a step, but got both"),
        ({"model": nn.Linear(1, 1)}, "builds a new network each time, but got Linear. Write model=lambda: Linear"),
        ({"optimizer": "adam"}, "optimizer must be a function, but got str"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, but got 0"),
        ({"clip": 0.0}, "clip must be a positive norm, or None"),
        ({"schedule": torch.optim.lr_scheduler.StepLR}, r"a function of \(step, total\) .* got the class StepLR"),
        ({"workers": -1}, "workers must be a whole number of at least 0, but got -1"),
        ({"optimizer": torch.optim.Adam}, r"got the class Adam. Write optimizer=lambda model: torch.optim.Adam"),
        (
            {"loss": nn.MSELoss()},
            r"a function of the model and a batch, but got MSELoss\(\), which takes outputs and labels",
        ),
        ({"loss": nn.functional.cross_entropy}, "but got cross_entropy, which takes outputs and labels"),
        ({"metrics": [len]}, "metrics must be functions by name, but got list"),
        (
            {"metrics": {"a": lambda outputs: 0}},
            r"metrics\['a'\] must accept the arguments \(outputs, batch\), but got <lambda>\(o",
        ),
        (
            {"loss": lambda model, x, y: 0},
            r"loss must accept the arguments \(model, batch\), but got <lambda>\(model, x, y\)",
        ),
    ],
)
def test_invalid_task_arguments_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        mh.Task(**{**GOOD, **changes})


@pytest.mark.parametrize("kind", [mh.Task, mh.StrategySpec])
def test_docstring_documents_every_field(kind: type) -> None:
    listed = [
        name for names in re.findall(r"^- (`.+?`):", inspect.getdoc(kind) or "", re.M) for name in names.split(", ")
    ]
    assert sorted(listed) == sorted(f"`{field.name}`" for field in dataclasses.fields(kind))


def test_var_keyword_accepts_any_parameter_name() -> None:
    def open_to_all(lr: float = 0.1, **kw: Any) -> mh.Task:
        raise NotImplementedError

    def closed(*args: Any, lr: float = 0.1) -> mh.Task:
        raise NotImplementedError

    assert typed(open_to_all, {"lr": "1", "width": "8", "kw": 3}) == {"lr": 1.0, "width": "8", "kw": 3}
    with pytest.raises(SettingsError, match="a parameter of the task must be one of lr, but got 'args'"):
        typed(closed, {"args": 1})


def test_parameters_are_converted_by_signature_annotations() -> None:
    def task(
        lr: float = 1e-3, width: int = 8, deep: bool = False, name: str = "a", clip: float | None = None
    ) -> mh.Task:
        return mh.Task(**GOOD)

    given = {"lr": "3e-4", "width": "16", "deep": "true", "name": "b", "clip": "0.5"}
    assert typed(task, given) == {"lr": 3e-4, "width": 16, "deep": True, "name": "b", "clip": 0.5}
    assert typed(task, {"clip": "none"}) == {"clip": None}
    with pytest.raises(SettingsError, match="deep must be of type bool, but got 'perhaps'"):
        typed(task, {"deep": "perhaps"})
    with pytest.raises(TaskError, match="must return an mh.Task, but got int"):
        as_task(lambda: 3)  # type: ignore[arg-type, return-value]


def test_task_repr_omits_the_data() -> None:
    assert repr(mh.Task(**GOOD)) == (
        "Task(model=<lambda>, loss=<lambda>, optimizer=<lambda>, data=Tensor, batch_size=2, seed=0)"
    )
    with pytest.raises(TaskError, match="a task must be an mh.Task or a function that returns one, but got Linear"):
        as_task(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_mean_rejects_non_scalar_total_and_count() -> None:
    assert isinstance(mh.mean(torch.tensor(2.0), 4), Mean)
    with pytest.raises(TaskError, match="the total of mh.mean must be a scalar"):
        mh.mean(torch.ones(3), 3)
    with pytest.raises(TaskError, match="the count of mh.mean must be a single number"):
        mh.mean(torch.tensor(1.0), torch.ones(2))


def test_errors_survive_pickling() -> None:
    for error in (
        TaskError("rule", got=3, remedy="do"),
        WorkerFailed(1, "host", "why", "trace"),
        PeerLost("all_reduce", "file:1", "rank 2", "detail"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)


class Double(Predictor):
    signature = Signature({"x": TensorSpec("float32", (None, 2))}, {"y": TensorSpec("float32", (None, 2))})

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": inputs["x"] * 2}


def test_predictor_validates_its_inputs() -> None:
    double = Double()
    assert double([[1, 2]]).tolist() == [[2.0, 4.0]]
    assert double({"x": torch.ones(3, 2)}).shape == (3, 2)
    with pytest.raises(DataError, match=r"input 'x' must be float32\[\*, 2\], but got float32\[1, 3\]"):
        double(torch.ones(1, 3))
    with pytest.raises(DataError, match="the inputs must be x, but got z"):
        double({"z": torch.ones(1, 2)})
    assert Signature.from_dict(json.loads(json.dumps(double.signature.to_dict()))) == double.signature


def test_incomplete_line_does_not_corrupt_the_event_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write(event("a", value=torch.tensor(1.5)))
    log.close()
    with path.open("a") as file:
        file.write('{"v": 1, "kind": "to')
    log = EventLog(path)
    log.write(event("b"))
    log.close()
    with pytest.warns(RuntimeWarning, match=r"1 line of .*events\.jsonl could not be read"):
        assert [entry["kind"] for entry in read_events(path)] == ["a", "b"]
    assert next(read_events(path))["value"] == 1.5


def test_random_states_are_restored_exactly() -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [torch.rand(()).item(), float(np.random.randn()), random.gauss(0, 1), random.random()]

    seed_all(mix(3, 1))
    draw()
    states = random_state(torch.device("cpu"))
    first = draw()
    restore_random_state({name: value.clone() for name, value in states.items()}, torch.device("cpu"))
    assert draw() == first
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500
