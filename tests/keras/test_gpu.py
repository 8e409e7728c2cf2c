"""Keras on a CUDA device: equal to the CPU, alone, split in two, and in bf16; saved for plain Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.backend.torch import core as keras_torch

import manyhands.keras as mhk
from manyhands.launcher import LocalEngine

from .behaviours import BEHAVIOURS, run_example, weights
from .conftest import told_by
from .scenarios import INPUTS, SCENARIOS, TARGETS, OwnStep

pytestmark = pytest.mark.gpu
X, Y = INPUTS.astype("float32"), TARGETS.astype("float32")


@pytest.fixture(autouse=True)
def _where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras_torch, "DEFAULT_DEVICE", keras_torch.DEFAULT_DEVICE)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory, engine: LocalEngine) -> list[dict[str, Any]]:
    """What two replicas on one GPU tell, by name."""
    return told_by(engine, "cuda:0*2", tmp_path_factory.mktemp("halves"), {**SCENARIOS, **BEHAVIOURS})


def functional() -> Any:
    inputs = keras.Input((8,))
    hidden = layers.BatchNormalization()(layers.Dense(16, activation="relu")(inputs))
    model = keras.Model(inputs, layers.Dense(2)(hidden))
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse", metrics=["mae"])
    return model


def own_step() -> Any:
    model = OwnStep()
    model.compile(optimizer="rmsprop", loss="mse")
    model(X[:1])
    return model


def learned(model: Any, first: list[Any]) -> dict[str, Any]:
    """What comes of some first weights: those of a GPU are drawn by the GPU."""
    model.set_weights(first)
    keras.utils.set_random_seed(2)
    history = model.fit(X, Y, batch_size=16, epochs=3, verbose=0, validation_data=(X, Y)).history
    return {
        **history,
        "evaluated": model.evaluate(X, Y, verbose=0, return_dict=True)["mae"],
        "answers": model.predict(X, verbose=0),
        "weights": np.concatenate([weight.ravel() for weight in weights(model)]),
    }


@pytest.mark.parametrize("made", [functional, own_step])
def test_training_on_a_gpu_matches_plain_keras_on_the_cpu(made: Callable[[], Any], tmp_path: Path) -> None:
    with keras.device("cpu"):
        plain = made()
        first = plain.get_weights()
        wanted = learned(plain, first)
    strategy = mhk.MirroredStrategy(["gpu:0"])
    with strategy.scope():
        model = made()
    assert {str(variable.value.device) for variable in model.variables} == {"cuda:0"} == {str(strategy.hand.device)}
    for key, value in learned(model, first).items():
        np.testing.assert_allclose(value, wanted[key], rtol=1e-3, atol=1e-4, err_msg=key)
    model.save_weights(tmp_path / "gpu.weights.h5")
    with keras.device("cpu"):
        plain.load_weights(tmp_path / "gpu.weights.h5")
        np.testing.assert_allclose(plain.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-3, atol=1e-4)


def test_model_saved_on_a_gpu_loads_on_the_cpu(tmp_path: Path) -> None:
    with mhk.MirroredStrategy(["gpu:0"]).scope():
        model = functional()
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "gpu.keras")
    answers = model.predict(X, verbose=0)
    mhk.OneDeviceStrategy("cpu")
    read = keras.models.load_model(tmp_path / "gpu.keras")
    assert {variable.value.device.type for variable in read.variables} == {"cpu"}
    np.testing.assert_allclose(read.predict(X, verbose=0), answers, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_replicas_on_one_gpu_train_like_one(name: str, halves: list[dict[str, Any]], tmp_path: Path) -> None:
    one = SCENARIOS[name](tmp_path)
    for two in halves:
        for key, values in one["history"].items():
            np.testing.assert_allclose(two[name]["history"][key], values, rtol=1e-6, atol=1e-8, err_msg=key)
        for mine, theirs in zip(one["weights"], two[name]["weights"], strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=0, atol=1e-8)


def test_bfloat16_keeps_float32_weights_and_similar_losses(halves: list[dict[str, Any]], tmp_path: Path) -> None:
    """By the strategy and by Keras' policy: float32 weights that learn nearly the same."""
    alone = BEHAVIOURS["narrow"](tmp_path)
    assert {weight.dtype for weight in alone["weights"]} == {np.dtype("float32")}
    for mine, theirs in zip(alone["losses"], halves[0]["narrow"]["losses"], strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=0.02)
        assert mine[-1] < mine[0]


def test_gpu_replicas_draw_different_dropout_and_stay_synchronized(halves: list[dict[str, Any]]) -> None:
    first, second = halves
    for mine, theirs in zip(first["each_draws_its_own"]["zeros"], second["each_draws_its_own"]["zeros"], strict=True):
        assert (mine != theirs).any()
    for name in ("callbacks_run_once", "backup_and_restore", "each_draws_its_own", "first_weights_are_one"):
        for mine, theirs in zip(first[name]["weights"], second[name]["weights"], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


def test_custom_training_loop_on_a_gpu_matches_one_device(halves: list[dict[str, Any]], tmp_path: Path) -> None:
    first, second = (told["micro_steps_of_a_loop_of_ones_own"]["losses"] for told in halves)
    alone = run_example("own_loop.py", tmp_path, MICRO_STEPS="1")["losses"]
    assert first == second == pytest.approx([float(loss) for loss in alone], rel=1e-3)
