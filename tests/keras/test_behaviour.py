"""Two Keras replicas: callbacks and files once, one data order, separate rows and dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from manyhands.core import read_events
from manyhands.dashboard.run import RunFolder

from .behaviours import BEHAVIOURS, run_example
from .scenarios import INPUTS, TARGETS

Facts = list[dict[str, Any]]
ACTS = BEHAVIOURS


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """Those of one device that can be compared."""
    names = ("micro_batches", "narrow", "a_metric_with_states", "each_makes_its_own")
    return {name: BEHAVIOURS[name](folder) for name in names}


def same(facts: Facts, key: str) -> Any:
    """A value on which both replicas agree bit by bit."""
    for mine, theirs in zip(facts[0][key], facts[1][key], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    return facts[0][key]


def test_callbacks_run_on_one_replica_only(every: dict[str, Facts], folder: Path) -> None:
    facts, made = every["callbacks_run_once"], folder / "callbacks_run_once"
    assert facts[0]["history"] == facts[1]["history"]
    same(facts, "weights")
    assert len((made / "log.csv").read_text().splitlines()) == 1 + 3
    meddled = (made / "meddled.txt").read_text().splitlines()
    assert [line.split()[0] for line in meddled] == ["0", "1", "2"]
    # What the callback measured alone is what all measured together just before.
    assert [float(line.split()[1]) for line in meddled] == pytest.approx(facts[0]["history"]["val_loss"], rel=1e-5)
    assert [fact["rate"] for fact in facts] == pytest.approx([0.01 / 3] * 2)
    assert len(list((made / "board").rglob("*tfevents*"))) == 2


def test_fit_writes_a_run_for_the_dashboard(every: dict[str, Facts], folder: Path) -> None:
    history, path = every["callbacks_run_once"][0]["history"], folder / "callbacks_run_once" / "runs" / "meddled"
    events = list(read_events(path / "events.jsonl"))
    assert [each["kind"] for each in events if each["kind"] != "steps"] == [
        "start",
        *["epoch", "waits", "waits"] * 3,
        "end",
    ]
    shown = RunFolder("meddled", path)
    while shown.refresh():
        pass
    told = shown.summary()
    assert (told["state"], told["step"], told["total"], len(told["devices"])) == ("finished", 12, 12, 2)
    assert shown.record["batch_size"] == 32
    for rank in (0, 1):
        seconds = shown.ranks.by_number[rank].seconds
        assert seconds["total"] == pytest.approx(sum(seconds.values()) / 2)
        assert seconds["input"] > 0
        assert seconds["validation"] > 0
    assert told["samples_per_second"] > 0
    losses = [loss for each in events if each["kind"] == "steps" for loss in each["losses"]["loss"]]
    # Of batches of 32, 32, 32 and 5 rows.
    assert np.average(losses[-4:], weights=[32, 32, 32, 5]) == pytest.approx(history["loss"][-1], rel=1e-5)
    assert shown.curves.metrics["val_loss"].last == pytest.approx(history["val_loss"][-1])


def test_saved_files_are_readable_by_plain_keras(every: dict[str, Facts], folder: Path) -> None:
    facts, made = every["callbacks_run_once"], folder / "callbacks_run_once"
    read = keras.models.load_model(made / "last.keras")
    np.testing.assert_allclose(read.predict(INPUTS, verbose=0), facts[1]["answers"], rtol=1e-5, atol=1e-6)
    assert read.evaluate(INPUTS, TARGETS, verbose=0) == pytest.approx(facts[0]["val_loss"], rel=1e-5)
    best = keras.models.load_model(made / "best.keras")
    assert best.evaluate(INPUTS, TARGETS, verbose=0) == pytest.approx(min(facts[0]["history"]["val_loss"]), rel=1e-5)
    best.load_weights(made / "last.weights.h5")
    np.testing.assert_array_equal(best.get_weights()[0], read.get_weights()[0])


def test_early_stopping_ends_all_replicas_at_the_same_step(every: dict[str, Facts]) -> None:
    assert [fact["steps"] for fact in every["a_callback_stops_in_mid_epoch"]] == [3, 3]
    stopped = every["early_stopping_restores"]
    assert stopped[0]["epochs"] == stopped[1]["epochs"] < 8
    assert np.isfinite(np.concatenate([w.ravel() for w in same(stopped, "weights")])).all()
    # Where no terminal shows a bar, an epoch is a line, told once.
    assert [fact["said"].count("loss:") for fact in stopped] == [stopped[0]["epochs"], 0]


def test_callback_exception_is_raised_on_all_replicas(every: dict[str, Facts]) -> None:
    facts = every["failing_callbacks"]
    first, second = (fact["said"] for fact in facts)
    assert first == second
    assert first[:2] == ["OwnError: one and another"] * 2
    assert "no_such_attribute" in first[2]
    assert "head, another Dense" in first[3]
    assert "file, of type TextIOWrapper, which cannot be sent" in first[4]
    assert "NotADirectoryError" in first[5]
    assert len({fact["steps"] for fact in facts}) == 1
    same(facts, "weights")


def test_input_types_of_keras_are_accepted(every: dict[str, Facts]) -> None:
    facts = every["what_keras_takes"]
    assert [fact["steps"] for fact in facts] == [4, 4]
    same(facts, "weights")


def test_backup_and_restore_resumes_all_replicas(every: dict[str, Facts]) -> None:
    facts = every["backup_and_restore"]
    assert [fact["epochs"] for fact in facts] == [[2, 3, 4]] * 2
    assert [fact["steps"] for fact in facts] == [5 * 4] * 2
    same(facts, "weights")


def test_initial_weights_are_equal_without_a_seed(every: dict[str, Facts]) -> None:
    same(every["first_weights_are_one"], "weights")


def test_dropout_masks_differ_between_replicas(every: dict[str, Facts]) -> None:
    facts = every["each_draws_its_own"]
    for mine, theirs in zip(facts[0]["zeros"], facts[1]["zeros"], strict=True):
        assert mine.shape == theirs.shape == (4, 16)
        assert (mine != theirs).any()
    same(facts, "weights")


def test_replicas_read_disjoint_samples(every: dict[str, Facts]) -> None:
    first, second = (fact["read"] for fact in every["each_reads_its_own"])
    assert sorted(first + second) == list(range(101))


def test_per_replica_datasets_keep_replicas_synchronized(every: dict[str, Facts], alone: dict[str, Any]) -> None:
    facts = every["each_makes_its_own"]
    assert alone["each_makes_its_own"]["steps"] == 3
    assert [fact["steps"] for fact in facts] == [3, 3]
    same(facts, "weights")
    same(facts, "loss")


def test_strategy_reduce_sums_and_averages(every: dict[str, Facts]) -> None:
    for rank, fact in enumerate(every["reductions"]):
        assert fact == {
            "sum": 3.0,
            "mean": 1.5,
            "mean_of_rows": pytest.approx((0 + 1 + 0 + 1 + 2) / 5),
            "rows": [0, 1, 0, 1, 2],
            "inside": True,
            "outside": False,
            "replica": rank,
            "crossed": True,
        }


def test_micro_batches_equal_the_whole_batch(every: dict[str, Facts], alone: dict[str, Any]) -> None:
    keras.utils.set_random_seed(5)
    from .behaviours import network, weights

    whole = network()
    history = whole.fit(INPUTS, TARGETS, batch_size=20, epochs=2, verbose=0)
    for facts in (alone["micro_batches"], *every["micro_batches"]):
        assert facts["steps"] == 12
        assert facts["history"]["loss"] == pytest.approx(history.history["loss"], rel=1e-5)
        for mine, theirs in zip(weights(whole), facts["weights"], strict=True):
            np.testing.assert_allclose(theirs, mine, atol=1e-6)


def test_mixed_precision_on_two_replicas_matches_one(every: dict[str, Facts], alone: dict[str, Any]) -> None:
    same(every["narrow"], "weights")
    assert {facts["scale"] for facts in every["narrow"]} == {alone["narrow"]["scale"]}
    for mine, theirs in zip(alone["narrow"]["losses"], every["narrow"][0]["losses"], strict=True):
        assert theirs == pytest.approx(mine, rel=0.02)
        assert theirs[-1] < theirs[0]
    # Steps that overflow are the same ones.
    assert every["narrow"][0]["losses"][-1] == pytest.approx(alone["narrow"]["losses"][-1], rel=1e-3)


def test_low_precision_weights_are_refreshed_after_an_update(every: dict[str, Facts]) -> None:
    for fact in every["narrow_after_an_update"]:
        assert fact["error"][0] < 0.02


def test_metrics_cover_all_rows(every: dict[str, Facts], alone: dict[str, Any]) -> None:
    for fact in every["a_metric_with_states"]:
        assert fact["values"] == pytest.approx(alone["a_metric_with_states"]["values"], rel=1e-5)


def test_replicas_track_the_same_metrics_after_models_are_freed(every: dict[str, Facts]) -> None:
    first, second = every["metrics_of_models_that_are_gone"]
    assert first == second
    assert first["mean"] == 0.5
    assert first["held"] > first["left"] == 1


def test_input_that_differs_between_replicas_is_rejected(every: dict[str, Facts]) -> None:
    for facts in every["inputs_that_differ_are_refused"]:
        *iterated, of_arrays, of_tensors, of_fewer, order = facts["said"]
        indexed = [of_arrays, of_tensors, of_fewer]
        assert ["the same batches on every replica" in said for said in iterated] == [True] * 2
        assert "shuffle(1000, seed=0)" in iterated[0]
        assert [said.startswith("every replica must have the same data") for said in indexed] == [True] * 3
        assert "torch.Generator().manual_seed(0)" in order
        assert "101 samples here" in indexed[0]
        assert "np.random.default_rng(0)" in indexed[0]


def test_files_are_written_once(every: dict[str, Facts]) -> None:
    names = ["again_by_0.keras", "early.keras", "late.keras", "mine.weights.h5", "of_0.weights.h5", "saved_by_0.keras"]
    for facts in every["files_are_written_once"]:
        assert facts == {"is_there": True, "files": names}


def test_tensorflow_shuffle_seeds_are_equal_on_all_replicas(every: dict[str, Facts]) -> None:
    first, second = (facts["seeds"] for facts in every["shuffles_of_tensorflow_are_one"])
    assert first == second
    assert len(first) == 2


def test_micro_steps_of_a_custom_training_loop_equal_one_step(every: dict[str, Facts], tmp_path: Path) -> None:
    """Four micro-steps on two replicas are one step on one device."""
    first, second = (facts["losses"] for facts in every["micro_steps_of_a_loop_of_ones_own"])
    alone = run_example("own_loop.py", tmp_path, MICRO_STEPS="1")["losses"]
    assert first == second == pytest.approx([float(loss) for loss in alone], rel=1e-5)
