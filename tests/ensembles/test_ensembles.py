"""Ensembles: combinations, uncertainty, execution in one program or several processes, serving, failed members."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyhands as mh
from manyhands.core import DataError, RequestRefused, SettingsError, Signature, TaskError, TensorSpec
from manyhands.ensembles import (
    CalledMember,
    CombinationRule,
    Ensemble,
    ProcessMember,
    RemoteEnsemble,
    calibration,
)
from manyhands.ensembles.combination import COMBINATIONS
from manyhands.ensembles.remote_members import MOST_OPEN

GENERATOR = torch.Generator().manual_seed(0)
CENTRES = torch.randn(3, 6, generator=GENERATOR)
LABELS = torch.randint(3, (360,), generator=GENERATOR)
INPUTS = CENTRES[LABELS] + 1.2 * torch.randn(360, 6, generator=GENERATOR)


def loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def classifier(width: int = 16, classes: int = 3, seed: int = 0) -> mh.Task:
    return mh.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, classes)),
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.03),
        data=(INPUTS[:160], LABELS[:160]),
        valid=(INPUTS[160:], LABELS[160:]),
        batch_size=32,
        seed=seed,
    )


def regression() -> mh.Task:
    wanted = INPUTS.sum(1, keepdim=True)
    return mh.Task(
        model=lambda: torch.nn.Linear(6, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=(INPUTS[:160], wanted[:160]),
        valid=(INPUTS[160:], wanted[160:]),
        batch_size=32,
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> mh.tuning.Study:
    """Four members with seeds of their own."""
    folder = tmp_path_factory.mktemp("ensemble")
    space = {"seed": [0, 1, 2, 3]}
    return mh.tune(
        classifier,
        space,
        epochs=8,
        on="cpu",
        folder=folder,
        options=[mh.options.Algorithm(search="grid"), mh.options.Selection(keep=4), mh.options.Display(progress=False)],
    )


@pytest.fixture(scope="module")
def runs(study: mh.tuning.Study) -> list[mh.Run]:
    return [study.run(trial) for trial in study.trials]


def by_hand(runs: list[mh.Run]) -> Tensor:
    with torch.no_grad():
        return torch.stack([run.model()(INPUTS) for run in runs])


def test_mean_averages_member_probabilities_and_returns_logits(runs: list[mh.Run]) -> None:
    ensemble = mh.ensemble(runs)
    wanted = by_hand(runs).softmax(-1).mean(0)
    torch.testing.assert_close(ensemble(INPUTS).softmax(-1), wanted, rtol=1e-6, atol=1e-6)
    assert repr(ensemble).startswith("Ensemble of 4 (00000, ")
    assert repr(ensemble).endswith("), combined by mean")


def test_vote_returns_the_share_of_votes(runs: list[mh.Run]) -> None:
    ensemble = mh.ensemble(runs, combine="vote")
    votes = F.one_hot(by_hand(runs).argmax(-1), 3).float().mean(0)
    torch.testing.assert_close(ensemble(INPUTS).softmax(-1), votes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combine", ["weighted", "stacked"])
def test_fitted_combination_has_higher_likelihood_than_the_mean(
    runs: list[mh.Run], combine: str, tmp_path: Path
) -> None:
    bad = mh.fit(
        classifier(seed=9), "single", steps=1, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    mixed = [*runs, bad]

    def likelihood(ensemble: Ensemble) -> float:
        return float(F.cross_entropy(ensemble(INPUTS[160:]), LABELS[160:]))

    fitted = mh.ensemble(mixed, combine=combine)
    assert likelihood(fitted) < likelihood(mh.ensemble(mixed))
    weights = fitted.rule.combinations["output"].weights
    if combine == "weighted":
        assert weights[-1] < 0.1
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-6)
        assert bool((weights >= 0).all())


def test_regression_outputs_are_averaged_with_spread(tmp_path: Path) -> None:
    ensemble = mh.ensemble(
        regression(), members=3, epochs=2, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    answers = ensemble.each(INPUTS)["output"]
    torch.testing.assert_close(ensemble(INPUTS), answers.mean(0))
    assert ensemble.uncertainty(INPUTS)["spread"].shape == (360,)
    assert "mutual_information" not in ensemble.uncertainty(INPUTS)
    with pytest.raises(DataError, match="calibration needs class labels"):
        ensemble.calibration()


def test_uncertainty_is_high_where_members_disagree(runs: list[mh.Run]) -> None:
    ensemble = mh.ensemble(runs, options=mh.options.Combining(uncertainty=True))
    told = ensemble(INPUTS)
    assert set(told) == {"output", "spread", "mutual_information"}
    torch.testing.assert_close(told["spread"], ensemble.uncertainty(INPUTS)["spread"])
    winners = by_hand(runs).argmax(-1)
    agree = (winners == winners[0]).all(0)
    assert told["mutual_information"][~agree].mean() > told["mutual_information"][agree].mean()
    assert bool((told["mutual_information"] >= 0).all())


def test_calibration_is_reported_for_the_ensemble_and_each_member(runs: list[mh.Run]) -> None:
    ensemble, members = mh.ensemble(runs).calibration()
    assert len(members) == 4
    assert ensemble.loss < sum(one.loss for one in members) / 4
    assert sum(ensemble.counts) == 200
    sure = torch.eye(3)[LABELS]
    assert calibration(sure, LABELS).error == 0.0


def test_members_differ_only_in_their_seed(tmp_path: Path) -> None:
    ensemble = mh.ensemble(
        classifier, members=3, epochs=2, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    alone = mh.fit(
        classifier(seed=2),
        "single",
        epochs=2,
        on="cpu",
        folder=tmp_path / "runs",
        options=mh.options.Display(progress=False),
    )
    with torch.no_grad():
        wanted = alone.model()(INPUTS)
    torch.testing.assert_close(ensemble.each(INPUTS)["output"][2], wanted, rtol=1e-4, atol=1e-5)


def test_ensemble_of_a_study_uses_the_best_trials(study: mh.tuning.Study) -> None:
    ensemble = mh.ensemble(study, members=2)
    assert [member.name for member in ensemble.members] == [f"{trial.number:05d}" for trial in study.top(2)]


@pytest.mark.parametrize("combine", COMBINATIONS)
def test_local_remote_and_exported_ensembles_predict_the_same(runs: list[mh.Run], tmp_path: Path, combine: str) -> None:
    ensemble = mh.ensemble(runs, combine=combine, options=mh.options.Combining(uncertainty=True))
    here = ensemble(INPUTS)
    exported = mh.load(ensemble.export(tmp_path / "models"))
    assert exported.meta["members"] == ["00000", "00001", "00002", "00003"]
    with mh.remote_ensemble(ensemble, on="cpu*2", deadline=30.0) as remote:
        answer = remote.ask(INPUTS)
        assert answer.members == (0, 1, 2, 3)
        assert not answer.is_degraded
        for name, wanted in here.items():
            torch.testing.assert_close(answer.outputs[name], wanted, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(exported(INPUTS)[name], wanted, rtol=1e-6, atol=1e-6)
        assert remote(INPUTS)["answered"].tolist() == [[True] * 4] * 360


def test_stacked_ensemble_predicts_like_the_sequential_one(runs: list[mh.Run]) -> None:
    ensemble = mh.ensemble(runs)
    program = ensemble._program
    plain = program(INPUTS)["output"]
    program.settle([INPUTS[:4]])
    if program._stack is None:  # slower here, so it was not kept
        program._stack = program.stacked_parts()
    torch.testing.assert_close(program.answer(INPUTS)["output"], plain, rtol=1e-6, atol=1e-6)


def test_members_on_several_devices_predict_the_same_and_export(runs: list[mh.Run], tmp_path: Path) -> None:
    wanted = mh.ensemble(runs)
    for homes in ([torch.device("cpu")], [torch.device("cpu"), torch.device("cpu:0")]):
        ensemble = Ensemble(wanted.members, batches=wanted._batches, devices=homes)
        torch.testing.assert_close(ensemble(INPUTS), wanted(INPUTS), rtol=1e-6, atol=1e-6)
    assert not ensemble.is_stacked
    torch.testing.assert_close(mh.load(ensemble.export(tmp_path))(INPUTS), wanted(INPUTS), rtol=1e-6, atol=1e-6)


@pytest.fixture
def remote(runs: list[mh.Run]) -> Iterator[mh.ensembles.RemoteEnsemble]:
    with mh.remote_ensemble(mh.ensemble(runs[:3]), on="cpu*2", deadline=20.0, quorum=2) as ensemble:
        yield ensemble


def test_killed_member_fails_no_query_and_degraded_answers_are_marked(
    remote: mh.ensembles.RemoteEnsemble, runs: list[mh.Run]
) -> None:
    whole = by_hand(runs[:3]).softmax(-1)
    wanted = {members: whole[list(members)].mean(0) for members in ((0, 1, 2), (0, 2))}
    seen: list[tuple[int, ...]] = []
    wrong: list[str] = []
    end = threading.Event()

    def load() -> None:
        while not end.is_set():
            try:
                answer = remote.ask(INPUTS)
                if answer.is_degraded != (len(answer.members) < 3):
                    wrong.append("a degraded answer that does not say so")
                told = answer.outputs["output"].softmax(-1)
                if not torch.allclose(told, wanted[answer.members], atol=1e-6):
                    wrong.append(f"another answer of {answer.members}")
                seen.append(answer.members)
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    handle = remote.handles[1]
    assert isinstance(handle, ProcessMember)
    os.kill(handle.pid, signal.SIGKILL)
    limit = time.monotonic() + 120
    while time.monotonic() < limit and not (seen.count((0, 2)) and seen[-1:] == [(0, 1, 2)]):
        time.sleep(0.05)
    end.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (0, 2) in seen
    assert seen[-1] == (0, 1, 2)


def test_query_below_the_quorum_is_rejected_with_the_reasons(remote: mh.ensembles.RemoteEnsemble) -> None:
    for handle in remote.handles[:2]:
        assert isinstance(handle, ProcessMember)
        handle.close()
        handle._started_at = time.monotonic() + 3600
    with pytest.raises(RequestRefused, match=r"1 of 2 required members answered \(member 0: .*; member 1: ") as caught:
        remote.ask(INPUTS)
    assert caught.value.code == "UNAVAILABLE"


def test_slow_member_is_left_out_after_the_deadline(runs: list[mh.Run]) -> None:
    with mh.remote_ensemble(mh.ensemble(runs[:3]), on="cpu*2", deadline=0.5, quorum=1) as remote:
        handle = remote.handles[2]
        assert isinstance(handle, ProcessMember)
        os.kill(handle.pid, signal.SIGSTOP)
        answer = remote.ask(INPUTS)
        assert 2 not in answer.members
        assert answer.missing[2] == "no answer within 0.5 s"
        for _ in range(MOST_OPEN - 1):
            handle.ask({"input": INPUTS[:1]})
        assert remote.ask(INPUTS).missing[2] == f"{MOST_OPEN} earlier queries are unanswered"


def test_unreachable_or_silent_member_is_reported_as_missing() -> None:
    def fail(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        raise TimeoutError

    rule = CombinationRule.of("mean", {"output": torch.zeros(3, 1, 2)}, None, False)
    signature = Signature({"input": TensorSpec("float32", (None, 1))}, {"output": TensorSpec("float32", (None, 2))})
    handles = [CalledMember(call, "member") for call in (lambda inputs: {"output": torch.ones(1, 2)}, fail, fail)]
    handles[2].close()
    with RemoteEnsemble(handles, rule, signature, deadline=20.0, quorum=1) as ensemble:
        answer = ensemble.ask(torch.zeros(1, 1))
        assert answer.members == (0,)
        assert answer.missing == {1: "TimeoutError", 2: "cannot schedule new futures after shutdown"}
        assert answer.outputs["output"].tolist() == [[1.0, 1.0]]


def test_integer_outputs_are_voted_and_median_of_two_is_the_midpoint() -> None:
    classes = torch.tensor([[2, 0], [2, 1], [0, 1]])
    scores = torch.tensor([[1.0, 4.0], [3.0, 8.0]])
    assert CombinationRule.of("mean", {"class": classes}, None, False).combined({"class": classes})[
        "class"
    ].tolist() == [2, 1]
    assert CombinationRule.of("vote", {"score": scores}, None, True).combined({"score": scores})["score"].tolist() == [
        2.0,
        6.0,
    ]


def test_ensemble_of_served_models(runs: list[mh.Run], tmp_path: Path) -> None:
    for number, run in enumerate(runs[:2]):
        run.export(tmp_path / "models" / f"member{number}")
    with mh.serve(tmp_path / "models", on="cpu", listen=mh.serving.Listen(http=0, grpc=0, manage=0)) as server:
        urls = [f"{server.url}/member{number}" for number in range(2)]
        with mh.remote_ensemble(urls, deadline=20.0, data=(INPUTS, LABELS)) as remote:
            answer = remote.ask(INPUTS)
            assert answer.members == (0, 1)
            wanted = by_hand(runs[:2]).softmax(-1).mean(0)
            torch.testing.assert_close(answer.outputs["output"].softmax(-1), wanted, rtol=1e-5, atol=1e-5)


def test_ensemble_is_served_like_any_model(runs: list[mh.Run]) -> None:
    ensemble = mh.ensemble(runs, options=mh.options.Combining(uncertainty=True))
    with mh.serve({"ensemble": ensemble}, on="cpu", listen=mh.serving.Listen(http=0, grpc=0, manage=0)) as server:
        told = mh.serving.Client(server.url)("ensemble", INPUTS[:5])
        torch.testing.assert_close(
            torch.as_tensor(told["output"]), ensemble(INPUTS[:5])["output"], rtol=1e-6, atol=1e-6
        )
        assert set(told) == {"output", "spread", "mutual_information"}


def test_incompatible_members_and_settings_are_rejected(
    runs: list[mh.Run], study: mh.tuning.Study, tmp_path: Path
) -> None:
    other = mh.fit(
        classifier(classes=4), "single", steps=1, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    with pytest.raises(TaskError, match=r"the same outputs: 00000 has output: float32\[\*, 3\], but got .*\[\*, 4\]"):
        mh.ensemble([runs[0], other])
    with pytest.raises(SettingsError, match="combine must be one of mean, vote, weighted, stacked, but got 'best'"):
        mh.ensemble(runs, combine="best")
    with pytest.raises(SettingsError, match="but got Run. Pass for example"):
        mh.ensemble(runs[0])
    with pytest.raises(SettingsError, match="an ensemble needs at least one member"):
        mh.ensemble([])
    with pytest.raises(SettingsError, match="got 4 trials for 5 members"):
        mh.ensemble(study, members=5)
    with pytest.raises(TaskError, match="runs or exported models, but got int"):
        mh.ensemble([3])
    with pytest.raises(SettingsError, match="quorum must be between 1 and 2, but got 3"):
        mh.remote_ensemble(mh.ensemble(runs[:2]), on="cpu*2", quorum=3)
    with pytest.raises(SettingsError, match="an address must name a model"):
        mh.remote_ensemble(["http://127.0.0.1:1"])


def poor(seed: int) -> mh.Task:
    """A classifier that stays as it was initialized, in large, so that it is sure of wrong classes."""
    return classifier(seed=seed).replace(
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), Large(16, 3)),
    )


class Large(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 20 * super().forward(x)


QUIET = mh.options.Display(progress=False)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[mh.Run]:
    """A good member and three poor ones."""
    folder = tmp_path_factory.mktemp("mixed")
    good = mh.fit(classifier(), epochs=8, on="cpu", folder=folder, name="good", options=QUIET)
    return [
        good,
        *(
            mh.fit(poor(seed), epochs=1, on="cpu", folder=folder, name=f"poor-{seed}", options=QUIET)
            for seed in range(1, 4)
        ),
    ]


def test_ensemble_worse_than_its_best_member_says_so_and_what_would_help(
    mixed: list[mh.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    together = mh.ensemble(mixed)
    said = capsys.readouterr().err
    comparison = together.comparison()
    assert comparison is not None
    assert comparison.is_worse
    assert comparison.member == "good"
    assert comparison.num_rows == 200
    _, alone = together.calibration()
    assert comparison.best == pytest.approx(alone[0].loss)
    assert comparison.together == pytest.approx(together.calibration()[0].loss)
    assert "the ensemble is worse than its best member: loss " in said
    assert comparison.advice in said
    assert comparison.advice.startswith(('combine="weighted" gives', "good alone has"))
    advised = mh.ensemble(mixed, combine="weighted", options=QUIET).comparison()
    assert advised is not None
    assert not advised.is_worse


def test_ensemble_of_equally_good_members_is_not_reported(
    runs: list[mh.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = mh.ensemble(runs).comparison()
    assert comparison is not None
    assert not comparison.is_worse
    assert comparison.advice == ""
    assert "worse" not in capsys.readouterr().err
    assert str(comparison).startswith("the ensemble is not worse than its best member: loss ")


@pytest.mark.parametrize(("combine", "measure"), [("mean", "squared error"), ("vote", "squared error")])
def test_ensemble_of_numbers_is_compared_by_squared_error(tmp_path: Path, combine: str, measure: str) -> None:
    runs = [
        mh.fit(regression(), epochs=epochs, on="cpu", folder=tmp_path, name=name, options=QUIET)
        for name, epochs in (("first", 1), ("long", 30), ("short", 1))
    ]
    comparison = mh.ensemble(runs, combine=combine, options=QUIET).comparison()
    assert comparison is not None
    assert (comparison.measure, comparison.member, comparison.is_worse) == (measure, "long", True)
    assert comparison.advice.startswith(('combine="weighted"', "long alone has"))


def test_ensemble_is_not_compared_without_labels_or_with_few_rows(runs: list[mh.Run]) -> None:
    together = mh.ensemble(runs, options=QUIET)
    (name,) = together.signature.inputs
    assert together.comparison([({name: INPUTS[:50]}, None)]) is None
    assert together.comparison([({name: INPUTS[:5]}, LABELS[:5])]) is None
    assert together.comparison([]) is None
