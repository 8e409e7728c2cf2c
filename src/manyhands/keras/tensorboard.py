"""TensorBoard callback without TensorFlow, which Keras' own callback needs: the same curves and names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras.callbacks import Callback

from ..core import SettingsError


class TensorBoard(Callback):  # type: ignore[misc]
    """Write the logs of every epoch, and with `update_freq="batch"` or a number also those of batches.

    Curves are `epoch_loss` and so on under log_dir/train and log_dir/validation, as Keras names them.
    """

    def __init__(self, log_dir: str | Path = "logs", update_freq: str | int = "epoch") -> None:
        super().__init__()
        if update_freq not in ("epoch", "batch") and not isinstance(update_freq, int):
            raise SettingsError(
                'update_freq must be "epoch", "batch" or a number of batches',
                got=repr(update_freq),
                remedy='pass for example update_freq="epoch"',
            )
        self._folder, self._every = Path(log_dir), {"epoch": 0, "batch": 1}.get(str(update_freq), update_freq)
        self._num_batches = 0
        self._writers: dict[str, Any] = {}

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Write the values of a batch."""
        self._num_batches += 1
        if self._every and self._num_batches % int(self._every) == 0:
            self._write("batch", logs, self._num_batches)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Write the values of an epoch."""
        self._write("epoch", logs, epoch)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, prefix: str, logs: Mapping[str, float] | None, at: int) -> None:
        for name, value in (logs or {}).items():
            kind = "validation" if name.startswith("val_") else "train"
            self._writer(kind).add_scalar(f"{prefix}_{name.removeprefix('val_')}", value, at)

    def _writer(self, kind: str) -> Any:
        if kind not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            self._writers[kind] = SummaryWriter(str(self._folder / kind))
        return self._writers[kind]
