"""Calibration: constants are recovered from steps generated with them, and unexplained time is kept."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from manyhands.core import StrategySpec
from manyhands.costs import Network, trace
from manyhands.planning import Cluster, Observation, Residuals, Workload, calibrated, estimate

from ..costs.networks import gpt_task


@cache
def network() -> Network:
    made = gpt_task(width=256, layers=8, length=128)
    return trace(made, made.data, rows=8)


def workload(batch_size: int) -> Workload:
    return Workload(networks={"fp32": network()}, batch_size=batch_size, captured=False)


def test_calibration_recovers_hardware_constants() -> None:
    known = Cluster.parse("8 A100")
    true = replace(known, chip=replace(known.chip, reach=0.45, operation=60e-6, streaming=0.5))
    works = [workload(size) for size in (8, 64, 512, 4096)]
    specs = [StrategySpec(), StrategySpec(accumulate=2), StrategySpec(tensor=2)]
    seen = [Observation(work, spec, estimate(work, true, spec).seconds) for work in works for spec in specs]
    found = calibrated(known, seen)
    for work in [workload(size) for size in (16, 1024)]:
        guess, real = (estimate(work, where, StrategySpec()).seconds for where in (found, true))
        assert guess == pytest.approx(real, rel=0.03)
    assert found.chip.operation == pytest.approx(60e-6, rel=0.1)


def test_calibration_keeps_catalogue_values_that_match_observations() -> None:
    known = Cluster.parse("8 A100")
    work = workload(64)
    one = Observation(work, StrategySpec(), estimate(work, known, StrategySpec()).seconds)
    found = calibrated(known, [one])
    assert found.chip.reach == pytest.approx(known.chip.reach, rel=1e-3)


def test_residual_correction_applies_only_to_similar_steps() -> None:
    here, work = Cluster.parse("8 A100"), workload(64)
    spec = StrategySpec(tensor=4)
    odd = Observation(work, spec, 1.3 * estimate(work, here, spec).seconds)
    correction = Residuals.of(here, [odd]).correction(work)
    assert estimate(work, here, spec, correction=correction).seconds == pytest.approx(odd.seconds, rel=0.02)
    assert correction(StrategySpec(replicas=8), 8) == pytest.approx(1.0, abs=0.01)


def test_calibrated_fractions_do_not_exceed_the_datasheet() -> None:
    known = Cluster.parse("8 A100")
    works = [workload(size) for size in (64, 512, 4096)]
    seen = [Observation(work, StrategySpec(), 0.3 * estimate(work, known, StrategySpec()).seconds) for work in works]
    found = calibrated(known, seen)
    assert max(found.chip.reach, found.chip.streaming, found.inside.share) <= 1
