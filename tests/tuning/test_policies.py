"""Searchers and stopping policies: their proposals and decisions, given a history."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

import manyhands as mh
from manyhands.core import SettingsError
from manyhands.tuning import Objective, Range, Searcher, Trial, make_searcher
from manyhands.tuning.searching import SEARCHERS

LOSS = (Objective("valid_loss", "min"),)
SPACE: dict[str, Range] = {"x": mh.tuning.uniform(-5.0, 5.0), "y": mh.tuning.loguniform(1e-3, 10.0)}


def bowl(params: Mapping[str, float]) -> float:
    return (params["x"] - 2) ** 2 + (params["y"] - 0.1) ** 2


def search(searcher: Searcher, num: int, known: list[Trial] | None = None) -> list[Trial]:
    """Run a number of trials that end at once."""
    trials = known or []
    for trial in trials:
        searcher.observe(trial)
    for number in range(len(trials), num):
        trial = Trial(number, searcher.propose(number, trials))
        trial.values, trial.state = (bowl(trial.params),), "finished"
        trials.append(trial)
        searcher.observe(trial)
    return trials


@pytest.mark.parametrize("name", SEARCHERS)
def test_interrupted_search_resumes_with_the_same_sequence(name: str) -> None:
    whole = search(make_searcher(name, SPACE, LOSS, 3), 40)
    for cut in (1, 7, 23, 39):
        again = search(make_searcher(name, SPACE, LOSS, 3), 40, whole[:cut])
        assert [trial.params for trial in again] == [trial.params for trial in whole]
    if name != "grid":
        assert search(make_searcher(name, SPACE, LOSS, 4), 3)[0].params != whole[0].params


@pytest.mark.parametrize("name", ["tpe", "cma"])
def test_model_based_search_beats_random_search(name: str) -> None:
    def best(name: str, seed: int) -> float:
        return min(trial.value for trial in search(make_searcher(name, SPACE, LOSS, seed), 80))

    assert sum(best(name, seed) < best("random", seed) for seed in range(3)) >= 2


def test_number_of_trials_passed_to_optuna_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.tuning.searching import window

    seen: list[int] = []
    asked = window.asked
    monkeypatch.setattr(window, "asked", lambda s, d, trials, p: (seen.append(len(trials)), asked(s, d, trials, p))[1])
    searcher = make_searcher("tpe", SPACE, LOSS, 0)
    trials = [Trial(n, {"x": n / 400, "y": 0.1}, "finished", (float(n),)) for n in range(2000)]
    for trial in trials:
        searcher.observe(trial)
    searcher.propose(2000, trials)
    assert seen == [200]


def test_tpe_search_supports_two_objectives() -> None:
    both = (Objective("a", "min"), Objective("b", "max"))
    searcher = make_searcher("tpe", SPACE, both, 0)
    trials: list[Trial] = []
    for number in range(60):
        trial = Trial(number, searcher.propose(number, trials))
        trial.values = (trial.params["x"] ** 2, -((trial.params["x"] - 2) ** 2))
        trial.state = "finished"
        trials.append(trial)
        searcher.observe(trial)
    late = [trial.params["x"] for trial in trials[30:]]
    assert sum(-0.5 <= x <= 2.5 for x in late) > len(late) / 2


def test_cma_waits_until_its_generation_is_finished() -> None:
    searcher = make_searcher("cma", SPACE, LOSS, 0)
    trials = search(searcher, 4)
    trials += [Trial(number, searcher.propose(number, trials)) for number in (4, 5)]
    assert not searcher.is_ready(6, trials)
    for trial in trials[4:]:
        trial.values, trial.state = (bowl(trial.params),), "finished"
    assert searcher.is_ready(6, trials)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_searcher("luck", SPACE, LOSS, 0), "search must be one of tpe, random, grid, cma, but got 'luck'"),
        (
            lambda: make_searcher("cma", {"a": mh.tuning.choice(1, 2), "b": mh.tuning.uniform(0, 1)}, LOSS, 0),
            "'a', a choice",
        ),
        (lambda: mh.tuning.ASHA(factor=1), "a factor of at least 2"),
        (lambda: mh.tuning.Median(others=0), "at least 1"),
    ],
)
def test_unsupported_search_settings_are_rejected(make: Callable[[], object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def _there(values: list[float], rung: int = 1) -> list[Trial]:
    return [Trial(number, {}, reports={rung: value}) for number, value in enumerate(values)]


def test_asha_continues_the_best_third_and_resumes_paused_trials() -> None:
    asha = mh.tuning.ASHA()
    trials = _there([0.5, 0.4])
    assert asha.judge(trials[1], trials, 9, float) == "pause"
    trials = _there([0.5, 0.4, 0.6])
    assert asha.judge(trials[2], trials, 9, float) == "pause"
    found = asha.promoted(trials, 9, float, {0, 1, 2})
    assert found is not None
    assert found.number == 1
    assert asha.promoted(trials, 9, float, {0, 2}) is None
    best = [*trials, Trial(3, {}, reports={1: 0.1})]
    assert asha.judge(best[3], best, 9, float) == "continue"


def test_median_stops_trials_worse_than_the_median() -> None:
    median = mh.tuning.Median(others=3)
    trials = _there([0.1, 0.2, 0.3, 0.9])
    assert median.judge(trials[3], trials, 5, float) == "stop"
    assert median.judge(trials[0], trials, 5, float) == "continue"
    assert median.judge(trials[3], trials[1:], 5, float) == "continue"
