"""Public function `plan`: rank the strategies for a task by their predicted cost on given hardware."""

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
"""The strategy that is replaced by the planner's choice."""


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
    """Rank the strategies for a task by predicted step time, with their memory and the speed by number of devices.

    Args:
        task: A Task, or a function that returns one.
        cluster: Description of other hardware, such as "8 hosts x 8 H100, 400Gb/s", or a TOML file. Several clusters,
            or several kinds of hosts in one, are compared. By default the devices of this machine, which are measured.
        on: Devices of this machine, as for `mh.fit`, if `cluster` is None.
        params: Parameters of the task function.
        precision: Precision of the computation, "fp32" or "bf16".
        lossy: Whether policies that change the mathematics may be chosen.
        tries: Number of best strategies that are measured for a few steps on this machine, in addition to data
            parallelism; 0 measures none.
        networks: Number of networks to train, for a search or an ensemble; `plan.ways` compares how to train them.
        seen: Earlier runs of this task on devices like those of `cluster`, or their folders. The constants of the cost
            model are fitted to them.
        timeout: Seconds within which a healthy operation completes.

    Returns:
        A Plan; a Comparison of plans for several clusters.

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
            "tries must be a whole number of at least 0",
            got=repr(tries),
            remedy="pass for example tries=3, or 0 to measure no strategy",
        )
    if isinstance(networks, bool) or not isinstance(networks, int) or networks < 1:
        raise SettingsError(
            "networks must be a whole number of at least 1", got=repr(networks), remedy="pass for example networks=100"
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
                "seen= needs the cluster on which the runs were trained", remedy="pass cluster=, or omit seen"
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
    """Return the plan for a cluster, after its constants are fitted to earlier runs on devices of the same kind."""
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
    """Return the median step time of a run as an observation, and the kind of its devices, such as "cuda"."""
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
            "a run in seen= must have logged its steps at least twice", got=str(run.path), remedy="pass a longer run"
        )
    load = replace(workload, batch_size=run.record["batch_size"] or workload.batch_size)
    return Observation(load, spec, median(pairs)), devices[0].partition(":")[0]


def strategy_of_plan(strategy: str | Path, task: Task, on: On, name: str) -> tuple[StrategySpec, list[Event]]:
    """Return the strategy for "auto" or from a plan file, and events about the plan for the run's log."""
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
    """Return why a spec cannot be run, or not with this task; empty if it can."""
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
