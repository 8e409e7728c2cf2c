"""Public functions `ensemble` and `remote_ensemble`: combine several networks into one Predictor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from . import ensembles, studies
from .core import DataError, SettingsError, Signature, Task, TaskError, as_task, event, keep_event, typed
from .data import Cursor, Feed, as_source
from .ensembles import Batches, Ensemble, RemoteEnsemble
from .storage import Archive
from .training import Run, inputs_of
from .tuning import Study, Trial
from .verbs import On, _engine

MAX_ROWS = 10_000
"""Rows of validation data that weights are fitted on, at most."""


def ensemble(
    source: Task | Callable[..., Task] | Study | Sequence[Any],
    members: int | None = None,
    *,
    combine: str = "mean",
    uncertainty: bool = False,
    data: Any = None,
    epochs: int = 1,
    params: Mapping[str, Any] | None = None,
    on: On = None,
    execution: str | None = None,
    name: str | None = None,
    folder: str | Path = "studies",
    resume: bool | str = False,
    progress: bool | None = None,
) -> Ensemble:
    """Train or collect several networks and combine them into one model.

    Args:
        source: A task, of which `members` networks are trained with different seeds; a list of runs or exported models;
            or a study, whose best `members` trials are used (tune with `keep=`).
        members: Number of members; 5 by default.
        combine: "mean" (of probabilities, or of numbers), "vote", "weighted" or "stacked". The last two are fitted to
            `data`.
        uncertainty: Whether predictions include the members' spread and mutual information as additional outputs.
        data: Data with labels; by default the task's validation data.
        epochs, params, execution, name, folder, resume, progress: Options of the training, as in `mh.tune`.
        on: Devices on which the members are trained, and on which they run, in turn: "cuda:0,1" uses both GPUs in one
            program. By default members are trained on all devices of this machine and run on the CPU.

    Example:
        ensemble = mh.ensemble(task, members=10, epochs=5)
        ensemble(images); ensemble.uncertainty(images); print(ensemble.calibration()[0])
        ensemble.export("models/digits")
    """
    ensembles.require_combination(combine)
    study: Study | None = None
    if isinstance(source, Study):
        study = source
        chosen: list[Any] = [source.run(trial) for trial in _best_of(source, members)]
    elif isinstance(source, Task) or callable(source):
        study = _trained(
            source,
            _num(members, 5),
            epochs=epochs,
            params=params,
            on=on,
            execution=execution,
            name=name,
            folder=folder,
            resume=resume,
            progress=progress,
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
    batches = _batches(chosen, data)
    joined = Ensemble(
        [ensembles.member_of(one) for one in chosen],
        combine=combine,
        batches=batches,
        uncertainty=uncertainty,
        devices=_homes(on),
    )
    if study is not None:
        keep_event(study.path, event("ensemble", **summary_of(joined)))
    return joined


def _homes(on: On) -> list[torch.device]:
    """Return the devices of this machine that members are pinned to; none if they stay on the CPU."""
    if on is None:
        return []
    engine, devices, _ = studies._place(on)
    homes = [device.torch for device in devices] if engine is _engine else []
    return homes if any(home.type != "cpu" for home in homes) else []


def _best_of(study: Study, members: int | None) -> list[Trial]:
    """Return the best trials of a study, as many as requested."""
    best = study.top(_num(members, 5))
    if members is not None and len(best) < members:
        raise SettingsError(
            "the study must have as many finished trials as the ensemble has members",
            got=f"{len(best)} trials for {members} members",
            remedy=f"tune with keep={members}, or use fewer members",
        )
    return best


def summary_of(ensemble: Ensemble) -> dict[str, Any]:
    """Return an ensemble as JSON-ready data: its members, and its calibration if the validation data have labels."""
    known = {
        "members": [one.name for one in ensemble.members],
        "combine": ensemble.combine,
        "stacked": ensemble.is_stacked,
    }
    try:
        together, alone = ensemble.calibration()
    except DataError:
        return known
    return {**known, "calibration": asdict(together), "alone": [asdict(one) for one in alone]}


def remote_ensemble(
    ensemble: Ensemble | Sequence[str],
    *,
    on: On = None,
    deadline: float = 1.0,
    quorum: int | None = None,
    combine: str = "mean",
    data: Any = None,
    token: str | None = None,
) -> RemoteEnsemble:
    """Run every member of an ensemble in its own process, or use models that servers already provide.

    Args:
        ensemble: An Ensemble, or the addresses of served models such as "http://host:8501/digits".
        on: Devices for the processes, in turn.
        deadline: Seconds within which members must answer a query.
        quorum: Number of members that must have answered by the deadline; by default more than half of them.
        combine: How predictions of served models are combined; an Ensemble has its own combination.
        data: A pair (inputs, labels) for served models. Labels show that outputs are classes, and the combinations
            "weighted" and "stacked" are fitted to them.
        token: Access token of the servers.

    Example:
        with mh.remote_ensemble(ensemble, on="cpu*2", deadline=0.5, quorum=3) as remote:
            answer = remote.ask(images)
            answer.outputs, answer.members, answer.missing
    """
    if isinstance(ensemble, Ensemble):
        engine, devices, _ = studies._place(on)
        handles: list[ensembles.ProcessMember] = []
        try:
            for number, member in enumerate(ensemble.members):
                handles.append(ensembles.ProcessMember(engine, member, devices[number % len(devices)]))
            for handle in handles:
                handle.ready()
            return RemoteEnsemble(
                handles, ensemble.rule, ensemble.members[0].signature, deadline=deadline, quorum=quorum
            )
        except BaseException:
            for handle in handles:
                handle.close()
            raise
    return _served(list(ensemble), deadline, quorum, combine, data, token)


def _trained(source: Task | Callable[..., Task], members: int, *, params: Any, **options: Any) -> Study:
    """Return a study of the same task with different seeds, whose trials are the members."""
    if isinstance(source, Task):
        base, seed = source, source.seed

        def make(seed: int = seed) -> Task:
            return base.replace(seed=seed)
    else:
        function, given = source, typed(source, params or {})
        takes_seed = "seed" in inspect.signature(function).parameters and "seed" not in given
        seed = as_task(function, params).seed

        def make(seed: int = seed) -> Task:
            made = function(**{**given, **({"seed": seed} if takes_seed else {})})
            return made.replace(seed=seed)

    first = as_task(make)
    objective = "valid_loss" if first.valid is not None and first.loss is not None else "loss"
    space = {"seed": [seed + number for number in range(members)]}
    study = studies.tune(make, space, search="grid", objective=objective, keep=members, **options)
    if len(study.finished) < members:
        failed = [trial for trial in study.trials if trial.state != "finished"]
        reason = failed[0].reason if failed and failed[0].reason else "it was stopped"
        remedy = f'pass name="{study.name}" and resume=True to resume it' if study.stopped else "correct the task"
        raise TaskError(
            f"all {members} members must be trained to the end", got=f"{len(study.finished)} ({reason})", remedy=remedy
        )
    return study


def _batches(chosen: Sequence[Any], data: Any) -> Batches:
    """Yield inputs and labels of the validation data, as the first member's task uses them."""
    run = next((one for one in chosen if isinstance(one, Run)), None)
    if run is None:
        return _pairs(chosen[0].signature, data) if data is not None and isinstance(chosen[0], Archive) else ()
    task = run.require_task()
    held = task.valid if data is None else data
    if held is None:
        return ()
    source = as_source(held, collate=task.collate)
    feed = Feed(source, batch_size=task.batch_size or source.batch_size or 256, shuffle=False)
    found: list[tuple[dict[str, Tensor], Tensor | None]] = []
    rows = 0
    for batch in feed.epoch(Cursor()):
        inputs = inputs_of(task, batch.data)
        found.append((inputs, _labels(batch.data)))
        rows += len(next(iter(inputs.values())))
        if rows >= MAX_ROWS:
            break
    feed.close()
    return found


def _pairs(signature: Signature, data: Any) -> Batches:
    """Yield batches of the arrays (inputs, labels), for members with one input."""
    if not isinstance(data, (tuple, list)) or len(data) != 2 or len(signature.inputs) != 1:
        raise DataError(
            "data must be a pair (inputs, labels) for exported models",
            got=type(data).__name__,
            remedy="pass for example data=(inputs, labels)",
        )
    return [({next(iter(signature.inputs)): torch.as_tensor(data[0])}, torch.as_tensor(data[1]))]


def _labels(batch: Any) -> Tensor | None:
    """Return the labels of a batch: the second element, or the entry of a dict with that name."""
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in ("label", "labels", "target", "targets", "y") if name in batch), None)
    else:
        found = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    return found if isinstance(found, Tensor) else None


def _served(
    urls: Sequence[str], deadline: float, quorum: int | None, combine: str, data: Any, token: str | None
) -> RemoteEnsemble:
    """Return an ensemble of served models."""
    from .serving import Client

    if not urls or not all(isinstance(url, str) for url in urls):
        raise SettingsError(
            "remote_ensemble needs an Ensemble, or a list of addresses", got=repr(urls)[:80], remedy="pass one of these"
        )
    signatures, asking = [], []
    for url in urls:
        parts = urlsplit(url)
        model = parts.path.strip("/")
        if not model:
            rule = "an address must name a model, as in http://host:8501/digits"
            raise SettingsError(rule, got=repr(url), remedy="add the name of the model")
        client = Client(f"{parts.scheme}://{parts.netloc}", token=token, timeout=deadline)
        signatures.append(client.signature(model))
        asking.append(_Asking(client, model))
    ensembles.require_alike(list(urls), signatures)
    inputs, labels = _pairs(signatures[0], data)[0] if data is not None else (_zeros(signatures[0]), None)
    answers = [ask(inputs) for ask in asking]
    together = {name: torch.stack([answer[name] for answer in answers]) for name in answers[0]}
    rule_of = ensembles.CombinationRule.of(combine, together, labels, False)
    handles = [ensembles.CalledMember(ask, ask.model) for ask in asking]
    return RemoteEnsemble(handles, rule_of, signatures[0], deadline=deadline, quorum=quorum)


def _zeros(signature: Signature) -> dict[str, Tensor]:
    """Two rows of zeros, to see what answers look like."""
    return {
        name: torch.zeros([2 if size is None else size for size in spec.shape], dtype=getattr(torch, spec.dtype))
        for name, spec in signature.inputs.items()
    }


class _Asking:
    """Asks a server for one model."""

    def __init__(self, client: Any, model: str) -> None:
        self._client, self.model = client, model

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self._client(self.model, inputs)
        answers = found if isinstance(found, dict) else {"output": found}
        return {name: torch.as_tensor(value) for name, value in answers.items()}


def _num(members: int | None, default: int) -> int:
    if members is not None and (isinstance(members, bool) or not isinstance(members, int) or members < 1):
        raise SettingsError(
            "members must be a whole number of at least 1", got=members, remedy="pass for example members=5"
        )
    return default if members is None else members
