"""Log a Keras fit as a run, which `manyhands dashboard` shows during and after training."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import torch
from keras import ops
from keras.callbacks import Callback
from keras.metrics import Mean
from keras.src.backend.torch import core as keras_torch

from ..core import event, keep_event, replace_text
from ..distributed import held_now
from ..training import RECORD, Hand, new_folder
from .strategy import home_of

SECONDS = 1.0
"""Interval in seconds at which the losses of batches are written."""


class FitTimer:
    """Measures how a replica spends the time of a fit; waiting for other replicas counts as sync."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._began = self._since = self._now()
        self._seconds = {"input": 0.0, "validation": 0.0}

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._hand.world.waited

    def begin(self) -> None:
        """Start timing an activity."""
        self._since = self._now()

    def end(self, what: str) -> None:
        """Add the time since `begin` to the activity `what`."""
        passed, waited = (now - then for now, then in zip(self._now(), self._since, strict=True))
        self._seconds[what] += passed - waited

    def describe(self) -> dict[str, Any]:
        """Return the timings and memory of this rank for the dashboard."""
        total, waited = (now - then for now, then in zip(self._now(), self._began, strict=True))
        known = {"sync": waited, **self._seconds}
        rank_info = self._hand.world.rank_info
        return {
            "rank": self._hand.world.rank,
            "host": rank_info.host,
            "device": str(rank_info.device),
            "seconds": {"total": total, "compute": max(0.0, total - sum(known.values())), **known},
            "memory": held_now(self._hand.device),
        }


class RunLog(Callback):  # type: ignore[misc]
    """Callback that writes batch losses, epoch metrics and learning rates, as `manyhands dashboard` shows them.

    Args:
        folder: Folder of all runs.
        name: Name of the run's folder in it; an existing run of this name is continued. By default every fit is a new
            run, named after the model.
    """

    def __init__(self, folder: str | Path = "runs", name: str | None = None) -> None:
        super().__init__()
        self._folder, self._name = Path(folder), name
        self.path: Path | None = None
        """The run's folder; None until the first epoch begins."""
        self.waits: list[dict[str, Any]] = []
        """Timings of each replica in this epoch; the callback list sets them."""
        self._record: dict[str, Any] = {}
        self._step = self._epoch = 0
        self._batches: list[tuple[int, float]] = []
        self._reported = 0.0, 0.0
        """Sum and count of the epoch's loss after the previous batch."""
        self._written_at = 0.0

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Forget the run of an earlier fit; `on_epoch_begin` opens a new one."""
        self.path = None

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Open the run at the first epoch, because another callback may restore an earlier step before it."""
        self._epoch, self._reported = epoch, (0.0, 0.0)
        if self.path is None:
            self._begin()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Record the loss of a batch."""
        self._step += 1
        self._batches.append((self._step, self._loss(logs or {})))
        if time.monotonic() > self._written_at + SECONDS:
            self._write_batches()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Write the metrics of an epoch and the timings of each replica."""
        self._write_batches()
        metrics = {name: float(value) for name, value in (logs or {}).items() if name not in ("loss", "learning_rate")}
        self._write("epoch", epoch=epoch, step=self._step, metrics=metrics)
        for each in self.waits:
            self._write("waits", **each)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Write the end of the run."""
        if self.path is not None:
            self._write("end", step=self._step, stopped=bool(self.model.stop_training))

    def _begin(self) -> None:
        self.path = new_folder(self._folder, self._name, self.model.name, self._name is not None, may_begin=True)
        self._step, self._batches = int(ops.convert_to_numpy(self.model.optimizer.iterations)), []
        strategy = home_of(self.model)
        epochs, steps = self.params["epochs"], self.params["steps"]
        self._record = {
            "torch": torch.__version__,
            "keras": keras.__version__,
            "python": sys.version.split()[0],
            "spec": {} if strategy is None else strategy.spec.to_dict(),
            "devices": [torch.device(keras_torch.get_device()).type] * (1 if strategy is None else strategy.hand.size),
            "epochs": epochs,
            "task": self.model.name,
        }
        self._write_record()
        parameters = self.model.count_params() if self.model.built else None
        self._write("start", total=steps and steps * epochs, epochs=epochs, parameters=parameters, step=self._step)

    def _write_record(self) -> None:
        assert self.path is not None
        replace_text(self.path / RECORD, json.dumps(self._record, indent=2))

    def _loss(self, logs: Mapping[str, float]) -> float:
        """Return the last batch's loss, computed from the change of the running mean that Keras reports."""
        tracker = next((each for each in self.model.metrics if each.name == "loss" and isinstance(each, Mean)), None)
        if tracker is None or not float(ops.convert_to_numpy(tracker.count)):
            return float(logs.get("loss", "nan"))
        total, count = (float(ops.convert_to_numpy(variable)) for variable in (tracker.total, tracker.count))
        before_total, before_count = self._reported if count > self._reported[1] else (0.0, 0.0)
        self._reported = total, count
        if "batch_size" not in self._record:
            # Keras does not pass the batch size to callbacks; the first batch is a whole one.
            self._record["batch_size"] = round(count - before_count)
            self._write_record()
        return (total - before_total) / (count - before_count)

    def _write_batches(self) -> None:
        self._written_at = time.monotonic()
        if self._batches:
            steps, losses = zip(*self._batches, strict=True)
            self._batches = []
            rate = float(ops.convert_to_numpy(self.model.optimizer.learning_rate))
            self._write("steps", steps=steps, losses={"loss": losses}, epoch=self._epoch, lr={"": rate})

    def _write(self, kind: str, **values: Any) -> None:
        assert self.path is not None
        keep_event(self.path, event(kind, **values))
