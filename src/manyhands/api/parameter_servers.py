"""Training with parameter servers, and the comparison of its first steps with one device."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.utils.data import Subset

from .. import parameter_server, training
from ..core import DataError, Event, StrategySpec, Task
from ..distributed import Device, DirectChannel, NullWorld
from ..monitoring import View
from ..storage import CheckpointStore
from ..training import Job, ReplicaResult, Verdict
from .runtime import current_device, own_randomness, runtime
from .signals import interruptible


def train_served(
    job: Job,
    devices: Sequence[Device],
    timeout: float,
    on_event: Callable[[int, Event], None],
    view: View,
    role: parameter_server.ProcessRole | None,
) -> ReplicaResult:
    """Train with parameter servers, and return the result of the coordinator, which runs in this process.

    Args:
        job: The run.
        devices: The devices of the workers.
        timeout: Seconds within which a healthy operation completes.
        on_event: Called with a rank and an event for every event.
        view: View that displays the output of servers and workers.
        role: The role of this process if a launcher has started servers and workers; None if they are started here,
            each as a separate job.
    """
    channel = DirectChannel(lambda entry: on_event(0, entry))
    here = NullWorld(devices[0], channel)
    with (
        own_randomness(),
        current_device(here.device),
        contextlib.closing(here),
        interruptible(lambda: channel.handle_message({"stop": True}), view),
    ):
        return parameter_server.train_served(
            here,
            job,
            devices=devices,
            start=role or (lambda fn, device: runtime.engine.start(fn, [device], timeout=timeout)),
            on_output=view.output,
            timeout=timeout,
        )


def check_served(task: Task, spec: StrategySpec, devices: Sequence[Device], timeout: float) -> Verdict:
    """Compare two steps with parameter servers with one device.

    First the workers' parts of the batches are computed one after another in this process, then two steps run on real
    servers and workers.
    """
    parameter_server.check_served(task)
    tables = parameter_server.tables_in(task)
    if tables:
        return Verdict("not verified", spec, why=f"rows of {', '.join(tables)} are on the servers alone")
    with own_randomness():
        plan = training.plan_of(task, spec)
        rows = Subset(task.data, [row for part in plan for row in part])
        # The compared steps do not follow the schedule, which is the same under every strategy.
        task = task.replace(data=rows, shuffle=False, batch_size=len(plan[0]), valid=None, metrics={}, schedule=None)
        plan = [[*range(len(plan[0]))], [*range(len(plan[0]), len(rows))]]
        whole = training.take_steps(NullWorld(), task, StrategySpec(), plan)
        failed = training.fails_in_parts(task, spec, plan, whole)
        if failed is None:
            failed = training.changes_parameters(task, spec, plan, whole, NullWorld())
        if failed is None:
            failed = training.keeps_state(task, spec, plan, whole, NullWorld())
        if failed is not None:
            return failed
        # Workers collate their own samples, so a batch that cannot be split is compared on the servers only.
        with contextlib.suppress(DataError):
            apart = training.take_steps(NullWorld(), task, StrategySpec(accumulate=training.parts_of(spec)), plan)
            verdict = training.judge(task, spec, plan, whole, apart)
            if not verdict:
                return verdict
    exact = dataclasses.replace(spec, staleness=0, backup=0, correction=False, followers=0)
    plain = dataclasses.replace(exact, precision="fp64", deterministic=True)
    entries: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(task=task, spec=plain, folder=Path(folder), steps=2, save_every=1, keep=3, verify=False)
        train_served(job, devices, timeout, lambda rank, entry: entries.append(entry), View(), None)
        store = CheckpointStore(job.folder / training.CHECKPOINTS)
        states = [store.load(step).model for step in (1, 2)]
    losses = [loss for entry in entries if entry["kind"] == "steps" for loss in entry["losses"]["loss"]]
    with own_randomness():
        return training.judge(task, spec, plan, whole, training.record_of(states, losses, whole))
