"""Unequal devices: shares of a batch follow the measured speed of the replicas, and the result stays the same."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import StrategySpec, read_events
from manyhands.data import Cursor, Feed, as_source, sizes_by
from manyhands.data.batch_split import share_of, weighted_sizes
from manyhands.distributed import current_world
from manyhands.training.load_balance import weights_of

from ..grouped_options import fit_options

STEPS = 60
ROWS, BATCH = 54, 12
SECONDS_PER_ROW = 0.002


class Shares(mh.Callback):
    """Writes the samples of every step of a replica."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, hand: mh.Hand) -> None:
        assert hand.batch is not None
        with (self.folder / f"shares-{os.getpid()}").open("a") as file:
            file.write(json.dumps([hand.num_steps, hand.rank, hand.batch.ids.tolist()]) + "\n")


def uneven_loss(model: nn.Module, batch: Any) -> Tensor:
    """The second of two replicas takes three times as long for a row."""
    world = current_world()
    if world is not None and world.size == 2 and model.training:
        time.sleep(SECONDS_PER_ROW * len(batch[0]) * (3 if world.rank == 1 else 1))
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def task(loss: Any = uneven_loss) -> mh.Task:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 5, generator=generator)
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data=(inputs, inputs.sum(1, keepdim=True)),
        batch_size=BATCH,
    )


def fit(folder: Path, strategy: StrategySpec, **options: Any) -> mh.Run:
    settings = fit_options(folder=folder, progress=False, callbacks=[Shares(folder)], **options)
    return mh.fit(task(), strategy, on=f"cpu*{strategy.replicas or 1}", epochs=100, steps=STEPS, **settings)


def shares(folder: Path) -> dict[int, dict[int, list[int]]]:
    """Return the samples by step and replica."""
    found: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for path in folder.glob("shares-*"):
        for line in path.read_text().splitlines():
            step, rank, ids = json.loads(line)
            found[step][rank] = ids
    return found


def test_slower_replica_gets_fewer_rows_and_the_result_stays_the_same(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    two = fit(tmp_path / "two", mh.Mirrored(2, precision="fp64"), balance=True)
    one = fit(tmp_path / "one", mh.Single(precision="fp64"))
    by_step = shares(tmp_path / "two")
    first, last = by_step[1], by_step[STEPS - STEPS % 5 - 1]
    assert len(first[0]) == len(first[1]) == BATCH // 2
    assert len(last[0]) > len(last[1]) > 0
    assert any(
        "the shares of a batch follow the speed of the replicas" in entry["text"]
        for entry in read_events(two.path / "events.jsonl")
        if entry["kind"] == "notice"
    )
    # Every sample of a batch belongs to one replica, in the order of one device.
    alone = shares(tmp_path / "one")
    assert {step: parts[0] + parts[1] for step, parts in by_step.items()} == {s: p[0] for s, p in alone.items()}
    assert two.losses == pytest.approx(one.losses, rel=1e-9)
    for name, tensor in one.model().state_dict().items():
        torch.testing.assert_close(two.model().state_dict()[name], tensor, rtol=1e-9, atol=1e-12)


def test_equal_devices_keep_equal_shares_by_default(tmp_path: Path) -> None:
    fit(tmp_path, mh.Mirrored(2))
    assert all(abs(len(parts[0]) - len(parts[1])) <= 1 for parts in shares(tmp_path).values())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"sync": "localsteps(4)"}, "only replicas that synchronize in every step"),
        ({"batch_stats": "local"}, "batch statistics would depend on its speed"),
        ({"deterministic": True}, "measured times differ from run to run"),
    ],
)
def test_strategies_without_unequal_shares_say_so(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    run = fit(tmp_path, mh.Mirrored(2, **settings), balance=True, verify=False)
    texts = [entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "notice"]
    assert any("the replicas get equal shares of a batch: " in text and why in text for text in texts)
    assert all(abs(len(parts[0]) - len(parts[1])) <= 1 for parts in shares(tmp_path).values())


def test_shares_that_whole_rows_cannot_improve_stay_as_they_are() -> None:
    assert sizes_by(weights_of([0.10, 0.13]), 4, 1, 2) == sizes_by(None, 4, 1, 2) == [2, 2]
    assert sizes_by(weights_of([0.10, 0.30]), 4, 1, 2) == [3, 1]


@pytest.mark.parametrize("count", range(1, 40))
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 2, 7), (9998, 1, 1)])
def test_weighted_shares_cover_a_batch_without_overlap(count: int, weights: tuple[int, ...]) -> None:
    sizes = weighted_sizes(count, weights)
    assert sum(sizes) == count
    assert min(sizes) >= (count >= len(weights))
    for accumulate in (1, 3):
        rows = [share_of(count, accumulate, part, len(weights), weights).rows for part in range(len(weights))]
        covered = Counter(int(row) for part in rows for row in torch.arange(count).numpy()[part])
        assert covered == Counter(range(count))


def test_feed_divides_the_batches_after_the_current_one() -> None:
    feeds = [
        Feed(as_source(torch.arange(20)), batch_size=8, shuffle=False, replica=rank, num_replicas=2) for rank in (0, 1)
    ]
    found: list[list[list[int]]] = [[], []]
    for rank, feed in enumerate(feeds):
        for batch in feed.epoch(Cursor()):
            found[rank].append(batch.data.tolist())
            feed.divide_by((3, 1))
    assert found[0] == [[0, 1, 2, 3], [8, 9, 10, 11, 12, 13], [16, 17, 18]]
    assert found[1] == [[4, 5, 6, 7], [14, 15], [19]]


def test_weights_are_in_proportion_to_speed() -> None:
    assert weights_of([0.1, 0.1]) == (5000, 5000)
    assert weights_of([0.001, 0.004, 0.004]) == (6667, 1667, 1667)
