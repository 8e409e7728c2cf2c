"""The wandb sink: a run of Weights & Biases, configured by wandb's variables (WANDB_PROJECT, WANDB_MODE, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core import SettingsError
from .sink import FAILED, About, NumberSink

_STEP = "step"
"""The x-axis of every curve. wandb's own step counter cannot go back, but the steps of a resumed run can."""


class WandbSink(NumberSink):
    """Log numbers by step, the run's parameters as the config of the wandb run, and notices in its summary."""

    name = "wandb"
    package = "wandb"
    extra = "wandb"
    most = 25

    def require(self) -> None:
        super().require()
        import wandb

        # Without a key wandb would prompt for one in the terminal in the middle of the run.
        if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise SettingsError(
                "log_to='wandb' needs the key of an account",
                remedy="run wandb login, or set WANDB_MODE=offline and upload the run later with wandb sync",
            )

    def start(self, about: About) -> None:
        import wandb

        self._notices: list[str] = []
        self._run: Any = wandb.init(
            name=about.name,
            dir=str(about.folder),
            config=about.flat(),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.link = self._run.url or f"offline; wandb sync {Path(self._run.dir).parent} sends the run"
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP, step_sync=True)

    def numbers(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log({**values, _STEP: step})

    def text(self, step: int, text: str) -> None:
        self._notices.append(f"step {step}: {text}")
        self._run.summary["notices"] = "\n".join(self._notices)

    def end(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == FAILED else 0)
