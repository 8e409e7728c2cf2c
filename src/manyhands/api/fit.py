"""Public function `fit`: train a task, distributed by a strategy."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import parameter_server, training
from ..core import StrategyError, StrategySpec, Task, as_task, event, require_positive, split_params, task_name, typed
from ..distributed import Device, current_world
from ..launcher import JoinedHosts
from ..monitoring import make_sinks
from ..options import Checkpoints, Display, Equality, Logging, Recovery, Resources, collect, takes_options
from ..storage import CheckpointStore
from ..strategies import SplitTable, require_loss
from ..training import Callback, Job, Patience, ReplicaResult, Run, new_folder
from .check import check_data
from .parameter_servers import check_served, train_served
from .planned import planned
from .recording import explain_mathematics, put_record, record_of, recording, started_before
from .runtime import TaskLike, Where, from_first, lease, own_randomness, runtime
from .signals import defer_sigterm

if TYPE_CHECKING:
    from ..strategies import Layout


OPTIONS = (Checkpoints, Logging, Display, Resources, Recovery, Equality)
FitOptions = Checkpoints | Logging | Display | Resources | Recovery | Equality


@takes_options(*OPTIONS)
def fit(
    task: TaskLike,
    strategy: StrategySpec | str | None = None,
    *,
    epochs: int = 1,
    steps: int | None = None,
    on: Where = None,
    name: str | None = None,
    folder: str | Path = "runs",
    resume: bool | Run | str | Path = False,
    callbacks: Sequence[Callback | Patience] = (),
    options: FitOptions | Sequence[FitOptions] | None = None,
) -> Run:
    """Train a task, distributed over devices by a strategy.

    With one device, training runs in this process, except if a memory limit is set for a CPU. On Ctrl-C the run stops
    after the current step, is saved and returned. On SIGTERM the same happens, and then the program exits.

    Args:
        task: A Task, or a function with defaults that returns one; `functools.partial(task, lr=0.1)` sets parameters,
            which the run records.
        strategy: `mh.Single()`, `mh.Mirrored(2)`, or a string such as "mirrored,accumulate=4". By default one replica
            on every device. "auto" plans and uses the best strategy; "plan.toml" names the file of a saved plan.
        epochs: Number of passes over the data.
        steps: Number of steps after which training ends, even within an epoch.
        on: Devices, such as "cuda:0,1", "cpu*2" or "ray://head:10001"; by default those of this machine.
        name: Name of the run; by default the name of the task and the time.
        folder: Folder of the runs; the run is saved in folder/name.
        resume: Whether to resume from the last checkpoint, on any number of devices: True (with a name), a Run, or the
            path of a run. "auto" (with a name) resumes the run, or starts it if it does not exist, for programs that
            are restarted.
        callbacks: `mh.Callback` objects, and `mh.Patience("valid_loss", 5)` to stop when a metric does not improve.
        options: An object, or a list of several, of the following classes.
            `mh.options.Checkpoints(start_from=, save_every=, keep=)`: the initial weights, and what is saved.
            `mh.options.Logging(log_to=, profile=, tags=, notes=)`: events sent to "tensorboard", "wandb", "mlflow",
            "csv" or a function, steps profiled for `run.profile`, and labels that the dashboard shows.
            `mh.options.Display(progress=False)`: no output.
            `mh.options.Resources(memory=, fit_in=, balance=)`: limits of memory, and shares of the batch that follow
            the speed of unequal devices.
            `mh.options.Recovery(timeout=, copy_every=)`: seconds after which an operation counts as hanging, and steps
            between copies of shards to the memory of another rank.
            `mh.options.Equality(deterministic=, verify=, allow_different=)`: the same random numbers on any number of
            devices; the comparison with one device before training, whose outcome is `run.verdict`; and whether hosts
            may have different code or data.

    Returns:
        The trained run.

    Events are written to events.jsonl and passed to a function in `log_to`. An event is a dict with its `kind`, its
    time `t` and its values. A "steps" event comes a few times per second: {"kind": "steps", "t": 1767225600.0,
    "steps": [1, 2], "losses": {"loss": [0.9, 0.8]}, ...}; an "epoch" event after each epoch: {"kind": "epoch",
    "epoch": 0, "step": 2, "losses": {...}, "metrics": {"valid_loss": 0.7}, ...}. The other kinds are "start", "plan",
    "partition", "verdict", "log", "notice", "skipped", "waits", "parts", "pace", "profile", "straggler", "lost",
    "recovered", "coordinator", "hang", "checkpoint", "end" and "failed"; samples of the host's usage are written to
    the file only. `manyhands dashboard` displays events.

    >>> import tempfile, torch, manyhands as mh
    >>> task = mh.Task(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=(torch.ones(8, 4), torch.ones(8, 1)),
    ...     batch_size=4,
    ... )
    >>> quiet = mh.options.Display(progress=False)
    >>> run = mh.fit(task, mh.Single(), epochs=2, on="cpu", folder=tempfile.mkdtemp(), options=quiet)
    >>> run.num_steps
    4
    """
    checkpoints, logging, display, resources, recovery, equality = collect("fit", OPTIONS, options)
    timeout, verify = recovery.timeout, equality.verify
    require_positive(epochs=epochs, steps=steps)
    with runtime.joined(on, strategy, timeout, display.progress) as on:
        training.check_callbacks(callbacks)
        stop = tuple(one for one in callbacks if isinstance(one, Patience))
        sinks = make_sinks(logging.log_to)
        limit = None if resources.memory is None else training.parse_bytes(resources.memory)
        may_begin = resume == "auto"
        if may_begin:
            resume = True
        if not isinstance(resume, bool):
            resumed = resume.path if isinstance(resume, Run) else Path(resume)
            folder, name, resume = resumed.parent, resumed.name, True
        made = as_task(task)
        strategy, plan_events = planned(strategy, made, on, task_name(task))
        spec, devices, notices = runtime.settle(
            strategy, on, deterministic=equality.deterministic, timeout=timeout, with_servers=True
        )
        if resources.fit_in is not None:
            spec, chosen = _fitted(made, spec, training.parse_bytes(resources.fit_in), devices)
            notices += chosen
        require_loss(spec, made.loss is not None)
        training.check_pieces(made, spec, devices)
        check_data(made, steps)
        role = parameter_server.find_role() if spec.servers else None
        if spec.servers:
            parameter_server.check_served(made)
            if verify and role is None and parameter_server.has_own_optimizer(made):
                # A copy in this process does not show how servers update their parts of the parameters.
                training.refuse(check_served(made, spec, devices, timeout))
        if role is not None and logging.profile:
            raise StrategyError(
                "profile=True needs workers that mh.fit has started",
                got=f"{spec} in an existing cluster",
                remedy="omit it, or profile the task on one host",
            )
        if role is not None and not role.is_chief:
            parameter_server.run_member(role, made, spec, devices[0], timeout)
            # The rest of the program uses the run, which only the coordinator has.
            raise SystemExit(0)
        training.check_metrics(made, spec.num_parts)
        training.check_patience(stop, made)
        made = made.replace(weights=training.as_weights(made.weights, folder))
        source = training.as_weights(checkpoints.start_from, folder)
        if not resume or (may_begin and not (Path(folder) / str(name)).is_dir()):
            training.check_start(made, made.weights)
            training.check_start(made, source)
        table, layout = _explained(made, spec)
        shown = typed(*split_params(task)) if not isinstance(task, Task) else {}
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
            save_every=checkpoints.save_every,
            keep=checkpoints.keep,
            copy_every=recovery.copy_every,
            callbacks=tuple(one for one in callbacks if not isinstance(one, Patience)),
            stop=stop,
            start_from=source,
            memory=limit,
            layout=layout,
            profile=training.EVERY if logging.profile is True else int(logging.profile),
            verify=verify,
            balance=resources.balance,
            sources=training.local_sources() if isinstance(on, JoinedHosts) or current_world() is not None else None,
            allow_different=equality.allow_different,
        )
        with (
            defer_sigterm(),
            recording(
                job,
                devices,
                shown,
                display.progress,
                sinks,
                task,
                labels=logging.labels(),
                hosts=on if isinstance(on, JoinedHosts) else None,
            ) as (view, on_event),
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
        # The disk of another host may not have the run, so its record is made from the job.
        here = (path / training.RECORD).exists()
        return Run(path, made, outcomes[0], None if here else record_of(job, devices, shown))


def _fitted(task: Task, spec: StrategySpec, memory: int, devices: Sequence[Device]) -> tuple[StrategySpec, list[str]]:
    """Return the least costly spec whose step fits into `memory` bytes per device, and notices about it.

    Raises:
        StrategyError: `fit_in` cannot be used with this task or strategy.
    """
    if (
        task.loss is None
        or spec.tensor * spec.stages * spec.context != 1
        or spec.servers
        or not training.can_explain(task)
    ):
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
    """Return the table of layers to log and the tensor-parallel layout of a run that splits its network.

    Both are None if the network is not split or cannot be traced; the table is also None for pipelines.
    """
    splits = spec.shards != 1 or spec.tensor > 1
    if not splits or not training.can_explain(task):
        return None, None
    with own_randomness():
        table, layout = training.explain(task, spec)
    # Ranks of a pipeline measure and report the contents of their stages.
    return (table if spec.stages == 1 else None), layout
