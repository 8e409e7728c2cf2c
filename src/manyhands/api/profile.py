"""Public function `profile`: time some steps of a task on its ranks, or read the profiled steps of a run."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import costs, profiling, training
from ..core import (
    EVENTS,
    ManyhandsError,
    SettingsError,
    StrategySpec,
    Task,
    UsageError,
    as_task,
    format_bytes,
    read_events,
    task_name,
)
from ..data import Feed, as_source, check_source, source_of
from ..distributed import DEFAULT_TIMEOUT, World
from ..options import Display, Logging, Recovery
from ..profiling import Profile, RankProfile
from ..strategies import require_loss
from .fit import fit
from .planned import planned
from .runtime import TaskLike, Where, own_randomness, runtime

WARMUP = 3
"""Number of first steps that are not counted, under parameter servers, whose workers report every step."""


ROWS = 8
"""Number of samples with which a network is traced; its operations are proportional to the number of samples."""


def profile(
    task: TaskLike | training.Run | str | Path,
    strategy: StrategySpec | str | None = None,
    *,
    on: Where = None,
    params: Mapping[str, Any] | None = None,
    steps: int = 20,
    timeout: float = DEFAULT_TIMEOUT,
) -> Profile:
    """Measure the time and memory of a training step by rank, module and operation, and give advice.

    Args:
        task: A Task, or a function that returns one: some of its steps are run, and their result is discarded. Or a
            run, or its folder, that was trained with `mh.options.Logging(profile=True)`: its profiled steps are read.
        strategy: Strategy, as for `mh.fit`.
        on: Devices or hosts, as for `mh.fit`.
        params: Parameters of the task function.
        steps: Number of steps to time; a few more run under torch's profiler.
        timeout: Seconds within which a healthy operation completes.

    Returns:
        The profile of all ranks, on every host and on every rank that calls this function.

    >>> import torch, manyhands as mh
    >>> task = mh.Task(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)),
    ...     loss=lambda model, batch: model(batch).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=torch.ones(64, 64),
    ...     batch_size=64,
    ... )
    >>> found = mh.profile(task, mh.Single(), on="cpu", steps=3)
    >>> found.phases["forward"] > 0
    True
    """
    if isinstance(task, (str, Path)):
        task = training.Run(task)
    if isinstance(task, training.Run):
        return _of_run(task)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise SettingsError(
            "steps must be a whole number of at least 1", got=repr(steps), remedy="pass for example steps=20"
        )
    with runtime.joined(on, strategy, timeout, None) as on:
        return _of_task(task, strategy, on=on, params=params, steps=steps, timeout=timeout)


def _of_task(
    task: TaskLike,
    strategy: StrategySpec | str | None,
    *,
    on: Where,
    params: Mapping[str, Any] | None,
    steps: int,
    timeout: float,
) -> Profile:
    """Run some steps of a task and return their profile."""
    made = as_task(task, params)
    strategy, picked = planned(strategy, made, on, task_name(task))
    spec, devices, notices = runtime.settle(strategy, on, timeout=timeout, with_servers=True)
    if spec.servers:
        return _of_served(made, spec, on, steps, timeout, task_name(task))
    require_loss(spec, made.loss is not None)
    training.check_pieces(made, spec, devices)
    work = functools.partial(_probed, task=made, spec=spec, steps=steps)
    ranks = runtime.call(work, devices, timeout, on=on)[0]
    source = source_of(made)
    batch_size = check_source(source, made.batch_size)
    valid = None if made.valid is None else as_source(made.valid, collate=made.collate)
    flops, notes = _flops(made, batch_size, spec)
    return Profile(
        name=task_name(task),
        strategy=str(spec),
        spec=spec.to_dict(),
        batch_size=batch_size,
        ranks=tuple(ranks),
        flops=flops,
        epoch_steps=source.num_steps(batch_size),
        valid_steps=0 if valid is None else valid.num_steps(made.batch_size or batch_size) or 0,
        notes=(
            *notices,
            *profiling.load_notes((one.breakdown.host, one.other_load) for one in ranks),
            *(entry["text"] for entry in picked if entry["kind"] == "notice"),
            *notes,
        ),
    )


def _of_served(task: Task, spec: StrategySpec, on: Where, steps: int, timeout: float, name: str) -> Profile:
    """Train with parameter servers for a short time, in which workers time every step, and return the profile."""
    with tempfile.TemporaryDirectory() as folder:
        run = fit(
            task.replace(valid=None),
            spec,
            on=on,
            steps=WARMUP + steps,
            epochs=WARMUP + steps,
            folder=folder,
            name=name,
            options=[Display(progress=False), Logging(profile=1), Recovery(timeout=timeout)],
        )
        if run.stopped:
            raise KeyboardInterrupt
        found = _of_run(run)
    flops, notes = _flops(task, found.batch_size, spec)
    return replace(found, flops=flops, upkeep={}, notes=(*found.notes, *notes))


def _hottest(sizes: Sequence[int], num_steps: int) -> list[str]:
    """Return a note on the server that exchanges most bytes with the workers; empty if there was no traffic.

    Args:
        sizes: Bytes that each server has exchanged.
        num_steps: Number of steps of the run.
    """
    if not sum(sizes):
        return []
    hot = max(range(len(sizes)), key=lambda number: sizes[number])
    share, each = sizes[hot] / sum(sizes), sizes[hot] / max(1, num_steps)
    even = "; the others have as much to do" if share < 1.2 / len(sizes) else ""
    return [
        f"server {hot} of {len(sizes)} is the hottest: {share:.0%} of all bytes, {format_bytes(each, 3)} a step{even}"
    ]


def _probed(world: World, task: Task, spec: StrategySpec, steps: int) -> list[RankProfile]:
    """Profile some steps on this rank, and return the profiles of all ranks.

    They are gathered because a host only gets the results of its own ranks.
    """
    return world.gather_objects(profiling.probe(world, task, spec, steps))


def _flops(task: Task, batch_size: int, spec: StrategySpec) -> tuple[float | None, list[str]]:
    """Return the FLOPs of a step; None and the reason if the network cannot be traced."""
    precision = "bf16" if spec.precision == "bf16" else "fp32"
    feed = Feed(source_of(task), batch_size=batch_size, workers=0)
    try:
        batch = feed.peek(min(ROWS, batch_size))
    finally:
        feed.close()
    threads = torch.get_num_threads()
    try:
        with own_randomness():
            return costs.trace(task, batch, rows=ROWS, precision=precision).flops_per_sample * batch_size, []
    except ManyhandsError as error:
        return None, [f"operations are not counted: {error}"]
    finally:
        # The model function may set the number of threads for its ranks, but must not change it in this program.
        torch.set_num_threads(threads)


def _of_run(run: training.Run) -> Profile:
    """Return the profile of a run whose steps were profiled; raise UsageError if none were."""
    taken = run.profile
    if not taken:
        raise UsageError(
            "the run must have profiled steps",
            got=f"{run.path} without any",
            remedy="train it with options=mh.options.Logging(profile=True) for more than fifty steps, or profile the "
            "task",
        )
    spent: dict[int, dict[str, float]] = {}
    for entry in read_events(run.path / EVENTS):
        if entry["kind"] == "waits":
            spent[entry["rank"]] = entry["seconds"]
    whole = spent.get(0, {})
    total = whole.get("total") or 1.0
    upkeep = {name: whole.get(name, 0.0) / total for name in ("save", "validation")}
    spec = run.record["spec"]
    sizes = run.record.get("servers", {}).get("bytes", [])
    return profiling.of_run(
        run.name,
        str(StrategySpec.from_dict(spec)),
        spec,
        run.record["batch_size"] or 1,
        taken,
        upkeep=upkeep,
        notes=(f"medians of {len(taken[0].steps)} sampled steps", *_hottest(sizes, run.num_steps)),
    )
