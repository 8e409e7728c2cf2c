"""Pipeline schedules: complete, free of deadlocks, with the bubble of the formula."""

from __future__ import annotations

from collections import Counter

import pytest

from manyhands.strategies.schedules import (
    Action,
    bubble,
    even,
    live,
    merged,
    per_rank,
    stages_per_rank,
    usable,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
LENGTHS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def makespan(order: list[Action], num_ranks: int, num_stages: int) -> float:
    """When the last action ends, where a backward takes as long as two forwards and nothing needs time to cross."""
    free: Counter[int] = Counter()
    done: dict[tuple[str, int, int], float] = {}
    for action in order:
        stage, micro, rank = action.stage, action.micro, action.stage % num_ranks
        needs = [("F", stage - 1, micro)] if action.kind == "F" else [("B", stage + 1, micro), ("F", stage, micro)]
        if action.kind == "W":
            needs = [("B", stage, micro)]
        start = max([float(free[rank]), *(done[need] for need in needs if need in done)])
        end = start + LENGTHS[action.kind] / (num_stages // num_ranks)
        free[rank] = end  # type: ignore[assignment]
        done["B" if action.kind == "I" else action.kind, stage, micro] = end
    return max(done.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "wanted"), [(2, 1), (2, 5), (3, 7), (4, 8), (4, 13)])
def test_pipeline_schedule_runs_every_action_once_in_rank_order(schedule: str, num_ranks: int, wanted: int) -> None:
    num_micros = usable(schedule, num_ranks, wanted)
    order = merged(schedule, num_ranks, num_micros)
    num_stages = num_ranks * stages_per_rank(schedule)
    backwards = Counter((a.stage, a.micro) for a in order if a.kind in "BI")
    assert Counter((a.stage, a.micro) for a in order if a.kind == "F") == backwards
    assert set(backwards.values()) == {1}
    assert len(backwards) == num_stages * num_micros
    assert sum(a.kind == "I" for a in order) == sum(a.kind == "W" for a in order)
    for rank, own in enumerate(per_rank(schedule, num_ranks, num_micros)):
        assert [action for action in order if action.stage % num_ranks == rank] == own
    assert makespan(order, num_ranks, num_stages) > 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_pipeline_bubble_matches_closed_form(schedule: str) -> None:
    num_ranks, num_micros = 4, 8
    order = merged(schedule, num_ranks, num_micros)
    whole = makespan(order, num_ranks, num_ranks * stages_per_rank(schedule))
    assert 1 - 3 * num_micros / whole == pytest.approx(bubble(schedule, num_ranks, num_micros), abs=0.02)


def test_1f1b_holds_fewer_live_microbatches_than_gpipe() -> None:
    assert [live(merged("1f1b", 4, 16), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert live(merged("gpipe", 4, 16), 0) == 16
    zero = merged("zero-bubble", 4, 8)
    assert makespan(zero, 4, 4) < makespan(merged("1f1b", 4, 8), 4, 4)


def test_even_splits_sizes_differ_by_at_most_one() -> None:
    assert even(10, 4) == [3, 3, 2, 2]
