"""Hosts with other code or other data are refused before training, with the difference."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import manyhands as mh
from manyhands.core import Event, SettingsError
from manyhands.distributed import World, resolve
from manyhands.distributed.network import listen
from manyhands.launcher import LocalEngine
from manyhands.training.host_comparison import local_sources, require_identical

SCRIPT = """
import sys
import manyhands as mh, torch
import helper

if __name__ == "__main__":
    task = mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=helper.made(),
        batch_size=4,
    )
    join = mh.Join(address=sys.argv[1], hosts=2, on="cpu")
    mh.fit(task, epochs=1, name="run", on=join, options=mh.options.Recovery(timeout=60))
"""
HELPER = "import torch\ndef made():\n    return torch.arange(48.0).view(12, 4) / {}, torch.ones(12, 1)\n"


def test_hosts_with_another_helper_module_are_refused_before_training(tmp_path: Path) -> None:
    with listen("127.0.0.1") as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = {"PYTHONPATH": str(Path(mh.__file__).parents[1]), "MANYHANDS_TOKEN": "a" * 40}
    programs = []
    for name, scale in (("a", 48), ("b", 47)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        (folder / "helper.py").write_text(HELPER.format(scale))
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
        programs.append(subprocess.Popen([sys.executable, "train.py", address], env={**os.environ, **path}, **options))
    said = [program.communicate(timeout=250)[1] for program in programs]
    assert all(program.returncode for program in programs), said
    for text in said:
        assert "all hosts must have the same code and data" in text
        assert "in the source of helper, the data (12 samples, " in text
        assert "epoch 1" not in text


def test_intended_differences_are_reported_and_allowed(engine: LocalEngine) -> None:
    def work(world: World, allow_different: bool) -> str:
        task = mh.Task(
            model=lambda: None, loss=lambda model, batch: None, optimizer=lambda model: None, data=np.arange(8.0),
            batch_size=4,
        )  # fmt: skip
        sources = {"helper": str(world.rank), "same": "x", f"only{world.rank}": "y"}
        try:
            require_identical(world, task, sources, allow_different=allow_different)
        except SettingsError as error:
            return str(error.got)
        return ""

    def run(allow_different: bool) -> tuple[list[str], list[str]]:
        events: list[Event] = []
        job = engine.start(functools.partial(work, allow_different=allow_different), resolve("cpu*2")[0])
        raised = job.wait(lambda rank, entry: events.append(entry), lambda rank, text, stream: None)
        return raised, [entry["text"] for entry in events if entry["kind"] == "notice"]

    raised, _ = run(allow_different=False)
    assert all(text.endswith("in the source of helper") for text in raised)
    raised, (notice,) = run(allow_different=True)
    assert raised == ["", ""]
    assert notice.startswith("allow_different=True: ")
    assert notice.endswith("in the source of helper")


def test_only_modules_of_the_project_are_compared() -> None:
    names = local_sources()
    assert __name__ in names
    assert not [name for name in names if name.partition(".")[0] in ("manyhands", "torch", "json", "pytest")]
