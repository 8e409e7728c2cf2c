"""fit_in chooses the cheapest options that fit, and its prediction equals the measured memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.memory import task as gpt

import manyhands as mh
from manyhands.core import OutOfMemory, StrategyError
from manyhands.training import fit_in, memory_fitting
from manyhands.training.explain import few_samples

from .problems import problem

MIB = 1 << 20


def test_strategy_that_fits_in_memory_is_unchanged() -> None:
    spec, (text,) = fit_in(gpt(128, 4, 16), mh.Single(), 1 << 30, 1)
    assert spec == mh.Single()
    assert "of 1.0 GiB on each device" in text


def test_smaller_memory_limits_choose_stronger_memory_savings() -> None:
    task = gpt(128, 4, 16)
    chosen = [fit_in(task, mh.Mirrored(), size * MIB, 2)[0] for size in (400, 60, 34, 24)]
    assert chosen[0] == mh.Mirrored(2)
    assert chosen[1].accumulate > 1
    assert chosen[1].shards == 1
    assert chosen[3].shards == 2, "two replicas of the optimizer's state are too much"
    with pytest.raises(OutOfMemory, match="no option fits into 90% of 16.0 MiB: the smallest is"):
        fit_in(task, mh.Mirrored(), 16 * MIB, 1)


def test_optimizer_state_is_offloaded_only_as_a_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.training.memory_fitting.AT_ONCE", MIB // 4)
    task = gpt(128, 4, 16)
    spec, (text,) = fit_in(task, mh.Single(), 14 * MIB, 1, host=1 << 30)
    assert spec.offload == "optimizer"
    assert "replicas=1 would take" in text
    assert not fit_in(task, mh.Single(), 1 << 30, 1, host=1 << 30)[0].offload
    with pytest.raises(OutOfMemory, match="no option fits into 90% of 14.0 MiB"):
        fit_in(task, mh.Single(), 14 * MIB, 1, host=4 * MIB)


@pytest.mark.parametrize("what", ["", "blocks"])
def test_repeated_blocks_are_measured_once_with_the_same_peak(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = gpt(32, 7, 8)
    model, (batch, _) = task.model(), few_samples(task, mh.Single(), 4)
    names = list(model.state_dict())
    short = memory_fitting._seen(task, model, batch, what, False)
    assert list(model.state_dict()) == names
    monkeypatch.setattr(memory_fitting, "rows_of", lambda model: [])
    whole = memory_fitting._seen(task, model, batch, what, False)
    assert len(short.large) < 0.7 * len(whole.large)
    assert [short.peak(rows) for rows in (1, 8, 64)] == [whole.peak(rows) for rows in (1, 8, 64)]


def test_user_settings_are_kept_by_memory_fitting() -> None:
    spec, _ = fit_in(gpt(128, 4, 16), mh.Single(recompute="blocks", accumulate=2), 60 * MIB, 1)
    assert (spec.recompute, spec.accumulate) == ("blocks", 2)


def test_fit_in_trains_with_equal_losses_and_logs_memory_use(tmp_path: Path) -> None:
    task = gpt(64, 2, 8, 32)
    whole = mh.fit(task, mh.Single(), on="cpu", epochs=2, folder=tmp_path, options=mh.options.Display(progress=False))
    run = mh.fit(
        task,
        mh.Mirrored(),
        on="cpu*2",
        epochs=2,
        folder=tmp_path,
        options=[mh.options.Resources(fit_in="16MiB"), mh.options.Display(progress=False)],
    )
    assert run.losses == pytest.approx(whole.losses, rel=1e-5)
    assert "on each device" in (run.path / "events.jsonl").read_text()
    with pytest.raises(StrategyError, match="fit_in needs a task with loss="):
        mh.fit(
            problem("gan"),
            mh.Single(),
            on="cpu",
            folder=tmp_path,
            options=[mh.options.Resources(fit_in="1GiB"), mh.options.Display(progress=False)],
        )
