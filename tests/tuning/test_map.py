"""mh.map: results in order, failed items by name, and replaced processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.core import SettingsError
from manyhands.tuning import ItemsFailed
from manyhands.tuning.pool import Packing


def test_results_from_worker_processes_are_in_item_order() -> None:
    found = mh.map(lambda n: (n * n, os.getpid(), torch.full((2,), n)), range(20), on="cpu*2")
    assert [square for square, _, _ in found] == [n * n for n in range(20)]
    assert len({process for _, process, _ in found}) == 2
    assert os.getpid() not in {process for _, process, _ in found}
    assert all(torch.equal(tensor, torch.full((2,), n)) for n, (_, _, tensor) in enumerate(found))


def test_single_worker_runs_in_the_calling_process() -> None:
    assert mh.map(lambda n: os.getpid(), [1], on="cpu", per_device=1) == [os.getpid()]


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_failed_item_is_named_and_other_items_complete(on: str) -> None:
    def fail_on_two(n: int) -> int:
        if n == 2:
            raise KeyError("no such thing")
        return n

    with pytest.raises(ItemsFailed, match=r"1 of 5 items failed(.|\n)*item 2 \(2\): .*no such thing") as caught:
        mh.map(fail_on_two, range(5), on=on, per_device=1)
    assert caught.value.results == [0, 1, None, 3, 4]
    assert list(caught.value.failures) == [2]


def test_error_without_message_is_reported_by_type() -> None:
    def refuse(n: int) -> int:
        raise SystemExit if n else NotImplementedError

    with pytest.raises(ItemsFailed, match=r"item 0 \(0\): NotImplementedError\nitem 1 \(1\): SystemExit\n") as caught:
        mh.map(refuse, [0, 1], on="cpu", per_device=1)
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_item_whose_process_dies_is_retried_once(tmp_path: Path) -> None:
    def die_once(n: int) -> int:
        mark = tmp_path / str(n)
        if n % 3 == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    def die_always(n: int) -> int:
        if n == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    assert mh.map(die_once, range(7), on="cpu*2", progress=False) == list(range(7))
    with pytest.raises(ItemsFailed, match=r"item 1 \(1\): .*killed by signal 9"):
        mh.map(die_always, range(3), on="cpu*2", progress=False)


def test_invalid_arguments_are_rejected_before_start() -> None:
    with pytest.raises(SettingsError, match="mh.map needs a function, but got int"):
        mh.map(3, [1])  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="per_device must be a whole number of at least 1, but got 0"):
        mh.map(abs, [1], per_device=0)
    assert mh.map(abs, []) == []


def test_packing_settles_on_the_process_count_with_highest_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces take as long as the clock says: twice the processes do twice as much, until four share what two did."""
    now = [0.0]
    monkeypatch.setattr("manyhands.tuning.pool.time.monotonic", lambda: now[0])
    packing = Packing(None, 16)
    levels = []
    for _ in range(60):
        now[0] += 1.0 / min(packing.level, 2)
        packing.record_results(1, packing.level)
        levels.append(packing.level)
    assert max(levels) == 4
    assert levels[-1] == 2
