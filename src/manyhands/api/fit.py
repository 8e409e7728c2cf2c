"""Public function `fit`: train a task, distributed by a strategy."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import parameter_server, training
from ..core import StrategyError, StrategySpec, Task, as_task, event, task_name, typed
from ..distributed import DEFAULT_TIMEOUT, Device, current_world
from ..launcher import JoinedHosts
from ..monitoring import LogTo, make_sinks
from ..storage import CheckpointStore, Weights
from ..strategies import SplitTable, require_loss
from ..training import Callback, Job, Patience, ReplicaResult, Run, new_folder
from .checks import check_data
from .planned import planned
from .recording import explain_mathematics, put_record, record_of, recording, started_before
from .runtime import TaskLike, Where, from_first, is_first_host, lease, own_randomness, require_positive, runtime
from .served import check_served, train_served
from .signals import defer_sigterm

if TYPE_CHECKING:
    from ..strategies import Layout


def fit(
    task: TaskLike,
    strategy: StrategySpec | str | None = None,
    *,
    epochs: int = 1,
    steps: int | None = None,
    on: Where = None,
    params: Mapping[str, Any] | None = None,
    name: str | None = None,
    folder: str | Path = "runs",
    resume: bool | Run | str | Path = False,
    start_from: Run | Weights | Mapping[str, Tensor] | str | Path | None = None,
    save_every: int | None = None,
    keep: int = 2,
    copy_every: int = 100,
    callbacks: Sequence[Callback] = (),
    stop: Patience | Sequence[Patience] | None = None,
    log_to: LogTo | None = None,
    progress: bool | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    deterministic: bool = False,
    memory: str | int | None = None,
    fit_in: str | int | None = None,
    profile: bool | int = False,
    verify: bool = True,
    allow_different: bool = False,
) -> Run:
    """Train a task, distributed over devices by a strategy.

    With one device, and no limit of a CPU's memory, training runs in this process. Ctrl-C stops the run after the
    current step and returns it. A SIGTERM does the same, and then exits the program.

    Args:
        task: A Task, or a function with defaults that returns one.
        strategy: `mh.Single()`, `mh.Mirrored(2)`, or a string such as "mirrored,accumulate=4". By default one replica
            on every device. "auto" plans and uses the best strategy; "plan.toml" is a saved plan.
        epochs: Number of passes over the data.
        steps: Number of steps after which training ends, even within an epoch.
        on: Devices, such as "cuda:0,1", "cpu*2" or "ray://head:10001"; by default those of this machine.
        params: Parameters of the task function.
        name: Name of the run; by default the name of the task and the time.
        folder: Folder of the runs; the run is saved in folder/name.
        resume: True (with a name), a Run, or the path of a run: resume from its last checkpoint, on any number of
            devices. "auto" (with a name) starts the run if it does not exist, for programs that are restarted.
        start_from: A run, a file of weights, an exported model or a Hugging Face folder whose weights initialize the
            network. Data order and optimizer start fresh. A resumed run uses its checkpoint instead.
            `mh.weights(path, strict=False)` loads the tensors that fit.
        save_every: Steps between checkpoints, in addition to those at epoch ends. By default
            checkpoints take at most 2% of the run's time, so that not every short epoch is saved, and at most five
            minutes of work are unsaved.
        keep: Number of checkpoints to keep, in addition to the best one.
        copy_every: Steps between copies, in the memory of another rank, of state that only one rank holds.
        callbacks: `mh.Callback` objects.
        stop: `mh.Patience("valid_loss", 5)`, or several: stop when one of these metrics does not improve.
        log_to: "tensorboard", "wandb", "mlflow", "csv", an `mh.Sink`, a function of an event, or a list of these.
        progress: False to display nothing.
        timeout: Seconds within which a healthy operation completes.
        deterministic: Whether random numbers, including dropout, are the same on any number of devices.
        memory: Memory limit of each replica on its device, such as "8GiB".
        fit_in: Memory such as "24GiB"; recompute, accumulate, sharding and offload are chosen so that a step fits, at
            the least cost.
        profile: Profile one step in fifty (or in the given number), for `run.profile` and `mh.profile(run)`.
        verify: Before training, compare the first two steps, on a float64 copy of the network, with those of one
            device, if that takes at most a few seconds. A difference raises TaskError; `run.verdict` has the outcome.
        allow_different: Whether hosts may have different code or data. By default, training on several hosts compares
            the source of the project's modules, the length of the data and some of its samples, and names a difference.

    Returns:
        The trained run.

    An event, as passed to a function in `log_to` and written to events.jsonl, is a dict with its `kind`, its time `t`
    and its values: {"kind": "steps", "t": 1767225600.0, "steps": [1, 2], "losses": {"loss": [0.9, 0.8]}, ...} a few
    times per second, {"kind": "epoch", "epoch": 0, "step": 2, "losses": {...}, "metrics": {"valid_loss": 0.7}, ...},
    and "start", "plan", "partition", "verdict", "log", "notice", "skipped", "waits", "parts", "pace", "profile",
    "straggler", "lost", "recovered", "hang", "checkpoint", "end" or "failed". `manyhands dashboard` displays them.

    >>> import tempfile, torch, manyhands as mh
    >>> task = mh.Task(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=(torch.ones(8, 4), torch.ones(8, 1)),
    ...     batch_size=4,
    ... )
    >>> run = mh.fit(task, mh.Single(), epochs=2, on="cpu", folder=tempfile.mkdtemp(), progress=False)
    >>> run.num_steps
    4
    """
    with runtime.joined(on, strategy, timeout, progress) as on:
        require_positive(epochs=epochs, steps=steps, save_every=save_every, keep=keep, copy_every=copy_every)
        training.check_callbacks(callbacks)
        sinks = make_sinks(log_to)
        limit = None if memory is None else training.parse_bytes(memory)
        may_begin = resume == "auto"
        if may_begin:
            resume = True
        if not isinstance(resume, bool):
            resumed = resume.path if isinstance(resume, Run) else Path(resume)
            folder, name, resume = resumed.parent, resumed.name, True
        made = as_task(task, params)
        strategy, plan_events = planned(strategy, made, on, task_name(task))
        spec, devices, notices = runtime.settle(
            strategy, on, deterministic=deterministic, timeout=timeout, with_servers=True
        )
        if fit_in is not None:
            spec, chosen = _fitted(made, spec, training.parse_bytes(fit_in), devices)
            notices += chosen
        require_loss(spec, made.loss is not None)
        training.check_pieces(made, spec, devices)
        check_data(made, steps)
        role = parameter_server.find_role() if spec.servers else None
        if spec.servers:
            parameter_server.check_served(made)
            if verify and role is None and parameter_server.has_own_optimizer(made):
                # What a copy computes here does not show how servers update their pieces.
                training.refuse(check_served(made, spec, devices, timeout))
        if role is not None and profile:
            raise StrategyError(
                "profile=True needs workers that mh.fit has started",
                got=f"{spec} in an existing cluster",
                remedy="omit profile, or profile the task on one host",
            )
        if role is not None and not role.is_chief:
            parameter_server.run_member(role, made, spec, devices[0], timeout)
            # What follows in the program is for the coordinator, which has the run.
            raise SystemExit(0)
        training.check_metrics(made, spec.num_parts)
        training.check_patience(training.as_patience(stop), made)
        made = made.replace(weights=training.as_weights(made.weights, folder))
        source = training.as_weights(start_from, folder)
        if not resume or (may_begin and not (Path(folder) / str(name)).is_dir()):
            training.check_start(made, made.weights)
            training.check_start(made, source)
        table, layout = _explained(made, spec)
        shown = typed(task, params or {}) if not isinstance(task, Task) else {}
        default = f"{task_name(task)}-{time.strftime('%Y%m%d-%H%M%S')}"
        before = started_before(folder)
        resume = resume or before is not None
        path = before or from_first(lambda: new_folder(folder, name, default, resume, may_begin=may_begin), on)
        if source is not None and resume and CheckpointStore(path / training.CHECKPOINTS).steps():
            notices.append("start_from is ignored, because the run resumes from its checkpoint")
        job = Job(
            task=made,
            spec=spec,
            folder=path,
            epochs=epochs,
            steps=steps,
            resume=resume,
            save_every=save_every,
            keep=keep,
            copy_every=copy_every,
            callbacks=tuple(callbacks),
            stop=training.as_patience(stop),
            start_from=source,
            memory=limit,
            layout=layout,
            profile=training.EVERY if profile is True else int(profile),
            verify=verify,
            sources=training.local_sources() if isinstance(on, JoinedHosts) or current_world() is not None else None,
            allow_different=allow_different,
        )
        with (
            defer_sigterm(),
            recording(job, devices, shown, progress, sinks, task, writes=is_first_host(on)) as (view, on_event),
            lease(on, devices, path.name, lambda text: on_event(0, event("notice", text=text))),
        ):
            for entry in [
                *plan_events,
                *(event("notice", text=text) for text in [*notices, *explain_mathematics(spec)]),
            ]:
                on_event(0, entry)
            if table is not None:
                on_event(0, event("split", lines=table.lines(), **table.to_dict()))
            if spec.servers:
                outcomes = [train_served(job, devices, timeout, on_event, view, role)]
            else:
                train = functools.partial(training.train, job=job)
                separate = limit is not None and devices[0].kind == "cpu"
                outcomes = runtime.start(
                    train,
                    devices,
                    timeout,
                    on_event,
                    view,
                    on=on,
                    separate=separate,
                    after_loss="regroup",
                    unit=spec.tensor * spec.stages,
                )
            # Ranks of a host that are not part of a complete group have no result.
            outcomes = outcomes or [ReplicaResult(0, {}, stopped=False)]
            end = outcomes[0]
            if end.servers:
                record = json.loads((path / training.RECORD).read_text())
                put_record(job, {**record, "servers": end.servers})
            on_event(0, event("end", step=end.num_steps, stopped=end.stopped, seconds=end.seconds))
        # A rank on another host, whose disk does not have the run, still knows what was asked for.
        here = (path / training.RECORD).exists()
        return Run(path, made, outcomes[0], None if here else record_of(job, devices, shown))


def _fitted(task: Task, spec: StrategySpec, memory: int, devices: Sequence[Device]) -> tuple[StrategySpec, list[str]]:
    """Return the least costly spec that fits into memory, with notices; raise where `fit_in` cannot choose."""
    if task.loss is None or spec.tensor * spec.stages != 1 or spec.servers or not training.can_explain(task):
        raise StrategyError(
            "fit_in needs a task with loss=, on replicas or shards",
            got=f"{spec}",
            remedy="omit fit_in, and set recompute, accumulate and sharding",
        )
    with own_randomness():
        chosen, notices = training.fit_in(task, spec, memory, len(devices), training.host_bytes(devices))
        fitting = training.with_micro_statistics(task, chosen)
    micro = 'batch_stats="micro": batch statistics are those of a micro-batch'
    return fitting, [*notices, *([micro] if fitting != chosen else [])]


def _explained(task: Task, spec: StrategySpec) -> tuple[SplitTable | None, Layout | None]:
    """Return the table and the layout of a run that splits its network; None for what does not apply."""
    splits = spec.shards != 1 or spec.tensor > 1
    if not splits or not training.can_explain(task):
        return None, None
    with own_randomness():
        table, layout = training.explain(task, spec)
    # The contents of pipeline stages are measured in the ranks and reported from there.
    return (table if spec.stages == 1 else None), layout
