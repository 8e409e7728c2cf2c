"""Keras models as tasks and as exported models; and what is refused, with the remedy."""

from __future__ import annotations

from pathlib import Path
from traceback import FrameSummary
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers
from keras.src.backend.torch import core as keras_torch

import manyhands as mh
import manyhands.keras as mhk
from manyhands.core import DataError, DeviceError, SettingsError, StrategyError, TaskError
from manyhands.distributed import innermost
from manyhands.keras.backend import require_torch_backend
from manyhands.training import Hand

from .scenarios import INPUTS, LABELS

X, Y = torch.tensor(INPUTS[:96], dtype=torch.float32), torch.tensor(LABELS[:96])


def made(*more: Any, optimizer: Any = "sgd", seed: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), *more, layers.Dense(3)])
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop"])
def test_task_from_a_keras_model_trains_like_the_model(optimizer: str, tmp_path: Path) -> None:
    task = mhk.as_task(lambda: made(optimizer=optimizer), (X, Y), batch_size=32, shuffle=False)
    run = mh.fit(task, "single", epochs=2, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))
    losses: list[float] = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    model = made(optimizer=optimizer)
    for _ in range(2):
        for start in range(0, 96, 32):
            model.fit(X[start : start + 32], Y[start : start + 32], batch_size=32, verbose=0, callbacks=[watch])
    assert run.losses == pytest.approx(losses, rel=1e-4)


def test_keras_task_trains_on_parameter_servers(tmp_path: Path) -> None:
    task = mhk.as_task(made, (X, Y), batch_size=32, shuffle=False)
    alone = mh.fit(task, "single", epochs=1, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))
    served = mh.fit(
        task,
        mh.ParameterServer(servers=1),
        epochs=1,
        on="cpu*2",
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    assert served.losses == pytest.approx(alone.losses, rel=1e-5)


def test_exported_models_can_be_served_and_combined_in_ensembles(tmp_path: Path) -> None:
    models = [made(layers.BatchNormalization(), seed=seed) for seed in (1, 2)]
    for model in models:
        model.fit(INPUTS, LABELS, verbose=0)
    loaded = [mh.load(mhk.export(model, tmp_path / "digits")) for model in models]
    for model, one in zip(models, loaded, strict=True):
        np.testing.assert_allclose(one(X), model.predict(X, verbose=0), rtol=1e-5, atol=1e-5)
    ensemble = mh.ensemble(loaded, options=mh.options.Combining(data=(X, Y)))
    wanted = np.mean([torch.softmax(torch.tensor(model.predict(X, verbose=0)), 1) for model in models], axis=0)
    np.testing.assert_allclose(torch.softmax(ensemble(X), 1), wanted, atol=1e-5)
    with mh.serve(tmp_path, listen=mh.serving.Listen(http=0, grpc=0, manage=0)) as server:
        answers = mh.serving.Client(server.url)("digits", X[:5])
    np.testing.assert_allclose(answers, models[1].predict(X[:5], verbose=0), rtol=1e-5, atol=1e-5)


def test_export_supports_several_inputs_and_dynamic_lengths(tmp_path: Path) -> None:
    words, size = keras.Input((None,), dtype="int32", name="words"), keras.Input((2,), name="size")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(words))
    out = [layers.Dense(3, name="kind")(hidden), layers.Dense(1, name="price")(layers.Concatenate()([hidden, size]))]
    model = keras.Model([words, size], out)
    read = mh.load(mhk.export(model, tmp_path))
    given = {"words": torch.randint(0, 9, (3, 11), dtype=torch.int32), "size": torch.ones(3, 2)}
    kind, price = model.predict(list(given.values()), verbose=0)
    answers = read(given)
    np.testing.assert_allclose(answers["output_0"], kind, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answers["output_1"], price, rtol=1e-5, atol=1e-6)


def test_export_has_the_names_of_keras_own_export(tmp_path: Path) -> None:
    sequential = keras.Sequential([keras.Input((3,), name="features"), layers.Dense(2, name="dense_7")])
    signature = mh.load(mhk.export(sequential, tmp_path / "sequential")).signature
    assert (list(signature.inputs), list(signature.outputs)) == (["features"], ["output_0"])
    one, two = keras.Input((2,), name="one"), keras.Input((2,), name="two")
    model = keras.Model([one, two], {"difference": layers.Subtract()([one, two]), "first": layers.Identity()(one)})
    # In another order than that of the model.
    example = {"two": np.ones((2, 2), "float32"), "one": np.full((2, 2), 3, "float32")}
    loaded = mh.load(mhk.export(model, tmp_path / "functional", example))
    assert (list(loaded.signature.inputs), set(loaded.signature.outputs)) == (["one", "two"], {"difference", "first"})
    np.testing.assert_array_equal(loaded({name: torch.tensor(v) for name, v in example.items()})["difference"], 2.0)
    with pytest.raises(TaskError, match="inputs of the model, one, two, but got one"):
        mhk.export(model, tmp_path, {"one": example["one"]})


def test_unsupported_keras_models_are_rejected() -> None:
    with pytest.raises(TaskError, match="GroupNormalization"):
        mhk.as_task(lambda: made(layers.BatchNormalization()), (X, Y), batch_size=8).model()
    with pytest.raises(TaskError, match="not compiled"):
        mhk.as_task(lambda: keras.Sequential([keras.Input((8,)), layers.Dense(1)]), (X, Y), batch_size=8).model()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    for optimizer in (
        keras.optimizers.Adam(schedule),
        keras.optimizers.Lion(),
        keras.optimizers.SGD(clipnorm=1.0),
        scaled,
    ):
        with pytest.raises(TaskError, match="must also exist in PyTorch"):
            mhk.as_task(made, (X, Y), batch_size=8).optimizer(made(optimizer=optimizer))
    with pytest.raises(TaskError, match="Pass example="):
        mhk.export(keras.Sequential([layers.Dense(1)]), "nowhere")


def test_tensorflow_distribute_names_are_available() -> None:
    assert mhk.cluster_resolver.TFConfigClusterResolver is mhk.TFConfigClusterResolver
    assert mhk.experimental.ParameterServerStrategy is mhk.ParameterServerStrategy
    options = mhk.experimental.CommunicationOptions(implementation=mhk.experimental.CommunicationImplementation.NCCL)
    parts = mhk.experimental.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)
    for strategy in (
        mhk.MirroredStrategy("cpu", cross_device_ops=mhk.NcclAllReduce()),
        mhk.MultiWorkerMirroredStrategy(communication_options=options),
        mhk.ParameterServerStrategy(mhk.cluster_resolver.SlurmClusterResolver(), variable_partitioner=parts),
    ):
        assert strategy.run(lambda: 3, options=mhk.RunOptions()) == 3
    for refused in (mhk.coordinator.ClusterCoordinator, mhk.experimental.CentralStorageStrategy):
        with pytest.raises((SettingsError, StrategyError), match="every replica"):
            refused()


def test_error_location_is_in_the_user_script_not_in_keras() -> None:
    frames = [FrameSummary("train.py", 7, "main"), FrameSummary(keras.src.__file__, 3, "fit")]
    assert innermost(frames).filename == "train.py"


def test_strategies_reject_unsupported_usage() -> None:
    symbolic = type("SymbolicTensor", (), {})()  # what a tf.function passes on
    with pytest.raises(SettingsError, match="in a tf.function. Remove @tf.function"):
        mhk.OneDeviceStrategy("cpu").run(lambda x: x, args=(symbolic,))
    with pytest.raises(DeviceError, match="TPUs are not supported"):
        mhk.TPUClusterResolver(tpu="")
    with pytest.raises(DeviceError, match="Keras with JAX"):
        mhk.TPUStrategy()
    with pytest.raises(SettingsError, match="Remove the branch that creates a Server"):
        mhk.Server(None, job_name="ps", task_index=0)
    with pytest.raises(SettingsError, match="strategy.run"):
        mhk.ClusterCoordinator(None)
    with pytest.raises(SettingsError, match="--join"):
        mhk.GCEClusterResolver("project", "zone", "group", 80)
    with pytest.raises(DeviceError, match="of one type"):
        mhk.MirroredStrategy(devices=["cpu:0", "gpu:0"])
    with pytest.raises(DataError, match="divisible"):
        mhk.InputContext(2, 0, 2).get_per_replica_batch_size(7)
    sharded = mh.StrategySpec(deterministic=True)
    with pytest.raises(StrategyError, match="a Keras strategy supports"):
        mhk.Strategy(Hand(mhk.get_strategy().hand.world, sharded))


def test_strategy_sets_the_keras_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (lambda: mhk.MirroredStrategy(["cpu:0"]), lambda: mhk.OneDeviceStrategy("cpu")):
        monkeypatch.setattr(keras_torch, "DEFAULT_DEVICE", "cuda")
        made()
        keras.utils.clear_session()
        assert keras_torch.get_device() == "cpu"


def test_tensors_stay_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed = mhk.compute_average_loss(torch.ones(3, device="meta"), np.ones(3), global_batch_size=6)
    assert weighed.device.type == "meta"
    model, task = made(), mhk.as_task(made, (X, Y), batch_size=8)
    # As with a GPU that the task is not trained on.
    monkeypatch.setattr(keras_torch, "DEFAULT_DEVICE", "meta")
    assert np.isfinite(float(task.loss(model, (X[:8], Y[:8])).detach()))
    assert task.predict(model, X[:8]).device.type == "cpu"


def test_cluster_resolvers_read_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mhk.TFConfigClusterResolver().task_type is None
    config = '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}'
    monkeypatch.setenv("TF_CONFIG", config)
    resolver = mhk.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == {"worker": ["a:1", "b:2"]}
    assert resolver.master() == "a:1"
    with pytest.raises(SettingsError, match="Omit the resolver, or correct one of the two"):
        mhk.SimpleClusterResolver(mhk.ClusterSpec({"worker": ["c:1"]}))


def test_other_keras_backend_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(SettingsError, match="PyTorch backend, but got the backend 'jax'. Set KERAS_BACKEND=torch"):
        require_torch_backend()
