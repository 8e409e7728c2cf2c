"""Folders for `benchmarks.dashboard`: many runs, one run with a million events, and something for every page."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from manyhands.core import keep_event

BEGAN = 1_760_000_000.0
NUM_RANKS = 4
RECORD = {"spec": {"replicas": NUM_RANKS}, "devices": [f"cpu#{rank}" for rank in range(NUM_RANKS)], "batch_size": 64}


def line(t: float, kind: str, **values: Any) -> str:
    """An event as the log has it."""
    return json.dumps({"v": 1, "t": BEGAN + t, "kind": kind, **values}) + "\n"


def write_run(path: Path, num_steps: int, seed: int) -> None:
    """A run that has ended: a "steps" event for every ten steps, and an epoch for every hundred."""
    draw = random.Random(seed)
    record = {
        **RECORD,
        "task": f"task{seed % 3}",
        "params": {"lr": 10 ** draw.uniform(-4, -1), "width": 2 ** (seed % 6)},
    }
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(record))
    began = 3600.0 * seed
    with (path / "events.jsonl").open("w") as file:
        file.write(line(began, "start", total=num_steps, epochs=num_steps // 100, parameters=1000, step=0))
        for last in range(10, num_steps + 1, 10):
            losses = [math.exp(-step / num_steps) + draw.random() / 10 for step in range(last - 9, last + 1)]
            fields = {"epoch": (last - 1) // 100, "samples_per_second": 640.0, "lr": {"": 0.01}}
            steps = list(range(last - 9, last + 1))
            file.write(line(began + last / 10, "steps", steps=steps, losses={"loss": losses}, **fields))
            if last % 100 == 0:
                metrics = {"valid_loss": losses[-1], "valid_accuracy": 1 - losses[-1] / 2}
                file.write(
                    line(began + last / 10, "epoch", epoch=last // 100 - 1, step=last, metrics=metrics, losses={})
                )
        file.write(line(began + num_steps / 10, "end", step=num_steps, stopped=False, seconds={}))


def write_runs(folder: Path, num: int) -> None:
    """So many runs of a thousand steps."""
    for seed in range(num):
        write_run(folder / f"run-{seed:03d}", 1000, seed)


def write_long_run(path: Path, num_events: int) -> None:
    """A run of four ranks with so many events, in one file: losses, and the time and pace of every rank."""
    draw = random.Random(0)
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({**RECORD, "task": "long"}))
    rounds = (num_events - 1) // (1 + 2 * NUM_RANKS)
    with (path / "events.jsonl").open("w") as file:
        file.write(line(0, "start", total=2 * rounds, epochs=1, parameters=1000, step=0))
        for number in range(rounds):
            t, step = 0.5 * number, 2 * number + 2
            losses = [math.exp(-step / rounds) + draw.random() / 10 for _ in range(2)]
            fields = {"epoch": 0, "samples_per_second": 256.0, "lr": {"": 0.01}}
            file.write(line(t, "steps", steps=[step - 1, step], losses={"loss": losses}, **fields))
            for rank in range(NUM_RANKS):
                where = {"rank": rank, "host": "host1", "device": f"cpu#{rank}"}
                seconds = {"compute": 0.4 * number, "sync": 0.1 * number, "total": t}
                file.write(line(t, "waits", **where, seconds=seconds, limit="", memory=1 << 30))
                file.write(line(t, "pace", rank=rank, host="host1", step=step, seconds=draw.uniform(0.2, 0.25)))
        for _ in range(num_events - 1 - rounds * (1 + 2 * NUM_RANKS)):
            file.write(line(0.5 * rounds, "notice", text="done"))


def task(lr: float = 0.1, kind: str = "a") -> mh.Task:
    """A small classifier."""
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    labels = (inputs.sum(1) > 0).long()
    return mh.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        data=(inputs, labels),
        valid=(inputs, labels),
        batch_size=8,
    )


def write_everything(folder: Path) -> list[str]:
    """Something for every page, most of it by the library itself; returns the addresses of the pages."""
    quiet: dict[str, Any] = {"options": mh.options.Display(progress=False)}
    space = {"lr": mh.tuning.loguniform(1e-3, 1e-1), "kind": mh.tuning.choice("a", "b")}
    mh.tune(task, space, trials=6, epochs=1, on="cpu", name="first", folder=folder / "studies", **quiet)
    mh.ensemble(task, members=2, epochs=1, on="cpu", name="seeds", folder=folder / "studies", **quiet)
    placed = mh.Placed({"0": 0, "2": 1})
    mh.fit(task, placed, on="cpu*2", name="partitioned", folder=folder / "runs", **quiet)
    mh.plan(task, ["8 H100, $2/h", "8 A100, $1/h"]).log(folder / "plans" / "both")
    mh.profile(task, on="cpu", steps=2).log(folder / "profiles" / "first")
    lists = ["studies", "ensembles", "plans", "profiles", "serving", "cluster"]
    return [*write_logs(folder), *lists, "study?id=studies%2Ffirst", "run?id=runs%2Fpartitioned"]


def write_logs(folder: Path) -> list[str]:
    """Two runs and a server, without training; returns the addresses of their pages."""
    write_run(folder / "runs" / "long", 1000, 0)
    write_broken_run(folder / "runs" / "broken")
    write_server(folder / "logs" / "server")
    runs = ["runs%2Flong", "runs%2Fbroken"]
    return ["runs", *(f"run?id={run}" for run in runs), f"compare?id={'&id='.join(runs)}", "log?id=logs%2Fserver"]


def write_broken_run(path: Path) -> None:
    """A run with a lost rank, a slow one, utilization, and a loss that became NaN."""
    path.mkdir(parents=True)
    about = {"host": "host1", "platform": "Linux", "command": "fit.py", "commit": "5" * 40, "branch": "main"}
    record = {**RECORD, "task": "task1", "environment": about, "tags": ["baseline", "wide"], "notes": "lr too high"}
    (path / "run.json").write_text(json.dumps({**record, "params": {"lr": 3.0}, "defaults": {"lr": 0.1, "width": 8}}))
    lines = [line(0, "start", total=100, epochs=1, parameters=1000, step=0)]
    for step in range(1, 60):
        losses = {"loss": [math.exp(-step / 20) + 0.01], "penalty": [0.1]}
        lines.append(line(step, "steps", steps=[step], losses=losses, epoch=0, samples_per_second=1.0, lr={"": 0.01}))
        gpus = [{"used": 50 + step % 7, "memory": step << 24}]
        lines.append(
            line(step, "usage", host="host1", cpu=20 + step % 9, memory=step << 22, sent=1e3, received=2e3, gpus=gpus)
        )
        for rank in range(NUM_RANKS):
            where = {"rank": rank, "host": "host1", "device": f"cpu#{rank}"}
            seconds = {"compute": 0.6 * step, "sync": 0.3 * step, "input": 0.1 * step, "total": 1.0 * step}
            lines.append(line(step, "waits", **where, seconds=seconds, limit="", memory=step << 20))
            lines.append(line(step, "pace", rank=rank, host="host1", step=step, seconds=0.2))
    lines.append(line(30, "lost", rank=1, host="host1", reason="was killed (SIGKILL)"))
    lines.append(line(31, "checkpoint", step=30))
    lines.append(line(40, "straggler", rank=0, host="host1", step=40, seconds=1.0, text="rank 0 on host1 is slow"))
    lines.append(line(60, "steps", steps=[60], losses={"loss": [math.nan], "penalty": [0.1]}, epoch=0, lr={"": 0.01}))
    lines.append(line(61, "failed", reason="LossNotFinite: loss became nan at step 60; lower the learning rate"))
    (path / "events.jsonl").write_text("".join(lines))


def write_server(path: Path) -> None:
    """The log of a server with two versions of a model, a split, and a minute of requests."""

    def say(t: float, kind: str, **values: Any) -> None:
        keep_event(path, {"v": 1, "t": BEGAN + t, "kind": kind, **values})

    say(0, "serving", devices=["cpu#0"], host="host1", http=8501, grpc=8500)
    for version in (1, 2):
        say(version, "version_loading", model="digits", version=version)
        say(version + 0.5, "version_available", model="digits", version=version)
    say(
        4,
        "split",
        model="canary",
        shares=[{"model": "digits", "version": 1, "weight": 9.0}, {"model": "digits", "version": 2, "weight": 1.0}],
    )
    say(5, "label", model="digits", label="stable", version=1)
    say(6, "replica_lost", model="digits", version=1, reason="was killed")
    with (path / "access.jsonl").open("w") as file:
        for number in range(600):
            file.write(
                json.dumps(
                    {"t": BEGAN + number / 10, "status": 503 if number % 50 == 0 else 200, "ms": 1.0 + number % 7}
                )
                + "\n"
            )
    say(61, "stopped")
