"""Time, price and energy to a target loss, and clusters side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.core import SettingsError
from manyhands.planning import BatchOption, Plan, Search, compare, make_plan

from .test_estimate import cluster, timed

WHOLE = Search()


def priced(hosts: int, gbits: float = 400.0, price: float = 2.0) -> mh.planning.Cluster:
    made = cluster(hosts, gbits=gbits)
    return replace(made, price=price, chip=replace(made.chip, watts=500.0))


def plan_with(noise: float, batch_size: int = 256) -> Plan:
    return make_plan(timed(0.02, 1e7, batch_size=batch_size), priced(8), WHOLE).with_noise(noise)


def test_price_and_energy_follow_from_hours_devices_and_design_power() -> None:
    found = make_plan(timed(0.01, 1e6, batch_size=64), priced(2), WHOLE)
    best = found.best.option
    hours = best.seconds * 1e6 / 64 / 3600
    assert found.hours(best) == pytest.approx(hours)
    assert found.cost(best) == pytest.approx(hours * best.estimate.num_devices * 2)
    assert found.energy(best) == pytest.approx(hours * best.estimate.num_devices * 0.5)
    assert make_plan(timed(0.01, 1e6), cluster(2), WHOLE).energy(best) is None


def test_a_larger_batch_on_more_devices_is_recommended_only_where_it_pays() -> None:
    noisy, quiet = plan_with(1e6), plan_with(1.0)
    best = noisy.recommended_batch()
    assert best is not None
    assert best.batch_size > 256
    assert best.num_devices > 8
    assert best.efficiency >= 0.5
    now = option(noisy, 256, 8)
    assert best.hours < 0.9 * now.hours
    other = quiet.recommended_batch()
    assert other is None or other.batch_size <= 256
    assert option(quiet, 4096, 8).hours > 10 * option(quiet, 256, 8).hours


def option(plan: Plan, batch_size: int, num_devices: int) -> BatchOption:
    return next(o for o in plan.batches() if (o.batch_size, o.num_devices) == (batch_size, num_devices))


def test_the_target_takes_as_long_as_its_samples_with_the_tasks_batch_size() -> None:
    found = plan_with(1000.0)
    best = found.best.option
    now = option(found, 256, best.estimate.num_devices)
    assert now.steps == pytest.approx(1e6 / 256)
    assert now.hours == pytest.approx(found.hours(best))
    assert now.cost == pytest.approx(found.cost(best))
    double = option(found, 512, best.estimate.num_devices)
    assert double.steps / now.steps == pytest.approx((1 + 1000 / 512) / (1 + 1000 / 256))
    assert {o.batch_size for o in plan_with(float("inf")).batches()} >= {256, 4096}


def test_batches_need_a_noise_scale_that_is_a_number() -> None:
    found = make_plan(timed(0.01, 1e6), cluster(2), WHOLE)
    assert found.batches() == []
    assert found.recommended_batch() is None
    for noise in (-1.0, float("nan"), "much", True):
        with pytest.raises(SettingsError, match="gradient noise scale must be a number"):
            found.with_noise(noise)  # type: ignore[arg-type]


def test_batches_that_do_not_fit_are_accumulated() -> None:
    work = timed(0.02, 1e7, batch_size=256)
    network = work.network("fp32")
    heavy = replace(network, pieces=tuple(replace(piece, kept=2e9) for piece in network.pieces))
    found = make_plan(replace(work, networks={"fp32": heavy}), priced(8), WHOLE).with_noise(1e5)
    large = option(found, 4096, found.best.option.estimate.num_devices)
    assert large.spec.accumulate > found.best.spec.accumulate


def test_clusters_are_compared_by_time_price_energy_and_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = timed(0.02, 1e7, batch_size=256)
    fast, cheap = (make_plan(work, one, WHOLE) for one in (priced(8, price=5.0), priced(2, price=1.0)))
    both = compare([cheap, fast])
    assert both.plans == (fast, cheap)
    both.show()
    shown = capsys.readouterr().out
    for word in ("side by side", "time", "price", "energy", "kWh", "±30%", "is the cheapest", "least energy"):
        assert word in shown
    assert "measure both" not in both.why()
    both.with_noise(1e5).save_html(tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert page.count("<svg") == 2
    assert "side by side" in page
    assert "to the loss that" in page
    assert "kWh" in both._repr_html_()
    both.log(tmp_path)
    entries = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len({entry["compared"] for entry in entries}) == 1
    assert entries[0]["hours_per_million_samples"] < entries[1]["hours_per_million_samples"]
    assert all(entry["energy_per_million_samples"] > 0 for entry in entries)


def test_clusters_that_differ_by_less_than_the_error_are_to_be_measured() -> None:
    work = timed(0.02, 1e7, batch_size=256)
    alike = compare([make_plan(work, priced(8, gbits), WHOLE) for gbits in (400.0, 100.0)])
    assert "less than the error of 30%: measure both" in alike.why()
    euros = compare([alike.plans[0], replace(alike.plans[1], cluster=replace(priced(8), currency="€"))])
    assert "cheapest" not in euros.why()
