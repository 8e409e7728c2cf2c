"""Public function `plan`: rank the strategies for a task on hardware by their cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from .. import costs, parameter_server, planning, training
from ..core import (
    EVENTS,
    Event,
    SettingsError,
    StrategyError,
    StrategySpec,
    Task,
    UsageError,
    as_task,
    event,
    read_events,
    task_name,
)
from ..distributed import DEFAULT_TIMEOUT, current_world
from ..planning import Cluster, Comparison, Observation, Plan, Search, Workload, as_clusters
from ..strategies import require_built, require_loss
from .bench import Bench, workload_of
from .runtime import On, TaskLike

AUTO = "auto"


ClusterLike = Cluster | str | Path


def plan(
    task: TaskLike,
    cluster: ClusterLike | Sequence[ClusterLike] | None = None,
    *,
    on: On = None,
    params: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    lossy: bool = False,
    tries: int = 3,
    networks: int = 1,
    seen: Sequence[training.Run | str | Path] = (),
    timeout: float = DEFAULT_TIMEOUT,
) -> Plan | Comparison:
    """Rank the strategies for a task by their cost: step time by part, memory, and speed by number of devices.

    - `cluster`: hardware that need not be here, "8 hosts x 8 H100, 400Gb/s" or a TOML file; several are compared, and
      so are the kinds of hosts in a file. By default the devices of this machine (or `on`), which are measured first;
    - `precision`: "fp32" or "bf16", in which the network is to be computed;
    - `lossy`: whether ways that change the mathematics may be picked;
    - `tries`: how many of the best are tried here for a few steps; data parallel is always among them; 0 tries none;
    - `networks`: how many such networks are to be trained, for a search or an ensemble: `plan.ways` says how;
    - `seen`: earlier runs of this task on such devices, or their folders, to which the constants are fitted.

    >>> import torch, manyhands as mh
    >>> task = mh.Task(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)),
    ...     loss=lambda model, batch: model(batch).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=torch.ones(64, 64),
    ...     batch_size=64,
    ... )
    >>> found = mh.plan(task, "4 hosts x 8 A100, 100Gb/s")
    >>> found.curve.saturates < 32  # far too small for so many
    True
    """
    if precision not in ("fp32", "bf16"):
        raise SettingsError("precision must be fp32 or bf16", got=repr(precision), remedy='pass precision="bf16"')
    if isinstance(tries, bool) or not isinstance(tries, int) or tries < 0:
        raise SettingsError(
            "tries must be a number of plans to measure",
            got=repr(tries),
            remedy="pass for example tries=3, or 0 to measure none",
        )
    if isinstance(networks, bool) or not isinstance(networks, int) or networks < 1:
        raise SettingsError(
            "networks must be the number of networks to train", got=repr(networks), remedy="pass 1 or more"
        )
    made = as_task(task, params)
    clusters = _listed(cluster)
    search = Search(precision=precision, lossy=lossy, refuses=functools.partial(_refused, task=made))
    bench = Bench(made, on, timeout)
    workload, notes = workload_of(made, task_name(task), bench)
    fingerprint = costs.fingerprint(made)
    finish = functools.partial(
        planning.make_plan, search=search, fingerprint=fingerprint, notes=notes, networks=networks
    )
    if clusters is None:
        if seen:
            raise SettingsError(
                "seen is for hardware that is not here", got="no cluster", remedy="pass cluster=, or omit seen"
            )
        here = bench.cluster()
        workload, here = bench.calibrated(workload, here, precision)
        measure = bench.measure if tries else None
        search = replace(search, correction=bench.correction)
        return finish(workload, here, search=search, measure=measure, tries=tries)
    observations = [_observed(one, workload) for one in seen]
    plans = [_fitted(finish, workload, one, search, observations) for one in clusters]
    return planning.compare(plans) if isinstance(cluster, list | tuple) or len(plans) > 1 else plans[0]


def _fitted(
    finish: Callable[..., Plan],
    workload: Workload,
    cluster: Cluster,
    search: Search,
    seen: Sequence[tuple[Observation, str]],
) -> Plan:
    """Return the plan for a cluster, whose constants are fitted to earlier runs on its kind of devices."""
    if not seen:
        return finish(workload, cluster)
    for _, device in seen:
        if (device == "cpu") != (cluster.chip.name == "CPU"):
            raise SettingsError(
                f"seen must be runs on devices like those of the cluster, {cluster.chip.name}",
                got=f"a run on {device}",
                remedy="pass runs on that hardware only",
            )
    observations = [one for one, _ in seen]
    fitted = planning.calibrated(cluster, observations)
    correction = planning.Residuals.of(fitted, observations).correction(workload)
    return finish(workload, fitted, search=replace(search, correction=correction))


def _observed(given: training.Run | str | Path, workload: Workload) -> tuple[Observation, str]:
    """Return the usual time of a run's steps as an observation, and the kind of its devices."""
    run = given if isinstance(given, training.Run) else training.Run(given)
    spec = StrategySpec.from_dict(run.record["spec"])
    devices = [str(device) for device in run.record["devices"]]
    entries = [one for one in read_events(run.path / EVENTS) if one["kind"] == "steps" and one["steps"]]
    pairs = [
        (after["t"] - before["t"]) / (after["steps"][-1] - before["steps"][-1])
        for before, after in pairwise(entries)
        if after["steps"][-1] > before["steps"][-1] and after["t"] > before["t"]
    ]
    if not pairs:
        raise SettingsError(
            "a seen run must have logged its steps at least twice", got=str(run.path), remedy="pass a longer run"
        )
    load = replace(workload, batch_size=run.record["batch_size"] or workload.batch_size)
    return Observation(load, spec, median(pairs)), devices[0].partition(":")[0]


def strategy_of_plan(strategy: str | Path, task: Task, on: On, name: str) -> tuple[StrategySpec, list[Event]]:
    """Return the strategy for "auto" or from a plan file, and the events that describe it in the run's log."""
    if strategy != AUTO:
        spec, planned = planning.read_plan(strategy)
        planning.require_same(strategy, planned, costs.fingerprint(task))
        return training.with_micro_statistics(task, spec), []
    if current_world() is not None:
        raise StrategyError(
            'strategy="auto" must be planned before ranks are started',
            got="a call in a rank",
            remedy="plan first: mh.plan(task).best.save(...)",
        )
    found = plan(task, on=on)
    assert isinstance(found, Plan)
    choice = event("notice", text=f"auto: {found.best.spec} ({found.best.why})")
    return training.with_micro_statistics(task, found.best.spec), [
        choice,
        event("plan", **{**found.to_dict(), "task": name}),
    ]


def _listed(cluster: ClusterLike | Sequence[ClusterLike] | None) -> list[Cluster] | None:
    if cluster is None:
        return None
    given = list(cluster) if isinstance(cluster, list | tuple) else [cluster]
    if not given:
        raise SettingsError("at least one cluster is required", remedy='pass for example "8 H100", or several clusters')
    return [found for one in given for found in as_clusters(one)]  # type: ignore[arg-type]


def _refused(spec: StrategySpec, task: Task) -> str:
    """Why a spec cannot be run, or not with this task."""
    try:
        require_built(spec)
    except StrategyError as error:
        return f"not yet: {error.rule}"
    try:
        require_loss(spec, task.loss is not None)
        if spec.servers:
            parameter_server.check_served(task)
    except UsageError as error:
        return f"not for this task: {error.rule}"
    return ""
