"""Numbers given as text: every public option refuses them before anything starts, and quotes what was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import UsageError
from manyhands.vectorized import Population


def task(**changes: Any) -> mh.Task:
    settings: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(1, 1),
        "loss": lambda model, batch: model(batch).mean(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "data": torch.ones(4, 1),
        "batch_size": 2,
    }
    return mh.Task(**settings | changes)


CALLS: dict[str, Callable[[], Any]] = {
    "epochs": lambda: mh.fit(task(), epochs="3", on="cpu"),  # type: ignore[arg-type]
    "steps": lambda: mh.fit(task(), steps="3", on="cpu"),  # type: ignore[arg-type]
    "trials": lambda: mh.tune(task, {"lr": [1.0]}, trials="3", on="cpu"),  # type: ignore[arg-type]
    "members": lambda: mh.ensemble(task(), members="3", on="cpu"),  # type: ignore[arg-type]
    "epochs of a population": lambda: Population([task()], epochs="3", device="cpu"),  # type: ignore[arg-type]
    "batch_size": lambda: task(batch_size="3"),
    "clip": lambda: task(clip="3"),
    "workers": lambda: task(workers="3"),
    "timeout": lambda: mh.options.Recovery(timeout="3"),  # type: ignore[arg-type]
    "copy_every": lambda: mh.options.Recovery(copy_every="3"),  # type: ignore[arg-type]
    "keep": lambda: mh.options.Selection(keep="3"),  # type: ignore[arg-type]
    "seconds": lambda: mh.options.Budget(seconds="3"),  # type: ignore[arg-type]
    "bounds": lambda: mh.tuning.uniform("3", 4.0),  # type: ignore[arg-type]
    "integers": lambda: mh.tuning.integers("3", 4),  # type: ignore[arg-type]
    "patience": lambda: mh.Patience("valid_loss", "3"),  # type: ignore[arg-type]
    "min_delta": lambda: mh.Patience("valid_loss", min_delta="3"),  # type: ignore[arg-type]
    "networks": lambda: mh.plan(task(), networks="3"),  # type: ignore[arg-type]
    "steps of a profile": lambda: mh.profile(task(), steps="3", on="cpu"),  # type: ignore[arg-type]
    "port": lambda: mh.serving.Listen(http="3"),  # type: ignore[arg-type]
    "timeout of a server": lambda: mh.serving.Listen(timeout="3"),  # type: ignore[arg-type]
    "queue_mib": lambda: mh.serving.Listen(queue_mib="3"),  # type: ignore[arg-type]
    "max_rows": lambda: mh.serving.Batching(max_rows="3"),  # type: ignore[arg-type]
    "poll": lambda: mh.serving.Rollout(poll="3"),  # type: ignore[arg-type]
    "replicas": lambda: mh.Mirrored("3"),  # type: ignore[arg-type]
    "window": lambda: mh.data.files(__file__, window="3"),  # type: ignore[arg-type]
    "hosts": lambda: mh.Join(address="127.0.0.1:1", hosts="3"),  # type: ignore[arg-type]
    "save_every": lambda: mh.options.Checkpoints(save_every="3"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
def test_number_given_as_text_is_refused_and_quoted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="but got '3'"):
        CALLS[name]()
    assert list(tmp_path.rglob("*.json*")) == []
