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
from ..launcher import JoinedHosts
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
from ..storage import CheckpointStore, TermClaim, term_file
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
    hosts: JoinedHosts | None = None,
) -> Iterator[tuple[View, Callable[[int, Event], None]]]:
    """Write the record of a run; yield its progress view, and a function that takes the events of ranks.

    That function writes an event to the event log, displays it, and passes it to the sinks. Inside a launch only the
    first rank writes and displays; on other ranks, and on other hosts than the first, the view and the function do
    nothing. If the coordinator is elected, the function begins and ends to write with this host's terms.

    Args:
        job: The run.
        devices: The devices of all ranks.
        params: Parameters of the task function, for the record.
        progress: False to display nothing; None to display progress.
        sinks: Other destinations of the events.
        task: The task or task function, whose name is recorded.
        labels: Tags and notes of the user, for the record.
        hosts: The hosts that have joined, if there are several.
    """
    world = current_world()
    is_elected = hosts is not None and hosts.is_elected
    if hosts is not None and not hosts.is_first and not is_elected:
        yield View(), lambda rank, entry: None
        return
    if world is not None and not world.is_first:
        yield View(), lambda rank, entry: None
        world.barrier()
        return
    writer = _RunWriter(job, devices, params, sinks, task, labels or {})
    if hosts is None or hosts.is_first:
        writer.begin(0 if hosts is None else hosts.term)
    title = f"{job.spec} on {describe_devices(devices)}"
    writer.view = make_view(title, progress, live=not is_elected) if world is None else View()
    writer.prints_dropped = progress is False
    tap = functools.partial(writer.take, 0)
    try:
        if world is not None:
            world.channel.taps.append(tap)
        yield writer.view, writer.take
    except BaseException as error:
        writer.take(0, event("failed", reason=f"{type(error).__name__}: {error}"))
        writer.close_sinks()  # before `_explain`, which may remove the folder that sinks write to
        if not is_elected:
            _explain(error, job)
        raise
    finally:
        if world is not None:
            world.channel.taps.remove(tap)
        try:
            writer.end()
        finally:
            writer.view.close()
    if world is not None:
        world.barrier()


class _RunWriter:
    """Writes the record and the events of a run, displays them, and passes them to the sinks.

    If the coordinator is elected, this program writes only during its own terms.
    """

    def __init__(
        self,
        job: Job,
        devices: Sequence[Device],
        params: Mapping[str, Any],
        sinks: Sequence[Sink],
        task: TaskLike,
        labels: Mapping[str, Any],
    ) -> None:
        self._job, self._devices, self._params, self._sinks, self._task = job, devices, params, sinks, task
        self._labels = labels
        self.view, self.prints_dropped = View(), False
        self._claim: TermClaim | None = None
        self._log: EventLog | None = None
        self._copy: EventLog | None = None
        """The log of this host's own disk, while another host coordinates and writes to a disk of its own."""

    def begin(self, term: int) -> None:
        """Begin to write; under an elected coordinator, first claim the run for its term, a number above 0."""
        job, task = self._job, self._task
        if term:
            # Raises CheckpointError, before anything is written, where a later coordinator has claimed the run.
            claim = TermClaim(job.folder / training.CHECKPOINTS, term)
            claim.take()
            self._claim = claim
        self._lock = _locked(job.folder, is_required=not term)
        self._record = _own_record(job) if term else None
        if self._record is None:
            self._record = _write_record(job, self._devices, self._params, task, self._labels)
        self._log = EventLog(job.folder / EVENTS)
        if term:
            self._log.take_over()
        self._dispatcher = SinkDispatcher(self._sinks, About.of(job.folder, job.spec, self._record, task))
        self._stragglers = Stragglers(size=len(self._devices))
        self._usage = HostUsage(with_gpus=any(device.kind == "cuda" for device in self._devices))

    def take(self, rank: int, entry: Event) -> None:
        """Handle an event of a rank or of the coordinator."""
        if entry["kind"] == "follows":
            self.end()
            return
        if entry["kind"] == "copied":
            self._write_copy(entry["entry"], entry["term"])
            return
        if entry["kind"] == "coordinator" and (self._claim is None or self._claim.term != entry["term"]):
            self.end()
            self.begin(entry["term"])
        if self._log is None:
            if self._copy is not None and entry["kind"] in ("end", "failed"):
                self._copy.write(entry)
            return
        if self._claim is not None and not self._claim.is_latest:
            self.view.line(f"{self._job.folder} is not written any more: a later coordinator has claimed it")
            self.end()
            return
        self._log.write(entry)
        if entry["kind"] == "verdict" and self._record is not None:
            self._record["verdict"] = {name: entry[name] for name in ("outcome", "why", "error")}
            put_record(self._job, self._record)
        self.view.show(rank, entry)
        for text in self._dispatcher.take(entry):
            self._notice(text)
        for report in self._stragglers.handle_event(entry):
            self.take(0, report)
        if (sample := self._usage.take()) is not None:
            self._log.write(sample)

    def close_sinks(self) -> None:
        """Finish the sinks; do nothing if this program does not write."""
        if self._log is not None:
            self._dispatcher.close(self._notice)

    def end(self) -> None:
        """Stop writing; do nothing if this program does not write."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        log = self._log
        if log is None:
            return
        try:
            self._dispatcher.close(self._notice)
        finally:
            self._log, self._claim = None, None
            log.close()
            self._lock.close()

    def _write_copy(self, entry: Event, term: int) -> None:
        """Write an event of the coordinator to this host's disk, unless it is the disk that the coordinator writes."""
        job = self._job
        if self._log is not None or term_file(job.folder / training.CHECKPOINTS, term).exists():
            return
        if self._copy is None:
            job.folder.mkdir(parents=True, exist_ok=True)
            if _own_record(job) is None:
                _write_record(job, self._devices, self._params, self._task, self._labels)
            self._copy = EventLog(job.folder / EVENTS)
        self._copy.write(entry)

    def _notice(self, text: str) -> None:
        self.take(0, event("notice", text=text))
        if self.prints_dropped and DROPPED in text:
            print(text, file=sys.stderr, flush=True)


def _own_record(job: Job) -> dict[str, Any] | None:
    """Return the record that an earlier coordinator has written, None if this host's disk has none."""
    return training.read_record(job.folder) if (job.folder / training.RECORD).exists() else None


def _locked(folder: Path, *, is_required: bool = True) -> IO[str]:
    """Lock a run's folder for this program and return the lock file; raise SettingsError if another one has the lock.

    The kernel releases the lock when the file is closed or the program ends. It is not required where the folder is
    claimed for a term: the kernel of a host that was disconnected may still hold it.
    """
    # Never through a link: the folder may be a copy of one that another user made.
    file = os.fdopen(open_regular(folder / ".lock", os.O_RDWR | os.O_CREAT), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not is_required:
            return file
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
