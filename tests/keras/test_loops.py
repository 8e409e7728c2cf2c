"""Custom training loops on two replicas: refusals give the reason, and the strategy's options apply."""

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
    "applied outside": "a call outside of it",
    "weights beside": r"\(x, y, sample_weight\), but got class_weight",
    "targets beside": "but got y. Add them to the dataset",
    "accumulated": "but got accumulate=2. Omit it",
    "rows for another model": "a model that was created outside of the strategy's scope",
    "other weights": "kernel. Create the model in `with strategy.scope",
    "not with the same data": "replica 0: take batches of data, replica 1: call callbacks",
    "not together": "replica 0: evaluate, replica 1: predict. Make this call on every replica",
}


@pytest.mark.parametrize("what", REFUSED)
def test_loop_operations_that_diverge_or_deadlock_are_rejected(what: str, every: dict[str, Facts]) -> None:
    for facts in every["what_loops_must_not_do"]:
        assert re.search(REFUSED[what], facts[what])


def test_training_without_synchronization_warns_once(every: dict[str, Facts]) -> None:
    (text,), nothing = (facts["warned"] for facts in every["what_loops_must_not_do"])
    assert "each of the 2 replicas trains its own copy on all rows" in text
    assert not nothing


def test_a_callback_sees_all_rows_of_a_distributed_dataset(every: dict[str, Facts]) -> None:
    for facts in every["a_callback_looks_at_a_distributed_dataset"]:
        loss, _, refused = facts["text"].partition(" ")
        assert float(loss) == pytest.approx(facts["loss"], rel=1e-5)
        assert refused.startswith("all replicas must take part in strategy.reduce")


def test_strategy_options_apply_in_custom_training_loops(every: dict[str, Facts]) -> None:
    first, second = every["options_of_a_strategy"]
    # The first is Keras' look at the shapes; then two steps of two micro-batches, and one of a batch.
    assert (first["sizes"][1:], second["sizes"][1:]) == ([20, 20, 5, 5, 25], [20, 20, 5, 6, 25])
    assert {facts["narrow"] for facts in (first, second)} == {"torch.bfloat16"}


def test_scope_switches_the_device_between_strategies() -> None:
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


def test_strategies_with_different_replicas_are_rejected(every: dict[str, Facts]) -> None:
    for facts in every["another_choice_of_devices"]:
        assert facts["said"].startswith(
            "all strategies of a program must have the same replicas, but got cpu*1 after cpu*2."
        )
        assert facts["steps"] == 4
