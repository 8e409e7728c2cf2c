"""A batch, a request and a trial pass the files that ARCHITECTURE.md lists."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F

import manyhands as mh
from manyhands.distributed import resolve
from manyhands.launcher import LocalEngine
from manyhands.serving import Server, version
from manyhands.storage import export
from manyhands.training import step_reporter
from manyhands.tuning.driver import Driver

from .call_trace import CallTrace
from .serving.conftest import Adder, publish, settings_of
from .test_architecture import FILE, MAP

MAX_FILES = {"batch": 12, "request": 20, "trial": 12}
"""Files that each may pass; that of a request may only become smaller."""


def listed(what: str) -> list[str]:
    """Return the files of a trace in ARCHITECTURE.md."""
    section = MAP.read_text(encoding="utf-8").partition(f"## Trace of a {what}\n\n")[2]
    found = (path for path, name in FILE.findall(section.partition("\n\n")[0]) if not name)
    files = [path for path in found if not path.startswith("tests/")]
    assert 0 < len(files) <= MAX_FILES[what]
    return files


def require_calls_downwards(calls: list[tuple[str, str]], files: list[str]) -> None:
    """Fail where a file calls one that precedes it, so that work goes back and forth between them."""
    place = {file: number for number, file in enumerate(files)}
    assert not [(one, other) for one, other in calls if {one, other} <= {*files} and place[one] >= place[other]]


class Watch(mh.Callback):
    """Writes the calls of some steps of rank 0 to a file."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        self.path, self.first, self.last = path, first, last
        self.trace: Any = None

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == self.first and hand.is_first:
            step_reporter.REPORT_SECONDS = 0.0  # report the events of every step
            self.trace = CallTrace()
            self.trace.start()
        if hand.num_steps == self.last and hand.is_first:
            self.trace.stop()
            self.path.write_text(json.dumps([list(self.trace.files), list(self.trace.calls)]), encoding="utf-8")


def task(lr: float = 0.01) -> mh.Task:
    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    data = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)), torch.arange(256) % 3
    return mh.Task(
        model=lambda: torch.nn.Linear(4, 3),
        loss=loss,
        data=data,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=lr),
        batch_size=8,
        clip=1.0,
    )


def test_batch_passes_the_listed_files_from_top_to_bottom(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    # The first steps are timed to choose how steps are executed.
    callbacks = [Watch(path, 20, 24)]
    quiet = mh.options.Display(progress=False)
    mh.fit(task(), mh.Mirrored(), on="cpu*2", epochs=1, folder=tmp_path / "run", callbacks=callbacks, options=quiet)
    files, calls = json.loads(path.read_text(encoding="utf-8"))
    assert set(files) == set(listed("batch"))
    require_calls_downwards(calls, listed("batch"))


def test_trial_passes_the_listed_files_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, run = CallTrace(), Driver.run

    def traced(driver: Driver) -> None:
        trace.start()
        try:
            run(driver)
        finally:
            trace.stop()

    monkeypatch.setattr(Driver, "run", traced)
    space = {"lr": mh.tuning.loguniform(0.01, 1.0)}
    options = [mh.options.Algorithm(search="random"), mh.options.Display(progress=False)]
    mh.tune(task, space, trials=2, epochs=1, objective="loss", on="cpu", folder=tmp_path, options=options)
    passed = [file for file in trace.files if file.startswith("tuning/") or file == "training/loop.py"]
    assert set(passed) == set(listed("trial"))
    # Training reports every event to the trial.
    require_calls_downwards([call for call in trace.calls if call[0] != "training/loop.py"], listed("trial"))


def test_request_passes_the_listed_files(engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a version does from time to time belongs to no request.
    monkeypatch.setattr(version, "_SWEEP", 60.0)
    (tmp_path / "exported").mkdir()
    adder = export(Adder(), lambda model, x: model(x), {"x": torch.ones(2, 3)}, tmp_path / "exported" / "adder")
    publish(adder, tmp_path / "models" / "adder", 1)
    trace = CallTrace()
    server = Server(tmp_path / "models", engine, resolve("cpu")[0], settings_of(poll=60.0))
    with server.start(), httpx.Client(base_url=server.url) as client:
        assert server._loop is not None
        for step in (None, trace.start, None, trace.stop):
            if step is None:
                reply = client.post("/v1/models/adder:predict", json={"instances": [[1, 2, 3]]})
                assert reply.json() == {"predictions": [[2.0, 3.0, 4.0]]}
            else:
                asyncio.run_coroutine_threadsafe(called(step), server._loop).result(10)
    assert list(trace.files) == listed("request")


async def called(function: Any) -> None:
    """Call a function on the event loop."""
    function()
