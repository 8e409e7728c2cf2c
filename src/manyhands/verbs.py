"""The API functions, which connect the packages. The strategy argument decides how the work is split."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import inspect
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import Subset

from . import __version__, parameter_server, training
from .core import (
    EVENTS,
    Event,
    EventLog,
    Predictor,
    SettingsError,
    StrategyError,
    StrategySpec,
    Task,
    TaskError,
    UsageError,
    as_spec,
    as_task,
    event,
    open_regular,
    random_state,
    replace_text,
    restore_random_state,
    task_name,
    typed,
)
from .data import as_source, check_source, is_arrays
from .distributed import DEFAULT_TIMEOUT, Device, DirectChannel, NullWorld, World, current_world, resolve
from .launcher import AfterLoss, Engine, Join, JoinedHosts, LocalEngine, engine_for, leased, whole_host
from .storage import CheckpointStore, Weights
from .strategies import Outline, SplitTable, require_built, require_loss
from .sync import carrying, make_policy
from .training import (
    About,
    Callback,
    Hand,
    Job,
    LogTo,
    Patience,
    Replay,
    ReplicaResult,
    Run,
    Sink,
    SinkDispatcher,
    Stragglers,
    Verdict,
    View,
    make_sinks,
    make_view,
    new_folder,
)

if TYPE_CHECKING:
    from .serving import Router, Scaling, Server, ServeSettings
    from .strategies import Layout

TaskLike = Task | Callable[..., Task]
On = str | Sequence[Device] | Sequence[str] | None
Where = On | Join | JoinedHosts
"""Devices of this host, a hosts file, or many hosts that join; while a verb runs, those that have."""
P = ParamSpec("P")
R = TypeVar("R")

_engine = LocalEngine(preload=["manyhands.verbs", "manyhands.serving.replica_process", "torch._dynamo"])


def _over_hosts(verb: Callable[P, R]) -> Callable[P, R]:
    """Let a verb run on many hosts: `on=Join(...)` is replaced by the hosts that joined, which are released at the end.

    A cluster in which a scheduler has started one process per host is handled the same way.
    """

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        on: Any = kwargs.get("on")
        strategy: Any = args[1] if len(args) > 1 else kwargs.get("strategy")
        if not isinstance(on, Join | JoinedHosts) and current_world() is None and not _has_servers(strategy):
            on = whole_host(on) or on
        if not isinstance(on, Join):
            return verb(*args, **kwargs)
        spec = as_spec(strategy)
        timeout: Any = kwargs.get("timeout", DEFAULT_TIMEOUT)
        view = make_view("", cast("bool | None", kwargs.get("progress")), live=False)
        _engine.warm_up()
        joined = on.gather(spec.num_devices, timeout, view.line)
        try:
            return verb(*args, **{**kwargs, "on": joined})  # type: ignore[arg-type]
        except BaseException as error:
            joined.close(f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        finally:
            joined.close("")

    return run


def _has_servers(strategy: StrategySpec | str | None) -> bool:
    """Return whether a strategy uses parameter servers, so that cluster roles are coordinator, server and worker."""
    is_planned = isinstance(strategy, str | Path) and (strategy == "auto" or str(strategy).endswith(".toml"))
    return not is_planned and bool(as_spec(strategy).servers)


@_over_hosts
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
        save_every: Steps between checkpoints, in addition to one after each epoch.
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
    _require_positive(epochs=epochs, steps=steps, save_every=save_every, keep=keep, copy_every=copy_every)
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
    strategy, planned = _planned(strategy, made, on, task_name(task))
    spec, devices, notices = settle(strategy, on, deterministic=deterministic, timeout=timeout, with_servers=True)
    if fit_in is not None:
        spec, chosen = _fitted(made, spec, training.parse_bytes(fit_in), devices)
        notices += chosen
    require_loss(spec, made.loss is not None)
    training.check_pieces(made, spec, devices)
    _check_data(made, steps)
    place = parameter_server.find_role() if spec.servers else None
    if spec.servers:
        parameter_server.check_served(made)
        if verify and place is None and parameter_server.has_own_optimizer(made):
            # What a copy computes here does not show how servers update their pieces.
            training.refuse(_check_served(made, spec, devices, timeout))
    if place is not None and profile:
        raise StrategyError(
            "profile=True needs workers that mh.fit has started",
            got=f"{spec} in an existing cluster",
            remedy="omit profile, or profile the task on one host",
        )
    if place is not None and not place.is_chief:
        parameter_server.run_member(place, made, spec, devices[0], timeout)
        # What follows in the program is for the chief, which has the run.
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
    before = _begun_before(folder)
    resume = resume or before is not None
    path = before or _from_first(lambda: new_folder(folder, name, default, resume, may_begin=may_begin), on)
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
    )
    with (
        _defer_sigterm(),
        _recording(job, devices, shown, progress, sinks, task, writes=_is_first(on)) as (view, on_event),
        _holding(_here(on, devices), path.name, lambda text: on_event(0, event("notice", text=text))),
    ):
        for entry in [*planned, *(event("notice", text=text) for text in [*notices, *_notices(spec)])]:
            on_event(0, entry)
        if table is not None:
            on_event(0, event("split", lines=table.lines(), **table.to_dict()))
        if spec.servers:
            outcomes = [_serve(job, devices, timeout, on_event, view, place)]
        else:
            train = functools.partial(training.train, job=job)
            apart = limit is not None and devices[0].kind == "cpu"
            outcomes = _start(
                train,
                devices,
                timeout,
                on_event,
                view,
                on=on,
                apart=apart,
                after_loss="regroup",
                unit=spec.tensor * spec.stages,
            )
        # Ranks of a host that are not part of a complete group have no result.
        outcomes = outcomes or [ReplicaResult(0, {}, stopped=False)]
        end = outcomes[0]
        if end.servers:
            before = json.loads((path / training.RECORD).read_text())
            _put_record(job, {**before, "servers": end.servers})
        on_event(0, event("end", step=end.num_steps, stopped=end.stopped, seconds=end.seconds))
    # A rank on another host, whose disk does not have the run, still knows what was asked for.
    here = (path / training.RECORD).exists()
    return Run(path, made, outcomes[0], None if here else _record(job, devices, shown))


@_over_hosts
def launch(
    fn: Callable[[Hand], Any],
    strategy: StrategySpec | str | None = None,
    *,
    on: Where = None,
    progress: bool | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    deterministic: bool = False,
) -> list[Any]:
    """Run `fn(hand)` once per replica, and return the results in rank order.

    If a rank or its host fails, all ranks restart `fn`; `hand.restore` resumes from the last `hand.save`, and `fit`
    resumes its run. After three restarts without a new step the job fails. An exception that `fn` raises ends the job.

    Args:
        fn: Function of a Hand.
        strategy: Strategy, as for `mh.fit`.
        on: Devices, as for `mh.fit`.
        progress: False to display nothing.
        timeout: Seconds within which a healthy operation completes.
        deterministic: Whether the network, code in `with hand.scope():`, and functions passed to `hand.minimize` draw
            the same random numbers on any number of replicas.

    >>> launch(lambda hand: hand.rank, "single", on="cpu")
    [0]
    """
    spec, devices, notices = settle(strategy, on, deterministic=deterministic, timeout=timeout)
    view = make_view(f"{spec} on {_place(devices)}", progress, live=False)
    for text in notices:
        view.line(text)
    try:
        with _holding(_here(on, devices), getattr(fn, "__name__", ""), view.line):
            work = functools.partial(_with_hand, fn=fn, spec=spec, launch=secrets.token_hex(8))
            return _start(work, devices, timeout, view.show, view, on=on, after_loss="restart")
    finally:
        view.close()


def check(
    task: TaskLike,
    strategy: StrategySpec | str | None = None,
    *,
    on: On = None,
    params: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Verdict:
    """Compare two steps in float64 under a strategy with those on one device, and return where they differ.

    Compares losses, gradients, buffers and the weights after each update, in training mode, on rows from all over the
    data. Random numbers are layout-free in both, as with deterministic=True, so that dropout is compared too.
    """
    made = training.with_data(as_task(task, params))
    spec, devices, _ = settle(strategy, on, with_servers=True)
    require_loss(spec, made.loss is not None)
    training.check_pieces(made, spec, devices)
    _check_data(made, None)
    if spec.servers:
        training.check_statistics(made, spec)
        verdict = _check_served(made, spec, devices, timeout)
    else:
        with _own_randomness():
            plan = training.plan_of(made, spec)
            whole = training.take_steps(NullWorld(), made, StrategySpec(), plan)
            failed = training.fails_in_parts(made, spec, plan, whole)
        if failed is not None:
            return failed
        split = functools.partial(training.take_split_steps, task=made, spec=spec, plan=plan, draws=whole.draws)
        parts = _ask(split, devices, timeout, on=on)[0]
        with _own_randomness():
            verdict = training.judge(made, spec, plan, whole, parts)
        if verdict:
            # The rows of a trial may be too few for micro-batches, which training has.
            training.check_statistics(made, spec)
    return dataclasses.replace(verdict, notes=(*verdict.notes, *_notices(spec)))


def _check_served(task: Task, spec: StrategySpec, devices: Sequence[Device], timeout: float) -> Verdict:
    """Verify parameter servers: first the workers' parts one after another here, then on real servers and workers."""
    parameter_server.check_served(task)
    tables = parameter_server.tables_in(task)
    if tables:
        return Verdict("not verified", spec, why=f"rows of {', '.join(tables)} are on the servers alone")
    with _own_randomness():
        plan = training.plan_of(task, spec)
        rows = Subset(task.data, [row for part in plan for row in part])
        # Trials do not follow the schedule, which is the same under every strategy.
        task = task.replace(data=rows, shuffle=False, batch_size=len(plan[0]), valid=None, metrics={}, schedule=None)
        plan = [[*range(len(plan[0]))], [*range(len(plan[0]), len(rows))]]
        whole = training.take_steps(NullWorld(), task, StrategySpec(), plan)
        failed = training.fails_in_parts(task, spec, plan, whole)
        if failed is None:
            failed = training.changes_parameters(task, spec, plan, whole, NullWorld())
        if failed is not None:
            return failed
        apart = training.take_steps(NullWorld(), task, StrategySpec(accumulate=training.parts_of(spec)), plan)
        verdict = training.judge(task, spec, plan, whole, apart)
    if not verdict:
        return verdict
    exact = dataclasses.replace(spec, staleness=0, backup=0, correction=False, followers=0)
    plain = dataclasses.replace(exact, precision="fp64", deterministic=True)
    entries: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(task=task, spec=plain, folder=Path(folder), steps=2, save_every=1, keep=3, verify=False)
        _serve(job, devices, timeout, lambda rank, entry: entries.append(entry), View(), None)
        store = CheckpointStore(job.folder / training.CHECKPOINTS)
        states = [store.load(step).model for step in (1, 2)]
    losses = [loss for entry in entries if entry["kind"] == "steps" for loss in entry["losses"]["loss"]]
    with _own_randomness():
        return training.judge(task, spec, plan, whole, training.record_of(states, losses, whole))


def serve(
    models: str | Path | Predictor | Mapping[str, Predictor],
    *,
    on: On = None,
    servers: int | str = 1,
    name: str = "model",
    host: str = "127.0.0.1",
    http: int = 8501,
    grpc: int = 8500,
    manage: int = 8502,
    manage_host: str = "127.0.0.1",
    manage_grpc: int | None = None,
    token: str | None = None,
    manage_token: str | None = None,
    allow: Sequence[str] = (),
    cert: str | Path | None = None,
    key: str | Path | None = None,
    client_ca: str | Path | None = None,
    versions: str = "latest",
    max_rows: int = 64,
    sizes: Sequence[int] = (),
    queue_rows: int = 1024,
    queue_mib: int = 1024,
    timeout: float = 30.0,
    probation: float = 30.0,
    precision: str = "fp32",
    compile: bool = False,
    warmup: str | Path | None = None,
    record: str | Path | None = None,
    unload_first: bool = False,
    traces: bool = False,
    log: str | Path | None = None,
) -> Server | Router:
    """Serve a folder of exported models, or predictors, on every device; return when the server is ready.

    Args:
        models: A folder that is watched for new versions, a Predictor (served as `name`), or a dict of Predictors.
        on: Devices, such as "cuda:0,1" or "cpu*2", each with a replica of every version. On "ray" or
            "ray://head:10001" servers of one device each run on the hosts of the cluster, behind a router in this
            process; the folder and the token must be the same on all hosts.
        servers: Number of servers in a Ray cluster, or a range such as "1..4" that follows the load.
        name: Name of a single Predictor.
        host: Address to listen on; addresses other than loopback need a `token`.
        http: HTTP port; 0 for any free port.
        grpc: gRPC port; 0 for any free port.
        manage: Port for management.
        manage_host: Address for management, for example for a router on another host.
        manage_grpc: Port for loading and unloading models over gRPC.
        token: Access token for requests.
        manage_token: Access token for management, which must differ from `token`.
        allow: Additional host names of this server, and origins of web pages that may use it, such as
            "https://app.example". Requests with other names or origins are rejected.
        cert: Certificate (PEM) for TLS on all ports.
        key: Key of the certificate (PEM).
        client_ca: Certificate authority (PEM); clients then need a certificate that it signed.
        versions: "latest", "latest:2", "all" or numbers such as "1,3".
        max_rows: Maximum rows of a batch.
        sizes: Batch sizes to pad to.
        queue_rows: Rows that may wait before requests are rejected.
        queue_mib: MiB of request bodies that may wait before requests are rejected.
        timeout: Timeout of a request in seconds.
        probation: Seconds in which a new version that fails or is slow is rolled back.
        precision: "bf16" computes in bfloat16 where autocast considers that safe.
        compile: Compile exported networks when they are loaded, if that makes them faster.
        warmup: Folder with files NAME.jsonl of requests that every version of NAME computes before it takes over.
        record: Folder to which such files are written.
        unload_first: Unload the old version before the new one is loaded, if a device cannot hold both; requests are
            rejected during that time.
        traces: Emit an OpenTelemetry span for every request.
        log: Folder for the event log and the access log.

    Example:
        server = mh.serve("models")
        server.wait()            # until Ctrl-C; server.stop() lets every request finish
    """
    from .serving import BatchSettings, Limits, RolloutGuard, Scaling, Server, ServeSettings, ServingTls

    scaling = Scaling.parse(servers, busy=max_rows)
    settings = ServeSettings(
        host=host,
        http=http,
        grpc=grpc,
        manage=manage,
        manage_host=manage_host,
        manage_grpc=manage_grpc,
        token=token,
        manage_token=manage_token,
        allow=tuple(allow),
        tls=ServingTls.of(cert, key, client_ca),
        versions=versions,
        timeout=timeout,
        limits=Limits.holding(queue_mib),
        batch=BatchSettings(max_rows=max_rows, sizes=tuple(sizes), queue_rows=queue_rows),
        probation=RolloutGuard(seconds=probation),
        precision=precision,
        compiles=compile,
        warmup=Path(warmup) if warmup is not None else None,
        record=Path(record) if record is not None else None,
        unload_first=unload_first,
        traces=traces,
        log=Path(log) if log is not None else None,
    )
    served = {name: models} if isinstance(models, Predictor) else models
    served = Path(served) if isinstance(served, str) else served
    engine = engine_for(on, _engine)
    devices, _ = engine.devices(on, None)
    if engine is not _engine:
        return _serve_placed(engine, served, devices[0].kind if devices else "cpu", settings, scaling)
    if scaling.most > 1:
        raise SettingsError(
            "servers= needs a cluster",
            got=f"servers={servers!r} on this machine",
            remedy='pass on="ray", or start the servers and use mh.route',
        )
    return Server(served, _engine, devices, settings).start()


def _serve_placed(
    engine: Engine, models: Path | Mapping[str, Predictor], kind: str, settings: ServeSettings, scaling: Scaling
) -> Router:
    """Start servers where the engine has capacity, and a router here with the settings' listening options."""
    from .serving import ListenSettings, PlacedServer, RouteSettings, ScaledRouter

    if settings.manage_grpc is not None:
        raise SettingsError(
            "a router can only be managed over HTTP",
            got=f"manage_grpc={settings.manage_grpc}",
            remedy="omit manage_grpc; manyhands models manages all servers together",
        )
    listening = {each.name: getattr(settings, each.name) for each in dataclasses.fields(ListenSettings)}
    models = models.absolute() if isinstance(models, Path) else models
    make = functools.partial(PlacedServer, models=models, settings=dataclasses.replace(settings, tls=None, log=None))
    return ScaledRouter(RouteSettings(**listening), engine, make, Device(kind), scaling).start()


def route(
    backends: str | Sequence[str],
    *,
    host: str = "127.0.0.1",
    http: int = 8501,
    grpc: int = 8500,
    manage: int = 8502,
    manage_host: str = "127.0.0.1",
    token: str | None = None,
    manage_token: str | None = None,
    allow: Sequence[str] = (),
    cert: str | Path | None = None,
    key: str | Path | None = None,
    client_ca: str | Path | None = None,
    backend_ca: str | Path | None = None,
    timeout: float = 30.0,
    queue_mib: int = 1024,
    log: str | Path | None = None,
) -> Router:
    """Start a router in front of several servers; return when it listens.

    Args:
        backends: Servers such as "a:8500,b:8500", with their gRPC ports; HTTP and management use the next two ports
            ("a:8500/8601/8602" for other ports). A name may resolve to several hosts, and is resolved repeatedly.
        backend_ca: Certificate authority of the backends, if they use TLS; the router presents its own certificate.
        host, http, grpc, manage, manage_host, allow, cert, key, client_ca, timeout, queue_mib, log: As for `mh.serve`.
        token, manage_token: Access tokens of the router, which the backends must accept too.

    Example:
        router = mh.route("a:8500,b:8500", token=token)
        router.wait()
    """
    from .serving import Limits, Router, RouteSettings, ServingTls

    tls = ServingTls.of(cert, key, client_ca)
    settings = RouteSettings(
        backends=tuple(part.strip() for part in backends.split(",")) if isinstance(backends, str) else tuple(backends),
        host=host,
        http=http,
        grpc=grpc,
        manage=manage,
        manage_host=manage_host,
        token=token,
        manage_token=manage_token,
        allow=tuple(allow),
        tls=tls,
        backend_tls=ServingTls.of(cert, key, backend_ca) if backend_ca is not None else None,
        timeout=timeout,
        limits=Limits.holding(queue_mib),
        log=Path(log) if log is not None else None,
    )
    return Router(settings).start()


def explain(
    task: TaskLike,
    strategy: StrategySpec | str | None = None,
    *,
    on: On = None,
    params: Mapping[str, Any] | None = None,
) -> SplitTable | Outline:
    """Return where layers are placed, and what each device holds and sends in a step, without training.

    For a strategy that partitions the network, the result is that of `mh.partition`.

    >>> import torch, manyhands as mh
    >>> task = mh.Task(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=(torch.ones(8, 4), torch.ones(8, 1)),
    ...     batch_size=4,
    ... )
    >>> print(mh.explain(task, mh.Sharded(2)))
    layers  kind    way  whole  a device
    * x2    Linear       196 B     116 B
    a device holds 232 B: parameters 116 B, gradients 116 B, optimizer state 0 B
    a device sends 294 B a step: shards 294 B
    """
    made = as_task(task, params)
    spec = as_spec(strategy)
    require_built(spec)
    if on is not None or spec.num_devices is None:
        spec = settle(spec, on)[0]
    require_loss(spec, made.loss is not None)
    if spec.stages != 1:
        return training.outline_of(made, *settle(spec, on)[:2])
    return training.explain(made, spec)[0]


def _fitted(task: Task, spec: StrategySpec, memory: int, devices: Sequence[Device]) -> tuple[StrategySpec, list[str]]:
    """Return the least costly spec that fits into memory, with notices; raise where `fit_in` cannot choose."""
    if task.loss is None or spec.tensor * spec.stages != 1 or spec.servers or not training.can_explain(task):
        raise StrategyError(
            "fit_in needs a task with loss=, on replicas or shards",
            got=f"{spec}",
            remedy="omit fit_in, and set recompute, accumulate and sharding",
        )
    with _own_randomness():
        chosen, notices = training.fit_in(task, spec, memory, len(devices), training.host_bytes(devices))
        fitting = training.with_micro_statistics(task, chosen)
    micro = 'batch_stats="micro": batch statistics are those of a micro-batch'
    return fitting, [*notices, *([micro] if fitting != chosen else [])]


def _explained(task: Task, spec: StrategySpec) -> tuple[SplitTable | None, Layout | None]:
    """Return the table and the layout of a run that splits its network; None for what does not apply."""
    splits = spec.shards != 1 or spec.tensor > 1
    if not splits or not training.can_explain(task):
        return None, None
    with _own_randomness():
        table, layout = training.explain(task, spec)
    # The contents of pipeline stages are measured in the ranks and reported from there.
    return (table if spec.stages == 1 else None), layout


def evaluate(
    run: Run,
    data: Any = None,
    strategy: StrategySpec | str | None = "single",
    *,
    on: On = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> dict[str, float]:
    """Return the loss and the metrics of a run over some data; by default over the validation data of its task."""
    task = run.require_task()
    held = task.valid if data is None else data
    if held is None:
        raise TaskError("mh.evaluate needs data", got="a task without valid=", remedy="pass mh.evaluate(run, data)")
    training.check_metrics(task, settle(strategy, on)[0].num_parts)
    return _over_data(training.evaluate, run, task, held, strategy, on, timeout)  # type: ignore[no-any-return]


def predict(
    run: Run | Predictor,
    data: Any,
    strategy: StrategySpec | str | None = "single",
    *,
    on: On = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Any:
    """Return the predictions of a run for every row of some data, in order; a dict if there are several outputs.

    Predictions of different shapes, such as those of padded texts, are returned as a list. Lists of numbers are rows.
    """
    if isinstance(run, Predictor):
        return run(data)
    if isinstance(data, list) and data and isinstance(data[0], list | Number):
        data = torch.tensor(data)
    outputs: dict[str, Any] = _over_data(training.predict, run, run.require_task(), data, strategy, on, timeout)
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def replay(run: Run, step: int, *, on: str | Sequence[Device] | None = None) -> Replay:
    """Repeat a committed step of a run on one device and compare its losses, to find corrupt replicas and bad samples.

    It starts from the nearest checkpoint before that step, or from the beginning. `mh.Run(path, task)` opens a run.
    """
    devices, _ = resolve(on, 1)
    with _own_randomness(), _current_device(devices[0].torch):
        return training.replay(run, step, devices[0])


def _planned(
    strategy: StrategySpec | str | None, task: Task, on: Where, name: str
) -> tuple[StrategySpec | str | None, list[Event]]:
    """Return the strategy with "auto" planned or a plan file read, and the events that describe the plan."""
    if not isinstance(strategy, str | Path) or not (strategy == "auto" or str(strategy).endswith(".toml")):
        return strategy, []
    if isinstance(on, Join | JoinedHosts):
        raise StrategyError(
            "a job on several hosts needs an explicit strategy",
            got=repr(strategy),
            remedy="pass the strategy that mh.plan chooses",
        )
    from . import plans  # joins this file to the planner, which few runs need

    return plans.settled(strategy, task, on, name)


def settle(
    strategy: StrategySpec | str | None,
    on: Where,
    *,
    deterministic: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    with_servers: bool = False,
) -> tuple[StrategySpec, list[Device], list[str]]:
    """Return a complete spec, its devices, and notices; raise for everything that is not supported."""
    spec = as_spec(strategy)
    if deterministic:
        spec = dataclasses.replace(spec, deterministic=True)
    require_built(spec)
    if isinstance(on, Join):
        raise SettingsError(
            "only mh.fit and mh.launch can run on several hosts", got=repr(on.address), remedy="use one of them"
        )
    place = parameter_server.find_role() if spec.servers and with_servers and current_world() is None else None
    if place is not None and not isinstance(on, JoinedHosts):
        return place.fitted(spec), [resolve(on, 1)[0][0]] * place.num_workers, []
    world = None if isinstance(on, JoinedHosts) else training.joined_world(on, timeout)
    if spec.servers and (world is not None or isinstance(on, JoinedHosts) or not with_servers):
        raise StrategyError(
            "parameter servers can only be used by mh.fit in a separate program",
            got=f"{spec} {'in a rank' if with_servers else 'for another function'}",
            remedy="use mh.Mirrored() here",
        )
    if isinstance(on, JoinedHosts):
        return spec.with_devices(len(on.devices)), list(on.devices), list(on.notices)
    if world is not None:
        return spec.with_devices(world.size), [world.rank_info.device] * world.size, []
    devices, notices = engine_for(on, _engine).devices(on, spec.num_devices, spec.arithmetic)
    if None in (spec.replicas, spec.shards) and len(devices) == 1 and strategy is not None:
        part = "replica" if spec.replicas is None else "shard"
        notices.append(f'there is one device ({devices[0]}), so one {part}; on="{devices[0].name}*2" makes two')
    return spec.with_devices(len(devices)), devices, notices


def _start(
    fn: Callable[[World], Any],
    devices: Sequence[Device],
    timeout: float,
    on_event: Callable[[int, Event], None],
    view: View,
    *,
    on: Where = None,
    apart: bool = False,
    after_loss: AfterLoss = "end",
    unit: int = 1,
    checks_stop: bool = True,
) -> list[Any]:
    """Run a function on the devices: in this process for one device (unless `apart`) or in a rank, else in new ones.

    Without `checks_stop` the function cannot stop after a step, so the first Ctrl-C interrupts it.
    """
    world = current_world()
    if world is not None:
        return [fn(world)]
    if len(devices) == 1 and not apart and not isinstance(on, JoinedHosts) and engine_for(on, _engine) is _engine:
        channel = DirectChannel(lambda entry: on_event(0, entry))
        here = NullWorld(devices[0], channel)
        interruptible = _interruptible(lambda: _ask_to_stop(channel, after_loss), view, checks_stop)
        with _own_randomness(), _current_device(here.device), contextlib.closing(here), interruptible:
            return [fn(here)]
    if isinstance(on, JoinedHosts):
        job = on.start(_engine, carrying(fn), timeout=timeout, after_loss=after_loss, unit=unit)
    else:
        job = engine_for(on, _engine).start(carrying(fn), devices, timeout=timeout, after_loss=after_loss, unit=unit)
    with _interruptible(job.stop, view, checks_stop):
        return job.wait(on_event, view.output)


def _ask(fn: Callable[[World], Any], devices: Sequence[Device], timeout: float, *, on: Where = None) -> list[Any]:
    """Run a function on the devices and return its results, without progress output; Ctrl-C interrupts it."""
    return _start(fn, devices, timeout, lambda rank, entry: None, View(), on=on, checks_stop=False)


def _serve(
    job: Job,
    devices: Sequence[Device],
    timeout: float,
    on_event: Callable[[int, Event], None],
    view: View,
    place: parameter_server.ProcessRole | None,
) -> ReplicaResult:
    """Train with parameter servers: the coordinator runs here, every server and worker is a separate job."""
    channel = DirectChannel(lambda entry: on_event(0, entry))
    here = NullWorld(devices[0], channel)
    with (
        _own_randomness(),
        _current_device(here.device),
        contextlib.closing(here),
        _interruptible(lambda: channel.handle_message({"stop": True}), view),
    ):
        return parameter_server.train_served(
            here,
            job,
            devices=devices,
            start=place or (lambda fn, device: _engine.start(fn, [device], timeout=timeout)),
            on_output=view.output,
            timeout=timeout,
        )


def _is_first(on: Where) -> bool:
    """Return whether this host reports for all hosts."""
    return not isinstance(on, JoinedHosts) or on.is_first


def _here(on: Where, devices: Sequence[Device]) -> Sequence[Device]:
    """Return those of the devices that are on this host."""
    return on.here if isinstance(on, JoinedHosts) else devices


def _holding(
    devices: Sequence[Device], run: str, notify: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """Lease this host's devices for a long job; inside a rank the launching program already holds the lease."""
    here = [device for device in devices if not device.host]
    return leased(here, run, notify) if current_world() is None else contextlib.nullcontext()


@contextlib.contextmanager
def _recording(
    job: Job,
    devices: Sequence[Device],
    params: Mapping[str, Any],
    progress: bool | None,
    sinks: Sequence[Sink],
    task: TaskLike,
    *,
    writes: bool = True,
) -> Iterator[tuple[View, Callable[[int, Event], None]]]:
    """Write a run's record and events and display them; inside a launch only the first rank does."""
    world = current_world()
    if not writes:
        yield View(), lambda rank, entry: None
        return
    if world is not None and not world.is_first:
        yield View(), lambda rank, entry: None
        world.barrier()
        return
    lock = _locked(job.folder)
    record = _write_record(job, devices, params, task)
    view = make_view(f"{job.spec} on {_place(devices)}", progress) if world is None else View()
    log = EventLog(job.folder / EVENTS)
    dispatcher = SinkDispatcher(sinks, About.of(job.folder, job.spec, record, task))
    stragglers = Stragglers(size=len(devices))

    def on_event(rank: int, entry: Event) -> None:
        log.write(entry)
        if entry["kind"] == "verdict":
            record["verdict"] = {name: entry[name] for name in ("outcome", "why", "error")}
            _put_record(job, record)
        view.show(rank, entry)
        for text in dispatcher.take(entry):
            notice(text)
        for report in stragglers.handle_event(entry):
            on_event(0, report)

    def notice(text: str) -> None:
        on_event(0, event("notice", text=text))
        if progress is False and training.DROPPED in text:
            print(text, file=sys.stderr, flush=True)

    tap = functools.partial(on_event, 0)
    try:
        if world is not None:
            world.channel.taps.append(tap)
        yield view, on_event
    except BaseException as error:
        on_event(0, event("failed", reason=f"{type(error).__name__}: {error}"))
        dispatcher.close(notice)  # before `_explain`: sinks write to the folder, which it may remove
        _explain(error, job)
        raise
    finally:
        if world is not None:
            world.channel.taps.remove(tap)
        try:
            dispatcher.close(notice)
        finally:
            view.close()
            log.close()
            lock.close()
    if world is not None:
        world.barrier()


def _locked(folder: Path) -> IO[str]:
    """Lock a run's folder for one program at a time; the kernel releases the lock when the program ends."""
    # Never through a link: the folder may be a copy of one that another user made.
    file = os.fdopen(open_regular(folder / ".lock", os.O_RDWR | os.O_CREAT), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SettingsError(
            "only one program at a time can train a run",
            got=f"{folder}, which another program uses",
            remedy="wait for it to end",
        ) from None
    return file


def _explain(error: BaseException, job: Job) -> None:
    """Add a note on how to resume to an error; remove a new folder in which nothing was trained."""
    saved = CheckpointStore(job.folder / training.CHECKPOINTS).steps()
    if saved:
        name = job.folder.name
        error.add_note(f"{job.folder} is saved at step {saved[-1]}; pass name={name!r} and resume=True to resume it")
    elif isinstance(error, UsageError) and not job.resume:
        shutil.rmtree(job.folder, ignore_errors=True)


def _from_first(make: Callable[[], Path], on: Where) -> Path:
    """Run `make` on the first rank or host and return its result on all of them."""
    if isinstance(on, JoinedHosts):
        return Path(on.agree(lambda: str(make())))
    world = current_world()
    if world is None:
        return make()
    return cast(Path, world.gather_objects(make() if world.is_first else None)[0])


_launch: list[str] = []
"""In a rank of a launch: the launch's name, then one entry for every run that its script has started."""


def _with_hand(world: World, fn: Callable[[Hand], Any], spec: StrategySpec, launch: str) -> Any:
    hand = Hand(world, spec)
    hand.reports_steps = True
    _launch[:] = [launch]
    try:
        with training.holding(hand):
            return fn(hand)
    finally:
        _launch.clear()
        hand.close()


def _begun_before(folder: str | Path) -> Path | None:
    """Return the run that this position of a script had started before its ranks were restarted; None without one."""
    world = current_world()
    if not _launch or world is None:
        return None
    _launch.append(f"{_launch[0]}-{len(_launch)}")
    if world.rank_info.generation == 0:
        return None

    def find() -> Path | None:
        records = Path(folder).glob(f"*/{training.RECORD}")
        return next((path.parent for path in records if training.launch_of(path.parent) == _launch[-1]), None)

    return cast("Path | None", world.gather_objects(find() if world.is_first else None)[0])


def _over_data(
    act: Callable[..., Any],
    run: Run,
    task: Task,
    data: Any,
    strategy: StrategySpec | str | None,
    on: On,
    timeout: float,
) -> Any:
    spec, devices, _ = settle(strategy, on)
    precision = run.record["spec"].get("precision", "fp32")
    spec = dataclasses.replace(spec, precision=precision)
    work = functools.partial(_act, act=act, task=task, spec=spec, data=data, weights=run.state_dict())
    return _ask(work, devices, timeout, on=on)[0]


def _act(
    world: World,
    act: Callable[..., Any],
    task: Task,
    spec: StrategySpec,
    data: Any,
    weights: dict[str, Tensor],
) -> Any:
    hand = Hand(world, spec)
    # Arrays passed by the user are rows already; collate is for the samples of datasets.
    source = as_source(data, collate=None if is_arrays(data) else task.collate)
    rows = source.size if source.size is not None else task.batch_size or 32
    size = min(source.batch_size or task.batch_size or 32, max(1, rows))
    computed = (
        task.loss if act is training.evaluate and task.loss is not None else functools.partial(training.answers, task)
    )
    hand.make_replica(task.model(), task.make_optimizer, hand.probe(computed, source, size))
    hand.replica.load(weights)
    feed = hand.make_feed(source, size, shuffle=False)
    try:
        return act(hand, task, feed)
    finally:
        feed.close()
        hand.close()


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Restore the caller's random generators at the end of the enclosed block."""
    device = torch.device("cpu")
    states = random_state(device)
    try:
        yield
    finally:
        restore_random_state(states, device)


def _current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which an accelerator is torch's default device of its kind."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device).device(device)  # type: ignore[no-any-return]


_STOPPING: dict[int, str] = {
    signal.SIGINT: "stopping after this step; Ctrl-C again stops at once",
    signal.SIGTERM: "SIGTERM received: stopping after this step, then the program ends; a second signal stops at once",
}


@contextlib.contextmanager
def _interruptible(stop: Callable[[], None], view: View, checks_stop: bool = True) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM request a stop after the current step; the second one interrupts.

    A SIGTERM is meant for the whole program, so the previous handler is called afterwards.
    """
    if not checks_stop or threading.current_thread() is not threading.main_thread():
        yield
        return

    asked: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        stop()
        view.line(_STOPPING[number])

    before = {number: signal.signal(number, interrupt) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGTERM in asked:
        _hand_on(before[signal.SIGTERM])


def _ask_to_stop(channel: DirectChannel, after_loss: AfterLoss) -> None:
    """Request a stop after the current step; a script that never checks for it is interrupted at once."""
    channel.handle_message({"stop": True})
    if after_loss == "restart" and not channel.checks_stop:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _defer_sigterm() -> Iterator[None]:
    """Defer a SIGTERM that was handled inside the enclosed block until the block has ended."""
    if threading.current_thread() is not threading.main_thread() or current_world() is not None:
        yield
        return
    signals: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def on_signal(number: int, frame: Any) -> None:
        if frame is None:
            signals.append(number)
        else:
            _hand_on(before, frame)

    signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
    if signals:
        _hand_on(before)


def _hand_on(handler: Any, frame: Any = None) -> None:
    """Call the previous SIGTERM handler, with `frame=None` once the stop was handled; by default exit the program."""
    if callable(handler):
        handler(signal.SIGTERM, frame)
    elif handler != signal.SIG_IGN:
        raise SystemExit(128 + signal.SIGTERM)


def _check_data(task: Task, steps: int | None) -> None:
    """Check what is known about the data before any process starts; a function that makes data runs in the ranks."""
    if inspect.isfunction(task.data):
        return
    source = as_source(task.data, collate=task.collate)
    num_steps = source.num_steps(check_source(source, task.batch_size))
    training.check_schedule(task, num_steps if steps is None else steps)


def _record(job: Job, devices: Sequence[Device], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's record: versions, strategy, devices and options."""
    return {
        "manyhands": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "spec": job.spec.to_dict(),
        "changes_mathematics": _notices(job.spec),
        "devices": [str(device) for device in devices],
        "params": dict(params),
        "epochs": job.epochs,
        "steps": job.steps,
        "batch_size": job.task.batch_size,
        "seed": job.task.seed,
        "save_every": job.save_every,
        "start_from": None if job.start_from is None else str(job.start_from),
        **({"launch": _launch[-1]} if _launch else {}),
    }


def _write_record(
    job: Job, devices: Sequence[Device], params: Mapping[str, Any], task: TaskLike, **more: Any
) -> dict[str, Any]:
    """Write the run's record to its folder and return it."""
    record = {**_record(job, devices, params), "task": task_name(task), **more}
    _put_record(job, record)
    return record


def _put_record(job: Job, record: Mapping[str, Any]) -> None:
    replace_text(job.folder / training.RECORD, json.dumps(record, indent=2, default=str) + "\n")


def _notices(spec: StrategySpec) -> list[str]:
    if spec.changes_mathematics:
        return [f"{spec} changes the mathematics: {spec.changes_mathematics}; results differ from one device's"]
    policy = make_policy(spec.sync)
    if not policy.changes_mathematics:
        return []
    if spec.replicas == 1:
        return [f"there is one replica, so sync={policy} has nothing to do; more replicas would use it"]
    # The number of hosts is known only after the ranks' rendezvous.
    return [f"where there are several hosts, {policy.explanation}" if policy.between == "hosts" else policy.explanation]


def _place(devices: Sequence[Device]) -> str:
    kinds = {str(dataclasses.replace(device, share=1.0, slot=0)): 0 for device in devices}
    for device in devices:
        kinds[str(dataclasses.replace(device, share=1.0, slot=0))] += 1
    return ", ".join(name if count == 1 else f"{name}*{count}" for name, count in kinds.items())


def _require_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise TaskError(f"{name} must be a whole number of at least 1", got=value, remedy=f"pass {name}=1 or more")
