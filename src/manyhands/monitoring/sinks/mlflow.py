"""The mlflow sink: a run of MLflow, configured by MLflow's variables (MLFLOW_TRACKING_URI, ...)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .sink import FAILED, FINISHED, STOPPED, About, NumberSink

_STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
_MAX_METRICS, _MAX_PARAMS, _MAX_TEXT = 1000, 100, 5000
"""Limits of MLflow's API: metrics per call, parameters per call, and characters per value."""


class MlflowSink(NumberSink):
    """Log numbers by step, the run's parameters, and notices as the description of the MLflow run.

    The sink has its own client, so the program's active MLflow run is not affected.
    """

    name = "mlflow"
    package = "mlflow"
    extra = "mlflow"
    most = 100

    def start(self, about: About) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient()
        self._notices: list[str] = []
        self._metrics: list[Any] = []
        self._run_id = self._client.create_run(self._experiment(), run_name=about.name).info.run_id
        params = [Param(name, str(value)[:_MAX_TEXT]) for name, value in about.flat().items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])
        self._client.set_tag(self._run_id, "manyhands.folder", str(about.folder))

    def numbers(self, step: int, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        self._metrics.extend(Metric(name, value, int(at * 1000), step) for name, value in values.items())

    def text(self, step: int, text: str) -> None:
        self._notices.append(f"step {step}: {text}")
        self._client.set_tag(self._run_id, "mlflow.note.content", "\n\n".join(self._notices)[:_MAX_TEXT])

    def flush(self) -> None:
        for start in range(0, len(self._metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=self._metrics[start : start + _MAX_METRICS])
        self._metrics.clear()

    def end(self, status: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS[status])

    def _experiment(self) -> str:
        """Return the id of the experiment that MLflow's variables name; create the experiment if it does not exist."""
        if os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))
