"""A step is applied by all ranks or by none: kills at every point between the all-reduce and the next step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from tests.recovery.test_local import assert_same, kill, recoveries
from tests.training.problems import problem

from ..grouped_options import fit_options

POINTS = ["sums", "finish", "finish.", "clip.", "update", "optimizer", "update.", "end.", "meet"]
"""Where in a step: before what is named, or after it where a dot follows."""


class Traps(mh.Callback):
    """A trap at one point after another, on one rank and then on the other; files remember which have sprung."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.laid = folder, (-1, -1)

    def on_step(self, hand: mh.Hand) -> None:
        index = len(list(self.folder.glob("trap-*")))
        laid = index, hand.world.rank_info.generation
        if index >= len(POINTS) or hand.rank != index % 2 or laid == self.laid:
            return
        self.laid, point, flag = laid, POINTS[index], self.folder / f"trap-{index}-{hand.num_steps + 1}"

        def spring(*_: Any) -> None:
            flag.touch()
            kill()

        if point == "optimizer":
            hand.optimizers[""].register_step_post_hook(spring)
            return
        name = point.rstrip(".")
        if name == "sums":
            _wrap(hand.replica._buckets[""], "finish", spring, is_after=False)  # type: ignore[attr-defined]
        else:
            holder = hand.current if name in ("end", "meet") else hand.replica
            _wrap(holder, name, spring, is_after=point.endswith("."))


def _wrap(holder: Any, name: str, spring: Callable[[], None], *, is_after: bool) -> None:
    function = getattr(holder, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        if not is_after:
            spring()
        value = function(*args, **options)
        spring()
        return value

    setattr(holder, name, wrapped)


def test_kill_between_all_reduce_and_update_keeps_replicas_consistent(engine: Any, tmp_path: Path) -> None:
    task = dataclasses.replace(problem("mlp", "adamw"), clip=1.0, ema=0.5)
    strategy = mh.Mirrored(2, precision="fp64")
    options: dict[str, Any] = {"on": "cpu*2", "epochs": 10, "save_every": 1, "progress": False, "timeout": 60}
    calm = mh.fit(task, strategy, **fit_options(folder=tmp_path / "calm", **options))
    run = mh.fit(task, strategy, **fit_options(folder=tmp_path / "hit", callbacks=[Traps(tmp_path)], **options))
    assert_same(run, calm)
    torch.testing.assert_close(run.state_dict(averaged=False), calm.state_dict(averaged=False), rtol=0, atol=1e-9)
    sprung = sorted((int(index), int(step)) for _, index, step in (p.name.split("-") for p in tmp_path.glob("trap-*")))
    assert [index for index, _ in sprung] == list(range(len(POINTS)))
    found = recoveries(run)
    for (_, step), entry in zip(sprung, found, strict=True):
        # A step that the survivor took counts, a step that it did not take is repeated.
        assert entry["step"] in (step - 1, step)
        assert "memory" in entry["source"]
