"""Damaged lines in journals: the content of other lines is kept, and damaged ones are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.attacks.files import CONTENTS, KINDS, attack_journal, plant

import manyhands as mh
from manyhands.core import CheckpointError, FileError
from manyhands.tuning import Journal, Objective, Trial, read_journal
from manyhands.tuning.journal import DAMAGED, JOURNAL
from manyhands.tuning.searching.cma import CMA
from manyhands.tuning.trial import FAILED, FINISHED, RUNNING

SPACE = {"lr": mh.tuning.loguniform(1e-4, 1.0), "width": mh.tuning.uniform(0.0, 1.0)}
LOSS = (Objective("valid_loss", "min"),)
NUM = 4


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Trials with values 1 to 4; line 3 + 3 * n begins trial n, line 5 + 3 * n ends it."""
    journal = Journal(tmp_path, SPACE)
    journal.begin("first", LOSS, {"objectives": [["valid_loss", "min"]]})
    for number in range(NUM):
        trial = Trial(number, {"lr": 0.1, "width": number / 4})
        journal.propose(trial)
        journal.lease(trial, 0, 1)
        trial.state, trial.values, trial.metrics = FINISHED, (float(number + 1),), {"valid_loss": number + 1.0}
        journal.end(trial)
    journal.close()
    return tmp_path


def damage(folder: Path, number: int, content: bytes) -> None:
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    lines[number - 1] = content + b"\n"
    (folder / JOURNAL).write_bytes(b"".join(lines))


def test_corrupted_journal_line_does_not_affect_other_trials(study: Path) -> None:
    for content in [*CONTENTS.values(), b'{"op_code": 6, "trial_id": 0}', b'{"op_code": "6"}', b"\xff\xfe", b""]:
        outcomes = attack_journal(study, {5: content, 8: content, 14: content})
        assert [one for one in outcomes if one.succeeded or "damaged lines were skipped" not in one.reason] == []


def test_corrupted_start_line_keeps_the_trial_numbers(study: Path) -> None:
    damage(study, 6, b"\0\0\0")
    with pytest.warns(RuntimeWarning, match=r"1 damaged lines were skipped \(6\)"):
        record, trials = read_journal(study)
    assert record["objectives"] == [["valid_loss", "min"]]
    assert [trial.state for trial in trials] == [FINISHED, FAILED, FINISHED, FINISHED]
    assert [trial.values for trial in trials] == [(1.0,), (), (3.0,), (4.0,)]
    assert trials[2].params == {"lr": 0.1, "width": 0.5}
    assert "line 6 of the journal" in trials[1].reason


def test_parameters_are_recovered_from_a_partly_corrupted_line(study: Path) -> None:
    line = (study / JOURNAL).read_bytes().splitlines()[5]
    damage(study, 6, line.replace(b'"study_id":0', b'"study_id":\xff'))
    with pytest.warns(RuntimeWarning, match="damaged"):
        trials = read_journal(study)[1]
    assert (trials[1].params, trials[1].values) == ({"lr": 0.1, "width": 0.25}, (2.0,))


def test_trial_with_corrupted_end_line_is_read_as_running(study: Path) -> None:
    damage(study, 8, b"{")
    with pytest.warns(RuntimeWarning, match=r"\(8\)"):
        assert [trial.state for trial in read_journal(study)[1]] == [FINISHED, RUNNING, FINISHED, FINISHED]


def test_result_of_an_unknown_trial_is_skipped(study: Path) -> None:
    lines = (study / JOURNAL).read_text().splitlines()
    damage(study, 8, json.dumps({**json.loads(lines[7]), "trial_id": 9**9}).encode())
    with pytest.warns(RuntimeWarning, match=r"\(8\)"):
        assert [trial.values for trial in read_journal(study)[1]] == [(1.0,), (), (3.0,), (4.0,)]


def test_unassignable_results_are_rejected_with_line_numbers(study: Path) -> None:
    damage(study, 6, b"\0")
    damage(study, 8, b"\0")
    with pytest.raises(CheckpointError, match=r"1 trial without a creation record, and damaged lines 6, 8\. Restore"):
        read_journal(study)


def test_search_continues_after_an_unreadable_trial(study: Path) -> None:
    damage(study, 6, b"\0")
    with pytest.warns(RuntimeWarning):
        trials = read_journal(study)[1]
    searcher = CMA(SPACE, LOSS, seed=0)
    for number in range(len(trials), 12):
        trials.append(Trial(number, searcher.propose(number, trials), state=FAILED))
    assert all(set(trial.params) == {"lr", "width"} for trial in trials[4:])


def test_truncated_journal_bytes_are_saved_in_a_separate_file(study: Path) -> None:
    with (study / JOURNAL).open("ab") as file:
        file.write(b'{"op_code":6,"half')
    Journal(study, SPACE).close()
    assert (study / DAMAGED).read_bytes() == b'{"op_code":6,"half\n'
    assert len(read_journal(study)[1]) == NUM


@pytest.mark.parametrize("kind", KINDS)
def test_journal_that_is_not_a_regular_file_is_rejected(tmp_path: Path, kind: str) -> None:
    plant(tmp_path / "study" / JOURNAL, kind)
    with pytest.raises(FileError, match="must be a regular file"):
        read_journal(tmp_path / "study")
    with pytest.raises(FileError, match="must be a regular file"):
        Journal(tmp_path / "study", SPACE)


def test_study_with_a_damaged_journal_is_shown(study: Path) -> None:
    """Optuna, which computes importances and plots, does not accept such lines."""
    lines = (study / JOURNAL).read_bytes().splitlines(keepends=True)
    for content in [b"\0\n", b"[]\n", b'{"op_code": 6, "trial_id": 0}\n']:
        (study / JOURNAL).write_bytes(b"".join([*lines[:4], content, *lines[5:]]))
        with pytest.warns(RuntimeWarning, match="damaged line"):
            found = mh.tuning.Study(study)
        assert "3 finished" in found._repr_html_()
        assert found.conclusions() == []
    with pytest.raises(CheckpointError, match="Optuna must be able to read"):
        found.importance()


def test_finished_trial_without_its_values_counts_as_failed(study: Path) -> None:
    for values in ([], None, [1.0, 2.0]):
        fact = {"op_code": 6, "trial_id": 0, "state": 1, "values": values, "metrics": {}}
        damage(study, 5, json.dumps({**fact, "seconds": 1.0, "reason": "", "feasible": True}).encode())
        found = mh.tuning.Study(study)
        assert [trial.state for trial in found.trials] == [FAILED, FINISHED, FINISHED, FINISHED]
        assert found.best.number == 1
        assert "for the objectives" in found.trials[0].reason
