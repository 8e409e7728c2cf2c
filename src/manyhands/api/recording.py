"""Recording of a run: its folder, lock, record, event log, progress display and sinks."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

from .. import __version__, training
from ..core import (
    EVENTS,
    Event,
    EventLog,
    SettingsError,
    StrategySpec,
    UsageError,
    event,
    open_regular,
    replace_text,
    task_name,
)
from ..distributed import Device, current_world
from ..monitoring import (
    DROPPED,
    About,
    HostUsage,
    Sink,
    SinkDispatcher,
    Stragglers,
    View,
    default_params,
    make_view,
)
from ..storage import CheckpointStore
from ..sync import make_policy
from ..training import Job
from .environment import environment
from .runtime import TaskLike

launch_names: list[str] = []
"""In a rank of a launch, the launch's name, followed by one name for every run that the script has started."""


@contextlib.contextmanager
def recording(
    job: Job,
    devices: Sequence[Device],
    params: Mapping[str, Any],
    progress: bool | None,
    sinks: Sequence[Sink],
    task: TaskLike,
    *,
    labels: Mapping[str, Any] | None = None,
    writes: bool = True,
) -> Iterator[tuple[View, Callable[[int, Event], None]]]:
    """Write the record of a run; yield its progress view, and a function that takes the events of ranks.

    That function writes an event to the event log, displays it, and passes it to the sinks. Inside a launch only the
    first rank writes and displays; on other ranks, and without `writes`, the view and the function do nothing.

    Args:
        job: The run.
        devices: The devices of all ranks.
        params: Parameters of the task function, for the record.
        progress: False to display nothing; None to display progress.
        sinks: Other destinations of the events.
        task: The task or task function, whose name is recorded.
        labels: Tags and notes of the user, for the record.
        writes: Whether this host writes the run.
    """
    world = current_world()
    if not writes:
        yield View(), lambda rank, entry: None
        return
    if world is not None and not world.is_first:
        yield View(), lambda rank, entry: None
        world.barrier()
        return
    lock = _locked(job.folder)
    record = _write_record(job, devices, params, task, labels or {})
    view = make_view(f"{job.spec} on {describe_devices(devices)}", progress) if world is None else View()
    log = EventLog(job.folder / EVENTS)
    dispatcher = SinkDispatcher(sinks, About.of(job.folder, job.spec, record, task))
    stragglers = Stragglers(size=len(devices))
    usage = HostUsage(with_gpus=any(device.kind == "cuda" for device in devices))

    def on_event(rank: int, entry: Event) -> None:
        log.write(entry)
        if entry["kind"] == "verdict":
            record["verdict"] = {name: entry[name] for name in ("outcome", "why", "error")}
            put_record(job, record)
        view.show(rank, entry)
        for text in dispatcher.take(entry):
            notice(text)
        for report in stragglers.handle_event(entry):
            on_event(0, report)
        if (sample := usage.take()) is not None:
            log.write(sample)

    def notice(text: str) -> None:
        on_event(0, event("notice", text=text))
        if progress is False and DROPPED in text:
            print(text, file=sys.stderr, flush=True)

    tap = functools.partial(on_event, 0)
    try:
        if world is not None:
            world.channel.taps.append(tap)
        yield view, on_event
    except BaseException as error:
        on_event(0, event("failed", reason=f"{type(error).__name__}: {error}"))
        dispatcher.close(notice)  # before `_explain`, which may remove the folder that sinks write to
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
    """Lock a run's folder for this program and return the lock file; raise SettingsError if another one has the lock.

    The kernel releases the lock when the file is closed or the program ends.
    """
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
    if job.resume and isinstance(error, UsageError):
        return  # The resume itself was refused, so it would be refused again.
    saved = CheckpointStore(job.folder / training.CHECKPOINTS).steps()
    if saved:
        name = job.folder.name
        error.add_note(f"{job.folder} is saved at step {saved[-1]}; pass name={name!r} and resume=True to resume it")
    elif isinstance(error, UsageError):
        shutil.rmtree(job.folder, ignore_errors=True)


def started_before(folder: str | Path) -> Path | None:
    """Return the folder of the run that this call of `fit` in a launched script had started before a restart, or None.

    Runs are matched by the launch and by the number of runs that the script has started so far.
    """
    world = current_world()
    if not launch_names or world is None:
        return None
    launch_names.append(f"{launch_names[0]}-{len(launch_names)}")
    if world.rank_info.generation == 0:
        return None

    def find() -> Path | None:
        records = Path(folder).glob(f"*/{training.RECORD}")
        return next((path.parent for path in records if training.launch_of(path.parent) == launch_names[-1]), None)

    return cast("Path | None", world.gather_objects(find() if world.is_first else None)[0])


def record_of(job: Job, devices: Sequence[Device], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a run's record: versions, strategy, devices and options."""
    return {
        "manyhands": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "spec": job.spec.to_dict(),
        "changes_mathematics": explain_mathematics(job.spec),
        "devices": [str(device) for device in devices],
        "params": dict(params),
        "epochs": job.epochs,
        "steps": job.steps,
        "batch_size": job.task.batch_size,
        "seed": job.task.seed,
        "save_every": job.save_every,
        "start_from": None if job.start_from is None else str(job.start_from),
        **({"launch": launch_names[-1]} if launch_names else {}),
    }


def _write_record(
    job: Job, devices: Sequence[Device], params: Mapping[str, Any], task: TaskLike, labels: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the run's record to its folder and return it."""
    plain = (bool, int, float, str, type(None))
    record = {
        **record_of(job, devices, params),
        "task": task_name(task),
        "defaults": {name: value for name, value in default_params(task).items() if isinstance(value, plain)},
        **labels,
        "environment": environment(),
    }
    put_record(job, record)
    return record


def put_record(job: Job, record: Mapping[str, Any]) -> None:
    """Write a record to the folder of a job's run, replacing an earlier one."""
    replace_text(job.folder / training.RECORD, json.dumps(record, indent=2, default=str) + "\n")


def explain_mathematics(spec: StrategySpec) -> list[str]:
    """Return notices about how a strategy or its sync policy changes the mathematics; empty if it does not."""
    if spec.changes_mathematics:
        return [f"{spec} changes the mathematics: {spec.changes_mathematics}; results differ from one device's"]
    policy = make_policy(spec.sync)
    if not policy.changes_mathematics:
        return []
    if spec.replicas == 1:
        return [f"there is one replica, so sync={policy} has nothing to do; more replicas would use it"]
    # The number of hosts is known only after the ranks' rendezvous.
    return [f"where there are several hosts, {policy.explanation}" if policy.between == "hosts" else policy.explanation]


def describe_devices(devices: Sequence[Device]) -> str:
    """Return devices as text, such as "cuda:0, cuda:1" or "cpu*2" for two processes on one device."""
    kinds = {str(dataclasses.replace(device, share=1.0, slot=0)): 0 for device in devices}
    for device in devices:
        kinds[str(dataclasses.replace(device, share=1.0, slot=0))] += 1
    return ", ".join(name if count == 1 else f"{name}*{count}" for name, count in kinds.items())
