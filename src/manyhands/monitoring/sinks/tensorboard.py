"""The tensorboard sink: event files in the run's folder; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sink import About, NumberSink

FOLDER = "tensorboard"


class TensorBoardSink(NumberSink):
    """Write scalars by step, notices as text, and the run's parameters for TensorBoard's HParams tab."""

    name = "tensorboard"
    package = "torch.utils.tensorboard"
    extra = "tensorboard"
    most = 100

    def start(self, about: About) -> None:
        from torch.utils.tensorboard.summary import hparams

        self._folder = str(about.folder / FOLDER)
        self._open(None)
        flat = about.flat()
        rows = "\n".join(f"| {name} | {value} |" for name, value in flat.items())
        self._writer.add_text("run", f"| setting | value |\n|---|---|\n{rows}", 0)
        for summary in hparams(flat, {"train/loss": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def numbers(self, step: int, values: Mapping[str, float], at: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def text(self, step: int, text: str) -> None:
        self._writer.add_text("notices", text, step)

    def go_back(self, step: int) -> None:
        self._writer.close()
        self._open(step + 1)

    def end(self, status: str) -> None:
        self._writer.add_text("status", status, self._step)
        self._writer.close()

    def _open(self, purge_step: int | None) -> None:
        """Open a new event file; TensorBoard ignores values of older files from `purge_step` on, if that is given."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(self._folder, purge_step=purge_step)
