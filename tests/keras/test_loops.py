"""Loops of one's own on two replicas: what is refused says why, and a strategy's options count there as well."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from keras.src.backend.torch import core as keras_torch

import manyhands.keras as mhk

from .loops import LOOPS

Facts = list[dict[str, Any]]
ACTS = LOOPS

REFUSED = {
    "applied outside": "an optimizer that is applied outside of strategy.run",
    "weights beside": r"\(x, y, sample_weight\), but got class_weight",
    "targets beside": "but got y; put it into the dataset",
    "accumulated": "but got accumulate=2; leave it out",
    "rows for another model": "a model that was made outside of the strategy's scope",
    "other weights": "kernel that differs; make the model in `with strategy.scope",
    "not with the same data": "replica 0: take batches of data, replica 1: call callbacks",
    "not together": "replica 0: evaluate, replica 1: predict; let every replica come here",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_drift_or_hang_is_refused(what: str, every: dict[str, Facts]) -> None:
    for facts in every["what_loops_must_not_do"]:
        assert re.search(REFUSED[what], facts[what])


def test_who_trains_apart_is_told_once(every: dict[str, Facts]) -> None:
    (text,), nothing = (facts["warned"] for facts in every["what_loops_must_not_do"])
    assert "each of the 2 replicas trains its own copy on all rows" in text
    assert not nothing


def test_a_callback_sees_all_rows_of_a_distributed_dataset(every: dict[str, Facts]) -> None:
    for facts in every["a_callback_looks_at_a_distributed_dataset"]:
        loss, _, refused = facts["text"].partition(" ")
        assert float(loss) == pytest.approx(facts["loss"], rel=1e-5)
        assert refused.startswith("all replicas take part in strategy.reduce")


def test_options_count_in_loops_of_ones_own(every: dict[str, Facts]) -> None:
    first, second = every["options_of_a_strategy"]
    # The first is Keras' look at the shapes; then two steps of two micro-batches, and one of a batch.
    assert (first["sizes"][1:], second["sizes"][1:]) == ([20, 20, 5, 5, 25], [20, 20, 5, 6, 25])
    assert {facts["narrow"] for facts in (first, second)} == {"torch.bfloat16"}


def test_a_program_may_have_strategies_for_several_devices() -> None:
    before = keras_torch.get_device()
    here, there = (mhk.OneDeviceStrategy("cpu") for _ in range(2))
    there.hand.device = torch.device("cuda", 3)
    with here.scope():
        with there.scope():
            assert keras_torch.get_device() == "cuda:3"
        assert keras_torch.get_device() == "cpu"
    with there.scope():
        assert here.run(keras_torch.get_device) == "cpu"
    assert keras_torch.get_device() == before


def test_replicas_are_chosen_once(every: dict[str, Facts]) -> None:
    for facts in every["another_choice_of_devices"]:
        assert facts["said"].startswith("strategies of one program have the same replicas, but got cpu*1 after cpu*2;")
        assert facts["steps"] == 4
