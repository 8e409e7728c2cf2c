"""Tables larger than memory: untouched rows take no space on servers, in messages and in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import CheckpointError, TaskError

from ..grouped_options import fit_options
from .test_training import QUIET, rating_loss

ROWS = 50_000_000
USED = 100_000
BATCH = 5_000


class Likes(nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.things = mh.strategies.Embedding(rows, 8, std=0.1, seed=5)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.things(ids)).squeeze(1)


def likes(rows: int = ROWS) -> mh.Task:
    """Every sample touches another row, all over the table."""
    ids = torch.arange(USED) * (ROWS // USED) + 17
    return mh.Task(
        model=lambda: Likes(rows),
        loss=rating_loss,
        optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.5),
        data=(ids, torch.randn(USED, generator=torch.Generator().manual_seed(0))),
        batch_size=BATCH,
    )


def test_huge_table_saves_used_rows_and_resumes_on_more_servers(tmp_path: Path) -> None:
    task, settings = likes(), {"folder": tmp_path, **QUIET}
    straight = mh.fit(task, mh.ParameterServer(2, 1), **fit_options(on="cpu", epochs=2, name="straight", **settings))
    half = mh.fit(task, mh.ParameterServer(2, 1), **fit_options(on="cpu", epochs=1, name="half", **settings))
    resumed = mh.fit(task, mh.ParameterServer(3, 1), **fit_options(on="cpu", epochs=2, resume=half, **QUIET))
    one, other = (rows_of(run) for run in (straight, resumed))
    assert resumed.losses == pytest.approx(straight.losses, rel=1e-5)
    assert one["things ids"].tolist() == other["things ids"].tolist() == task.data[0].tolist()
    for name in ("things values", "things sum"):
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)
    assert float(one["things step"]) == 2 * USED // BATCH
    # A whole table of values and sums would be 3.2 GB.
    files = sum(file.stat().st_size for file in (straight.path / "checkpoints").rglob("*") if file.is_file())
    assert files < 50e6
    assert straight.state_dict()["things.weight"].shape == (0, 8)
    small = task.replace(model=lambda: Likes(USED), data=(task.data[0] % USED, task.data[1]))
    with pytest.raises(
        CheckpointError, match=r"only the used rows were saved can only be trained by parameter servers.*100000 rows"
    ):
        mh.fit(small, mh.Single(), **fit_options(on="cpu", epochs=3, resume=straight, **QUIET))


def rows_of(run: mh.Run) -> dict[str, Tensor]:
    return run._store().load().policy


def test_model_rebuilds_whole_table_from_saved_rows(tmp_path: Path, monkeypatch: Any) -> None:
    from manyhands.strategies import embedding

    task = likes().replace(data=(torch.tensor([3, 9]), torch.ones(2)), batch_size=2, model=lambda: Likes(20))
    settings = {"folder": tmp_path, **QUIET}
    one = mh.fit(task, mh.ParameterServer(2, 1), **fit_options(on="cpu", epochs=1, name="whole", **settings))
    monkeypatch.setattr(embedding, "WHOLE", 100)
    run = mh.fit(task, mh.ParameterServer(2, 1), **fit_options(on="cpu", epochs=1, name="rows", **settings))
    assert rows_of(run)["things ids"].tolist() == [3, 9]
    torch.testing.assert_close(run.model().state_dict(), one.model().state_dict())


def test_embedding_too_large_for_memory_is_rejected() -> None:
    with pytest.raises(TaskError, match=r"must fit into memory.*1000000000000 rows of 64, 232.8 TiB. Train it with"):
        mh.strategies.Embedding(10**12, 64)
