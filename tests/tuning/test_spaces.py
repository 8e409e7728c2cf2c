"""Spaces, objectives and the journal, without processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import optuna
import pytest

import manyhands as mh
from manyhands.core import RunError, SettingsError
from manyhands.tuning import Journal, Objective, Trial, as_objectives, as_space, parse_range, read_journal
from manyhands.tuning.journal import JOURNAL

SPACE = {"lr": mh.tuning.loguniform(1e-4, 1e-1), "width": mh.tuning.choice(32, 64), "depth": mh.tuning.integers(1, 3)}
LOSS = (Objective("valid_loss", "min"),)


@pytest.mark.parametrize("name", SPACE)
def test_range_value_and_share_are_inverse(name: str) -> None:
    one = SPACE[name]
    for share in np.linspace(0, 1, 21):
        value = one.at(float(share))
        assert one.at(one.share(value)) == pytest.approx(value)


def test_integers_are_sampled_uniformly() -> None:
    counts = np.bincount([mh.tuning.integers(0, 4).at((i + 0.5) / 1000) for i in range(1000)])
    assert counts.tolist() == [200] * 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mh.tuning.uniform(3, 1), "uniform needs a lower and a higher bound, but got 3 and 1"),
        (lambda: mh.tuning.loguniform(0, 1), "the lower bound of loguniform must be above 0, but got 0"),
        (lambda: mh.tuning.integers(1, 2.5), "whole numbers, but got 2.5"),
        (lambda: mh.tuning.choice(), "mh.tuning.choice needs at least one value"),
        (lambda: mh.tuning.choice(1, 1), "values of mh.tuning.choice must be different"),
        (lambda: mh.tuning.choice(1.0, float("nan")), "must be comparable, but got nan"),
        (lambda: mh.tuning.choice([1]), "numbers, strings, bools or None, but got list"),
        (lambda: parse_range("gauss:1..2"), "a range must be written uniform:LOW..HIGH"),
        (lambda: parse_range("uniform:2..1"), "needs a lower and a higher bound, but got 2.0 and 1.0"),
        (lambda: as_space({}), "a dict of the task's parameters"),
        (lambda: as_space({"lr": 3}), "the range of 'lr' must be"),
        (lambda: as_space({"lr": (1e-4, 1e-1)}), r"the range of 'lr' must be.*, but got \(0.0001, 0.1\)"),
        (lambda: as_objectives("valid_score"), "the direction of a metric must be known, but got 'valid_score'"),
        (lambda: as_objectives(["valid_loss", "valid_loss"]), "named once"),
        (lambda: as_objectives("valid_loss:down"), "NAME:min or NAME:max"),
    ],
)
def test_invalid_ranges_are_rejected(make: object, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()  # type: ignore[operator]


def _written(folder: Path) -> list[Trial]:
    """A small study by hand."""
    journal = Journal(folder, SPACE)
    journal.begin("by-hand", LOSS, {"objectives": [["valid_loss", "min"]]})
    first = Trial(0, {"lr": 0.01, "width": 64, "depth": 2})
    second = Trial(1, {"lr": 0.02, "width": 32, "depth": 1})
    for trial in (first, second):
        journal.propose(trial)
        journal.lease(trial, 0, 1)
    first.reports[1] = 0.7
    journal.report(first, 1, 0.25)
    first.state, first.values, first.metrics = "finished", (0.5,), {"valid_loss": 0.5}
    journal.end(first)
    journal.close()
    return [first, second]


def test_journal_round_trip(tmp_path: Path) -> None:
    written = _written(tmp_path)
    _, read = read_journal(tmp_path)
    assert [(t.number, t.params, t.state, t.values) for t in read] == [
        (t.number, t.params, t.state, t.values) for t in written
    ]
    assert read[0].reports == {1: 0.7}


def test_optuna_reads_the_journal(tmp_path: Path) -> None:
    _written(tmp_path)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / JOURNAL))
    study = optuna.load_study(study_name="by-hand", storage=optuna.storages.JournalStorage(backend))
    assert study.best_params == {"lr": 0.01, "width": 64, "depth": 2}
    assert study.best_value == 0.5
    first, second = study.trials
    assert first.intermediate_values == {1: 0.7}
    assert first.state.name == "COMPLETE"
    assert second.state.name == "RUNNING"
    assert second.user_attrs["lease"] == {"worker": 0, "until": 1}
    assert first.duration is not None


def test_incomplete_last_line_is_truncated(tmp_path: Path) -> None:
    _written(tmp_path)
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in range(last, len(whole), 7):
        path.write_bytes(whole[:length])
        assert read_journal(tmp_path)[1][0].state == "running"
        Journal(tmp_path, SPACE).close()
        assert path.read_bytes() == whole[:last]
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_journal_is_locked_to_one_program(tmp_path: Path) -> None:
    held = Journal(tmp_path, SPACE)
    with pytest.raises(SettingsError, match="only one program at a time can work on a study"):
        Journal(tmp_path, SPACE)
    held.close()
    Journal(tmp_path, SPACE).close()


@pytest.mark.root
def test_full_disk_is_reported_and_written_trials_are_kept(tmp_path: Path, small_disk: Path) -> None:
    journal = Journal(small_disk, SPACE)
    journal.begin("full", LOSS, {})
    num_kept = 0

    def fill() -> None:
        nonlocal num_kept
        while True:
            journal.propose(Trial(num_kept, {"lr": 0.01, "width": 64, "depth": 2}))
            num_kept += 1

    with pytest.raises(RunError, match="cannot be written: No space left on device; earlier results are kept"):
        fill()
    journal.close()
    assert num_kept > 100
    assert len(read_journal(small_disk)[1]) == num_kept
