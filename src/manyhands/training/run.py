"""`Run`: the result of training, read from its folder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, float64, nn

from ..core import (
    EVENTS,
    CheckpointError,
    FileError,
    SettingsError,
    Task,
    TaskError,
    as_task,
    counted,
    fields,
    html_curve,
    html_lines,
    html_table,
    read_events,
    read_json,
    restore_random_state,
    seed_all,
)
from ..core import random_state as _random_state
from ..data import Cursor, Feed, as_source
from ..storage import CheckpointStore, Weights, check_matches, export, save_state_dict, weights
from .embedding_tables import with_tables
from .job import CHECKPOINTS, ReplicaResult
from .predictor import ModelPredictor
from .sampling import Breakdown, breakdowns

RECORD = "run.json"
RECORD_LIMIT = 4 << 20
"""Maximum size of a run.json, in bytes."""
NUM_EXAMPLES = 8
"""Small batches from which a Predictor's signature is derived: a dimension in which they differ is dynamic."""


class Run:
    """A finished or stopped run.

    `run.metrics` holds the last values, `run.history` every value by step, `run.model()` the trained network.
    `run.losses[i]` is the training loss of step i + 1, NaN if it was skipped; `run.skipped` lists those steps.
    """

    def __init__(
        self,
        path: str | Path,
        task: Task | Callable[..., Task] | None = None,
        outcome: ReplicaResult | None = None,
        record: dict[str, Any] | None = None,
    ) -> None:
        """Open a run; pass its `record` where the folder is on another host's disk."""
        self.path, self.outcome = Path(path), outcome
        self.record: dict[str, Any] = read_record(self.path) if record is None else record
        params = None if isinstance(task, Task) else self.record.get("params") or {}
        self.task = None if task is None else as_task(task, params)
        self.history: dict[str, dict[int, float]] = {}
        self.skipped: list[int] = []
        """Steps that were skipped because their gradient was not finite; `history` has no loss for them."""
        self.first_loss = ""
        """The name of the training loss; the first one where there are several."""
        self._read_history()

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.name

    @property
    def losses(self) -> list[float]:
        """The training loss of every step, in order; NaN for skipped steps."""
        losses = self.history.get(self.first_loss, {})
        return [losses.get(step, math.nan) for step in range(1, max([0, *losses, *self.skipped]) + 1)]

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every loss and metric."""
        return {name: values[max(values)] for name, values in self.history.items() if values}

    @property
    def num_steps(self) -> int:
        """The step of the last checkpoint; 0 without one."""
        steps = self._store().steps()
        return steps[-1] if steps else 0

    @property
    def stopped(self) -> bool:
        """Whether it was stopped early by Ctrl-C or `hand.stop()`; running out of patience is a regular end."""
        return self.outcome is not None and self.outcome.stopped

    @property
    def verdict(self) -> str:
        """Whether the first steps equal one device's: "equal", or "not verified, because …"; empty if unknown."""
        verdict = self.record.get("verdict", {})
        return (
            ""
            if not verdict
            else "equal"
            if verdict["outcome"] == "equal"
            else f"{verdict['outcome']}, because {verdict['why']}"
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the first replica's time by activity."""
        return {} if self.outcome is None else self.outcome.seconds

    @property
    def profile(self) -> tuple[Breakdown, ...]:
        """Time of every rank within profiled steps, where the run had `profile=True`; see `mh.profile(run)`."""
        return breakdowns(read_events(self.path / EVENTS))

    def model(self, *, best: bool = False, averaged: bool = True) -> nn.Module:
        """Return the trained network as a plain module on the CPU, in evaluation mode: the last one, or the best one.

        The best one is that of the saved epoch with the lowest loss, or with the best value that `mh.Patience` watches.
        Without patience, runs with short epochs do not save every epoch.

        Where the task has `ema`, it has the averaged weights; `averaged=False` returns the weights that were trained.
        """
        task = self.require_task()
        model = self._build(task)
        store = self._store()
        checkpoint = store.load(store.best() if best else None)
        checkpoint = with_tables(checkpoint, model)
        check_matches(checkpoint, model)
        if any(tensor.dtype == float64 for tensor in checkpoint.model.values()):
            model = model.double()
        model.load_state_dict(checkpoint.averaged if averaged else checkpoint.model)
        return model.eval()

    def state_dict(self, *, best: bool = False, averaged: bool = True) -> dict[str, Tensor]:
        """Return the last or the best weights by the plain module's names, averaged where the task has `ema`.

        This needs no task.
        """
        store = self._store()
        checkpoint = store.load(store.best() if best else None)
        return checkpoint.averaged if averaged else checkpoint.model

    def predictor(self, *, best: bool = False) -> ModelPredictor:
        """Return the trained network as a Predictor."""
        task = self.require_task()
        model = self.model(best=best)
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        feed = Feed(as_source(task.data, collate=task.collate), batch_size=2, shuffle=False, dtype=dtype)
        batches = [batch.data for batch in itertools.islice(feed.epoch(Cursor()), NUM_EXAMPLES)]
        return ModelPredictor(task, model, batches)

    def export(self, path: str | Path, *, best: bool = False, weights_only: bool = False) -> Path:
        """Export the network as the next version under a folder: weights and program, without pickle.

        With `weights_only` write a plain state dict to one .safetensors file instead.
        """
        if weights_only:
            target = Path(path)
            save_state_dict(self.model(best=best).state_dict(), target)
            return target
        task = self.require_task()
        predictor = self.predictor(best=best)
        predict = task.predict or (lambda model, *inputs: model(*inputs))
        extra = {"run": self.name, "step": self.num_steps, "metrics": self.metrics}
        return export(self.model(best=best), predict, predictor.example, Path(path), free=predictor.free, extra=extra)

    def save_pretrained(self, folder: str | Path, *, best: bool = False, averaged: bool = True) -> Path:
        """Save the network's Hugging Face model (itself or a submodule) as a folder that `from_pretrained` reads."""
        _require_folder(Path(folder))
        model = self.model(best=best, averaged=averaged)
        found = {name: part for name, part in model.named_modules() if _is_pretrained(part)}
        outer = [name for name in found if not any(name.startswith(f"{o}." if o else "") and name != o for o in found)]
        if len(outer) != 1:
            have = f"{type(model).__name__} with {', '.join(outer) or 'none'}"
            raise TaskError(
                "save_pretrained needs one Hugging Face model in the network",
                got=have,
                remedy="use run.export(path), or run.model() and the save_pretrained of one of them",
            )
        found[outer[0]].save_pretrained(folder)
        return Path(folder)

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self.path / CHECKPOINTS)

    def _build(self, task: Task) -> nn.Module:
        """Build the network without changing the caller's random state."""
        import torch

        states = _random_state(torch.device("cpu"))
        try:
            seed_all(task.seed)
            return task.model()
        finally:
            restore_random_state(states, torch.device("cpu"))

    def require_task(self) -> Task:
        """Return the task that was trained; raise if the run was opened without it."""
        if self.task is None:
            raise TaskError(
                "this function needs the task that was trained, but the run was opened without it",
                remedy="open it with mh.Run(path, task)",
            )
        return self.task

    def _read_history(self) -> None:
        for entry in read_events(self.path / EVENTS):
            # `read_events` yields only events whose fields have the types that are needed here.
            if entry["kind"] == "steps":
                self.first_loss = self.first_loss or next(iter(entry["losses"]), "")
                for name, values in entry["losses"].items():
                    measured = zip(entry["steps"], values, strict=True)
                    self.history.setdefault(name, {}).update((at, one) for at, one in measured if one is not None)
            elif entry["kind"] == "epoch":
                for name, value in entry["metrics"].items():
                    if value is not None:
                        self.history.setdefault(name, {})[entry["step"]] = value
            elif entry["kind"] == "skipped":
                self.skipped.append(entry["step"])
            elif (entry["kind"] == "start" and entry["step"]) or entry["kind"] == "recovered":
                self._forget_after(entry["step"])

    def _forget_after(self, step: int) -> None:
        """Drop history after the step that the run resumed from, since those steps were repeated."""
        for name, values in self.history.items():
            self.history[name] = {at: value for at, value in values.items() if at <= step}
        self.skipped = [at for at in self.skipped if at <= step]

    def __repr__(self) -> str:
        shown = [f"{name}={value:.4g}" for name, value in self.metrics.items()]
        return f"Run({', '.join([repr(self.name), counted(self.num_steps, 'step'), *shown])})"

    def _repr_html_(self) -> str:
        strategy = ",".join(f"{name}={value}" for name, value in self.record.get("spec", {}).items())
        rows = [
            ("steps", self.num_steps),
            ("strategy", strategy or "single"),
            ("devices", ", ".join(map(str, self.record.get("devices", [])))),
            *([("verified", self.verdict)] if self.verdict else []),
            *((name, f"{value:.4g}") for name, value in self.metrics.items()),
        ]
        curve = html_curve(self.losses, self.first_loss)
        return html_table(f"run {self.name}", rows) + curve + html_lines([str(self.path)])


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a run: its strategy, devices and options.

    Raises:
        CheckpointError: The folder has no run.json, or a damaged one.
    """
    try:
        record = read_json(folder / RECORD, RECORD_LIMIT)
    except FileNotFoundError:
        raise CheckpointError(
            f"a run must be a folder with a {RECORD}", got=str(folder), remedy="pass a folder under runs/"
        ) from None
    except (OSError, FileError) as error:
        raise CheckpointError(f"{folder / RECORD} must be readable", got=str(error)) from None
    if not fields.holds(record, fields.RECORD_FIELDS):
        raise CheckpointError(
            f"{folder / RECORD} must be a record of a run",
            got="missing fields, or fields of other types",
            remedy="copy the run again, or pass another one",
        )
    return record


def launch_of(folder: Path) -> str | None:
    """Return the name of the launch that a run belongs to; None where there is none, or its record is damaged."""
    try:
        name = read_record(folder).get("launch")
    except CheckpointError:
        return None
    return name if isinstance(name, str) else None


def _require_folder(folder: Path) -> None:
    """Raise if a file is in the way of a folder, since Hugging Face would only log that and write nothing."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise SettingsError(
                "save_pretrained needs a folder", got=f"{path}, which is a file", remedy="choose another path"
            )


def _is_pretrained(part: Any) -> bool:
    return hasattr(part, "save_pretrained") and hasattr(part, "config")


def as_weights(start_from: Any, folder: str | Path = "runs") -> Weights | None:
    """Convert `fit(start_from=...)` to weights: a run, its folder, a file or folder of weights, or a state dict.

    `folder` is where runs are kept; given a run's name instead of a path, the error names the path.
    """
    if start_from is None or isinstance(start_from, Weights):
        found = start_from
    elif isinstance(start_from, Run):
        found = weights(start_from.path)
    elif isinstance(start_from, (str, Path, Mapping)):
        found = weights(start_from)
        _require_path(found.source, start_from, Path(folder))
    else:
        is_network = isinstance(start_from, nn.Module)
        raise CheckpointError(
            "start_from must be a run, a path of weights, or a state dict",
            got=type(start_from).__name__,
            remedy="pass its .state_dict()" if is_network else "pass one of these",
        )
    if found is not None and isinstance(found.source, Path) and (found.source / RECORD).exists():
        return Weights(found.source / CHECKPOINTS, found.strict, found.rename)
    return found


def _require_path(source: Path | Mapping[str, Tensor], given: Any, folder: Path) -> None:
    if isinstance(source, Path) and not source.exists() and (folder / given / RECORD).exists():
        raise CheckpointError(
            "start_from needs a path", got=f"{str(given)!r}, the name of a run", remedy=f"pass {str(folder / given)!r}"
        )


def _make(folder: Path, *, exist_ok: bool = False) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise SettingsError(
            "runs must be saved in a folder that can be written",
            got=f"{folder.parent} ({error.strerror})",
            remedy="choose another one with folder=, or --folder",
        ) from None


def new_folder(folder: str | Path, name: str | None, default: str, resume: bool, *, may_begin: bool = False) -> Path:
    """Return the folder of a run: a new one, or that of the run to resume; nothing is ever overwritten.

    With `may_begin`, create the folder of a run to resume if there is none.
    """
    root = Path(folder)
    if name is not None and (not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or len(name) > 64):
        raise SettingsError(
            "the name of a run must consist of letters, digits, - _ and ., at most 64 characters",
            got=repr(name),
            remedy="choose another name",
        )
    if resume:
        if name is None:
            raise SettingsError("resume needs the name of the run", remedy='pass name="..."')
        if may_begin:
            _make(root / name, exist_ok=True)
        if not (root / name).is_dir():
            raise SettingsError(
                f"a run to resume must exist; {root} has {_some_of(root)}",
                got=repr(name),
                remedy='choose one of these, or pass resume="auto" to start it if it does not exist',
            )
        return root / name
    chosen = name or default
    for suffix in ["", *(f"-{n}" for n in range(2, 10_000))] if name is None else [""]:
        try:
            _make(root / f"{chosen}{suffix}")
        except FileExistsError:
            continue
        return root / f"{chosen}{suffix}"
    raise SettingsError(
        "the folder of a new run must not exist yet",
        got=f"{root / chosen}, which exists",
        remedy="pass resume=True to resume it, or another name",
    )


def _some_of(root: Path) -> str:
    """Return the names of the last runs in a folder, and how many more there are."""
    names = sorted(path.name for path in root.glob("*") if path.is_dir())
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[-5:]) + more if names else "no runs"
