"""When a rank is killed, all ranks restart the script and resume from the backup."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import manyhands as mh


def train(hand: Any, folder: Path) -> dict[str, Any]:
    import keras

    import manyhands.keras as mhk

    from .scenarios import INPUTS, TARGETS

    if hand.world.rank_info.generation == 0 and hand.rank == 1:

        class Dies(mhk.DistributedInput):
            """An input whose reading ends the process in the third epoch."""

            def on_epoch_begin(self) -> None:
                self.epoch = getattr(self, "epoch", 0) + 1
                if self.epoch == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                super().on_epoch_begin()

        kind: Any = Dies
    else:
        kind = mhk.DistributedInput
    keras.utils.set_random_seed(1)
    strategy = mhk.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        model.compile(optimizer="adam", loss="mse")
    plain = keras.src.trainers.data_adapters.get_data_adapter(INPUTS, TARGETS, batch_size=16)
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    history = model.fit(kind(plain, strategy), epochs=5, verbose=0, shuffle=False, callbacks=[backup])
    return {"epochs": history.epoch, "steps": int(model.optimizer.iterations.numpy()), "weights": model.get_weights()}


def test_training_restarts_after_a_rank_is_killed(tmp_path: Path) -> None:
    run = functools.partial(train, folder=tmp_path)
    two = mh.launch(run, "mirrored", on="cpu*2", progress=False, timeout=60)
    whole = mh.launch(functools.partial(train, folder=tmp_path / "alone"), "single", on="cpu", progress=False)[0]
    assert two[0]["epochs"] == two[1]["epochs"]
    assert two[0]["epochs"][0] > 0
    assert two[0]["epochs"][-1] == 4
    assert two[0]["steps"] == whole["steps"] == 5 * 7
    for mine, theirs, wanted in zip(two[0]["weights"], two[1]["weights"], whole["weights"], strict=True):
        assert (mine == theirs).all()
        assert abs(mine - wanted).max() < 1e-5
