"""The scorecard's parts that need no measuring: published speed-ups and famous points, with nothing fitted to them."""

from __future__ import annotations

from statistics import fmean

from benchmarks.plan_famous import POINTS
from benchmarks.plan_published import points, predicted
from benchmarks.plan_vtrain import rank_correlation


def test_published_speedups() -> None:
    rows = predicted(points())
    assert len(rows) == 43
    assert fmean(abs(guess / measured - 1) for _, measured, guess in rows) <= 0.10


def test_famous_points_and_what_today_reaches() -> None:
    for point in POINTS:
        then, now = point.predicted(), point.nowadays()
        assert abs(then / point.speedup - 1) < 0.1, point.name
        assert point.speedup < now <= point.num_devices


def test_ranks() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == -1.0
