"""Public function `ensemble`: combine several networks into one Predictor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ensembles
from ..core import (
    DataError,
    SettingsError,
    Signature,
    Task,
    TaskError,
    as_task,
    event,
    keep_event,
    require_positive,
    split_params,
    typed,
)
from ..data import Cursor, Feed, as_source
from ..ensembles import Batches, Ensemble
from ..monitoring import make_view
from ..options import Algorithm, Combining, Display, Execution, Selection, collect, takes_options
from ..storage import Archive
from ..training import Run, inputs_of
from ..tuning import Study, Trial
from .runtime import On, runtime
from .tune import tune

MAX_ROWS = 10_000
"""Maximum number of rows of validation data, to which weights are fitted and on which calibration is measured."""


OPTIONS = (Combining, Execution, Display)
EnsembleOptions = Combining | Execution | Display


@takes_options(*OPTIONS)
def ensemble(
    source: Task | Callable[..., Task] | Study | Sequence[Any],
    members: int | None = None,
    *,
    combine: str = "mean",
    epochs: int = 1,
    on: On = None,
    name: str | None = None,
    folder: str | Path = "studies",
    resume: bool | str = False,
    options: EnsembleOptions | Sequence[EnsembleOptions] | None = None,
) -> Ensemble:
    """Train several networks, or take trained ones, and combine them into one model.

    Args:
        source: A task, of which `members` networks are trained with different seeds; a list of runs or exported models;
            or a study, whose best `members` trials are used (tune with `mh.options.Selection(keep=...)`).
            `functools.partial(task, lr=0.1)` sets parameters of a task function.
        members: Number of members; 5 by default.
        combine: "mean" (of probabilities, or of numbers), "vote", "weighted" or "stacked". The last two are fitted to
            the task's validation data.
        epochs: Epochs of each member.
        on: Devices on which the members are trained, and on which they run, in turn: "cuda:0,1" uses both GPUs in one
            program. By default members are trained on all devices of this machine and run on the CPU.
        name: Name of the study that trains the members.
        folder: Folder of the studies.
        resume: True to resume the study of that name; "auto" starts it if it does not exist.
        options: An object, or a list of several, of the following classes.
            `mh.options.Combining(uncertainty=, data=)`: whether predictions include the members' spread and mutual
            information, and data with labels that replace the task's validation data.
            `mh.options.Execution(execution=, per_device=)`: how members are trained, as for `mh.tune`.
            `mh.options.Display(progress=False)`: no output.

    Example:
        ensemble = mh.ensemble(task, members=10, epochs=5)
        ensemble(images); ensemble.uncertainty(images); print(ensemble.calibration()[0])
        ensemble.export("models/digits")
    """
    combining, how, display = collect("ensemble", OPTIONS, options)
    ensembles.require_combination(combine)
    study: Study | None = None
    if isinstance(source, Study):
        study = source
        chosen: list[Any] = [source.run(trial) for trial in _best_of(source, members)]
    elif isinstance(source, Task) or callable(source):
        study = _trained(
            source,
            num_members(members, 5),
            epochs=epochs,
            on=on,
            name=name,
            folder=folder,
            resume=resume,
            options=(how, display),
        )
        chosen = [study.run(trial) for trial in study.trials]
    elif isinstance(source, (list, tuple)):
        chosen = list(source)
    else:
        rule = "an ensemble needs a task, a study, or a list of runs or exported models"
        raise SettingsError(rule, got=type(source).__name__, remedy="pass for example [run1, run2]")
    if not chosen:
        raise SettingsError(
            "an ensemble needs at least one member", got="an empty list", remedy="pass runs, or a task and members=5"
        )
    made = [ensembles.member_of(one) for one in chosen]
    batches = _batches(chosen, combining.data, next(iter(made[0].signature.inputs)))
    joined = Ensemble(
        made,
        combine=combine,
        batches=batches,
        uncertainty=combining.uncertainty,
        devices=_homes(on),
    )
    summary = summary_of(joined)
    if study is not None:
        keep_event(study.path, event("ensemble", **summary))
    if "comparison" in summary and summary["comparison"]["is_worse"]:
        make_view("ensemble", display.progress, live=False).line(str(joined.comparison()))
    return joined


def _homes(on: On) -> list[torch.device]:
    """Return the devices of this machine on which the members are placed; an empty list for the CPU or a cluster."""
    if on is None:
        return []
    engine, devices, _ = runtime.find_devices(on)
    homes = [device.torch for device in devices] if engine is runtime.engine else []
    return homes if any(home.type != "cpu" for home in homes) else []


def _best_of(study: Study, members: int | None) -> list[Trial]:
    """Return the best `members` trials of a study, by default 5; raise SettingsError if a given number is too large."""
    best = study.top(num_members(members, 5))
    if members is not None and len(best) < members:
        raise SettingsError(
            "the study must have as many finished trials as the ensemble has members",
            got=f"{len(best)} trials for {members} members",
            remedy=f"tune with options=mh.options.Selection(keep={members}), or use fewer members",
        )
    return best


def summary_of(ensemble: Ensemble) -> dict[str, Any]:
    """Return an ensemble's members, combination, best member and calibration as JSON-ready data.

    The last two are omitted if the validation data have no class labels.
    """
    known: dict[str, Any] = {
        "members": [one.name for one in ensemble.members],
        "combine": ensemble.combine,
        "stacked": ensemble.is_stacked,
    }
    if (comparison := ensemble.comparison()) is not None:
        known["comparison"] = asdict(comparison)
    try:
        together, alone = ensemble.calibration()
    except DataError:
        return known
    return {**known, "calibration": asdict(together), "alone": [asdict(one) for one in alone]}


def _trained(
    source: Task | Callable[..., Task], members: int, *, options: Sequence[Execution | Display], **others: Any
) -> Study:
    """Train a task with `members` different seeds and return the study, whose trials are the ensemble's members."""
    if isinstance(source, Task):
        base, seed = source, source.seed

        def make(seed: int = seed) -> Task:
            return base.replace(seed=seed)
    else:
        function, bound = split_params(source)
        given = typed(function, bound)
        takes_seed = "seed" in inspect.signature(function).parameters and "seed" not in given
        seed = as_task(source).seed

        def make(seed: int = seed) -> Task:
            made = function(**{**given, **({"seed": seed} if takes_seed else {})})
            return made.replace(seed=seed)

    first = as_task(make)
    objective = "valid_loss" if first.valid is not None and first.loss is not None else "loss"
    space = {"seed": [seed + number for number in range(members)]}
    chosen = [Algorithm(search="grid"), Selection(keep=members), *options]
    study = tune(make, space, objective=objective, options=chosen, **others)
    if len(study.finished) < members:
        failed = [trial for trial in study.trials if trial.state != "finished"]
        reason = failed[0].reason if failed and failed[0].reason else "it was stopped"
        remedy = f'pass name="{study.name}" and resume=True to resume it' if study.stopped else "correct the task"
        raise TaskError(
            f"all {members} members must be trained to the end", got=f"{len(study.finished)} ({reason})", remedy=remedy
        )
    return study


def _batches(chosen: Sequence[Any], data: Any, name: str) -> Batches:
    """Return batches of inputs and labels of `data`, or else of the validation data of the first run in `chosen`.

    They are prepared as the task of that run prepares them, up to about `MAX_ROWS` rows; `name` is that of its only
    input, if the task has no `predict`. For exported models only `data` is used; without any data the result is empty.
    """
    run = next((one for one in chosen if isinstance(one, Run)), None)
    if run is None:
        return pairs(chosen[0].signature, data) if data is not None and isinstance(chosen[0], Archive) else ()
    task = run.require_task()
    held = task.valid if data is None else data
    if held is None:
        return ()
    source = as_source(held, collate=task.collate)
    feed = Feed(source, batch_size=task.batch_size or source.batch_size or 256, shuffle=False)
    found: list[tuple[dict[str, Tensor], Tensor | None]] = []
    rows = 0
    for batch in feed.epoch(Cursor()):
        inputs = inputs_of(task, batch.data, name)
        found.append((inputs, _labels(batch.data)))
        rows += len(next(iter(inputs.values())))
        if rows >= MAX_ROWS:
            break
    feed.close()
    return found


def pairs(signature: Signature, data: Any) -> Batches:
    """Return the arrays (inputs, labels) as one batch, for members with one input; raise DataError for other data."""
    if not isinstance(data, (tuple, list)) or len(data) != 2 or len(signature.inputs) != 1:
        raise DataError(
            "data must be a pair (inputs, labels) for exported models",
            got=type(data).__name__,
            remedy="pass for example options=mh.options.Combining(data=(inputs, labels))",
        )
    return [({next(iter(signature.inputs)): torch.as_tensor(data[0])}, torch.as_tensor(data[1]))]


def _labels(batch: Any) -> Tensor | None:
    """Return the labels of a batch: the second element, or a dict's entry such as "label" or "y"; None without any."""
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in ("label", "labels", "target", "targets", "y") if name in batch), None)
    else:
        found = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    return found if isinstance(found, Tensor) else None


def num_members(members: int | None, default: int) -> int:
    """Return the number of members, or the default for None; raise SettingsError if it is not a positive integer."""
    require_positive(members=members)
    return default if members is None else members
